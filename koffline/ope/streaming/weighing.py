"""Sums over episodes weighed by importance: what four estimators need of a log, by group of episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from koffline.data.row_block import RowBlock
from koffline.errors import DataError
from koffline.ope.streaming.columns import groups_of
from koffline.ope.streaming.episodes import EndedEpisodes, EpisodeRows
from koffline.ope.streaming.facts import Spread
from koffline.ope.streaming.frame import Frame

_MOST_STEPS = 1_000_000
_STANDS_FOR_ZERO = -18.0  # as in importance.ratios
_LARGEST_LOG = 700.0


@dataclass(eq=False)
class ScaledSums:
    """Σ e^log · x by place (T) and group (G), all numbers of a place divided by e^shift.

    ``values (C, G, T)`` for C kinds of x. ``squares (T,)``: Σ (e^log · x)² of the first kind. ``shift (T,)``:
    the largest log so far, −∞ where there is none: nothing overflows before it is multiplied back.
    """

    values: Float[np.ndarray, "kind group place"]
    squares: Float[np.ndarray, " place"]
    shift: Float[np.ndarray, " place"]

    @classmethod
    def zeros(cls, kinds: int, groups: int, places: int = 1) -> ScaledSums:
        """Of nothing."""
        return cls(np.zeros((kinds, groups, places)), np.zeros(places), np.full(places, -np.inf))

    def add(
        self,
        places: Int[np.ndarray, " entry"],
        groups: Int[np.ndarray, " entry"],
        logs: Float[np.ndarray, " entry"],
        kinds: tuple[Float[np.ndarray, " entry"], ...],
    ) -> None:
        """Count entries."""
        if not len(places):
            return
        self._grow(int(places.max()) + 1)
        _, n_groups, n_places = self.values.shape
        largest = np.full(n_places, -np.inf)
        np.maximum.at(largest, places, logs)
        self._rescale(largest)
        shift = self.shift[places]
        sizes = np.where(logs > -np.inf, np.exp(logs - np.where(shift > -np.inf, shift, 0.0)), 0.0)
        at = groups * n_places + places
        for kind, numbers in enumerate(kinds):
            sums = np.bincount(at, weights=sizes * numbers, minlength=n_groups * n_places)
            self.values[kind] += sums.reshape(n_groups, n_places)
        self.squares += np.bincount(places, weights=np.square(sizes * kinds[0]), minlength=n_places)

    def add_sums(self, other: ScaledSums) -> None:
        """Count another record's entries."""
        self._grow(len(other.shift))
        n_places = len(other.shift)
        padded = np.full(len(self.shift), -np.inf)
        padded[:n_places] = other.shift
        self._rescale(padded)
        factor = _factor(other.shift, self.shift[:n_places])
        self.values[..., :n_places] += other.values * factor
        self.squares[:n_places] += other.squares * np.square(factor)

    def _grow(self, places: int) -> None:
        more = places - len(self.shift)
        if more <= 0:
            return
        if places > _MOST_STEPS:
            raise DataError(
                f"an episode has {places} steps; importance weights of more than {_MOST_STEPS} are not "
                "summed from disk: use kloss"
            )
        self.values = np.pad(self.values, ((0, 0), (0, 0), (0, more)))
        self.squares = np.pad(self.squares, (0, more))
        self.shift = np.pad(self.shift, (0, more), constant_values=-np.inf)

    def _rescale(self, largest: Float[np.ndarray, " place"]) -> None:
        shift = np.maximum(self.shift, largest)
        factor = _factor(self.shift, shift)
        self.values *= factor
        self.squares *= np.square(factor)
        self.shift = shift


