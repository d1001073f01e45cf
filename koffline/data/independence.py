"""The independent units of a log, by which it is divided and resampled: clusters,
episodes, or rows that stand alone.

A copy is no second unit: equal episodes (rows) are one, and so are clusters that hold
copies of the same episode (`koffline.data.copies`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from koffline.data.copies import (
    RecurrenceCount,
    hash_units,
    join_clusters,
    with_joined_clusters,
    without_copies,
)
from koffline.data.disk.log import (
    AnyLog,
    LazyTransitions,
    RenumberedClusters,
    in_whole_units,
)
from koffline.data.hashing import hash_rows
from koffline.data.transitions import Transitions
from koffline.errors import counted

# of observations, whose recurrence is counted
COUNTED_VALUES = 1_000_000


@dataclass(frozen=True, eq=False)
class IndependentUnits:
    """``of_row (N,)``: number of each row's unit, 0 … ``count`` − 1. ``kind``: what a
    unit is. ``notes``: for the user, if copies made units one.
    """

    of_row: Int[np.ndarray, " row"]
    count: int
    kind: str
    notes: tuple[str, ...] = ()


def independent_units(log: Transitions) -> IndependentUnits:
    """The independent units of a log: its clusters, else its episodes, else its rows;
    those that share copies are one.
    """
    if log.clusters is not None:
        joined = with_joined_clusters(log).clusters
        assert joined is not None
        kind = "cluster"
        names, of_row = np.unique(joined, return_inverse=True)
        of_row = of_row.reshape(-1)
        count = len(names)
        notes = notes_on_clusters(log.clusters, joined)
        return IndependentUnits(of_row, count, kind, tuple(notes))
    kind = "row"
    if log.has_episodes:
        kind = "episode"
    distinct = without_copies(log)
    if len(distinct.kept) == distinct.units:
        return IndependentUnits(log.units, distinct.units, kind)
    first_copies = log.units[distinct.row_of]
    _, of_row = np.unique(first_copies, return_inverse=True)
    note = (
        f"The log has {counted(distinct.units, kind)}, only {len(distinct.kept)} of"
        " them different: copies stay together."
    )
    return IndependentUnits(of_row.reshape(-1), len(distinct.kept), kind, (note,))


def with_independent_clusters(log: AnyLog) -> AnyLog:
    """The log with clusters that share copies as one, and a note on it; the log itself
    where none do.

    Of a log on disk all rows are read once, if it has clusters; 16 bytes of each unit
    are held. Raises DataError for rows that cannot be read.
    """
    if isinstance(log, Transitions):
        joined = with_joined_clusters(log)
        notes = notes_on_clusters(log.clusters, joined.clusters)
        if not notes:
            return log
        return joined.with_metadata(log.metadata.with_notes(notes[0]))
    if "clusters" not in log.columns:
        return log
    numbers = _joined_on_disk(log)
    notes = notes_on_clusters(numbers.before, numbers.after)
    if not notes:
        return log
    # the digest stays that of the rows as they are stored
    stored = dataclasses.replace(log.metadata, sha256=log.sha256)
    return dataclasses.replace(
        log, metadata=stored.with_notes(notes[0]), renumbered_clusters=numbers
    )


def notes_on_clusters(
    clusters: np.ndarray | None, joined: np.ndarray | None
) -> list[str]:
    """A note if clusters were joined. clusters, joined: their numbers before and after,
    of the same rows or units.
    """
    if clusters is None or joined is None:
        return []
    before = len(np.unique(clusters))
    after = len(np.unique(joined))
    if after == before:
        return []
    return [
        f"The log has {before} clusters, some of which hold copies of the same episodes:"
        f" those count as one, which leaves {after}."
    ]


def _joined_on_disk(log: LazyTransitions) -> RenumberedClusters:
    """Numbers of a log's clusters, and of those they belong to."""
    count = RecurrenceCount(share=min(1.0, COUNTED_VALUES / len(log)))
    contents = []
    clusters = []
    for shard in range(len(log.shards)):
        for read in in_whole_units(log.shard_blocks(shard)):
            columns = dict(read.columns)
            columns.pop("episode_ids", None)
            block = Transitions.of_checked(columns, log.action_space)
            hashes = hash_units(block)
            count.add(hash_rows(block, ("observations",)), hashes[block.units])
            contents.append(hashes)
            clusters.append(np.asarray(block.clusters)[block.unit_starts])
    cluster_of = np.concatenate(clusters)
    joined_of = cluster_of
    if not count.allows_chance:
        joined_of = join_clusters(cluster_of, np.concatenate(contents))
    before, firsts = np.unique(cluster_of, return_index=True)
    return RenumberedClusters(before, joined_of[firsts])
