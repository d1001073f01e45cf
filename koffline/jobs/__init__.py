"""Independent pieces of work, run here, in several processes, or on a Ray cluster.

`run_jobs`: jobs whose results are files. `PassSettings.map`: values in the order of their items, such as sums
over the shards of a log.
"""

from koffline.jobs.mapping import JobError, JobStatus, Mapped, PassSettings, Report
from koffline.jobs.running import Job, JobsRun, LocalFile, run_jobs
from koffline.jobs.workers import JobFailure

__all__ = [
    "Job",
    "JobError",
    "JobFailure",
    "JobStatus",
    "JobsRun",
    "LocalFile",
    "Mapped",
    "PassSettings",
    "Report",
    "run_jobs",
]
