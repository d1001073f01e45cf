"""Bars on stderr: over the steps of a run, and over an evaluation with what it does meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


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
def training_bar(title: str) -> Iterator[Any]:
    """A bar on stderr that training loops update; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
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
