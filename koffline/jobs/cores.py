"""One computation in pieces, one for each core of this machine: replicas of a stack,
or tests of a log.

    with cores(2):
        parts = on_cores(train, count=15, seconds=9.0)  # of replicas 0 to 7, and 8 to 14

The pieces must not depend on each other; then the numbers are the same for any number
of cores. Batched products of libraries keep to that, but for some tiny ones, for which
another routine is chosen by the size of the whole batch: `on_cores` can ask.

This process computes one piece itself. On Linux the others are forks of it: they read
its memory instead of copies, start in milliseconds, and need no ``if __name__ ==
"__main__"`` in a script. A fork only computes and ends. Elsewhere, where libraries do
not survive a fork, and on Ray, pieces are sent to the workers of `PassSettings`.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from koffline.jobs import PassSettings, most_workers
from koffline.jobs.forks import Hear, Tell, can_fork, compute_in_forks
from koffline.jobs.workers import is_worker

S = TypeVar("S")
T = TypeVar("T")
# whether pieces of these replicas would give the digits of all in one piece
Agree = Callable[[list[slice]], bool]

# Rough time of one multiplication or addition of a product in float64. Like every guess
# of seconds it only tells whether further cores are worth their start.
PRODUCT_SECONDS = 5e-11
# work of less than these seconds stays in this process
_WORTH_A_FORK = 0.3
_WORTH_A_PROCESS = 3.0  # which starts Python and loads torch
_WORTH_IF_CHOSEN = 0.02  # where the user chose the number of cores
# Rough time that this process spends on the start of a fork, one after another: of a
# program with torch and a log of moderate size.
_FORK_SECONDS = 0.01


@dataclass(frozen=True)
class _Team:
    """``count``: of the cores. ``passes``: of the workers that stand for forks, None
    where forks can compute.
    """

    count: int
    is_chosen_by_user: bool
    passes: PassSettings | None = None


_ALONE = _Team(count=1, is_chosen_by_user=True)
_team: ContextVar[_Team] = ContextVar("team", default=_ALONE)


@contextmanager
def cores(count: int | None, ray: PassSettings | None = None) -> Iterator[None]:
    """Context in which `on_cores` uses ``count`` cores; None: the free ones of this
    machine, or all of the cluster.

    ray: passes on a Ray cluster, whose cores are used instead of this machine's.
    """
    is_chosen = count is not None
    if count is not None and ray is None:
        count = min(count, most_workers())
    if ray is None and count is None:
        count = free_cores()
    if ray is None and (count == 1 or can_fork()):
        team = _Team(count=count or 1, is_chosen_by_user=is_chosen)
        with _working(team):
            yield
        return
    passes = ray
    if passes is None:
        passes = PassSettings(workers=count or 1)
    # workers start when they get their first piece, and serve all calls of the context
    with passes.kept() as workers:
        size = count or 1
        if workers is not None and not count:
            size = workers.capacity
        team = _Team(count=size, is_chosen_by_user=is_chosen, passes=passes)
        with _working(team):
            yield


@contextmanager
def _working(team: _Team) -> Iterator[None]:
    token = _team.set(team)
    try:
        yield
    finally:
        _team.reset(token)


def usable_cores() -> int:
    """Physical cores that this process may use, by its affinity and its share of a
    container.
    """
    from joblib.externals.loky import cpu_count

    with warnings.catch_warnings():
        # a system without the commands that tell them counts logical ones
        warnings.simplefilter("ignore", UserWarning)
        return max(1, int(cpu_count(only_physical_cores=True)))


def free_cores() -> int:
    """The default number of cores: those that may be used and that nobody is busy on.

    1 under continuous integration, in threads and worker processes, whose program has
    divided the cores already, and on a busy machine.
    """
    is_shared = (
        os.environ.get("CI", "").lower() not in ("", "0", "false")
        or threading.current_thread() is not threading.main_thread()
        or multiprocessing.parent_process() is not None
        or is_worker()
    )
    if is_shared:
        return 1
    usable = usable_cores()
    idle = (os.cpu_count() or 1) - _busy_cores()
    return max(1, min(usable, round(idle)))


def _busy_cores() -> float:
    """Cores that are busy now, and were over the last minute: the smaller of the two.

    The mean of a minute alone would still count what this process did before.
    """
    if not hasattr(os, "getloadavg"):
        return 0.0
    try:
        busy = os.getloadavg()[0]
    except OSError:
        return 0.0
    running = _running_now()
    if running is not None:
        busy = min(busy, running - 1.0)  # besides this process
    return max(0.0, busy)


def _running_now() -> int | None:
    """Threads of all processes that run or wait for a core now; None if unknown."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


