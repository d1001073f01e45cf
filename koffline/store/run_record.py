"""Record for repeating a run: its command line, digests of its inputs, threads and
versions.

Every folder of results has this record as run.json, with everything that varies between
runs: dates, seconds, the machine. The other files of the folder depend on the inputs,
the settings and the seed only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from koffline.errors import DataError
from koffline.json_types import JsonObject
from koffline.store.files import (
    check_target,
    digest_of,
    minari_folder,
    remove_abandoned,
)
from koffline.untrusted.user_code import current_folder

FILE = "run.json"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PACKAGES = (
    "koffline",
    "torch",
    "numpy",
    "scipy",
    "h5py",
    "pyarrow",
    "d3rlpy",
    "gymnasium",
    "mujoco",
    "matplotlib",
)
_ESTIMATES = ("estimate.json", "estimates.json")  # of one command
# of `koffline improve`, besides those of every command
_OF_IMPROVEMENT = ("policy.npz", "policy.pt", "policy.onnx", "model_card.md")
FORMAT = 1
# options on where a result goes, which do not change it
_WHERE = ("--out", "--resume", "--force")
_EPSILON = re.compile("^(epsilon:[^:]*:)+")
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


@contextlib.contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Context of a command; arguments: the words after ``koffline``."""
    token = _arguments.set(tuple(arguments))
    try:
        yield
    finally:
        _arguments.reset(token)


def full_command() -> str:
    """The running command line as typed, or the program's arguments for a call from
    Python.
    """
    return shlex.join(["koffline", *_running()])


def shown_command() -> str:
    """The command line without output options, for quoting in results."""
    return shlex.join(["koffline", *without_place(_running())])


def without_place(arguments: Sequence[str]) -> list[str]:
    """The words without --out, --resume and --force and their values."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        option, assigned, _ = word.partition("=")
        if option not in _WHERE:
            kept.append(word)
        elif not assigned and (
            option == "--out" or (option == "--resume" and arguments[0] == "online")
        ):
            next(words, None)  # skip the option's value
    return kept


def start_run(
    kind: str, inputs: Iterable[str | Path | None] = (), **known: Any
) -> JsonObject:
    """Content of run.json at the start of a run of the command ``kind``; digests of
    inputs are taken now.

    inputs: further files and folders that the run reads, not named on the command line.
    known: more entries. The entry ``call`` is what is needed to repeat the run; None
    unless the running command is ``kind``.
    """
    arguments = _arguments.get()
    call = None
    if arguments[:1] == (kind,):
        named = [
            *named_in(without_place(arguments)[1:]),
            *(str(path) for path in inputs if path is not None),
        ]
        call = {
            "command": shlex.join(["koffline", *arguments]),
            "arguments": list(arguments),
            "directory": current_folder(),
            "inputs": digests_of(named),
            "threads": {
                **{name: os.environ.get(name) for name in THREADS},
                "cores": available_cores(),
            },
            "versions": versions(),
            "machine": f"{platform.system()} {platform.machine()}",
        }
    return {
        "format": FORMAT,
        "kind": kind,
        **known,
        "call": call,
        "started": now(),
        "finished": None,
    }


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of every existing file or folder by name, including modules and
    minari:<id>.
    """
    paths = {name: path_of(name) for name in dict.fromkeys(names)}
    return {name: digest_of(path) for name, path in paths.items() if path is not None}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect numbers and
    files.
    """
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = _version_of(name)
    return installed


@cache
def _version_of(package: str) -> str:
    """Version of an installed package; all packages together take a tenth of a second.

    Raises PackageNotFoundError.
    """
    return importlib.metadata.version(package)


def available_cores() -> int:
    """Number of cores that this process may use; by default, libraries start as many
    threads.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is not None:
        return len(affinity(0))
    return os.cpu_count() or 1


def _running() -> tuple[str, ...]:
    return _arguments.get() or tuple(sys.argv[1:])


def named_in(words: Iterable[str]) -> list[str]:
    """All parts of the words that may name a file, including A and B of KEY=A,B."""
    names = []
    for word in words:
        value = word.partition("=")[2]
        names += [word, value, *value.split(",")]
    return names


def path_of(name: str) -> Path | None:
    """File or folder of a name, also of file://…, minari:<id> and epsilon:0.1:…; None
    if there is none.
    """
    name = _EPSILON.sub("", name.removeprefix("file://"))
    if name.startswith("-") or name in ("", "/"):
        return None
    # too long a name, or an unknown user's home
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = Path(name).expanduser()
        if path.is_file() or path.is_dir():  # pipes and devices are never opened
            return path
    if name.startswith("minari:"):
        with contextlib.suppress(Exception):
            folder = minari_folder(name)
            if folder.is_dir():
                return folder
            return None
    return _module_file(name)


def _module_file(name: str) -> Path | None:
    """Source file of ``package.module:name``, found without importing it."""
    module, colon, attribute = name.partition(":")
    if (
        not colon
        or not attribute.isidentifier()
        or not all(map(str.isidentifier, module.split(".")))
    ):
        return None
    stem = Path(*module.split("."))
    roots = ("", *sys.path)  # first the current folder
    places = (
        Path(root, end)
        for root in roots
        for end in (stem.with_suffix(".py"), stem / "__init__.py")
    )
    return next(filter(Path.is_file, places), None)


def now() -> str:
    """Time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def check_results(out: Path, force: bool, marker: str) -> None:
    """Make the parent folder of ``out``. Raises DataError, before any work, if ``out``
    is in use.

    marker: the JSON file of the result; results of other commands are not replaced,
    even with ``force``.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    if out.is_file():
        raise DataError(f"{out} is a file; name a folder")
    if not out.is_dir() or any(out.iterdir()):
        check_target(out, force, result_files(marker))


def result_files(marker: str) -> tuple[str, ...]:
    """Patterns of the files in a folder of results."""
    results: tuple[str, ...] = (marker,)
    if marker in _ESTIMATES:
        results = _ESTIMATES
    if marker == "improvement.json":
        results = (marker, *_OF_IMPROVEMENT)
    return (*results, FILE, "report.html", "plots/*.png")
