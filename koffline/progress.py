"""Progress on stderr, as a bar on a terminal, else as lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_FIRST_LINE, _BETWEEN_LINES = 1.2, 10.0  # seconds
Tell = Callable[..., None]  # called with the number done and, when they change, total and note


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, show: bool) -> Iterator[Tell]:
    """Show a bar or lines on stderr; yield the function that receives progress."""
    if not show:
        yield lambda done, **changed: None
        return
    if not sys.stderr.isatty():
        with _lines(title, total) as tell:
            yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = [TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]")]
    columns = (texts[0], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), texts[1])
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, **changed: bar.update(task, completed=done, **changed)


@contextlib.contextmanager
def training_bar(title: str, quiet: bool = False) -> Iterator[TrainingBar | None]:
    """Receiver of the progress of training loops and passes; None if ``quiet``."""
    with progress_bar(title, None, not quiet) as tell:
        yield None if quiet else TrainingBar(tell)


class TrainingBar:
    """Receiver of gradient steps and of the shards of a pass."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def update(self, step: int, steps: int, loss: float) -> None:
        """Report gradient steps, see `koffline.fitting.Progress`."""
        note = "solving last layers" if step == steps else f"objective {loss:.3g}"
        self._tell(step, total=steps, note=note)

    def pass_over(self, done: int, total: int) -> None:
        """Report the number of shards read."""
        self._tell(done, total=total, note="reading shards")


@contextlib.contextmanager
def _lines(title: str, total: int | None) -> Iterator[Tell]:
    """A line after a second, then one every ten, from a thread of its own.

    Parts without reports get lines too; anything that ends within the first second prints nothing.
    """
    over, began, said = threading.Event(), time.monotonic(), {"state": "beginning"}

    def tell(done: int, total: int | None = total, note: str = "") -> None:
        of = f" of {total:,}" if total else ""
        said["state"] = f"step {done:,}{of}{', ' * bool(note)}{note}"

    def repeat(stream: TextIO, wait: float) -> None:
        while not over.wait(wait):
            print(f"{title}: {said['state']}, {time.monotonic() - began:.0f} s", file=stream, flush=True)
            wait = _BETWEEN_LINES

    thread = threading.Thread(target=repeat, args=(sys.stderr, _FIRST_LINE), daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()
