"""Independent pieces of work, run here, in several processes, or on a Ray cluster.

`run_jobs`: jobs whose results are files. `map_ordered`: values in the order of their items, such as sums over
the shards of a log.
"""

from koffline.jobs.mapping import Mapped, map_ordered
from koffline.jobs.running import Job, JobError, JobFailure, JobsRun, LocalFile, run_jobs
from koffline.jobs.status import JobStatus, Report

__all__ = [
    "Job",
    "JobError",
    "JobFailure",
    "JobStatus",
    "JobsRun",
    "LocalFile",
    "Mapped",
    "Report",
    "map_ordered",
    "run_jobs",
]