@dataclass(eq=False)
class EpisodeSums:
    """Of all episodes, by group.

    ``whole`` (one place): share·w of whole episodes, times 1, their return, and γ^length where they were cut.
    ``steps``: share·w_t of rows at step t, times 1 and the reward. ``ends``: share·w of episodes that have t
    steps, times 1. ``shares``, ``cut`` (G,): Σ share and Σ share·γ^length of cut ones. ``ratios``: π/β by
    row; ``tiny``: actions that the behaviour can hardly have taken.
    """

    whole: ScaledSums
    steps: ScaledSums
    ends: ScaledSums
    shares: np.ndarray
    cut: np.ndarray
    episodes: np.ndarray
    ratios: Spread = field(default_factory=Spread)
    tiny: int = 0

    @classmethod
    def zeros(cls, groups: int) -> EpisodeSums:
        """Of no episodes."""
        return cls(
            ScaledSums.zeros(3, groups),
            ScaledSums.zeros(2, groups),
            ScaledSums.zeros(1, groups, 2),
            np.zeros(groups),
            np.zeros(groups),
            np.zeros(groups),
        )

    def add(self, frame: Frame, block: RowBlock, rows: EpisodeRows) -> None:
        """Count the rows of a block, and the episodes that ended before its last."""
        assert block.steps is not None
        _check_weights(block)
        kept = rows.shares > 0.0
        groups = groups_of(frame, block.shard, block.units)[kept]
        shares, logs = rows.shares[kept], _clipped(rows.log_weights[kept], frame.clip)
        rewards = np.asarray(block.rewards, dtype=np.float64)[kept]
        self.steps.add(block.steps[kept], groups, logs, (shares, shares * rewards))
        ratios = np.exp(np.minimum(rows.log_ratios, _LARGEST_LOG))
        self.ratios = self.ratios + Spread.of(ratios)
        logged = np.asarray(block.behavior_log_probabilities)
        if frame.units.n_actions is not None:
            self.tiny += int(np.count_nonzero(logged < _STANDS_FOR_ZERO))
        self.add_ended(frame, block.shard, rows.ended)

    def add_ended(self, frame: Frame, shard: int, ended: EndedEpisodes) -> None:
        """Count whole episodes."""
        kept = ended.shares > 0.0
        if not kept.any():
            return
        groups = groups_of(frame, shard, ended.units)[kept]
        shares, lengths = ended.shares[kept], ended.lengths[kept]
        logs = _clipped(ended.log_weights[kept], frame.clip)
        missing = np.where(ended.cut[kept], frame.gamma**lengths, 0.0)
        nowhere = np.zeros(len(groups), dtype=np.int64)
        self.whole.add(nowhere, groups, logs, (shares, shares * ended.returns[kept], shares * missing))
        self.ends.add(lengths, groups, logs, (shares,))
        for total, numbers in ((self.shares, shares), (self.cut, shares * missing)):
            total += np.bincount(groups, weights=numbers, minlength=len(total))
        self.episodes += np.bincount(groups, minlength=len(self.episodes))

    def add_sums(self, other: EpisodeSums) -> None:
        """Count another record's episodes."""
        for name in ("whole", "steps", "ends"):
            getattr(self, name).add_sums(getattr(other, name))
        for name in ("shares", "cut", "episodes"):
            getattr(self, name)[...] += getattr(other, name)
        self.ratios, self.tiny = self.ratios + other.ratios, self.tiny + other.tiny


def _check_weights(block: RowBlock) -> None:
    """Episodes have one weight: importance weights belong to whole ones."""
    if block.weights is None:
        return
    uneven = (np.diff(block.weights) != 0.0) & (np.diff(block.units) == 0)
    if uneven.any():
        row = block.start + int(np.argmax(uneven)) + 1
        raise DataError(
            f"weights change inside an episode (row {row}); importance weights belong to whole episodes: "
            "give all rows of an episode the same weight"
        )


def _clipped(logs: np.ndarray, clip: float | None) -> np.ndarray:
    return logs if clip is None else np.minimum(logs, math.log(clip))


def _factor(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """e^(old − new), 0 where there was nothing."""
    known = old > -np.inf
    return np.where(known, np.exp(np.where(known, old - np.where(known, new, 0.0), 0.0)), 0.0)
