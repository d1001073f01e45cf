"""Run a recorded command again into another folder, and compare."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import ConfigError
from koffline.repeat.comparison import Comparison, compare_folders
from koffline.repeat.recorded import CONFIGURED, RecordedRun, check_inputs, read_run, split_words
from koffline.run_record import THREADS, without_place


@dataclass(frozen=True)
class Repetition:
    """A run and its repetition in ``out``. remarks: what else was different: versions, the machine."""

    run: RecordedRun
    out: Path
    comparison: Comparison
    remarks: tuple[str, ...]


def repeat_run(run: Path, out: Path) -> Repetition:
    """Run what the record of ``run`` says, in the same directory with the same threads, into ``out``.

    Raises ConfigError where there is no record, where an input has changed, where ``out`` holds something,
    and where the command fails.
    """
    recorded = read_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already; name a new folder")
    with _inside(recorded.directory):
        remarks = check_inputs(recorded)
    target = (out if recorded.target is None else out / recorded.target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _command_line(recorded, target) as words:
        code, said = _run(words, recorded.directory, _environment(recorded.call.get("threads", {})))
    if code != 0 and not out.exists():
        reason = (said.strip().splitlines() or [f"exit code {code}"])[-1]
        raise ConfigError(f"the command failed this time: {reason.removeprefix('error: ')}")
    found = compare_folders(recorded.folder, out, recorded.names)
    return Repetition(recorded, out, found, tuple(remarks))


def _run(words: Sequence[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code, and what it said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "koffline", *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@contextlib.contextmanager
def _command_line(run: RecordedRun, target: Path) -> Iterator[list[str]]:
    """The recorded words with another --out; settings of training runs from the record, not from a file."""
    words = without_place(run.arguments)
    if run.kind not in CONFIGURED or run.config is None:
        yield [*words, "--out", str(target)]
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(run.config), sort_keys=False), encoding="utf-8")
        yield [run.kind, str(path), *split_words(words)[1], *_paths(run.config), "--out", str(target)]


def _paths(config: Mapping[str, Any]) -> list[str]:
    """Names of files count from the current directory on the command line, not from the config's folder."""
    places: dict[str, Any] = {"initial_log": config.get("initial_log")}
    if "data" in config:
        places = {"data.source": config["data"].get("source"), "algo.policy": config["algo"].get("policy")}
        for name, evaluator in (config.get("evaluators") or {}).items():
            places[f"evaluators.{name}.base"] = (evaluator or {}).get("base")
    return [word for key, value in places.items() if value for word in ("--set", f"{key}={value}")]


def _environment(threads: Mapping[str, Any]) -> dict[str, str]:
    """This process's, with the run's numbers of threads."""
    kept = {name: value for name, value in os.environ.items() if name not in THREADS}
    return {**kept, **{name: str(threads[name]) for name in THREADS if threads.get(name)}}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
