"""Workers outside this process: other processes of this machine, or cores of a Ray
cluster.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from koffline.errors import ConfigError, KofflineError, install_command
from koffline.store.run_record import THREADS
from koffline.untrusted.limits import one_line_errors
from koffline.untrusted.user_code import (
    current_folder,
    separate_state_for_good,
    user_code,
    user_modules,
)

# Keeps Python from putting the current folder first on the
# path of a new process (from 3.11 on).
_SAFE_PATH = "PYTHONSAFEPATH"
# Where workers find the packed work: a file, or Ray's reference to it, in a list.
Place: TypeAlias = Path | list[object]
# The pickled value of an item as bytes (uint8), or the error with which it ended.
Packed: TypeAlias = np.ndarray | KofflineError
# ``call(shared, item)``, and ``shared``
Work: TypeAlias = tuple[Callable[[Any, Any], object], object]


@contextmanager
def _no_folder_on_path() -> Iterator[None]:
    """Context in which processes start without the current folder on their path."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


class JobError(KofflineError):
    """A job that failed by an error of koffline or the machine. trace: the worker's
    traceback.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Processes:
    """Single-threaded processes, each with its own executor: if one dies, only its own
    item is lost.
    """

    def __init__(self, workers: int) -> None:
        # threads that import it at once may fail
        from joblib.externals.loky.process_executor import BrokenProcessPool

        self.capacity = workers
        self._broken = BrokenProcessPool
        # each thread has an executor of its own
        self._threads = ThreadPoolExecutor(workers)
        self._own = threading.local()
        self._all: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False
        with _no_folder_on_path():
            # loky starts both before its first process.
            from joblib.externals.loky.backend import resource_tracker as of_loky

            of_loky._resource_tracker.ensure_running()
            resource_tracker.ensure_running()

    def place(self, work: bytes, folder: Path) -> Path:
        """Write the packed function to a file that every worker can read, and return
        its path.
        """
        (folder / "work").write_bytes(work)
        return folder / "work"

    def submit(self, place: Place, item: bytes, retries: int) -> Future[Packed]:
        """Give an item to a worker, and to up to ``retries`` others if workers die;
        read it by `value_of`.
        """
        return self._threads.submit(self._call, place, item, retries)

    def cancel(self, future: Future[Packed]) -> None:
        """Cancel an item whose value is no longer needed."""
        future.cancel()

    def close(self, at_once: bool) -> None:
        """End the workers; with ``at_once`` also interrupt running items."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        for executor in self._all:
            # loky's own kill_workers fails if an item has not been handed on yet.
            if at_once:
                for process in list(executor._processes.values()):
                    process.terminate()
        for executor in self._all:
            executor.shutdown()

    def _call(self, place: Place, item: bytes, retries: int) -> Packed:
        for _ in range(1 + retries):
            with self._lock:  # no process may start after `close`
                if self._closed:
                    raise RuntimeError("the workers have ended")
                future = self._executor().submit(_perform, place, item)
            try:
                packed: Packed = future.result()
                return packed
            except self._broken:
                del self._own.executor
        return _lost("a worker process died (killed, or out of memory?)", retries)

    def _executor(self) -> Any:
        """The executor of the calling thread, which has one process; a new one if that
        process has died.
        """
        from joblib.externals.loky import ProcessPoolExecutor

        if not hasattr(self._own, "executor"):
            # loky replaces a process that has grown by 300 MB between two items, and
            # warns of it needlessly.
            warnings.filterwarnings(
                "ignore", "A worker stopped while some jobs were given", UserWarning
            )
            env = dict.fromkeys(THREADS, "1") | {_SAFE_PATH: "1"}
            start = os.getpid(), os.environ.get(_SAFE_PATH)
            new = ProcessPoolExecutor(1, initializer=_attend, initargs=start, env=env)
            self._own.executor = new
            self._all.append(new)
        return self._own.executor


class RayCluster:
    """Cores of a Ray cluster: one core and one thread per item. A running cluster is
    not changed.

    address: "local" starts a cluster of ``workers`` cores on this machine and stops it
    after the run; "auto" or an address joins a running cluster. An existing connection
    of the caller is used and left open. Raises ConfigError if the cluster does not
    answer or ray is not installed.
    """

    def __init__(self, address: str, workers: int) -> None:
        # Ray reads these when it loads. It would report usage to its makers, and warn
        # of a change to come in how it hides accelerators from jobs that ask for none.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"ray is not installed; {install_command('ray')}, or leave --ray out"
            ) from None
        host, separator, port = address.removeprefix("ray://").rpartition(":")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            options |= {"num_cpus": workers, "include_dashboard": False}
        self._ray = ray
        self._is_own = not ray.is_initialized()
        remedy = "start one with `ray start --head`, give its address, or use local"
        with one_line_errors(
            "--ray", f"no Ray cluster at '{address}'", remedy, ConfigError
        ):
            # Ray itself waits for minutes, and talks, before it gives up on an address
            if separator:
                socket.create_connection((host, int(port)), timeout=10).close()
            if self._is_own:
                ray.init(address=address, **options)
        self._perform = ray.remote(num_cpus=1)(_perform)

    @property
    def capacity(self) -> int:
        """Current number of cores of the cluster, at least one; nodes may come and
        go.
        """
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def place(self, work: bytes, folder: Path) -> list[object]:
        """Store the packed function in Ray; returned in a list, so that Ray passes on
        the reference.
        """
        return [self._ray.put(np.frombuffer(work, dtype=np.uint8))]

    def submit(self, place: Place, item: bytes, retries: int) -> Future[Packed]:
        """Submit an item, as in `Processes`."""
        reference = self._perform.options(max_retries=retries).remote(place, item)
        future: Future[Packed] = reference.future()
        future.reference = reference  # type: ignore[attr-defined]
        return future

    def cancel(self, future: Future[Packed]) -> None:
        """Cancel an item, as in `Processes`."""
        self._ray.cancel(future.reference, force=True)  # type: ignore[attr-defined]

    def close(self, at_once: bool) -> None:
        """End the workers, as in `Processes`."""
        if self._is_own:
            self._ray.shutdown()


