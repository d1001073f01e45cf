"""Pieces of a computation in forks of this process, on Linux.

A fork reads this process's memory instead of copies, and starts in milliseconds. It
computes one piece, sends news and then its outcome through a pipe, and ends. The forks
and pipes are those of `multiprocessing`. What is added here: a fork that dies or hangs
is replaced, all of them end with this process however it ends, and arrays in results
pass without being copied on the way.
"""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import psutil

from koffline.jobs.workers import JobError, as_ours

if TYPE_CHECKING:
    import torch

T = TypeVar("T")  # the result of a piece
Tell = Callable[[Any], None]
# ``call(replicas, tell)``: of a piece; ``tell`` passes news on while it is computed
Call = Callable[[slice, Tell], T]
# receives the first replica of a piece and its news; the same news may come twice
Hear = Callable[[int, Any], None]

_RETRIES = 2  # of a piece whose process died
# A fork only computes. One that sleeps for so long without any processor time waits for
# a lock that another thread of this process held when it was forked.
_STUCK_SECONDS = 30.0
_BETWEEN_LOOKS = 2.0  # seconds, while this process waits
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_ALIGNED = 64  # bytes, as vector instructions like arrays to begin


def can_fork() -> bool:
    """Whether forks of this process can compute.

    On a Mac its BLAS does not survive a fork; Windows has none. `multiprocessing` lets
    a daemon, such as a worker of its pools, start no processes.
    """
    is_daemon = multiprocessing.current_process().daemon
    return sys.platform.startswith("linux") and not is_daemon


def compute_in_forks(
    call: Call[T], call_in_fork: Call[T], pieces: list[slice], hear: Hear
) -> list[T]:
    """Results in the order of the pieces: ``call`` for the last one in this process,
    ``call_in_fork`` for the others, each in a fork.

    An exception, such as an interrupt, ends the forks. Raises what a piece raises, and
    JobError if the processes of a piece die.
    """
    forks = _Forks(call_in_fork, hear)
    last = pieces[-1]

    def tell(news: object) -> None:
        hear(last.start, news)
        forks.listen(0.0)

    try:
        for piece in pieces[:-1]:
            forks.start(piece)
        last_result = call(last, tell)
        results = forks.results()
    finally:
        forks.end()
    return [*(results[piece.start] for piece in pieces[:-1]), last_result]


class _Forks(Generic[T]):
    """The forks of one computation, by the first replica of their piece."""

    def __init__(self, call: Call[T], hear: Hear) -> None:
        self._call = call
        self._hear = hear
        self._forks: dict[int, _Fork[T]] = {}

    def start(self, piece: slice, retries: int = _RETRIES) -> None:
        """Compute a piece in a new fork. retries: that are left if it dies."""
        with _interrupts_wait():
            self._forks[piece.start] = _Fork(self._call, piece, retries)

    def listen(self, seconds: float) -> None:
        """Pass on news, for which it waits at most so long."""
        forks = list(self._forks.values())
        ready = wait([fork.reader for fork in forks], seconds)
        for fork in forks:
            if not ready:
                fork.end_if_stuck()
            if fork.reader in ready:
                for news in fork.news():
                    self._hear(fork.piece.start, news)

    def results(self) -> dict[int, T]:
        """Wait for all forks, and return their results. Raises what a piece raises."""
        results = {}
        while self._forks:
            self.listen(_BETWEEN_LOOKS)
            ended = [fork for fork in self._forks.values() if fork.has_ended]
            for fork in ended:
                del self._forks[fork.piece.start]
                fork.end()
                if fork.has_outcome:
                    results[fork.piece.start] = fork.result()
                else:
                    self._replace(fork)
        return results

    def end(self) -> None:
        """End those that still run."""
        for fork in self._forks.values():
            fork.end()

    def _replace(self, fork: _Fork[T]) -> None:
        """A new fork for the piece of one that died. Raises JobError after several."""
        if not fork.retries:
            raise JobError(
                "a process of this computation died (killed, or out of memory?),"
                f" {1 + _RETRIES} times; free memory, or use one core (cores=1)"
            )
        self.start(fork.piece, fork.retries - 1)


