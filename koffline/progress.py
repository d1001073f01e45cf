"""Progress on stderr, as a bar on a terminal, otherwise as lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# seconds
_FIRST_LINE = 1.2
_BETWEEN_LINES = 10.0
# called with the number done, and optionally the total and a note
Tell = Callable[..., None]


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, show: bool) -> Iterator[Tell]:
    """Show a bar or lines on stderr; yield the function to call with the progress.

    title: what is done. total: the number of steps, if known. show: False shows
    nothing.
    """
    if not show:
        yield lambda *_, **__: None
        return
    if not sys.stderr.isatty():
        yield _lines(title, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    texts = [
        TextColumn(f"{{task.{part}}}", markup=False)
        for part in ("description", "fields[note]")
    ]
    columns = (
        texts[0],
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        texts[1],
    )
    with Progress(
        *columns, console=Console(stderr=True, emoji=False), transient=True
    ) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, total=total, note="": bar.update(
            task, completed=done, total=total, note=note
        )


def _lines(title: str, total: int | None) -> Tell:
    """Receiver that prints a line after a second, then every ten seconds; shorter work
    prints nothing.
    """
    began = time.monotonic()
    stream = sys.stderr
    due = began + _FIRST_LINE

    def tell(done: int, total: int | None = total, note: str = "") -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + _BETWEEN_LINES
            step = f"step {done:,}"
            if total:
                step += f" of {total:,}"
            if note:
                step += f", {note}"
            # nobody listens any more; the work goes on
            with contextlib.suppress(OSError, ValueError):
                print(f"{title}: {step}, {now - began:.0f} s", file=stream, flush=True)

    return tell
