"""What a record would run besides koffline: the code that its words, its settings and their files name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from koffline.errors import KofflineError
from koffline.policies.detect import detect
from koffline.repeat.recorded import RecordedRun
from koffline.run_record import named_in
from koffline.untrusted.code import texts_in
from koffline.untrusted.limits import read_text
from koffline.untrusted.yaml_files import LARGEST_TEXT, parse_yaml

# package.module:name and package:Environment-v0, anywhere in a text; no URL, no time of the day in a path.
_NAMES_CODE = re.compile(r"(?<![\w.:/\\-])([^\W\d]\w*(?:\.\w+)*):(?![\\/])(\w[\w.:/-]*)")
_NO_CODE = ("minari", "epsilon")
_OWN_RAY = ("local", "auto")  # this machine's, and the one that the user's environment names


def code_in(run: RecordedRun) -> list[str]:
    """What would run, each in words, without running any of it; empty for the ordinary case.

    What hides from this search is refused where it would be loaded: `koffline.untrusted.code`.
    """
    found = _ray_of(run.arguments)
    words = [*run.arguments, *texts_in(dict(run.call["inputs"])), *texts_in(dict(run.config or {}))]
    pending = [(word, run.directory) for word in words]
    seen = set(pending)
    while pending:
        text, folder = pending.pop()
        found += _named_code(text)
        if _is_program(folder / text):
            found.append(f"{text} (a TorchScript program)")
        nearby = [(part, folder) for part in _parts_of(text)]
        content = _texts_of_file(folder / text)  # names in it count from its folder, or from the directory
        nearby += [(part, place) for part in content for place in ((folder / text).parent, run.directory)]
        pending += [pair for pair in dict.fromkeys(nearby) if pair not in seen]
        seen.update(nearby)
    return sorted(set(found))


def _named_code(text: str) -> Iterator[str]:
    for match in _NAMES_CODE.finditer(text):
        module, name = match.groups()
        if module not in _NO_CODE:
            yield f"{module}:{name} (the Python module {module})"


def _parts_of(text: str) -> list[str]:
    """The values in KEY=A,B and the spec in a spec; what they mean as YAML, where a colon may be hidden."""
    parts = named_in(["", text])
    for part in (text.partition("=")[2], text):
        try:
            parts += texts_in(parse_yaml(part))
        except (ValueError, yaml.YAMLError):
            continue
    return [part for part in parts if part != text]


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() and detect(path) == "torchscript"
    except (KofflineError, OSError, ValueError):
        return False


def _texts_of_file(path: Path) -> list[str]:
    """Every text in a file of settings; none where it is no YAML or JSON."""
    try:
        return texts_in(parse_yaml(read_text(path, LARGEST_TEXT))) if path.is_file() else []
    except (ValueError, OSError, yaml.YAMLError):
        return []


def _ray_of(words: Sequence[str]) -> list[str]:
    """A cluster runs what it is sent, and what it sends back is unpickled."""
    given = [word.partition("=")[2] for word in words if word.startswith("--ray=")]
    given += [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--ray"]
    return [f"the Ray cluster at {address}" for address in given if address not in _OWN_RAY]
