"""Importance sampling from sums over episodes: is, wis, pdis, wpdis, with a jackknife over groups.

The estimators and what is said of them are those of `koffline.ope.importance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.errors import DataError
from koffline.ope.importance.notes import NO_WEIGHT, notes_on_weights
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.streaming.jackknife import GroupSpread, group_spread
from koffline.ope.streaming.weighing import EpisodeSums

_COVERS = (
    "it covers the sampling of {units}, its freedom at most their effective number − 1; it is too narrow "
    "where few large weights have yet to be seen (heavy tails)"
)
_COVERS_CLIPPED = f"{_COVERS}, and the bias of weight_clip is not in it"
NAMES = ("is", "wis", "pdis", "wpdis")
_WHOLE_WEIGHT = ("is", "wis")
_NOTHING = 1e-12  # a share of a sum below which a difference of sums is rounding
_DEVIATIONS = 5.0


@dataclass(frozen=True, eq=False)
class WeighedEpisodes:
    """Sums by group, brought to one scale: ``below (G, T)`` Σ share·w_t with ended episodes, ``above (G, T)``
    Σ share·w_t·r_t, both divided by e^``scale`` (T,); ``sizes (T,)``: effective numbers of episodes.
    """

    sums: EpisodeSums
    gamma: float
    below: Float[np.ndarray, "group step"]
    above: Float[np.ndarray, "group step"]
    scale: Float[np.ndarray, " step"]
    sizes: Float[np.ndarray, " step"]

    @classmethod
    def of(cls, sums: EpisodeSums, gamma: float) -> WeighedEpisodes:
        """With the weights of ended episodes counted at all later steps."""
        steps, ends = sums.steps, sums.ends
        horizon = len(steps.shift)
        running = _logs(steps.values[0], steps.shift)
        ended = np.logaddexp.accumulate(_padded(_logs(ends.values[0], ends.shift), horizon), axis=-1)
        total = np.logaddexp(running, ended)  # (G, T)
        scale = total.max(axis=0)
        squares = np.logaddexp(
            _logs(steps.squares, 2.0 * steps.shift),
            np.logaddexp.accumulate(_padded(_logs(ends.squares, 2.0 * ends.shift), horizon)),
        )
        finite = np.where(scale > -np.inf, scale, 0.0)
        below = np.exp(total - finite)
        sizes = np.zeros(horizon)
        some = below.sum(axis=0) > 0.0
        sizes[some] = np.exp(2.0 * (np.log(below.sum(axis=0)[some]) + finite[some]) - squares[some])
        factor = np.where(steps.shift > -np.inf, np.exp(steps.shift - finite), 0.0)
        return cls(sums, gamma, below, steps.values[1] * factor, finite, sizes)

    @property
    def powers(self) -> Float[np.ndarray, " step"]:
        """(T,) γ^t."""
        return np.asarray(self.gamma ** np.arange(len(self.scale)))

    def value(self, name: str, without: int | None = None) -> float:
        """The estimate, or that without one group; NaN where nothing is left."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return float(self._value(name, without))

    def _value(self, name: str, without: int | None) -> float:
        whole = self.sums.whole
        weights, returns, _ = (_left(part[:, 0], without) for part in whole.values)
        episodes = _left(self.sums.shares, without)
        if name == "wis":
            return float(returns / weights)
        if name == "is":
            return float(np.exp(whole.shift[0]) * returns / episodes)
        above = _left(self.above, without)
        if name == "pdis":
            return float((self.powers * above) @ np.exp(self.scale) / episodes)
        below = _left(self.below, without)
        present = below > 0.0
        return float((self.powers[present] * above[present] / below[present]).sum())

    def effective_size(self, name: str) -> float:
        """(Σw)²/Σw² over episodes: of whole weights, or averaged over steps with weights γ^t."""
        if name in _WHOLE_WEIGHT:
            whole = self.sums.whole
            squares = float(whole.squares[0])
            return float(whole.values[0].sum()) ** 2 / squares if squares > 0.0 else 0.0
        return float(self.powers @ self.sizes / self.powers.sum())

    @property
    def weightless_from(self) -> int | None:
        """The first step at which no episode has weight left; None where there always is one."""
        gone = np.flatnonzero(self.below.sum(axis=0) == 0.0)
        return int(gone[0]) if len(gone) else None

    @property
    def cut_share(self) -> float:
        """Mean of γ^length over episodes that were cut, 0 over others, as the policy weighs them."""
        weights, _, missing = (part.sum() for part in self.sums.whole.values)
        if weights > 0.0:
            return float(missing / weights)
        return float(self.sums.cut.sum() / self.sums.shares.sum())

    def spread(self, name: str) -> GroupSpread | None:
        """Jackknife over groups that have episodes."""
        value, shares = self.value(name), self.sums.shares / self.sums.shares.sum()
        present = np.flatnonzero(shares > 0.0)
        if len(present) < 2:
            return None
        found = np.array([(1.0 - shares[g]) * (value - self.value(name, int(g))) for g in present])
        return group_spread(found, shares[present], np.array([value]))


