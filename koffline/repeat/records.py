"""The record of a run and that of its repetition: seed, settings and inputs say the same in both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from koffline.repeat.recorded import CONFIGURED, RecordedRun, is_of_results, read_run, split_words

# What no two runs share, or what says where and with what they ran: remarks, but no differences.
_OF_THE_DAY = re.compile(
    r"(call|started|finished|seconds\w*|ran|found|training_seconds|steps_per_second|shares|versions|made_with"
    r"|command|metrics\.time_[^.]*|seeds\.[^.]*\.(seconds|started|finished)|.*\.seconds)(\.|$)"
)
# Where files lie, which digests tell better, and who is told.
_OF_THE_PLACE = re.compile(
    r"data\.source|config\.(data\.source|algo\.policy|initial_log|evaluators\.[^.]*\.base|logger(\..*)?)$"
)


def record_differences(run: RecordedRun, out: Path) -> list[str]:
    """A line for every entry that the repetition in ``out`` records otherwise than the run did."""
    try:
        again = read_run(out if run.target is None else out / run.target)
    except Exception as error:  # whatever is wrong with it, it is no second record of this run
        return [f"record: the repetition has none that can be read ({' '.join(str(error).split())[:200]})"]
    before, after = _entries(run.record), _entries(again.record)
    lines = [
        f"record: {name} is {_value(before, name)} there, {_value(after, name)} now"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]
    return [*lines, *_input_lines(run, again)]


def _input_lines(run: RecordedRun, again: RecordedRun) -> list[str]:
    """Inputs that only one of the two names; by digest where settings went through a file of their own."""
    known, found = dict(run.call["inputs"]), dict(again.call["inputs"])
    if run.kind in CONFIGURED and run.config is not None:
        config = split_words(again.arguments)[0]
        new = [name for name, digest in found.items() if name != config and digest not in known.values()]
    else:
        new = [name for name, digest in found.items() if known.get(name) != digest]
        lost = [name for name in known if name not in found]
        new += lost
    return [
        f"record: the input {name} is {'not ' if name not in known else ''}among the inputs there, "
        f"{'not ' if name not in found else ''}now"
        for name in new
        if not is_of_results(run.directory / name)
    ]


def _entries(record: Mapping[str, Any]) -> dict[str, Any]:
    flat = _flat(record, "")
    return {
        name: value
        for name, value in flat.items()
        if not _OF_THE_DAY.match(name) and not _OF_THE_PLACE.match(name)
    }


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    found = {}
    for name, part in value.items():
        found.update(_flat(part, f"{path}.{name}".lstrip(".")))
    return found


def _value(entries: Mapping[str, Any], name: str) -> str:
    return json.dumps(entries[name], ensure_ascii=False)[:80] if name in entries else "absent"