def pieces_of(count: int, parts: int) -> list[slice]:
    """Slices that cover ``count`` replicas in ``parts`` pieces (at most one for each),
    the larger ones first.
    """
    parts = max(1, min(count, parts))
    size, larger = divmod(count, parts)
    pieces = []
    start = 0
    for part in range(parts):
        stop = start + size
        if part < larger:
            stop += 1
        pieces.append(slice(start, stop))
        start = stop
    return pieces


def on_cores(
    call: Callable[[slice, Tell], T],
    count: int,
    seconds: float,
    hear: Hear | None = None,
    agree: Agree | None = None,
) -> list[T]:
    """``call(replicas, tell)`` for slices that cover ``count`` replicas (or other items),
    one slice on each core of the context; results in their order.

    seconds: rough time of all on one core; what is short stays in this process. hear:
    receives what pieces tell, with their first replica; pieces on workers tell nothing.
    agree: is asked about the pieces; there are half as many if they would not agree.
    A piece whose process dies is given to another, at most twice. Raises what a piece
    raises, and JobError.
    """
    team = _team.get()
    if team.is_chosen_by_user:
        worth = _WORTH_IF_CHOSEN
    elif team.passes is None:
        worth = _WORTH_A_FORK
    else:
        worth = _WORTH_A_PROCESS
    parts = team.count
    if seconds < worth:
        parts = 1
    elif team.passes is None:
        parts = min(parts, _most_forks(seconds))
    pieces = pieces_of(count, parts)
    while len(pieces) > 1 and agree is not None and not agree(pieces):
        pieces = pieces_of(count, len(pieces) // 2)

    def pass_on(first: int, news: object) -> None:
        if hear is not None:
            hear(first, news)

    if len(pieces) == 1:
        return [call(pieces[0], lambda news: pass_on(0, news))]
    if team.passes is None:

        def call_alone(piece: slice, tell: Tell) -> T:
            with _working(_ALONE):
                return call(piece, tell)

        return compute_in_forks(call, call_alone, pieces, pass_on)

    def name(piece: slice) -> str:
        return f"replicas {piece.start + 1} to {piece.stop}"

    return list(team.passes.map(_call_silently, pieces, call, name=name))


def each_on_cores(
    call: Callable[[S], T], items: Sequence[S], seconds: float
) -> list[T]:
    """``call(item)`` for each of the items, in their order, divided among the cores as
    by `on_cores`.

    seconds: rough time of all on one core.
    """

    def call_some(numbers: slice, _: Tell) -> list[T]:
        return [call(item) for item in items[numbers]]

    pieces = on_cores(call_some, count=len(items), seconds=seconds)
    return list(itertools.chain.from_iterable(pieces))


def _most_forks(seconds: float) -> int:
    """In how many pieces work of so many seconds is done soonest, if one process starts
    the forks: the p with the least seconds / p + p · `_FORK_SECONDS`.
    """
    return max(1, int(math.sqrt(seconds / _FORK_SECONDS)))


def _call_silently(call: Callable[[slice, Tell], T], piece: slice) -> T:
    """At a worker: a piece, whose news nobody hears."""
    with _working(_ALONE):
        return call(piece, lambda news: None)
