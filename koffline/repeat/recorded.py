"""The record of a run, wherever its command keeps it, and whether what it read is still the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.run_record import (
    FILE,
    FORMAT,
    THREADS,
    available_cores,
    digests_of,
    machine,
    named_in,
    versions,
    without_place,
)
from koffline.untrusted.limits import read_json

_MANIFEST = "manifest.json"
_BESIDE = ".run.json"
_IN_SETTINGS = ("--set", "--data")  # what they changed is in the recorded settings
_FLAGS = ("--videos", "--tensorboard", "--save-minari")
CONFIGURED = ("train", "online")  # commands whose record holds every setting
_KINDS = (*CONFIGURED, "build", "diagnose", "evaluate", "reproduce", "select", "sweep")


@dataclass(frozen=True)
class RecordedRun:
    """A run that can be repeated.

    folder: where its results lie; names: a regular expression of theirs, None for all files there; target:
    what ``--out`` named within the folder, None where that is the folder itself. call: as `describe_call`
    gives it. config: all settings of a training run. record: all that is recorded.
    """

    kind: str
    folder: Path
    call: Mapping[str, Any]
    names: str | None = None
    target: str | None = None
    config: Mapping[str, Any] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The words after ``koffline``."""
        return list(self.call["arguments"])

    @property
    def directory(self) -> Path:
        """Where the command was given; relative names of inputs count from there."""
        return Path(self.call["directory"])


def read_run(run: Path) -> RecordedRun:
    """The record of a folder with run.json, of NAME.json of an experiment, or of a dataset in a manifest.

    Raises ConfigError in one line where there is none, or where it says too little.
    """
    if not run.exists():
        raise ConfigError(f"{run} does not exist; name the folder of a run, or a dataset that was built")
    if run.is_dir() and not (run / FILE).exists():
        records = sorted(run.glob(f"*{_BESIDE}"))
        if len(records) == 1:
            return _of_experiment(records[0])
        if records:
            names = ", ".join(str(path.with_name(_stem(path) + ".json")) for path in records)
            raise ConfigError(f"{run} holds several experiments; name one: {names}")
    if run.is_dir() and (run / FILE).exists():
        record = _read(run / FILE)
        return _checked(
            RecordedRun(_kind(record), run, _call(record), config=record.get("config"), record=record), run
        )
    beside = run.with_name(f"{run.stem}{_BESIDE}")
    return _of_experiment(beside) if beside.exists() else _of_dataset(run)


def check_inputs(run: RecordedRun) -> list[str]:
    """Raise ConfigError where an input is missing or not what it was; else remarks on what differs besides.

    To be called in the run's directory.
    """
    known: Mapping[str, str] = run.call["inputs"]
    config = split_words(without_place(run.arguments))[0] if run.config is not None else None
    skipped = [config] if config is not None else []  # its settings are in the record
    found = digests_of(name for name in known if name not in skipped)
    for name, digest in known.items():
        if name in skipped:
            continue
        if name not in found:
            raise ConfigError(f"the input {name} is gone from {run.directory}; put it back to repeat the run")
        if found[name] != digest:
            raise ConfigError(
                f"the input {name} is not what the run read (sha256 {found[name][:12]}…, then "
                f"{digest[:12]}…); put the old one back to repeat the run"
            )
    _check_complete(run, config)
    return _remarks(run.call)


def _check_complete(run: RecordedRun, config: str | None) -> None:
    """Raise ConfigError where the command would read something that the list of inputs lacks."""
    words = [name for name in named_in(without_place(run.arguments)) if name != config]
    settings = run.config or {}
    words += [str(value) for value in paths_in(settings).values() if value]
    for name in digests_of(name for name in words if not is_of_results(Path(name))):
        if name not in run.call["inputs"]:
            raise ConfigError(
                f"the command reads {name}, which is not among the inputs of the record (the record was "
                "changed, or the file came later); move it away or run the command itself"
            )


def paths_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """What settings read besides themselves, by the name of the setting."""
    places: dict[str, Any] = {"initial_log": config.get("initial_log")}
    if "data" in config:
        places = {"data.source": config["data"].get("source"), "algo.policy": config["algo"].get("policy")}
        for name, evaluator in (config.get("evaluators") or {}).items():
            places[f"evaluators.{name}.base"] = (evaluator or {}).get("base")
    return places


