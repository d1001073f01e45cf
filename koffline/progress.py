"""A bar over the steps of a run, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


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
