"""Late ends: terminations that stand in a log more often than they happened, because
the last rows of cut episodes were left out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from koffline.data.hashing import unit_hash
from koffline.data.transitions import Transitions
from koffline.errors import counted

_ENDS = 0x656E6473


def stop_shares(log: Transitions) -> np.ndarray | None:
    """Share (T,) of episodes that lost their row at each step, among those whose world
    went on there.

    None unless the reader left out such rows.
    """
    if not (log.has_episodes and log.metadata.lost_last_rows):
        return None
    ends = log.episode_ends
    lengths = np.asarray(log.episode_lengths)
    weights = log.row_weights[ends]
    ended = np.asarray(log.terminated)[ends]
    size = int(lengths.max()) + 1
    lost = np.bincount(lengths[~ended], weights[~ended], minlength=size)
    # by number of rows that went on
    went_on = np.bincount(lengths - ended, weights, minlength=size)
    kept = went_on.sum() - np.cumsum(went_on)
    at_risk = lost + kept
    return np.asarray(lost / np.where(at_risk > 0.0, at_risk, 1.0))


def without_late_ends(
    log: Transitions, units: np.ndarray | None = None, stops: np.ndarray | None = None
) -> Transitions:
    """Remove some last rows of terminated episodes, which would be too frequent; the
    row before is then cut.

    If recording stops and the world goes on, the last row is left out; had the world
    ended, it would be there. To balance this, each terminal row is removed with the
    probability that recording stopped there (``stops`` (T,), else `stop_shares`),
    decided by the hash of its unit's number (``units`` (U,), else all units).
    """
    if stops is None:
        stops = stop_shares(log)
    if stops is None:
        return log
    ends = log.episode_ends
    if units is None:
        units = np.arange(len(ends))
    lengths = np.asarray(log.episode_lengths)
    uniform = unit_hash(_ENDS, 0, units).astype(np.float64) / 2.0**64
    share = np.append(stops, 0.0)[np.minimum(lengths - 1, len(stops))]
    ended = np.asarray(log.terminated)[ends]
    gone = ends[ended & (lengths > 1) & (uniform < share)]
    cut = np.array(log.truncated)
    cut[gone - 1] = True
    left = np.delete(np.arange(len(log)), gone)
    columns = {**log.columns, "truncated": cut}
    columns = {name: column[left] for name, column in columns.items()}
    metadata = dataclasses.replace(log.metadata, lost_last_rows=False)
    if len(gone):
        rows = counted(len(gone), "last row", "was", "were")
        metadata = metadata.with_notes(
            f"{rows} left out of episodes that terminated: where recording stops they"
            " would be too frequent"
        )
    return Transitions.of_checked(columns, log.action_space, metadata=metadata)
