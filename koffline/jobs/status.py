"""How far a run of jobs is, and the bar that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class JobStatus:
    """``done`` of ``total`` jobs, ``found`` of them finished by an earlier run; the names of what runs."""

    done: int
    found: int
    total: int
    running: tuple[str, ...]


Report = Callable[[JobStatus], None]


def silence(status: JobStatus) -> None:
    """A report that nobody hears."""


@contextmanager
def bar() -> Iterator[Report | None]:
    """A bar on stderr where it is a terminal, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield None
        return
    columns = (MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(status: JobStatus) -> None:
            bar.update(task, completed=status.done, total=status.total, description=_running_text(status))

        yield report


def _running_text(status: JobStatus, most: int = 3) -> str:
    """The names of what runs; rich's markup has no hold on them."""
    from rich.markup import escape

    names = ", ".join(status.running[:most])
    more = f" and {len(status.running) - most} more" if len(status.running) > most else ""
    earlier = f" ({status.found} found finished)" if status.found else ""
    return escape(names + more + earlier)