class _Fork(Generic[T]):
    """A copy of this process that computes one piece."""

    def __init__(self, call: Call[T], piece: slice, retries: int) -> None:
        self.piece = piece
        self.retries = retries
        self.has_ended = False
        self.has_outcome = False
        self._outcome: tuple[Any, Exception | None] = (None, None)  # result, error
        self._looked = (0.0, -1.0)  # when, and its processor time then
        context = multiprocessing.get_context("fork")
        self.reader, writer = context.Pipe(duplex=False)
        # the library that ends forks with this process is loaded before the fork
        arguments = (call, piece, writer, os.getpid(), ctypes.CDLL(None).prctl)
        self._process = context.Process(target=_compute, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # of other threads, as notebooks have; see `_STUCK_SECONDS`
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        writer.close()

    def news(self) -> Iterator[object]:
        """What the fork has told since the last call; keeps its outcome, and notes when
        it has ended.
        """
        try:
            while self.reader.poll():
                kind, value = _receive(self.reader)
                if kind == "news":
                    yield value
                else:
                    self._outcome = value
                    self.has_outcome = True
        except (EOFError, OSError):  # also in the middle of a message
            self.has_ended = True

    def result(self) -> T:
        """The result. Raises the error with which the piece ended."""
        value: T
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def end_if_stuck(self) -> None:
        """Kill the fork if it has slept for long without using the processor."""
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            used = sum(process.cpu_times()[:2])  # seconds of its own
            now = time.monotonic()
            since, used_before = self._looked
            if process.status() != psutil.STATUS_SLEEPING or used != used_before:
                self._looked = (now, used)
            elif now - since > _STUCK_SECONDS:
                self._process.kill()

    def end(self) -> None:
        """Kill the fork if it still runs, and forget it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.reader.close()


def _compute(
    call: Call[object],
    piece: slice,
    writer: Connection,
    parent: int,
    prctl: Callable[..., int],
) -> None:
    """In the fork: compute the piece, and send news and the outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # the collector would write to, and so copy, what both processes share
    gc.freeze()
    error: Exception | None = None
    try:
        result = call(piece, lambda news: _send(writer, ("news", news)))
        message = _packed(("outcome", (result, None)))
    except Exception as raised:
        error = raised
        try:
            pickle.loads(pickle.dumps(error))  # some cannot be read again
        except Exception:
            error = as_ours(error)
        message = _packed(("outcome", (None, error)))
    _send_packed(writer, message)


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

    def reducer_override(self, obj: object) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _tensor_of, (obj.detach().cpu().numpy(),)
        return NotImplemented


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    tensor: torch.Tensor = sys.modules["torch"].from_numpy(array)
    return tensor


def _packed(value: object) -> list[memoryview]:
    """A pickle, and then the buffers of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(value)
    return [content.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _send(writer: Connection, value: object) -> None:
    _send_packed(writer, _packed(value))


def _send_packed(writer: Connection, blocks: list[memoryview]) -> None:
    """Send the sizes of the blocks, and the blocks that are not empty."""
    sizes = [block.nbytes for block in blocks]
    writer.send(sizes)
    for block in blocks:
        if block.nbytes:
            writer.send_bytes(block)


def _receive(reader: Connection) -> Any:
    """What `_send` has sent. Its arrays can be written to. Raises EOFError or OSError
    if the fork ends before all is sent.
    """
    blocks = []
    for size in reader.recv():
        block = _aligned(size)
        if size:
            reader.recv_bytes_into(block)
        blocks.append(block)
    return pickle.loads(blocks[0], buffers=blocks[1:])


def _aligned(size: int) -> memoryview:
    """New memory of so many bytes, which begins at a multiple of `_ALIGNED`."""
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].data