def is_of_results(path: Path) -> bool:
    """Whether a folder holds results: a word of a command line may be the name of one by chance."""
    return path.is_dir() and any(path.glob(f"*{FILE}"))


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """CONFIG of a training run, and its options but --set and --data: --device cpu, --seed-count 2."""
    config, kept = None, list[str]()
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("--"):
            config = word
            continue
        option, assigned, _ = word.partition("=")
        whole = [word] if assigned or option in _FLAGS else [word, next(rest, "")]
        kept += [] if option in _IN_SETTINGS else whole
    return config, kept


def _remarks(call: Mapping[str, Any]) -> list[str]:
    there, here = call.get("versions", {}), versions()
    remarks = [
        f"{name} was {version}, is {here.get(name, 'absent')}"
        for name, version in there.items()
        if version != here.get(name)
    ]
    if call.get("machine", machine()) != machine():
        remarks.append(f"the machine was {call['machine']}, is {machine()}")
    cores = call.get("threads", {}).get("cores", available_cores())
    if cores != available_cores() and not any(call["threads"].get(name) for name in THREADS):
        remarks.append(f"the run had {cores} cores, this process {available_cores()}")
    return remarks


def _of_experiment(path: Path) -> RecordedRun:
    record = _read(path)
    names = re.escape(_stem(path)) + r"\."
    return _checked(RecordedRun(_kind(record), path.parent, _call(record), names=names, record=record), path)


def _of_dataset(path: Path) -> RecordedRun:
    """The entry of a file or folder in the manifest beside it."""
    entry = _read(path.parent / _MANIFEST).get(path.name) if (path.parent / _MANIFEST).exists() else None
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{path} has no {FILE} and no entry in a {_MANIFEST} beside it; name the folder of a run, or a "
            "dataset that koffline build wrote"
        )
    call = dict(_call(entry))
    if call:
        call["versions"] = entry.get("made_with", {})
        call["directory"] = str((path.parent / call.get("directory", ".")).resolve())
    names = re.escape(path.name) + "(/|$)"
    return _checked(
        RecordedRun("build", path.parent, call, names=names, target=path.name, record=entry), path
    )


def _checked(run: RecordedRun, where: Path) -> RecordedRun:
    call = run.call
    complete = (
        isinstance(call.get("arguments"), list)
        and all(isinstance(word, str) for word in call["arguments"])
        and isinstance(call.get("inputs"), dict)
        and isinstance(call.get("directory"), str)
        and call["arguments"][:1] == [run.kind]
        and run.kind in _KINDS
        and isinstance(call.get("threads", {}), dict)
        and isinstance(call.get("versions", {}), dict)
        and all(isinstance(text, str) for pair in call["inputs"].items() for text in pair)
        and _is_config(run.config)
    )
    if not complete:
        raise ConfigError(
            f"{where} does not say by which command line it was made (a run from Python, or of an older "
            "koffline); repeat it by its own program"
        )
    version = run.record.get("format", FORMAT)
    if version != FORMAT:
        raise ConfigError(
            f"{where} has records of format {version!r}, this koffline knows {FORMAT}; repeat it with the "
            "version that wrote it"
        )
    if not run.directory.is_dir():
        raise ConfigError(f"{where} was made in {run.directory}, which is gone; make that folder again")
    return run


def _is_config(config: Any) -> bool:
    """Whether the parts that hold paths are what they should be; the command checks the rest."""
    if config is None:
        return True
    if not isinstance(config, dict):
        return False
    if "data" not in config:
        return True
    evaluators = config.get("evaluators") or {}
    parts = [config["data"], config.get("algo"), evaluators]
    parts += evaluators.values() if isinstance(evaluators, dict) else []
    return all(part is None or isinstance(part, dict) for part in parts) and None not in parts[:2]


def _kind(record: Mapping[str, Any]) -> str:
    call = _call(record)
    return str(record.get("kind") or (call.get("arguments") or ["train"])[0])


def _call(record: Mapping[str, Any]) -> Mapping[str, Any]:
    call = record.get("call")
    return call if isinstance(call, dict) else {}


def _stem(path: Path) -> str:
    return path.name.removesuffix(_BESIDE)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); the run is damaged") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no record of a run; name the folder of a run")
    return content
