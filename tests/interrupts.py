"""Ends of processes: children that hear interrupts, and a stand-in for the end at any
write.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Hit(BaseException):
    """Stands for the end of a process; nothing catches it."""


@contextlib.contextmanager
def hit_at(
    monkeypatch: pytest.MonkeyPatch, writer, number: int, also_after: bool
) -> Iterator[None]:
    """End the run at its number-th write, before it (or after it).

    writer: the object and the name of its function that appends to a log, if there is
    one; renames count.
    """
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number and not also_after:
                raise Hit
            result = function(*args, **options)
            if count == number:
                raise Hit
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        if writer is not None:
            patch.setattr(*writer, counted(getattr(*writer)))
        yield


def ended_process() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def contents_of(folder: Path) -> dict[Path, bytes]:
    """What must not change where a run is refused."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hear_interrupts() -> None:
    """For ``preexec_fn``: a process that a background shell started passes 'ignored' on
    to its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
