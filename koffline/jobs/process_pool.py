"""Jobs in several processes of this machine, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace

from koffline.jobs.running import Failure, Job, Result, perform

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ProcessPool:
    """Fresh processes (no fork: torch's threads do not survive one), which end with their maker.

    Each job has an executor of one process to itself, so that a process that dies takes only its own job.
    """

    def __init__(self, workers: int) -> None:
        self.capacity = workers
        self._others = set(multiprocessing.active_children())
        self._idle: list[ProcessPoolExecutor] = []
        self._jobs: dict[Future[Failure | None], tuple[Job, ProcessPoolExecutor]] = {}

    def submit(self, job: Job) -> None:
        """Start a job; the check of its result stays here, where it need not be picklable."""
        with _one_thread():  # processes start here, and torch reads the variables when it loads
            executor = self._idle.pop() if self._idle else _one_process()
            future = executor.submit(perform, replace(job, is_valid=None))
        self._jobs[future] = job, executor

    def next_finished(self) -> tuple[Job, Result]:
        """Wait for one job. What a worker that died was running is a failure."""
        future = next(iter(wait(self._jobs, return_when=FIRST_COMPLETED).done))
        job, executor = self._jobs.pop(future)
        try:
            result = future.result()
        except BrokenProcessPool:
            executor.shutdown(wait=True)
            return job, Failure("a worker process died (killed, or out of memory?)", "")
        except Exception as error:  # what cannot be pickled never reaches a worker
            result = Failure(f"it cannot be sent to a worker ({' '.join(str(error).split())})", "")
        self._idle.append(executor)
        if result is None and not job.done:
            result = Failure(f"it ended without a valid result at {job.path}", "")
        return job, result

    def close(self, at_once: bool) -> None:
        """End the processes; with ``at_once`` also the jobs in them."""
        if at_once:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        for executor in (*self._idle, *(busy for _, busy in self._jobs.values())):
            executor.shutdown(wait=True, cancel_futures=True)


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
