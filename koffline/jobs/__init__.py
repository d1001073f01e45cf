"""Independent pieces of work, run in this process, in several processes, or on a Ray
cluster.

`PassSettings.map` yields values in the order of the items, so that sums are the same
float64 numbers everywhere. `run_jobs` runs jobs that write their results to files; a
job whose result exists is not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, starmap, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from koffline.errors import ConfigError, KofflineError
from koffline.jobs.workers import (
    JobError,
    Packed,
    Place,
    Workers,
    as_ours,
    opened,
    pack,
    packed_work,
    value_of,
)
from koffline.progress import Tell, progress_bar
from koffline.store.run_record import available_cores

AUTOMATIC = "auto"  # number of cores: those that are free
_RETRIES = 2  # of an item whose worker died
_MOST_PER_CORE = 16  # workers
Shared = TypeVar("Shared")  # what a worker receives once
Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class PassSettings:
    """Settings of passes over a log's shards: where they run.

    workers: 1 computes in this process, when a value is requested; more (up to 16 per
        core of this machine) use as many processes with one thread each.
    ray: "local", "auto" or the address of a Ray cluster: one core and one thread for
    each item.
    """

    workers: int = 1
    ray: str | None = None

    def __post_init__(self) -> None:
        most = most_workers()
        if not 1 <= self.workers <= most:
            raise ConfigError(
                f"workers is {self.workers}; give 1 to {most}, {_MOST_PER_CORE} per"
                " core of this machine"
            )

    def map(
        self,
        call: Callable[[Shared, Item], Value],
        items: Iterable[Item],
        shared: Shared = None,  # type: ignore[assignment]  # of calls that take None
        name: Callable[[Item], str] | None = None,
        progress: bool | Tell = False,
    ) -> Iterator[Value]:
        """Yield ``call(shared, item)`` for every item, in the order of the items,
        wherever it was computed.

        call: must not change ``shared``, which a worker receives once and keeps for its
        next items.
        name: name of an item in errors and in the bar; default "item 3".
        progress: True draws a bar on a terminal; a callable gets the numbers of items
            done and of all items, and the names of some running ones.
        An item whose worker dies is given to another worker, at most twice. Raises the
        item's KofflineError, JobError for any other error, and ConfigError if the work
        cannot be sent to workers or the cluster does not answer.
        """
        name = name or (lambda item: f"item {item}")

        def value_of_item(item: Item, value: Value | KofflineError) -> Value:
            if isinstance(value, KofflineError):
                if name(item) not in str(value):
                    value.args = (f"{name(item)}: {value}",)
                raise value from None
            return value

        with closing(
            self.results(call, items, shared, name, progress, are_jobs=False)
        ) as results:
            # no variable here keeps a large value alive
            yield from starmap(value_of_item, results)

    def results(
        self,
        call: Callable[[Shared, Item], Value],
        items: Iterable[Item],
        shared: Shared,
        name: Callable[[Item], str],
        progress: bool | Tell,
        are_jobs: bool,
    ) -> Generator[tuple[Item, Value | KofflineError], None, None]:
        """Yield each item with its value or its KofflineError; arguments as in `map`.

        are_jobs: yield items as they end, and do not give an item to another worker
        after one has died.
        """
        total = None  # not known of a generator
        if isinstance(items, Sized):
            total = len(items)
        if total == 0:
            return
        with ExitStack() as stack:
            hear = stack.enter_context(_heard_by(progress))

            def report(done: int, running: list[Item]) -> None:
                names = ", ".join(map(name, running[:3]))
                if len(running) > 3:
                    names += ", …"
                known_total = total
                if known_total is None:
                    known_total = done + len(running)
                hear(done, known_total, names)

            if self._is_here:
                done = 0
                for done, item in enumerate(items, 1):
                    report(done - 1, [item])
                    try:
                        yield item, call(shared, item)  # other errors pass through
                    except KofflineError as error:
                        yield item, error
                report(done, [])
                return
            work = packed_work(call, shared)
            folder = stack.enter_context(
                TemporaryDirectory(prefix="koffline-", ignore_cleanup_errors=True)
            )
            workers = stack.enter_context(opened(self.workers, self.ray))
            place = workers.place(work, Path(folder))
            del work
            yield from self._away(workers, place, iter(items), report, are_jobs)

    def kept(self) -> AbstractContextManager[Workers | None]:
        """Context in which passes share their workers, which take seconds to start; None
        where this process computes.

        Raises ConfigError.
        """
        if self._is_here:
            return nullcontext()
        return opened(self.workers, self.ray, keep=True)

    @property
    def _is_here(self) -> bool:
        return self.workers == 1 and self.ray is None

    def _away(
        self,
        workers: Workers,
        place: Place,
        items: Iterator[Item],
        report: Callable[[int, list[Item]], None],
        are_jobs: bool,
    ) -> Iterator[tuple[Item, Any]]:
        """Compute items in workers, at most twice their capacity ahead of the next item
        to be yielded.

        Jobs are submitted to Ray all at once, so that it may grow the cluster.
        """
        waiting: dict[Future[Packed], Item] = {}
        done = 0
        retries = _RETRIES
        if are_jobs:
            retries = 0
        try:
            while True:
                if not are_jobs:
                    most = 2 * workers.capacity
                elif self.ray:
                    most = sys.maxsize
                else:
                    most = workers.capacity
                for item in islice(items, max(0, most - len(waiting))):
                    waiting[workers.submit(place, pack(item), retries)] = item
                running = [
                    item for future, item in waiting.items() if not future.done()
                ]
                report(done, running[: workers.capacity])
                if not waiting:
                    return
                if are_jobs:  # whichever ends first
                    future = next(iter(wait(waiting, None, FIRST_COMPLETED).done))
                else:  # the oldest
                    future = next(iter(waiting))
                item = waiting.pop(future)
                futures = [future]
                del future  # frees its value
                done += 1
                yield item, value_of(futures.pop(), retries)
        finally:
            for future in waiting:
                workers.cancel(future)


def most_workers() -> int:
    """Largest number of workers on this machine."""
    return _MOST_PER_CORE * available_cores()


def _heard_by(progress: bool | Tell) -> AbstractContextManager[Tell]:
    """Function that receives the progress: for True a bar on a terminal, a callable
    itself, else a no-op.
    """
    if callable(progress):
        return nullcontext(progress)
    return progress_bar("", None, progress and sys.stderr.isatty())


@dataclass(frozen=True)
class Job:
    """One piece of work: ``call(path, *arguments)`` writes its result to ``path``
    atomically.

    call: may keep files of its own beside ``path``. is_valid: whether the file at
    ``path`` is a result of this job; an invalid result is computed again.
    """

    name: str
    call: Callable[..., object]
    arguments: tuple[object, ...]
    path: Path
    is_valid: Callable[[Path], object] = Path.is_file

    @property
    def done(self) -> bool:
        """Whether a valid result exists."""
        return self.path.is_file() and bool(self.is_valid(self.path))


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    ray: str | None = None,
    progress: bool | Tell = True,
    keep_going: bool = False,
) -> dict[str, KofflineError]:
    """Run the jobs that have no result yet. Returns {job name: error}, empty if all
    results exist.

    workers: 1 runs in this process; more use as many processes with one thread each.
    ray: "local", "auto" or the address of a Ray cluster whose machines see the jobs'
        folders under the same names.
    progress: True draws a bar on a terminal; a callable is called at every change.
    keep_going: after a failure run all other jobs, and return the errors.

    Without ``keep_going`` no job starts after a failure, and JobError names it. An
    interrupt stops the workers at once.
    """
    missing = [replace(job, path=job.path.absolute()) for job in jobs if not job.done]
    total = len(jobs)
    finished = total - len(missing)  # by an earlier call
    failures: dict[str, KofflineError] = {}
    for job in missing:
        job.path.parent.mkdir(parents=True, exist_ok=True)
    with _heard_by(progress) as report:

        def hear(done: int, _: int, running: str) -> None:
            report(finished + done - len(failures), total, running)

        waiting: Iterable[Job] = ()
        if missing:
            waiting = takewhile(lambda _: keep_going or not failures, missing)
        ended = PassSettings(workers, ray).results(
            _perform,
            waiting,
            shared=None,
            name=lambda job: job.name,
            progress=hear,
            are_jobs=True,
        )
        with closing(ended):
            for job, error in ended:
                if error is None and not job.done:
                    error = JobError(f"it ended without a valid result at {job.path}")
                if error is not None:
                    failures[job.name] = error
    if failures and not keep_going:
        first, *rest = failures
        error = failures[first]
        further = ""
        if rest:
            further = f" (so did {', '.join(rest)})"
        raise JobError(
            f"job {first} failed{further}: {error}; {sum(job.done for job in jobs)} of"
            f" {total} results are kept, mend the cause and run the same command again",
            getattr(error, "trace", ""),
        )
    return failures


def _perform(shared: None, job: Job) -> KofflineError | None:
    """Run one job in this process, and return its error if it fails."""
    try:
        job.call(job.path, *job.arguments)
    except Exception as error:
        return as_ours(error)
    return None
