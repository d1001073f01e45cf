"""A Ray cluster: joined or started, calls handed to it, and left as it was found."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from koffline.errors import ConfigError
from koffline.jobs.running import Failure, Lost
from koffline.untrusted.code import check_code_allowed

_REMEDY = "start one with `ray start --head`, give its address, or use local"


class RayTasks:
    """Calls on the cores of a Ray cluster, one core and one thread each.

    address: "local" starts a cluster of ``workers`` cores on this machine and ends it after the run; "auto"
    or an address joins one that runs. A connection that the caller has made already is used and left.
    Ray's own repetitions are off: what was lost is told, and the caller decides.
    """

    def __init__(self, address: str, workers: int, function: Callable[..., Any]) -> None:
        self._ray, self._own = connect(address, workers)
        self._remote = self._ray.remote(num_cpus=1, max_retries=0)(function)
        self._tasks: dict[Any, Any] = {}

    @property
    def cores(self) -> int:
        """Cores of the cluster now; nodes may come and go. At least one."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def put(self, value: Any) -> Any:
        """Keep a value where every worker can ask for it; the reference is an argument for `submit`."""
        return self._ray.put(value)

    def submit(self, key: Any, *arguments: Any) -> None:
        """Hand a call of the function over; Ray starts it when a core is free."""
        self._tasks[self._remote.remote(*arguments)] = key

    def next_finished(self) -> tuple[Any, Any]:
        """Wait for one call: its key, and its value, or a Failure (Lost where its worker or node died)."""
        reference = self._ray.wait(list(self._tasks), num_returns=1)[0][0]
        key = self._tasks.pop(reference)
        errors = self._ray.exceptions
        try:
            return key, self._ray.get(reference)
        except errors.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            kind = Failure if isinstance(error, errors.RayTaskError) else Lost
            return key, kind(f"its Ray worker was lost or lacks koffline ({reason})", str(error))

    def close(self, at_once: bool) -> None:
        """Leave the cluster as it was found."""
        if at_once:
            for reference in self._tasks:
                self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()


def connect(address: str, workers: int) -> tuple[Any, bool]:
    """The ray module, connected, and whether that was done here (else somebody else will disconnect it).

    Raises ConfigError for a cluster that does not answer, and where ray is not installed.
    """
    ray = _import_ray()
    if address not in ("local", "auto"):
        check_code_allowed(f"the Ray cluster at {address}", "runs code and sends pickles back")
    _check_reachable(address)
    own = not ray.is_initialized()
    if own:
        _connect(ray, address, workers)
    return ray, own


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
        raise ConfigError(f"no Ray cluster at '{address}' ({reason}); {_REMEDY}") from None
