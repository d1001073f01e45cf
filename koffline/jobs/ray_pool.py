"""Jobs on a Ray cluster; workers share no disk with this machine, so results travel as bytes."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from koffline.jobs.ray_tasks import RayTasks
from koffline.jobs.running import Failure, Job, LocalFile, Result, perform


class RayPool:
    """Everything is handed to Ray at once; it starts one job per free core and grows the cluster if it can.

    address: as of `RayTasks`.
    """

    capacity = 1_000_000

    def __init__(self, address: str, workers: int) -> None:
        self._tasks = RayTasks(address, workers, perform_elsewhere)
        self._files: dict[Path, Any] = {}  # contents that every worker can ask for

    def submit(self, job: Job) -> None:
        """Hand a job over, without its check, which stays here, and with the files among its arguments."""
        paths = [part.path for part in job.arguments if isinstance(part, LocalFile)]
        for path in paths:
            if path not in self._files:
                self._files[path] = self._tasks.put(path.read_bytes())
        self._tasks.submit(job, replace(job, is_valid=None), *(self._files[path] for path in paths))

    def next_finished(self) -> tuple[Job, Result]:
        """Wait for one job; a worker that was lost is a failure of its job."""
        return self._tasks.next_finished()

    def close(self, at_once: bool) -> None:
        """Leave the cluster as it was found."""
        self._tasks.close(at_once)


def perform_elsewhere(job: Job, *contents: bytes) -> bytes | Failure:
    """Run a job in a scratch folder of this machine, with one thread; the content of its file.

    contents: of the `LocalFile` among the job's arguments, in order.
    """
    if "torch" in sys.modules:  # the job's function has brought it along
        sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="koffline-") as scratch:
        arguments = _copied_files(job.arguments, contents, Path(scratch) / "inputs")
        here = replace(job, path=Path(scratch) / job.path.name, arguments=arguments)
        return perform(here) or here.path.read_bytes()


def _copied_files(arguments: tuple[Any, ...], contents: tuple[bytes, ...], folder: Path) -> tuple[Any, ...]:
    """The arguments with each file of the sender's machine replaced by its copy here, of the same name."""
    left = iter(contents)
    found: list[Any] = []
    for place, part in enumerate(arguments):
        if isinstance(part, LocalFile):
            copy = folder / str(place) / part.path.name
            copy.parent.mkdir(parents=True)
            copy.write_bytes(next(left))
            part = LocalFile(copy)
        found.append(part)
    return tuple(found)
