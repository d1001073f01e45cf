"""Work in several processes of this machine, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from koffline.jobs.running import Failure, Job, Lost, Result, perform

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Processes:
    """Fresh processes (no fork: torch's threads do not survive one), which end with their maker.

    Each task has an executor of one process to itself, so that a process that dies takes only its own task.
    """

    def __init__(self, workers: int) -> None:
        self.capacity = workers
        self.kept = False  # whether somebody else than its user will close it
        self._others = set(multiprocessing.active_children())
        self._idle: list[ProcessPoolExecutor] = []
        self._tasks: dict[Future[Any], tuple[Any, ProcessPoolExecutor]] = {}

    def submit(self, key: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a call; its process keeps what the function's module keeps for the next ones."""
        with _one_thread():  # processes start here, and torch reads the variables when it loads
            executor = self._idle.pop() if self._idle else _one_process()
            future = executor.submit(function, *arguments)
        self._tasks[future] = key, executor

    def next_finished(self) -> tuple[Any, Any]:
        """Wait for one call: its key, and its value, or a Failure (Lost where its process died)."""
        future = next(iter(wait(self._tasks, return_when=FIRST_COMPLETED).done))
        key, executor = self._tasks.pop(future)
        try:
            result = future.result()
        except BrokenProcessPool:
            executor.shutdown(wait=True)
            return key, Lost("a worker process died (killed, or out of memory?)", "")
        except Exception as error:  # what cannot be pickled never reaches a worker, or never comes back
            result = Failure(f"it cannot be sent to a worker ({' '.join(str(error).split())})", "")
        self._idle.append(executor)
        return key, result

    def close(self, at_once: bool) -> None:
        """End the processes; with ``at_once`` also the calls in them. The next call would start new ones."""
        if at_once:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        for executor in (*self._idle, *(busy for _, busy in self._tasks.values())):
            executor.shutdown(wait=True, cancel_futures=True)
        self._idle.clear()
        self._tasks.clear()


class ProcessPool:
    """Jobs in `Processes`; the check of a result stays here, where it need not be picklable."""

    def __init__(self, workers: int) -> None:
        self.capacity = workers
        self._processes = Processes(workers)

    def submit(self, job: Job) -> None:
        """Start a job."""
        self._processes.submit(job, perform, replace(job, is_valid=None))

    def next_finished(self) -> tuple[Job, Result]:
        """Wait for one job. What a worker that died was running is a failure."""
        job, result = self._processes.next_finished()
        if result is None and not job.done:
            result = Failure(f"it ended without a valid result at {job.path}", "")
        return job, result

    def close(self, at_once: bool) -> None:
        """End the processes; with ``at_once`` also the jobs in them."""
        self._processes.close(at_once)


def _one_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Child processes inherit one thread; this process keeps its own setting."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_worker() -> None:
    """An interrupt is the parent's affair, which stops the workers; a worker does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
