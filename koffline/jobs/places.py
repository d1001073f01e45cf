"""Where `map_ordered` computes: in this process, in others of this machine, or on a Ray cluster."""

from __future__ import annotations

import hashlib
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from koffline import errors
from koffline.errors import ConfigError, KofflineError
from koffline.jobs.running import Failure, in_words

Call = Callable[[Any, Any], Any]

_LARGE = 2**20  # bytes of a value that waits on the disk


@runtime_checkable
class Workers(Protocol):
    """What computes items: any of those that were handed over may end first."""

    @property
    def capacity(self) -> int:
        """How many may be handed over at a time."""
        ...

    @property
    def window(self) -> int:
        """How many may be handed over, or wait for those before them."""
        ...

    def submit(self, number: int, item: Any) -> None:
        """Hand an item over."""

    def next_finished(self) -> tuple[int, Any]:
        """Wait for one item: its number, and its value or a Failure (Lost where its worker died)."""
        ...

    def value(self, result: Any) -> Any:
        """The value itself, of what `next_finished` gave; asked for once, when it is its turn."""
        ...

    def close(self, at_once: bool) -> None:
        """Let go of the workers; with ``at_once`` stop what they do."""


class Here:
    """Computes an item when its value is asked for; errors that are not the user's pass through."""

    capacity = window = 1

    def __init__(self, call: Call, shared: Any) -> None:
        self._call, self._shared = call, shared
        self._waiting: tuple[int, Any] | None = None

    def submit(self, number: int, item: Any) -> None:
        """Keep an item until its value is asked for."""
        self._waiting = number, item

    def next_finished(self) -> tuple[int, Any]:
        """Compute it."""
        assert self._waiting is not None
        number, item = self._waiting
        try:
            return number, self._call(self._shared, item)
        except KofflineError as error:
            return number, _failure_of(error)

    def value(self, result: Any) -> Any:
        """The result."""
        return result

    def close(self, at_once: bool) -> None:
        """There is nothing to let go."""


class InProcesses:
    """Computes items in processes of this machine: those that `kept_workers` keeps, or its own.

    Large values wait for their turn on the disk, not in memory.
    """

    def __init__(self, payload: bytes, workers: int) -> None:
        from koffline.jobs.process_pool import Processes

        found = bool(_kept) and _kept[-1].capacity == workers
        self._processes = _kept.pop() if found else Processes(workers)
        self._payload = payload
        self._folder = tempfile.TemporaryDirectory(prefix="koffline-")
        self.capacity, self.window = workers, 2 * workers

    def submit(self, number: int, item: Any) -> None:
        """Give an item to a process that is free."""
        self._processes.submit(number, perform_in_process, self._payload, item, self._folder.name)

    def next_finished(self) -> tuple[int, Any]:
        """As of `Workers`."""
        return self._processes.next_finished()

    def value(self, result: Any) -> Any:
        """As of `Workers`."""
        if not isinstance(result, Path):
            return pickle.loads(result)
        with result.open("rb") as file:
            value = pickle.load(file)
        result.unlink()
        return value

    def close(self, at_once: bool) -> None:
        """As of `Workers`."""
        if at_once or not self._processes.kept:
            self._processes.close(at_once)
        if self._processes.kept:
            _kept.append(self._processes)
        self._folder.cleanup()


_kept: list[Any] = []  # processes that no pass uses now


@contextmanager
def kept_workers(workers: int, ray: str | None) -> Iterator[None]:
    """The passes inside start their processes, or join the Ray cluster, only once.

    Raises ConfigError for a cluster that does not answer.
    """
    if ray is not None:
        from koffline.jobs.ray_tasks import connect

        module, own = connect(ray, workers)
        try:
            yield
        finally:
            if own:
                module.shutdown()
    elif workers > 1:
        from koffline.jobs.process_pool import Processes

        processes = Processes(workers)
        processes.kept = True
        _kept.append(processes)
        try:
            yield
        finally:
            processes.kept = False
            if processes in _kept:  # not with a pass that was left in the middle
                _kept.remove(processes)
            processes.close(at_once=False)
    else:
        yield


class OnRay:
    """Computes items on a cluster; twice as many as it has cores are on their way, so that none is idle.

    Values wait for their turn in Ray's store.
    """

    def __init__(self, payload: bytes, address: str, workers: int) -> None:
        from koffline.jobs.ray_tasks import RayTasks

        self._tasks = RayTasks(address, workers, perform_on_ray)
        self._payload = self._tasks.put(payload)

    @property
    def capacity(self) -> int:
        """Nodes may come and go while a pass runs."""
        return 2 * self._tasks.cores

    @property
    def window(self) -> int:
        """What waits for its turn counts too."""
        return self.capacity

    def submit(self, number: int, item: Any) -> None:
        """Give an item to Ray."""
        self._tasks.submit(number, self._payload, item)

    def next_finished(self) -> tuple[int, Any]:
        """As of `Workers`."""
        return self._tasks.next_finished()

    def value(self, result: Any) -> Any:
        """As of `Workers`; arrays of Ray's store itself could not be written to."""
        return pickle.loads(memoryview(result))

    def close(self, at_once: bool) -> None:
        """As of `Workers`."""
        self._tasks.close(at_once)


_received: dict[bytes, tuple[Call, Any]] = {}


def perform_in_process(payload: bytes, item: Any, folder: str) -> bytes | Path | Failure:
    """At a process of this machine: the packed value, in a file where it is large."""
    packed_value = _perform(payload, item)
    if isinstance(packed_value, Failure) or len(packed_value) < _LARGE:
        return packed_value
    try:
        handle, name = tempfile.mkstemp(dir=folder)
        with open(handle, "wb") as file:
            file.write(packed_value)
    except OSError as error:
        return _failure_of(error)
    return Path(name)


def perform_on_ray(payload: bytes, item: Any) -> np.ndarray | Failure:
    """At a worker of Ray: the packed value as an array of bytes, which Ray does not copy."""
    packed_value = _perform(payload, item)
    if isinstance(packed_value, Failure):
        return packed_value
    return np.frombuffer(packed_value, dtype=np.uint8)


def _perform(payload: bytes, item: Any) -> bytes | Failure:
    """The packed value of one item, or why there is none. What is shared is unpacked once."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        digest = hashlib.sha256(payload).digest()
        if digest not in _received:
            _received.clear()
            _received[digest] = pickle.loads(payload)
        call, shared = _received[digest]
        value = call(shared, item)
    except Exception as error:
        return _failure_of(error)
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever the objects' own pickling raises
        return Failure(f"its value cannot be sent back ({' '.join(str(error).split())})", "")


def _failure_of(error: Exception) -> Failure:
    kinds = [one.__name__ for one in type(error).__mro__ if issubclass(one, KofflineError)]
    known = next((kind for kind in kinds if hasattr(errors, kind)), "")
    return Failure(in_words(error), "".join(traceback.format_exception(error)), known)


def packed(call: Call, shared: Any) -> bytes:
    """What a worker unpacks. Raises ConfigError for what cannot travel."""
    import cloudpickle

    try:  # unlike pickle it takes functions of scripts and notebooks along
        return cloudpickle.dumps((call, shared))
    except Exception as error:  # whatever the objects' own pickling raises
        reason = " ".join(str(error).split())
        raise ConfigError(f"the work cannot be sent to workers ({reason}); run it with workers=1") from None
