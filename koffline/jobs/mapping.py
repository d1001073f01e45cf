"""One function over many items, here, in processes, or on a Ray cluster; values in the order of the items.

A pass over a log too large for one machine is a map over its shards: each call returns sums, and because they
arrive in the order of the shards, adding them up gives the same float64 numbers everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from koffline import errors
from koffline.errors import ConfigError, KofflineError
from koffline.jobs.workers import JobFailure, Workers, failure_of, opened, pack, unpack


@dataclass(frozen=True)
class JobStatus:
    """``done`` of ``total`` jobs, ``found`` of them finished by an earlier run; the names of what runs."""

    done: int
    found: int
    total: int
    running: tuple[str, ...]


Report = Callable[[JobStatus], None]


@contextmanager
def bar() -> Iterator[Report]:
    """A bar on stderr where it is a terminal, else a report that nobody hears."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield lambda status: None
        return
    columns = (MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(status: JobStatus) -> None:
            names = ", ".join(status.running[:3]) + (", …" if len(status.running) > 3 else "")
            earlier = f" ({status.found} found finished)" if status.found else ""
            text = escape(names + earlier)  # rich's markup has no hold on names
            bar.update(task, completed=status.done, total=status.total, description=text)

        yield report


def heard_by(progress: bool | Report | None) -> AbstractContextManager[Report]:
    """What hears the progress: a bar for True, a callable itself, else nobody."""
    return bar() if progress is True else nullcontext(progress or (lambda status: None))


Call = Callable[[Any, Any], Any]
Name = Callable[[Any], str]
_Progress = Callable[[int, list[Any]], None]  # items that are done, and those that run


class JobError(KofflineError):
    """A job that failed. ``trace`` is the traceback of where it ran, for a fault that is not the user's."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True, eq=False)
class Mapped:
    """The value of one item, or why it has none (only where failures are skipped)."""

    item: Any
    value: Any
    failure: JobFailure | None = None


@dataclass(frozen=True)
class PassSettings:
    """Where the passes over a log's shards run, and whether they leave out what cannot be read.

    workers: 1 computes in this process, when a value is asked for; more in as many processes of one thread.
    ray: "local", "auto" or the address of a Ray cluster: one core and one thread for each item.
    skip_bad_shards: an item that raises a KofflineError, or whose workers all die, gives its failure in place
        of a value; otherwise the pass ends with the error, which names the item. Other errors end it always.
    retries: how often an item is given to another worker after one has died over it.
    ordered: False gives values as they are computed.

    Raises ConfigError for numbers that make no sense.
    """

    workers: int = 1
    ray: str | None = None
    skip_bad_shards: bool = False
    retries: int = 2
    ordered: bool = True

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; give a positive number")
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}; give 0 or more")

    def map(
        self,
        call: Call,
        items: Iterable[Any],
        shared: Any = None,
        name: Name | None = None,
        progress: bool | Report | None = None,
    ) -> Iterator[Mapped]:
        """Give ``call(shared, item)`` for every item, in the order of the items, wherever it was computed.

        call: must not change ``shared``, which a worker receives once and keeps for its next items.
        name: what an item is called in errors and the bar; default "item 3".
        progress: True draws a bar on a terminal; or a callable that hears every change.

        At most twice as many values as there are workers wait for their turn, not in this process's memory:
        it holds one at a time.
        Raises the item's DataError, PolicyError or ConfigError, JobError for anything else, and ConfigError
        for what cannot be sent to workers and for a cluster that does not answer.
        """
        total = len(items) if isinstance(items, Sized) else None
        if total == 0:
            return
        with ExitStack() as stack:
            heard = stack.enter_context(heard_by(progress))
            name = name or (lambda item: f"item {item}")

            def report(done: int, running: list[Any]) -> None:
                names = tuple(map(name, running))
                heard(JobStatus(done, 0, total if total is not None else done + len(running), names))

            if self._is_here:
                yield from self._here(call, items, shared, name, report)
                return
            packed = pack((call, shared))
            folder = stack.enter_context(TemporaryDirectory(prefix="koffline-", ignore_cleanup_errors=True))
            workers = stack.enter_context(opened(self.workers, self.ray))
            place = workers.place(packed, Path(folder))
            del packed
            yield from self._away(workers, place, iter(items), name, report)

    def kept(self) -> AbstractContextManager[Any]:
        """Several passes inside it share their workers, whose start takes seconds. Raises ConfigError."""
        return nullcontext() if self._is_here else opened(self.workers, self.ray, keep=True)

    @property
    def _is_here(self) -> bool:
        return self.workers == 1 and self.ray is None

    def _here(
        self, call: Call, items: Iterable[Any], shared: Any, name: Name, report: _Progress
    ) -> Iterator[Mapped]:
        """Compute an item when its value is asked for; errors that are not the user's pass through."""
        done = 0
        for item in items:
            report(done, [item])
            done += 1
            try:
                yield Mapped(item, call(shared, item))  # no name here keeps a large value alive
            except KofflineError as error:
                yield self._failed(item, replace(failure_of(error), name=name(item)))
        report(done, [])

    def _away(
        self, workers: Workers, place: Any, items: Iterator[Any], name: Name, report: _Progress
    ) -> Iterator[Mapped]:
        """Keep the workers busy, but not further ahead of the slowest item than twice what they can take.

        What need not be in order is handed to Ray at once, which grows the cluster if it can.
        """
        waiting: dict[Future[Any], Any] = {}
        done = 0
        threads = ThreadPoolExecutor(workers.capacity if self.ray is None else 10_000)
        try:
            while True:
                most = 2 * workers.capacity if self.ordered else sys.maxsize if self.ray else workers.capacity
                for item in islice(items, max(0, most - len(waiting))):
                    waiting[threads.submit(self._call, workers, place, item)] = item
                running = [item for future, item in waiting.items() if not future.done()]
                report(done, running[: workers.capacity])
                if not waiting:
                    return
                future = next(iter(waiting if self.ordered else wait(waiting, None, FIRST_COMPLETED).done))
                item, result = waiting.pop(future), future.result()
                done += 1
                del future  # and what it holds
                if isinstance(result, JobFailure):
                    yield self._failed(item, replace(result, name=name(item)))
                else:
                    yield Mapped(item, unpack(result))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, workers: Workers, place: Any, item: Any) -> Any:
        """Hand an item to a worker, and to others where they die."""
        try:
            packed = pack(item)
        except ConfigError as error:
            return failure_of(error)
        for _ in range(1 + self.retries):
            result = workers.call(place, packed)
            if not (isinstance(result, JobFailure) and result.lost):
                break
        return result

    def _failed(self, item: Any, failure: JobFailure) -> Mapped:
        """Return the failure of an item where it is skipped; else raise its error, which names it once."""
        if self.skip_bad_shards and (failure.kind or failure.lost):
            return Mapped(item, None, failure)
        reason = failure.reason
        if failure.name not in reason:
            reason = f"{failure.name}: {reason}"
        if failure.kind:
            error: type[KofflineError] = getattr(errors, failure.kind)
            raise error(reason) from None
        if failure.lost:
            reason += f", {1 + self.retries} times; give the workers more memory, or leave this part out"
        raise JobError(reason, failure.trace) from None
