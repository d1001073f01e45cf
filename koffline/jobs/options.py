"""Where work runs: ``--workers``, ``--ray`` and ``--skip-bad-shards``, one wording for all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from koffline.jobs.mapping import Mapped, map_ordered
from koffline.jobs.places import Call, kept_workers
from koffline.jobs.status import Report

Command = TypeVar("Command", bound=Callable[..., Any])

_WORKERS = "Processes, one core each."
_RAY = "Run on Ray: local, auto or an address."
_SKIP = "Leave out shards that cannot be read, and name them."
_LAZY = "Implies --lazy."  # a pass over shards is asked for


@dataclass(frozen=True)
class PassSettings:
    """Where the passes over a log's shards run, and whether they leave out what cannot be read."""

    workers: int = 1
    ray: str | None = None
    skip_bad_shards: bool = False

    def map(
        self,
        call: Call,
        items: Iterable[Any],
        shared: Any = None,
        name: Callable[[Any], str] | None = None,
        progress: bool | Report | None = None,
    ) -> Iterator[Mapped]:
        """As `map_ordered`, with these settings."""
        return map_ordered(
            call,
            items,
            shared=shared,
            workers=self.workers,
            ray=self.ray,
            skip_failed=self.skip_bad_shards,
            progress=progress,
            name=name,
        )

    def kept(self) -> AbstractContextManager[None]:
        """Several passes inside it share their workers, whose start takes seconds. Raises ConfigError."""
        return kept_workers(self.workers, self.ray)


def worker_options(command: Command) -> Command:
    """``--workers N`` and ``--ray ADDRESS``: the parameters ``workers: int`` and ``ray: str | None``."""
    return _workers_and_ray(command, _WORKERS, _RAY)


def pass_options(command: Command) -> Command:
    """`worker_options`, and ``--skip-bad-shards``: the parameter ``skip_bad_shards: bool``.

    For commands that leave the log on disk where one of them is given.
    """
    command = click.option("--skip-bad-shards", is_flag=True, help=f"{_SKIP} {_LAZY}")(command)
    workers = f"{_WORKERS} More than one: {_LAZY[0].lower()}{_LAZY[1:]}"
    return _workers_and_ray(command, workers, f"{_RAY} {_LAZY}")


def _workers_and_ray(command: Command, workers: str, ray: str) -> Command:
    command = click.option("--ray", metavar="ADDRESS", help=ray)(command)
    return click.option("--workers", type=int, default=1, show_default=True, help=workers)(command)
