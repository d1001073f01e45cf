"""Bars on stderr, lines where that is no terminal: over the steps of a run, and over an evaluation."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_FIRST_LINE, _BETWEEN_LINES = 1.2, 10.0  # seconds


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, show: bool) -> Iterator[Callable[..., None]]:
    """A bar or lines on stderr. Yields what is to be told: what is done and, as they change, total, note."""
    if not show:
        yield lambda done, **changed: None
        return
    if not sys.stderr.isatty():
        with _Lines(title).told() as lines:
            yield lambda done, **changed: lines.pass_over(done, changed.get("total") or total or 0, "step")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = [TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]")]
    columns = (texts[0], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), texts[1])
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, **changed: bar.update(task, completed=done, **changed)


@contextlib.contextmanager
def training_bar(title: str, quiet: bool = False) -> Iterator[Any]:
    """What training loops and passes tell how far they are; None where nobody wants to hear.

    A bar on stderr; where that is no terminal, lines.
    """
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with progress_bar(title, None, show=True) as tell:
            yield _Bar(tell)
    else:
        with _Lines(title).told() as lines:
            yield lines


class _Bar:
    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def update(self, step: int, steps: int, loss: float) -> None:
        self._tell(step, total=steps, note="last layer" if step == steps else f"objective {loss:.3g}")

    def pass_over(self, done: int, total: int) -> None:
        self._tell(done, total=total, note="reading shards")


class _Lines:
    """A line after a second, then one every ten, from a thread of its own.

    Long parts that tell nothing are heard of too; what is over, or refused, before that says nothing.
    """

    def __init__(self, title: str) -> None:
        self._title, self._state = title, "beginning"
        self._over, self._began = threading.Event(), time.monotonic()

    def update(self, step: int, steps: int, loss: float) -> None:
        self._state = f"step {step:,} of {steps:,}" if step < steps else "trained, solving last layers"

    def pass_over(self, done: int, total: int, what: str = "shard") -> None:
        self._state = f"{what} {done:,} of {total:,}" if done < total else f"{what}s are done"

    @contextlib.contextmanager
    def told(self) -> Iterator[_Lines]:
        """While this lasts."""
        thread = threading.Thread(target=self._tell, args=(sys.stderr,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _tell(self, stream: TextIO) -> None:
        wait = _FIRST_LINE
        while not self._over.wait(wait):
            seconds = time.monotonic() - self._began
            print(f"{self._title}: {self._state}, {seconds:.0f} s", file=stream, flush=True)
            wait = _BETWEEN_LINES
