"""Independent jobs whose results are files: in this process, in several, or on a Ray cluster.

A job whose file is there is not run again, so that a killed run continues where it was.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from koffline.errors import ConfigError, KofflineError
from koffline.jobs.status import JobStatus, Report, bar, silence
from koffline.store.files import atomic_file


class JobError(KofflineError):
    """A job that failed. ``trace`` is the traceback of where it ran, for a fault that is not the user's."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine among a job's arguments: on Ray the call receives one with a copy's path."""

    path: Path


@dataclass(frozen=True)
class Job:
    """One piece of work: ``call(path, *arguments)`` writes its result at ``path``, whole or not at all.

    call: importable by name (other processes import it). It may keep files of its own beside ``path``.
    path: on Ray the call receives a path of the same name in a scratch folder of the worker.
    is_valid: whether the file at ``path`` is a result of this job; an invalid one is computed again.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    path: Path
    is_valid: Callable[[Path], bool] | None = None

    @property
    def done(self) -> bool:
        """Whether a result is there."""
        return self.path.is_file() and (self.is_valid is None or self.is_valid(self.path))


@dataclass(frozen=True)
class Failure:
    """Why a job has no result, in words that can travel between processes.

    kind: the name of the KofflineError that says so; "" for a fault of ours or of the machine.
    """

    reason: str
    trace: str
    kind: str = ""


class Lost(Failure):
    """The worker died or cannot be reached; what it did may work elsewhere, or at another time."""


@dataclass(frozen=True)
class JobFailure:
    """The name of a job that failed, why in one line, and the traceback of where it ran."""

    name: str
    reason: str
    trace: str


@dataclass(frozen=True)
class JobsRun:
    """What `run_jobs` did: jobs that ended well now, jobs found finished, seconds, and what failed."""

    ran: int
    found: int
    seconds: float
    failures: tuple[JobFailure, ...] = ()


Result = bytes | Failure | None
"""What comes back of a job: its file's content where the worker's disk is another, a failure, nothing."""


@runtime_checkable
class Pool(Protocol):
    """What runs jobs: takes up to ``capacity`` at a time and gives back whichever ends first."""

    capacity: int

    def submit(self, job: Job) -> None:
        """Start a job."""

    def next_finished(self) -> tuple[Job, Result]:
        """Wait for one of the submitted jobs."""
        ...

    def close(self, at_once: bool) -> None:
        """Let go of the workers; with ``at_once`` stop what they do."""


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    ray: str | None = None,
    progress: bool | Report = True,
    keep_going: bool = False,
) -> JobsRun:
    """Run the jobs that have no result yet; when it returns, every job's file is there.

    workers: 1 runs in this process, more in as many processes with one thread each.
    ray: "local", "auto" or the address of a Ray cluster; results come back to this machine's disk.
    progress: True draws a bar on a terminal; or a callable that hears every change.
    keep_going: run all other jobs after a failure and return the failures, whose files are missing.

    Otherwise no further job starts after a failure, those that run may end, and JobError names the job. An
    interrupt stops the workers at once. Finished files stay in all cases.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; give a positive number")
    paths = [job.path for job in jobs]
    for job in jobs:
        if paths.count(job.path) > 1:
            raise ConfigError(f"several jobs write {job.path}; give each its own file")
    started = perf_counter()
    missing = [job for job in jobs if not job.done]
    found = len(jobs) - len(missing)
    failures: list[JobFailure] = []
    with ExitStack() as stack:
        report = stack.enter_context(bar()) if progress is True else progress
        for job in missing:
            _make_folder(job.path.parent)
        if missing:
            pool = _open_pool(workers, ray)
            failures = _run_missing(missing, found, pool, report or silence, keep_going)
        else:
            (report or silence)(JobStatus(found, found, found, ()))
    ran = len(missing) - len(failures)
    if failures and not keep_going:
        raise _error_of(failures, sum(job.done for job in jobs), len(jobs))
    return JobsRun(ran, found, perf_counter() - started, tuple(failures))


def perform(job: Job) -> Failure | None:
    """Run one job where this process is; any error becomes a Failure."""
    try:
        job.call(job.path, *job.arguments)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return Failure(in_words(error), trace)
    if not job.done:
        return Failure(f"it ended without a valid result at {job.path}", "")
    return None


class _ThisProcess:
    """Runs a job when its result is asked for."""

    capacity = 1

    def __init__(self) -> None:
        self._job: Job | None = None

    def submit(self, job: Job) -> None:
        self._job = job

    def next_finished(self) -> tuple[Job, Result]:
        assert self._job is not None
        return self._job, perform(self._job)

    def close(self, at_once: bool) -> None:
        pass


def _open_pool(workers: int, ray: str | None) -> Pool:
    if ray is not None:
        from koffline.jobs.ray_pool import RayPool

        return RayPool(ray, workers)
    if workers > 1:
        from koffline.jobs.process_pool import ProcessPool

        return ProcessPool(workers)
    return _ThisProcess()


def _run_missing(
    missing: Sequence[Job], found: int, pool: Pool, report: Report, keep_going: bool
) -> list[JobFailure]:
    total = found + len(missing)
    waiting, done = list(missing), found
    running: list[Job] = []
    failures: list[JobFailure] = []
    ended_well = False
    try:
        while running or waiting:
            if failures and not keep_going:
                waiting.clear()
            while waiting and len(running) < pool.capacity:
                running.append(waiting.pop(0))
                pool.submit(running[-1])
            if not running:
                break
            report(JobStatus(done, found, total, tuple(job.name for job in running)))
            job, result = pool.next_finished()
            running.remove(job)
            if isinstance(result, Failure):
                failures.append(JobFailure(job.name, result.reason, result.trace))
                continue
            if result is not None:
                with atomic_file(job.path, force=True) as temporary:
                    temporary.write_bytes(result)
            done += 1
        ended_well = True
    finally:
        pool.close(at_once=not ended_well)
    report(JobStatus(done, found, total, ()))
    return failures


def _error_of(failures: Sequence[JobFailure], done: int, total: int) -> JobError:
    first = failures[0]
    others = f" (so did {', '.join(other.name for other in failures[1:])})" if failures[1:] else ""
    return JobError(
        f"job {first.name} failed{others}: {first.reason}; {done} of {total} results are kept, "
        "mend the cause and run the same command again",
        first.trace,
    )


def in_words(error: Exception) -> str:
    """One line: the message of an error of ours; for others also their kind and the line they come from."""
    text = " ".join(str(error).split())
    if isinstance(error, KofflineError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}" + (text and f": {text}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created ({error.strerror or error}); choose another") from None
