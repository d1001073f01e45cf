"""Run a recorded command again into another folder, and compare."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import koffline
from koffline.errors import ConfigError, printable
from koffline.repeat.code import code_in
from koffline.repeat.comparison import Comparison, compare_folders
from koffline.repeat.recorded import CONFIGURED, RecordedRun, check_inputs, paths_in, read_run, split_words
from koffline.repeat.records import record_differences
from koffline.run_record import THREADS, without_place
from koffline.targets import locked
from koffline.untrusted.code import WITHOUT_CODE


@dataclass(frozen=True)
class Repetition:
    """A run and its repetition in ``out``.

    records: lines on what the two records say differently, seed, settings, inputs. remarks: what else was
    different: versions, the machine.
    """

    run: RecordedRun
    out: Path
    comparison: Comparison
    records: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every result has the same bytes, and the records say the same."""
        return self.comparison.is_equal and not self.records


def repeat_run(
    run: Path, out: Path, allow_code: bool = False, say: Callable[[str], None] = lambda line: None
) -> Repetition:
    """Run what the record of ``run`` says, in the same directory with the same threads, into ``out``.

    allow_code: also the code that the record names, Python modules and TorchScript programs, may run, and
    modules are looked for in the recorded directory. say: gets the command line before it runs. Raises
    ConfigError where there is no record, where it names code, where an input has changed, where ``out`` holds
    something, and where the command fails.
    """
    recorded = read_run(run)
    if not allow_code and (programs := code_in(recorded)):
        raise ConfigError(
            f"repeating {run} would run code that its record names: {', '.join(programs)}; look at it, then "
            "add --allow-code"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already; name a new folder")
    if run.resolve() in out.resolve().parents:
        raise ConfigError(f"--out {out} lies in {run}, with which it is compared; name a folder beside it")
    with locked(out.with_name(f"{out.name}.repeated")):  # the command that runs locks its target itself
        return _repeat(recorded, out, allow_code, say)


def _repeat(recorded: RecordedRun, out: Path, allow_code: bool, say: Callable[[str], None]) -> Repetition:
    with _inside(recorded.directory):
        remarks = check_inputs(recorded)
    target = (out if recorded.target is None else out / recorded.target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _command_line(recorded, target) as words:
        say(printable(f"running in {recorded.directory}: {shlex.join(['koffline', *words])}"))
        environment = _environment(recorded.call.get("threads", {}), allow_code)
        code, said = _run(words, recorded.directory, environment)
    if code != 0 and not out.exists():
        failure = (said.strip().splitlines() or [f"exit code {code}"])[-1]
        raise ConfigError(f"the command failed this time: {failure.removeprefix('error: ')}")
    found = compare_folders(recorded.folder, out, recorded.names)
    return Repetition(recorded, out, found, tuple(record_differences(recorded, out)), tuple(remarks))


def _run(words: Sequence[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code, and what it said on stderr."""
    done = subprocess.run(
        [*_python(directory, allow_code=WITHOUT_CODE not in environment), *words],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
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
    return [word for key, value in paths_in(config).items() if value for word in ("--set", f"{key}={value}")]


def _environment(threads: Mapping[str, Any], allow_code: bool) -> dict[str, str]:
    """This process's, with the run's numbers of threads; without code, the word for that to all below it."""
    kept = {name: value for name, value in os.environ.items() if name not in (*THREADS, WITHOUT_CODE)}
    if not allow_code:
        kept[WITHOUT_CODE] = "1"
    return {**kept, **{name: str(threads[name]) for name in THREADS if threads.get(name)}}


def _python(directory: Path, allow_code: bool) -> list[str]:
    """How koffline is started in ``directory``: without code nothing is imported from there.

    Isolated (-I), as -m and -c would put the current directory first, for processes of this one too.
    """
    if allow_code:
        return [sys.executable, "-m", "koffline"]
    home = Path(koffline.__file__).resolve().parents[1]
    places = [Path(place).absolute() for place in sys.path]
    outside = [directory.resolve(), Path.cwd().resolve()]
    kept = [str(place) for place in places if place.resolve() == home or place.resolve() not in outside]
    start = f"import sys; sys.path[:] = {kept!r}; from koffline.cli import cli; cli(prog_name='koffline')"
    return [sys.executable, "-I", "-c", start]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
