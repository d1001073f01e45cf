"""Jobs on a Ray cluster; workers share no disk with this machine, so results travel as bytes."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.jobs.running import Failure, Job, LocalFile, Result, perform


class RayPool:
    """Everything is handed to Ray at once; it starts one job per free core and grows the cluster if it can.

    address: "local" starts a cluster of ``workers`` cores on this machine and ends it after the run; "auto"
    or an address joins one that runs. A connection that the caller has made already is used and left.
    """

    capacity = 1_000_000

    def __init__(self, address: str, workers: int) -> None:
        self._ray = _import_ray()
        _check_reachable(address)
        self._own = not self._ray.is_initialized()
        if self._own:
            _connect(self._ray, address, workers)
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(perform_elsewhere)
        self._jobs: dict[Any, Job] = {}
        self._files: dict[Path, Any] = {}  # contents that every worker can ask for

    def submit(self, job: Job) -> None:
        """Hand a job over, without its check, which stays here, and with the files among its arguments."""
        paths = [part.path for part in job.arguments if isinstance(part, LocalFile)]
        for path in paths:
            if path not in self._files:
                self._files[path] = self._ray.put(path.read_bytes())
        contents = [self._files[path] for path in paths]
        self._jobs[self._task.remote(replace(job, is_valid=None), *contents)] = job

    def next_finished(self) -> tuple[Job, Result]:
        """Wait for one job; a worker that was lost is a failure of its job."""
        reference = self._ray.wait(list(self._jobs), num_returns=1)[0][0]
        job = self._jobs.pop(reference)
        try:
            return job, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return job, Failure(f"its Ray worker was lost or lacks koffline ({reason})", str(error))

    def close(self, at_once: bool) -> None:
        """Leave the cluster as it was found."""
        if at_once:
            for reference in self._jobs:
                self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself waits for minutes, and talks, before it gives up on an address. Raises ConfigError."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster at '{address}' ({error}); check the address, or use local"
        ) from None


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


def _import_ray() -> Any:
    # Ray reads these when it loads. It would report usage to its makers, and warn of a change to come in how
    # it hides accelerators from jobs that ask for none.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("ray is not installed; run `pip install koffline[ray]` or run without it") from None
    return ray


def _connect(ray: Any, address: str, workers: int) -> None:
    extra = {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **extra)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no Ray cluster at '{address}' ({reason}); start one with `ray start --head`, give its address, "
            "or use local"
        ) from None
