"""Independent pieces of work whose results are files, run here, in several processes, or on a Ray cluster."""

from koffline.jobs.running import Job, JobError, JobFailure, JobsRun, JobStatus, LocalFile, Report, run_jobs

__all__ = ["Job", "JobError", "JobFailure", "JobStatus", "JobsRun", "LocalFile", "Report", "run_jobs"]
