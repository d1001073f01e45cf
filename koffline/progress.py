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
def progress_bar(title: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A function to be called with the number of finished steps."""
    if not show:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, completed=step)


@contextlib.contextmanager
def training_bar(title: str, quiet: bool = False) -> Iterator[Any]:
    """What training loops and passes tell how far they are; None where nobody wants to hear.

    A bar on stderr; where that is no terminal, lines.
    """
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        with _Lines(title).told() as lines:
            yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar:
        task = bar.add_task(title, total=None, note="")

        class Bar:
            def update(self, step: int, steps: int, loss: float) -> None:
                note = "last layer" if step == steps else f"objective {loss:.3g}"
                bar.update(task, completed=step, total=steps, note=note)

            def pass_over(self, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, note="reading shards")

        yield Bar()


class _Lines:
    """A line after a second, then one every ten, from a thread of its own.

    Long parts that tell nothing are heard of too; what is over, or refused, before that says nothing.
    """

    def __init__(self, title: str) -> None:
        self._title, self._state = title, "reading"
        self._over, self._began = threading.Event(), time.monotonic()

    def update(self, step: int, steps: int, loss: float) -> None:
        self._state = f"step {step:,} of {steps:,}" if step < steps else "trained, solving last layers"

    def pass_over(self, done: int, total: int) -> None:
        self._state = f"shard {done:,} of {total:,}" if done < total else "shards are read"

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
