"""One function over many items, here, in processes, or on a Ray cluster; values in the order of the items.

A pass over a log too large for one machine is `map_ordered` over its shards: each call returns sums, and
because they arrive in the order of the shards, adding them up gives the same float64 numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from koffline import errors
from koffline.errors import ConfigError, KofflineError
from koffline.jobs.places import Call, Here, InProcesses, OnRay, Workers, kept_workers, packed
from koffline.jobs.running import Failure, JobError, JobFailure, Lost
from koffline.jobs.status import JobStatus, Report, bar, silence


@dataclass(frozen=True, eq=False)
class Mapped:
    """The value of one item, or why it has none (only where failures are skipped)."""

    item: Any
    value: Any
    failure: JobFailure | None = None


def map_ordered(
    call: Call,
    items: Iterable[Any],
    *,
    shared: Any = None,
    workers: int = 1,
    ray: str | None = None,
    retries: int = 2,
    skip_failed: bool = False,
    progress: bool | Report | None = None,
    name: Callable[[Any], str] | None = None,
) -> Iterator[Mapped]:
    """Give ``call(shared, item)`` for every item, in the order of the items, wherever it was computed.

    call: must not change ``shared``, which a worker receives once and keeps for its next items.
    workers: 1 computes in this process, when a value is asked for; more in as many processes of one thread.
    ray: "local", "auto" or the address of a Ray cluster: one core and one thread for each item.
    retries: how often an item is given to another worker after one has died over it.
    skip_failed: an item that raises a KofflineError, or whose workers all die, gives its failure in place of
        a value; otherwise the pass ends with the error, which names the item. Other errors end it always.
    progress: True draws a bar on a terminal; or a callable that hears every change.
    name: what an item is called in errors and the bar; default "item 3".

    At most twice as many values as there are workers wait for their turn, large ones not in this process's
    memory: it holds one at a time.
    Raises the item's DataError, PolicyError or ConfigError, JobError for anything else, and ConfigError for
    settings, for what cannot be sent to workers, and for a cluster that does not answer.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; give a positive number")
    if retries < 0:
        raise ConfigError(f"retries is {retries}; give 0 or more")
    plan = _Plan(call, shared, workers, ray, retries, skip_failed, progress, name or _item_name)
    return _run(plan, items)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The arguments of `map_ordered`."""

    call: Call
    shared: Any
    workers: int
    ray: str | None
    retries: int
    skip_failed: bool
    progress: bool | Report | None
    name: Callable[[Any], str]


def _open(plan: _Plan) -> Workers:
    if plan.ray is None and plan.workers == 1:
        return Here(plan.call, plan.shared)
    payload = packed(plan.call, plan.shared)
    if plan.ray is not None:
        return OnRay(payload, plan.ray, plan.workers)
    return InProcesses(payload, plan.workers)


def _run(plan: _Plan, items: Iterable[Any]) -> Iterator[Mapped]:
    total = len(items) if isinstance(items, Sized) else None
    if total == 0:
        return
    with ExitStack() as stack:
        report = stack.enter_context(bar()) if plan.progress is True else plan.progress
        workers = _open(plan)
        ended_well = False
        try:
            yield from _InOrder(plan, workers, iter(items), total).values(report or silence)
            ended_well = True
        finally:
            workers.close(at_once=not ended_well)


class _InOrder:
    """The state of a running pass: what is with the workers, and what waits for its turn."""

    def __init__(self, plan: _Plan, workers: Workers, items: Iterator[Any], total: int | None) -> None:
        self._plan, self._workers, self._total = plan, workers, total
        self._items = enumerate(items)
        self._away: dict[int, Any] = {}  # items with the workers, by number
        self._back: dict[int, tuple[Any, Any]] = {}  # items whose results wait for those before them
        self._losses: dict[int, int] = {}
        self._done = 0

    def values(self, report: Report) -> Iterator[Mapped]:
        turn = 0
        while True:
            self._hand_out()
            report(self._status())
            if not self._away:
                return
            self._take(*self._workers.next_finished())
            while turn in self._back:
                turn += 1
                yield self._mapped(*self._back.pop(turn - 1))  # no name here keeps a large value alive

    def _mapped(self, item: Any, result: Any) -> Mapped:
        if isinstance(result, JobFailure):
            return Mapped(item, None, result)
        return Mapped(item, self._workers.value(result))

    def _hand_out(self) -> None:
        """Keep the workers busy, but not further ahead of the slowest item than the window."""
        capacity, window = self._workers.capacity, self._workers.window
        while len(self._away) < capacity and len(self._away) + len(self._back) < window:
            number, item = next(self._items, (None, None))
            if number is None:
                return
            self._away[number] = item
            self._workers.submit(number, item)

    def _take(self, number: int, result: Any) -> None:
        """Keep a value for its turn; an item whose worker died goes to another one."""
        if isinstance(result, Lost):
            losses = self._losses[number] = self._losses.get(number, 0) + 1
            if losses <= self._plan.retries:
                self._workers.submit(number, self._away[number])
                return
        item = self._away.pop(number)
        self._done += 1
        if isinstance(result, Failure):
            failure = JobFailure(self._plan.name(item), result.reason, result.trace)
            skipped = self._plan.skip_failed and (result.kind or isinstance(result, Lost))
            if not skipped:
                raise _error_of(failure, result.kind, self._losses.get(number, 0))
            result = failure
        self._back[number] = item, result

    def _status(self) -> JobStatus:
        total = self._total if self._total is not None else self._done + len(self._away)
        return JobStatus(self._done, 0, total, tuple(self._plan.name(item) for item in self._away.values()))


def _error_of(failure: JobFailure, kind: str, losses: int) -> KofflineError:
    """The error of an item, of the kind that was raised where it was computed, naming the item once."""
    reason = failure.reason if failure.name in failure.reason else f"{failure.name}: {failure.reason}"
    if kind:
        error: type[KofflineError] = getattr(errors, kind)
        return error(reason)
    if losses:
        reason = f"{reason}, {losses} times; give the workers more memory, or leave this part out"
    return JobError(reason, failure.trace)


def _item_name(item: Any) -> str:
    return f"item {item}"


@dataclass(frozen=True)
class PassSettings:
    """Where the passes over a log's shards run, and whether they leave out what cannot be read."""

    workers: int = 1
    ray: str | None = None
    skip_bad_shards: bool = False

    def map(
        self,
        call: Call,
        items: Iterable[Any],
        shared: Any = None,
        name: Callable[[Any], str] | None = None,
        progress: bool | Report | None = None,
    ) -> Iterator[Mapped]:
        """As `map_ordered`, with these settings."""
        return map_ordered(
            call,
            items,
            shared=shared,
            workers=self.workers,
            ray=self.ray,
            skip_failed=self.skip_bad_shards,
            progress=progress,
            name=name,
        )

    def kept(self) -> AbstractContextManager[None]:
        """Several passes inside it share their workers, whose start takes seconds. Raises ConfigError."""
        return kept_workers(self.workers, self.ray)
