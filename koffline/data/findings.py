"""Everything that is wrong with a log, not only the first thing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from koffline.data import columns as checks
from koffline.data import remote
from koffline.data.raw import RawLog
from koffline.data.row_block import blocks_of
from koffline.data.streaming_findings import ErrorTally, WarningTally
from koffline.data.transitions import Transitions
from koffline.errors import DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs.mapping import PassSettings

_EDITED = "the rows are not those the file was written with: it was edited"


@dataclass(frozen=True)
class Finding:
    """An error (koffline refuses the log) or a warning (it does not, but look)."""

    severity: Literal["error", "warning"]
    message: str


def inspect_log(raw: RawLog) -> list[Finding]:
    """Errors first, each with the number of rows and the first of them; warnings only on sound logs."""
    errors = ErrorTally(raw.action_space)
    for rows in checks.blocks(len(raw.columns["rewards"])):
        errors.add({name: column[rows] for name, column in raw.columns.items()}, rows.start)
    found = [Finding("error", message) for message in errors.messages()]
    if found:
        return found
    try:
        log = raw.transitions()
    except DataError as error:
        return [Finding("error", str(error))]
    return [Finding("warning", message) for message in _warnings(log)]


def inspect_shards(
    log: LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> list[Finding]:
    """The same of a log on disk, in one pass: the errors of all shards, each naming shard and row.

    Rows in warnings are numbered through all shards. Memory does not grow with the log: where more than a
    million rows differ, the number of repeated rows is an estimate. settings: where the pass runs.
    """
    from koffline.jobs.mapping import PassSettings

    names = [shard.name for shard in log.shards]
    found = (settings or PassSettings()).map(
        inspect_shard, range(len(names)), log, lambda shard: names[shard], progress
    )
    warnings = WarningTally(log.action_space, log.has_episodes)
    errors: list[str] = []
    edited: list[str] = []
    for mapped in found:
        if mapped.failure is not None:
            errors.append(mapped.failure.reason)
            continue
        errors += mapped.value.errors
        if mapped.value.edited:
            edited.append(f"{names[mapped.item]}: {_EDITED}")
        if not errors:
            warnings.merge(mapped.value.warnings)
    if not errors and log.has_weights and not warnings.any_weight:
        errors.append("weights are all 0; give at least one row a positive weight")
    if errors:
        return [Finding("error", message) for message in errors]
    return [Finding("warning", message) for message in (*edited, *warnings.messages())]


@dataclass(frozen=True, eq=False)
class ShardFindings:
    """Errors of one shard; without any, what its rows add to the warnings. edited: by its file's digest."""

    errors: tuple[str, ...]
    warnings: WarningTally | None
    edited: bool


def inspect_shard(log: LazyTransitions, shard: int) -> ShardFindings:
    """Look through one shard, for ``PassSettings.map``."""
    tally = WarningTally(log.action_space, log.has_episodes)
    try:
        for block in log.shard_blocks(shard):
            tally.add(block)
        tally.end_shard()
        return ShardFindings((), tally, _is_edited(log, shard))
    except DataError as error:
        return ShardFindings(tuple(_errors_of_shard(log, shard) or [str(error)]), None, False)


def _errors_of_shard(log: LazyTransitions, shard: int) -> list[str]:
    """All that is wrong with the values of a shard; empty where it is something else."""
    tally, name = ErrorTally(log.action_space), log.shards[shard].name
    try:
        with log.open_shard(shard) as opened:
            for rows in checks.blocks(log.shards[shard].rows):
                tally.add(opened.columns(rows.start, rows.stop), rows.start)
    except DataError as error:  # unreadable from some row on
        return [*(f"{name}: {message}" for message in tally.messages()), str(error)]
    return [f"{name}: {message}" for message in tally.messages()]


def _is_edited(log: LazyTransitions, shard: int) -> bool:
    """Whether the file is another than the manifest says."""
    info = log.shards[shard]
    if info.sha256 is None:
        return False
    digest = hashlib.sha256()
    with remote.local_file(info.name) as path, open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest() != info.sha256


def _warnings(log: Transitions) -> Iterator[str]:
    if log.metadata.sha256 not in (None, log.sha256):
        yield _EDITED
    tally = WarningTally(log.action_space, log.has_episodes, repeated_limit=None)
    for block in blocks_of(log):
        tally.add(block)
    tally.end_shard()
    yield from tally.messages()