Workers = Processes | RayCluster
_kept: dict[tuple[int, str | None], Workers] = {}


@contextmanager
def opened(workers: int, ray: str | None, keep: bool = False) -> Iterator[Workers]:
    """Open workers for a block; an error stops them at once. With ``keep``, inner
    blocks share them.

    Raises ConfigError if the cluster does not answer.
    """
    if (workers, ray) in _kept:
        yield _kept[workers, ray]
        return
    new: Workers
    if ray is None:
        new = Processes(workers)
    else:
        new = RayCluster(ray, workers)
    if keep:
        _kept[workers, ray] = new
    ended_well = False
    try:
        yield new
        ended_well = True
    finally:
        if keep:
            del _kept[workers, ray]
        new.close(at_once=not ended_well)


def pack(value: object) -> bytes:
    """Pickle any value, including functions of scripts and notebooks.

    Raises ConfigError.
    """
    import cloudpickle

    with one_line_errors(
        "workers",
        "the work cannot be sent to them and back",
        "use workers=1",
        ConfigError,
    ):
        packed: bytes = cloudpickle.dumps(value, protocol=5)
    return packed


def packed_work(call: Callable[[Any, Any], object], shared: object) -> bytes:
    """Pickle a function and its first argument, with the places of their modules.

    Raises ConfigError.
    """
    unwanted = current_folder()
    if unwanted in sys.path:
        unwanted = None
    return pack((user_modules.folders, unwanted, pack((call, shared))))


def _unpacked_work(work: bytes | memoryview) -> Work:
    """At a worker: the function and its first argument from `packed_work`."""
    folders, unwanted, content = pickle.loads(work)
    # Ray puts the folder where the run began first on the path
    while unwanted in sys.path:
        sys.path.remove(unwanted)
    user_modules.remember(folders)
    separate_state_for_good()
    with user_code(
        "workers", "the work cannot be unpacked", "use workers=1", ConfigError
    ):
        unpacked: Work = pickle.loads(content)
    return unpacked


def value_of(future: Future[Packed], retries: int) -> Any:
    """The value of an item, or the KofflineError with which it ended.

    Arrays are writable.
    """
    try:
        result = future.result()
        if isinstance(result, KofflineError):
            return result
        return pickle.loads(result.data)
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = f"its Ray worker was lost or lacks koffline ({first})"
        if "TaskError" in type(error).__name__:
            return JobError(reason, str(error))
        return _lost(reason, retries)


def _lost(reason: str, retries: int) -> JobError:
    """The error of an item whose worker died, again and again."""
    tries = ""
    if retries:
        tries = f", {1 + retries} times"
    return JobError(
        f"{reason}{tries}; give the workers more memory, or leave this part out"
    )


def as_ours(error: Exception) -> KofflineError:
    """A KofflineError as it is; any other error as a JobError with its type and source
    line.
    """
    if isinstance(error, KofflineError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())
    message = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
    if reason:
        message += f": {reason}"
    return JobError(message, "".join(traceback.format_exception(error)))


# at a worker: the unpacked functions
_received: dict[str, Work] = {}


def is_worker() -> bool:
    """Whether this process is a worker, which has one core."""
    return bool(_received)


def _perform(place: Place, item: bytes) -> Packed:
    """Compute one item in a worker; return its packed value as an array (not copied by
    Ray), or an error.
    """
    try:
        key = str(place)
        if key not in _received:  # the work is unpacked once
            _received.clear()
            if isinstance(place, Path):
                work = place.read_bytes()
            else:
                work = sys.modules["ray"].get(place[0]).data
            _received[key] = _unpacked_work(work)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        call, shared = _received[key]
        return np.frombuffer(pack(call(shared, pickle.loads(item))), dtype=np.uint8)
    except Exception as error:
        return as_ours(error)


def _attend(parent: int, safe_path: str | None) -> None:
    """Initialise a worker: ignore interrupts, which the parent handles, and exit when
    the parent exits.

    safe_path: the parent's PYTHONSAFEPATH, for programs that user code starts.
    """
    if safe_path is None:
        os.environ.pop(_SAFE_PATH, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