def estimate_by_episodes(
    name: str, sums: EpisodeSums, gamma: float, level: float, clip: float | None
) -> PointEstimate:
    """One of ``NAMES`` from the sums. Raises DataError where there is no number."""
    weighed = WeighedEpisodes.of(sums, gamma)
    gone = weighed.weightless_from
    nothing_whole = name in _WHOLE_WEIGHT and not sums.whole.values[0].any()
    if gone == 0 or nothing_whole:
        raise DataError(f"{name}: " + NO_WEIGHT.format(steps=f"{gone} steps" if gone else "the first step"))
    value = weighed.value(name)
    if not math.isfinite(value):
        raise DataError(
            f"{name}: the largest weight is e^{sums.steps.shift.max():.0f}, beyond what numbers hold; cap "
            "weights with weight_clip, or use a self-normalised estimator (wis, wpdis)"
        )
    size, episodes = weighed.effective_size(name), int(sums.episodes.sum())
    spread = weighed.spread(name)
    interval = None
    if spread is not None:
        spread = GroupSpread(spread.variance, min(spread.freedom, max(size - 1.0, 1.0)), spread.groups)
        interval = spread.interval(value, level, "episodes", _COVERS if clip is None else _COVERS_CLIPPED)
    notes = _notes_on_ratios(sums)
    notes += notes_on_weights(name, episodes, size, clip, weighed.cut_share, gone)
    return PointEstimate(
        name=name,
        value=value,
        standard_error=None if spread is None else spread.standard_error,
        interval=interval,
        effective_sample_size=size,
        warnings=tuple(notes),
        diagnostics={
            "episodes": episodes,
            "longest_episode": len(sums.steps.shift),
            "cut_share": weighed.cut_share,
            "effective_episodes": size,
            "mean_ratio": sums.ratios.mean,
            "behavior": "log",
        },
    )


def _notes_on_ratios(sums: EpisodeSums) -> list[str]:
    """What is odd about the log's own probabilities."""
    found = []
    if sums.tiny:
        found.append(
            f"{sums.tiny} logged actions have a behavior probability below 1.5e-08: impossible actions, or "
            "zeros stored as small numbers; their weights are meaningless."
        )
    error = sums.ratios.standard_error
    error = math.inf if error is None else error
    if abs(sums.ratios.mean - 1.0) > _DEVIATIONS * error + 1e-3:
        found.append(
            f"Ratios of policy to behavior average {sums.ratios.mean:.4g} over rows (standard error "
            f"{error:.2g}) where 1 is expected: the logged probabilities are not those of the logged "
            "actions, or the policy takes actions that the behavior never takes."
        )
    return found


def _logs(values: np.ndarray, shift: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(values) + np.where(shift > -np.inf, shift, 0.0))


def _padded(logs: np.ndarray, places: int) -> np.ndarray:
    """As many places along the last axis, −∞ in new ones; ends after the last step are never asked for."""
    more = max(0, places - logs.shape[-1])
    return np.pad(logs, [(0, 0)] * (logs.ndim - 1) + [(0, more)], constant_values=-np.inf)[..., :places]


def _left(parts: np.ndarray, without: int | None) -> np.ndarray:
    """Sum over groups, of all or without one; what is only rounding is nothing."""
    total = np.asarray(parts.sum(axis=0))
    if without is None:
        return total
    rest = total - parts[without]
    return np.where(np.abs(rest) <= _NOTHING * np.abs(total), 0.0, rest)
