"""Independent jobs whose results are files: in this process, in several, or on a Ray cluster.

A job whose file is there is not run again, so that a killed run continues where it was.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from koffline.errors import ConfigError
from koffline.jobs.mapping import JobError, JobStatus, Mapped, PassSettings, Report, heard_by
from koffline.jobs.workers import JobFailure, failure_of
from koffline.store.files import atomic_file


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine among a job's arguments: on Ray the call receives one with a copy's path."""

    path: Path


@dataclass(frozen=True)
class Job:
    """One piece of work: ``call(path, *arguments)`` writes its result at ``path``, whole or not at all.

    call: may keep files of its own beside ``path``.
    path: on Ray the call receives a path of the same name in a scratch folder of the worker.
    is_valid: whether the file at ``path`` is a result of this job; an invalid one is computed again.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    path: Path
    is_valid: Callable[[Path], bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The check of a result stays in this process, and need not travel."""
        return {**self.__dict__, "is_valid": None}

    @property
    def done(self) -> bool:
        """Whether a result is there."""
        return self.path.is_file() and (self.is_valid is None or self.is_valid(self.path))


@dataclass(frozen=True)
class JobsRun:
    """What `run_jobs` did: jobs that ended well now, jobs found finished, seconds, and what failed."""

    ran: int
    found: int
    seconds: float
    failures: tuple[JobFailure, ...] = ()


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
    started = perf_counter()
    where = PassSettings(workers, ray, skip_bad_shards=True, retries=0, ordered=False)
    path, count = Counter(job.path for job in jobs).most_common(1)[0] if jobs else (None, 0)
    if count > 1:
        raise ConfigError(f"several jobs write {path}; give each its own file")
    missing = [job for job in jobs if not job.done]
    found, total = len(jobs) - len(missing), len(jobs)
    failures: list[JobFailure] = []
    for job in missing:
        job.path.parent.mkdir(parents=True, exist_ok=True)
    files = None if ray is None else _contents(missing)
    with heard_by(progress) as report:

        def hear(status: JobStatus) -> None:
            report(JobStatus(found + status.done - len(failures), found, total, status.running))

        if not missing:
            hear(JobStatus(0, 0, 0, ()))
        waiting = takewhile(lambda _: keep_going or not failures, missing) if missing else ()
        for mapped in where.map(_perform, waiting, files, lambda job: job.name, hear):
            if failure := _failure(mapped):
                failures.append(failure)
    if failures and not keep_going:
        raise _error_of(failures, sum(job.done for job in jobs), total)
    return JobsRun(len(missing) - len(failures), found, perf_counter() - started, tuple(failures))


def _failure(mapped: Mapped) -> JobFailure | None:
    """Keep the file that came back, if one did; return why there is no result."""
    job, result = mapped.item, mapped.value
    if mapped.failure or isinstance(result, JobFailure):
        return mapped.failure or replace(result, name=job.name)
    if result is not None:
        with atomic_file(job.path, force=True) as temporary:
            temporary.write_bytes(result)
    return None if job.done else JobFailure(job.name, f"it ended without a valid result at {job.path}", "")


def _perform(files: Mapping[Path, bytes] | None, job: Job) -> bytes | JobFailure | None:
    """Run one job where this process is; any error becomes a JobFailure.

    files: contents of the `LocalFile` among the arguments, for a machine that shares no disk with the
        sender's; the job works in a scratch folder there and the content of its file comes back.
    """
    try:
        if files is None:
            job.call(job.path, *job.arguments)
            return None
        with tempfile.TemporaryDirectory(prefix="koffline-") as scratch:
            path = Path(scratch) / job.path.name
            job.call(path, *_copied_files(job.arguments, files, Path(scratch) / "inputs"))
            return path.read_bytes() if path.is_file() else None
    except Exception as error:
        return failure_of(error)


def _contents(jobs: Sequence[Job]) -> dict[Path, bytes]:
    paths = {part.path for job in jobs for part in job.arguments if isinstance(part, LocalFile)}
    return {path: path.read_bytes() for path in paths}


def _copied_files(arguments: Sequence[Any], files: Mapping[Path, bytes], folder: Path) -> list[Any]:
    """The arguments with each file of the sender's machine replaced by its copy here, of the same name."""
    found: list[Any] = []
    for place, part in enumerate(arguments):
        if isinstance(part, LocalFile):
            copy = folder / str(place) / part.path.name
            copy.parent.mkdir(parents=True)
            copy.write_bytes(files[part.path])
            part = LocalFile(copy)
        found.append(part)
    return found


def _error_of(failures: Sequence[JobFailure], done: int, total: int) -> JobError:
    first = failures[0]
    others = f" (so did {', '.join(other.name for other in failures[1:])})" if failures[1:] else ""
    return JobError(
        f"job {first.name} failed{others}: {first.reason}; {done} of {total} results are kept, "
        "mend the cause and run the same command again",
        first.trace,
    )
