"""Options of commands that can read a log from disk, and how the log is then opened."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.jobs.options import pass_options
from koffline.ope.streaming.settings import DEFAULT_MEMORY, StreamSettings, parse_memory

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions

# Bytes in memory for each byte of a log: columns in double, their standardised copies, resampled weights.
_EAGER_FACTOR = 8
_EAGER_SHARE = 0.5  # of the machine's memory


@dataclass(frozen=True)
class Reading:
    """How DATA is to be read. ``lazy``: asked for, by itself or by an option that needs it."""

    lazy: bool
    stream: StreamSettings


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--lazy``, ``--memory``, ``--sample-rows``, ``--workers``, ``--ray``, ``--skip-bad-shards``; the
    command gets ``reading``.
    """

    @click.option("--lazy", is_flag=True, help="Leave the log on disk: one pass within --memory.")
    @click.option(
        "--memory", metavar="SIZE", help=f"What a process may hold; default {DEFAULT_MEMORY}. Implies --lazy."
    )
    @click.option("--sample-rows", type=int, help="Rows that networks are trained on. Implies --lazy.")
    @pass_options
    @functools.wraps(command)
    def run(
        *args: Any,
        lazy: bool,
        memory: str | None,
        sample_rows: int | None,
        workers: int,
        ray: str | None,
        skip_bad_shards: bool,
        **options: Any,
    ) -> Any:
        stream = StreamSettings(memory or DEFAULT_MEMORY, workers, ray, skip_bad_shards, sample_rows)
        asked = lazy or workers > 1 or skip_bad_shards
        asked = asked or any(option is not None for option in (memory, ray, sample_rows))
        return command(*args, reading=Reading(asked, stream), **options)

    return run


def open_for_reading(
    source: str, space: SpaceRequest | None, mapping: Any, reading: Reading
) -> Transitions | LazyTransitions:
    """The log, in memory or on disk as asked; a folder of shards that would not fit stays on disk (noted).

    Raises DataError.
    """
    from koffline.data.disk.shards import is_shard_folder
    from koffline.data.sources import open_transitions

    if reading.lazy:
        return open_transitions(source, space, lazy=True, mapping=mapping)
    if mapping is not None or not is_shard_folder(source):
        return open_transitions(source, space, mapping=mapping)
    log = open_transitions(source, space, lazy=True)
    needed, limit = _EAGER_FACTOR * len(log) * log.row_bytes, _EAGER_SHARE * machine_memory()
    if needed <= limit:
        return open_transitions(source, space)
    note = (
        f"the log would need about {needed / 1e9:.3g} GB in memory and was left on disk; networks saw a "
        "sample of its rows"
    )
    return dataclasses.replace(log, metadata=log.metadata.with_notes(note))


def machine_memory() -> int:
    """Bytes of memory of this machine; the default limit of a lazy pass where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return parse_memory(DEFAULT_MEMORY)
