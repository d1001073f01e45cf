"""Parts of a log that stays on disk: samples to learn from and to choose on, and all
rows of the certify part as shards.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from koffline.data.copies import without_copies
from koffline.data.disk.log import AnyLog, LazyTransitions, joined
from koffline.data.disk.writer import ShardWriter, open_lazy
from koffline.data.hashing import unit_hash
from koffline.data.late_ends import without_late_ends
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.improvement.copies_on_disk import (
    CopyMerger,
    EqualUnits,
    find_copies,
    whole_blocks,
)
from koffline.improvement.parts import (
    CERTIFY_SHARE,
    CHOOSE_SHARE,
    LogParts,
    split_in_three,
)
from koffline.improvement.work import CERTIFY_SHARDS

HELD_BYTES = 500_000_000  # of rows of a log that is simply read into memory
_HELD_ROWS = 200_000  # of each sample
_SHARD_ROWS = 100_000
_SAMPLE_STREAM = 0x73616D70


def parts_of(
    log: AnyLog, seed: int, folder: Path, held_bytes: float | None = None
) -> LogParts:
    """The parts of a log; of a large one on disk, samples and shards in ``folder``.

    held_bytes: up to which a log is read into memory; `HELD_BYTES` by default. Raises DataError.
    """
    log = held_if_small(log, held_bytes)
    if isinstance(log, Transitions):
        return split_in_three(log, seed)
    return _stream(log, seed, folder)


def held_if_small(log: AnyLog, held_bytes: float | None = None) -> AnyLog:
    """The log in memory if it is there, or takes at most ``held_bytes`` (by default
    `HELD_BYTES`); else the log on disk. Raises DataError.
    """
    if held_bytes is None:
        held_bytes = HELD_BYTES
    if isinstance(log, Transitions) or len(log) * log.row_bytes > held_bytes:
        return log
    return log.load()


def check_held(log: AnyLog, purpose: str) -> None:
    """Raise DataError for a log that stays on disk. purpose: needs the rows in memory."""
    if isinstance(log, Transitions):
        return
    megabytes = len(log) * log.row_bytes / 1e6
    place = log.metadata.source or "LOG"
    raise DataError(
        f"{purpose} needs the log in memory, and its {len(log)} rows"
        f" ({megabytes:.0f} MB) stay on disk; read it first, if they fit:"
        f" koffline.improve(koffline.open_transitions({place!r}), …)"
    )


def _stream(log: LazyTransitions, seed: int, folder: Path) -> LogParts:
    """Two passes over the shards: one to find copies, one that sends units to parts."""
    place = folder / CERTIFY_SHARDS
    if place.exists():
        shutil.rmtree(place)
    train_share = 1.0 - CERTIFY_SHARE - CHOOSE_SHARE
    kept = {
        0: _HELD_ROWS / (train_share * len(log)),
        1: _HELD_ROWS / (CHOOSE_SHARE * len(log)),
    }
    held: dict[int, list[Transitions]] = {0: [], 1: []}
    copies = find_copies(log, seed)
    merger = CopyMerger(copies)
    first_unit = 0
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(place, _SHARD_ROWS) as writer:
        for read in whole_blocks(log):
            block = copies.with_joined_clusters(read)
            numbers = copies.numbers(block, first_unit)
            first_unit += len(block.unit_starts)
            part_of_row = copies.parts(numbers)
            for part, share in kept.items():
                uniform = unit_hash(seed ^ _SAMPLE_STREAM, part, numbers) * 2.0**-64
                rows = (part_of_row == part) & (uniform < share)
                if rows.any():
                    held[part].append(_whole(block, rows))
            rows = part_of_row == 2
            if rows.any():
                merged = merger.merge(_whole(block, rows))
                if merged is not None:
                    writer.append(merged)
    if not held[0] or not held[1]:
        raise DataError(
            "the log has too few episodes for parts to learn from and to choose on;"
            " write it with more episodes"
        )
    train = _joined(held[0], log, copies)
    choose = _joined(held[1], log, copies)
    is_merged = (
        len(copies.contents) > 0
        or len(train) < sum(map(len, held[0]))
        or len(choose) < sum(map(len, held[1]))
    )
    return LogParts(
        train=without_late_ends(train),
        choose=choose,
        certify=open_lazy(place),
        part_of=np.zeros(0, dtype=np.int64),
        row_of=np.zeros(0, dtype=np.int64),
        notes=(
            f"{len(log)} rows stay on disk: candidates learn from a sample of whole"
            " episodes and are chosen on another; the certificate uses all rows of its"
            " part.",
            *copies.notes(is_merged),
        ),
    )


def _whole(block: Transitions, rows: np.ndarray) -> Transitions:
    """The given rows of a block, whole episodes with ids of their own."""
    columns = {name: column[rows] for name, column in block.columns.items()}
    columns.pop("episode_ids", None)
    return Transitions.of_checked(columns, block.action_space)


def _joined(
    blocks: list[Transitions], log: LazyTransitions, copies: EqualUnits
) -> Transitions:
    """The blocks of whole units as one log, with copies merged."""
    columns = dict(joined(blocks).columns)
    columns.pop("episode_ids", None)
    rows = Transitions.of_whole_units(columns, log.action_space, log.metadata)
    if copies.by_chance:
        return rows
    return without_copies(rows).transitions.with_metadata(log.metadata)
