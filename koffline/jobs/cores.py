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

import gc
import io
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from koffline.jobs import PassSettings, most_workers
from koffline.jobs.workers import JobError, as_ours, is_worker

T = TypeVar("T")
Tell = Callable[[Any], None]
# ``call(replicas, tell)``: of a piece; ``tell`` passes news on while it is computed
Call = Callable[[slice, Tell], T]
# receives the first replica of a piece and its news; the same news may come twice
Hear = Callable[[int, Any], None]
# whether pieces of these replicas would give the digits of all in one piece
Agree = Callable[[list[slice]], bool]

# work of less than these seconds stays in this process
_WORTH_A_FORK = 0.3
_WORTH_A_PROCESS = 3.0  # which starts Python and loads torch
_WORTH_IF_CHOSEN = 0.02  # where the user chose the number of cores
_RETRIES = 2  # of a piece whose process died
# A fork only computes. One that sleeps for so long without any processor time waits for
# a lock that another thread of this process held when it was forked.
_STUCK_SECONDS = 30.0
_BETWEEN_LOOKS = 2.0  # seconds, while this process waits
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_ALIGNED = 64  # bytes, as vector instructions like arrays to begin


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
    if ray is None and (count == 1 or _can_fork()):
        team = _Team(count=count or 1, is_chosen_by_user=is_chosen)
        with _working(team):
            yield
        return
    passes = ray
    if passes is None:
        passes = PassSettings(workers=count or 1)
    # workers start when they get their first piece, and serve all calls of the context
    with passes.kept() as workers:
        team = _Team(
            count=count or workers.capacity,
            is_chosen_by_user=is_chosen,
            passes=passes,
        )
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
    call: Call[T],
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
    pieces = pieces_of(count, parts)
    while len(pieces) > 1 and agree is not None and not agree(pieces):
        pieces = pieces_of(count, len(pieces) // 2)

    def pass_on(first: int, news: Any) -> None:
        if hear is not None:
            hear(first, news)

    if len(pieces) == 1:
        return [call(pieces[0], lambda news: pass_on(0, news))]
    if team.passes is None:
        return _Forks(call, pieces, pass_on).results()

    def name(piece: slice) -> str:
        return f"replicas {piece.start + 1} to {piece.stop}"

    return list(team.passes.map(_call_silently, pieces, call, name=name))


def _call_silently(call: Call[T], piece: slice) -> T:
    """At a worker: a piece, whose news nobody hears."""
    with _working(_ALONE):
        return call(piece, lambda news: None)


def _can_fork() -> bool:
    """Whether forks of this process can compute. On a Mac its BLAS does not survive a
    fork; Windows has none.
    """
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")


class _Forks:
    """The pieces of one call: the last one in this process, the others in forks.

    An exception, such as an interrupt, ends the forks.
    """

    def __init__(
        self, call: Callable[[slice, Tell], Any], pieces: list[slice], hear: Hear
    ) -> None:
        self._call = call
        self._pieces = pieces
        self._hear = hear
        self._forks: dict[int, _Fork] = {}  # by the number of their piece

    def results(self) -> list[Any]:
        """Results in the order of the pieces."""
        last = len(self._pieces) - 1
        results: dict[int, Any] = {}
        try:
            for number, piece in enumerate(self._pieces[:-1]):
                with _interrupts_wait():
                    self._forks[number] = _Fork(self._call, piece)
            piece = self._pieces[-1]

            def tell(news: Any) -> None:
                self._hear(piece.start, news)
                self._listen(0.0)

            results[last] = self._call(piece, tell)
            while self._forks:
                for number in self._listen(_BETWEEN_LOOKS):
                    ended = self._forks.pop(number)
                    if ended.is_complete():
                        results[number] = ended.value()
                    else:
                        with _interrupts_wait():
                            self._forks[number] = ended.replacement()
        finally:
            for fork in self._forks.values():
                fork.end()
        return [results[number] for number in range(last + 1)]

    def _listen(self, seconds: float) -> list[int]:
        """Pass on news, for which it waits at most so long; return the numbers of
        pieces whose forks have ended.
        """
        by_reader = {fork.reader: number for number, fork in self._forks.items()}
        readable, _, _ = select.select(list(by_reader), [], [], seconds)
        if not readable:
            for fork in self._forks.values():
                fork.end_if_stuck()
        for reader in readable:
            fork = self._forks[by_reader[reader]]
            for news in fork.news():
                self._hear(fork.piece.start, news)
        return [number for number, fork in self._forks.items() if fork.has_ended]


class _Fork:
    """A copy of this process that computes one piece, writes the result to shared
    memory and ends.
    """

    def __init__(
        self, call: Callable[[slice, Tell], Any], piece: slice, retries: int = _RETRIES
    ) -> None:
        self.piece = piece
        self.has_ended = False
        self._call = call
        self._retries = retries
        self._received = b""
        self._looked = (0.0, -1.0)  # when, and its processor time then
        self._memory = os.memfd_create("koffline-result")
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        parent = os.getpid()
        prctl = _prctl()  # loaded before the fork
        with warnings.catch_warnings():
            # of other threads, as notebooks have; see `_STUCK_SECONDS`
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:
                    self._compute(writer)
            finally:
                os._exit(1)  # nothing of the parent's is flushed or cleaned up
        os.close(writer)

    def _compute(self, writer: int) -> None:
        """In the fork: compute, write the outcome and end."""
        # the collector would write to, and so copy, what both processes share
        gc.freeze()
        _team.set(_ALONE)

        def tell(news: Any) -> None:
            content = pickle.dumps(news)
            _write(writer, [_LENGTH.pack(len(content)), content])

        outcome: tuple[Any, Exception | None]
        try:
            outcome = (self._call(self.piece, tell), None)
        except Exception as error:
            outcome = (None, error)
        try:
            if outcome[1] is not None:
                pickle.loads(pickle.dumps(outcome[1]))  # some cannot be read again
            blocks = _packed(outcome)
        except Exception as error:
            blocks = _packed((None, as_ours(outcome[1] or error)))
        _write(self._memory, blocks)
        os._exit(0)

    def news(self) -> list[Any]:
        """What the fork has told since the last call; notes when it has ended."""
        while True:
            try:
                received = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                break
            if not received:
                self.has_ended = True
                break
            self._received += received
        news = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            news.append(pickle.loads(self._received[_LENGTH.size : end]))
            self._received = self._received[end:]
        return news

    def is_complete(self) -> bool:
        """Whether a fork that has ended wrote its outcome."""
        os.close(self.reader)
        _, status = os.waitpid(self.pid, 0)
        return status == 0

    def value(self) -> Any:
        """The result. Raises the error with which the piece ended."""
        size = os.fstat(self._memory).st_size
        # private: arrays on it can be written to
        content = memoryview(mmap.mmap(self._memory, size, mmap.MAP_PRIVATE))
        os.close(self._memory)
        value, error = _unpacked(content)
        if error is not None:
            raise error
        return value

    def replacement(self) -> _Fork:
        """A new fork for the piece of one that died. Raises JobError after several."""
        os.close(self._memory)
        if not self._retries:
            raise JobError(
                "a process of this computation died (killed, or out of memory?),"
                f" {1 + _RETRIES} times; free memory, or use one core (cores=1)"
            )
        return _Fork(self._call, self.piece, self._retries - 1)

    def end_if_stuck(self) -> None:
        """Kill the fork if it has slept for long without using the processor."""
        state, used = _state_of(self.pid)
        now = time.monotonic()
        since, used_before = self._looked
        if state != "S" or used != used_before:
            self._looked = (now, used)
        elif now - since > _STUCK_SECONDS:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the fork, and forget it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for descriptor in (self.reader, self._memory):
            with suppress(OSError):
                os.close(descriptor)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Context in which an interrupt waits, so that no fork is lost to the parent, nor
    interrupted before it ignores interrupts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pickler(pickle.Pickler):
    """Keeps the numbers of tensors and arrays out of the pickle, in their own
    buffers.
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _tensor_of, (obj.detach().cpu().numpy(),)
        return NotImplemented


def _tensor_of(array: Any) -> Any:
    return sys.modules["torch"].from_numpy(array)


def _packed(value: Any) -> list[Any]:
    """Blocks of bytes that hold a value, each but the first at a multiple of
    `_ALIGNED`.

    The first is the table of where the others begin and how long they are.
    """
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(value)
    blocks = [content.getbuffer(), *(buffer.raw() for buffer in buffers)]
    table = [len(blocks)]
    start = _LENGTH.size * (1 + 2 * len(blocks))
    parts: list[Any] = []
    for block in blocks:
        gap = -start % _ALIGNED
        parts += [bytes(gap), block]
        table += [start + gap, len(block)]
        start += gap + len(block)
    return [b"".join(map(_LENGTH.pack, table)), *parts]


def _unpacked(content: memoryview) -> Any:
    """The value in the joined blocks of `_packed`; its arrays share their memory."""
    (count,) = _LENGTH.unpack_from(content)
    blocks = []
    for number in range(count):
        start, length = struct.unpack_from(
            "<QQ", content, _LENGTH.size * (1 + 2 * number)
        )
        blocks.append(content[start : start + length])
    return pickle.loads(blocks[0], buffers=blocks[1:])


def _write(descriptor: int, blocks: list[Any]) -> None:
    """Write all bytes of the blocks."""
    for block in blocks:
        rest = memoryview(block)
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]


def _state_of(pid: int) -> tuple[str, float]:
    """A process's state, as a letter, and its processor time in ticks."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # after the name, which may hold anything
            fields = file.read().rpartition(")")[2].split()
        return fields[0], float(fields[11]) + float(fields[12])
    except (OSError, IndexError, ValueError):
        return "?", 0.0


@cache
def _prctl() -> Callable[..., int]:
    """Linux's prctl, by which a fork asks to end with its parent."""
    import ctypes

    return ctypes.CDLL(None).prctl
