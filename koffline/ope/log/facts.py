"""Facts about all rows of a log that need no model, and the limits that they set to any
estimate.

The facts say whether the log supports an interval at all, and which values are
possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.config import ANY_GAMMA
from koffline.data.disk.log import AnyLog, LazyTransitions
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Transitions, no_log
from koffline.data.units import cluster_sums
from koffline.ope import thresholds
from koffline.ope.log.bounds import value_bounds
from koffline.ope.results import Interval, PointEstimate, Uplift

_WHERE = "where rewards like the log's put every value"
_NOT_ADDED = {"gamma", "longest", "clusters"}


@dataclass(frozen=True)
class Limits:
    """Limits that a log sets to estimates from it.

    ``facts``: facts about all rows of the log. ``bounds``: bounds of every discounted
    sum of rewards that lie in the range of the log's rewards or, if given, within the
    reward bounds. ``fixed_starts``: the user gave the start states. ``copies``: share
    of the rows that are copies of others and were not merged.
    """

    facts: LogFacts
    bounds: tuple[float, float]
    fixed_starts: bool = False
    copies: float = 0.0

    def of_logged_returns(self) -> Limits:
        """Limits for returns that end where the log cuts its episodes, without a future
        after the cuts.
        """
        low, high = self.bounds
        return dataclasses.replace(self, bounds=(min(low, 0.0), max(high, 0.0)))

    def reasons_for_no_interval(self, by_rows: bool = False) -> list[str]:
        """Reasons why the log does not support a calibrated interval; empty if it does.

        by_rows: the interval only assumes that rewards and next states are drawn
        independently from row to row. With given start states, one episode is then
        enough to estimate the spread.
        """
        facts = self.facts
        low, high = facts.bounds()
        unseen = facts.unseen
        reasons: list[str] = []
        is_enough = by_rows and self.fixed_starts
        if facts.units < thresholds.FEWEST_UNITS and not is_enough:
            reasons.append(
                f"the log has one {facts.kind_of_unit} that counts (copies and weights"
                " near zero do not): that says nothing of spread"
            )
        if low == high:
            reasons.append(
                "rewards and endings are the same in all rows, so that nothing in the"
                " log tells policies apart; log rewards that differ"
            )
        if self.copies > 0.0:
            reasons.append(
                f"{self.copies:.0%} of the rows are copies of others; remove them, or"
                " let sample_rows hold all rows"
            )
        if unseen > thresholds.MOST_UNSEEN:
            reasons.append(
                f"{unseen:.0%} of a constant reward's value lies beyond the longest"
                f" episode ({facts.longest} steps); log longer episodes, or ask for a"
                " smaller gamma"
            )
        return reasons

    @property
    def _slack(self) -> tuple[float, float]:
        """Distances below and above the bounds that rounding and unfinished training
        alone can explain.
        """
        low, high = map(abs, self.bounds)
        least = thresholds.SLACK_OF_LARGEST * max(low, high)
        below = max(thresholds.SLACK_OF_BOUND * low, least)
        above = max(thresholds.SLACK_OF_BOUND * high, least)
        return below, above

    def settle(
        self, estimate: PointEstimate, reasons: list[str] | None
    ) -> PointEstimate:
        """Clip both policies' values to the bounds. With ``reasons``, drop the
        interval, else clip it too.

        reasons: None for a certified interval, which is never dropped for such reasons.
        """
        warnings = list(estimate.warnings)
        against = list(reasons or ())
        impossible = self.impossible(estimate.value)
        if impossible is not None:
            warnings.append(f"{impossible}; the nearest possible value is given.")
            if reasons is not None:
                against.append("the estimate is impossible")
        interval = estimate.interval
        uplift = estimate.uplift
        why_not = None
        if interval is not None and against:
            why_not = "; ".join(against)
            interval = None
            if uplift is not None:
                uplift = dataclasses.replace(
                    uplift, interval=None, behavior_interval=None
                )
        elif interval is not None:
            interval, note = self.cut(interval)
            if interval is None:
                why_not = note
            elif note is not None:
                warnings.append(note)
        if why_not is not None:
            warnings.append(f"No interval: {why_not}.")
        if uplift is not None:
            uplift = self._clip_behavior(uplift)
        return dataclasses.replace(
            estimate,
            value=self._clip(estimate.value),
            interval=interval,
            uplift=uplift,
            why_no_interval=why_not,
            warnings=tuple(warnings),
        )

    def _clip(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)

    def _clip_behavior(self, uplift: Uplift) -> Uplift:
        """The uplift with the behavior policy's value and interval within the
        bounds.
        """
        interval = uplift.behavior_interval
        if interval is not None:
            interval = interval.within(self.bounds)
        return dataclasses.replace(
            uplift,
            behavior_value=self._clip(uplift.behavior_value),
            behavior_interval=interval,
        )

    def impossible(self, value: float) -> str | None:
        """Clause about a value that the rewards and γ do not allow; None for a possible
        value.
        """
        low, high = self.bounds
        below, above = self._slack
        if low - below <= value <= high + above:
            return None
        return f"{value:.4g} lies outside [{low:.4g}, {high:.4g}], {_WHERE}"

    def cut(self, interval: Interval) -> tuple[Interval | None, str | None]:
        """The part of an interval that the rewards and γ allow, and a sentence if the
        interval was cut.

        Returns None and a clause if no part of the interval is possible.
        """
        low, high = self.bounds
        below, above = self._slack
        text = f"[{interval.low:.4g}, {interval.high:.4g}]"
        within = f"[{low:.4g}, {high:.4g}], {_WHERE}"
        if interval.low > high + above or interval.high < low - below:
            return None, f"{text} lies wholly outside {within}"
        inside = interval.within(self.bounds)
        if interval.low >= low - below and interval.high <= high + above:
            return inside, None
        return inside, f"The interval {text} was cut to {within}."


def usual_gamma(log: AnyLog, gamma: float | None = None) -> float | None:
    """The given gamma, else the log's hint. None if neither is known.

    If every row ends its episode, nothing is discounted, and any gamma serves. Raises
    DataError if ``log`` is no log.
    """
    if not isinstance(log, (Transitions, LazyTransitions)):
        raise no_log(log)
    if gamma is not None:
        return gamma
    if log.metadata.gamma is not None:
        return log.metadata.gamma
    for shard in range(len(log.shard_names)):
        for block in log.shard_blocks(shard):
            if not block.terminated.all():
                return None
    return ANY_GAMMA


def contradiction(
    intervals: Mapping[str, Interval], scale: float, steps: int
) -> list[str]:
    """A sentence if the intervals of two heads of the same networks are disjoint; else
    empty.

    scale: the root mean square return; smaller gaps than a share of it do not count.
    """
    lower = min(intervals, key=lambda head: intervals[head].high)
    upper = max(intervals, key=lambda head: intervals[head].low)
    gap = intervals[upper].low - intervals[lower].high
    if not gap > thresholds.NOTABLE * scale:
        return []
    texts = []
    for head in (lower, upper):
        interval = intervals[head]
        texts.append(f"{head} says [{interval.low:.4g}, {interval.high:.4g}]")
    return [
        f"after {steps} steps {' and '.join(texts)}: train longer, or log more episodes"
    ]


@dataclass(frozen=True)
class LogFacts:
    """Facts of a log at a ``gamma`` that add up over its parts.

    ``returns``: discounted returns of episodes up to their cuts. ``sizes``: |return|.
    ``beyond``: share γ^length of the horizon after a cut, 0 after a termination.
    ``weights``: mean weight of each unit's rows.
    ``clusters``: their numbers (C,) and summed weights, if any. ``starts``: number of
    start states with positive weight. ``going_on`` and ``final``: rewards of rows with
    positive weight after which the episode goes on, and of those that end it.
    """

    gamma: float
    rows: int
    episodes: int
    terminated: int
    truncated: int
    starts: int
    longest: int
    going_on: ColumnStatistics
    final: ColumnStatistics
    returns: ColumnStatistics
    sizes: ColumnStatistics
    beyond: ColumnStatistics
    weights: ColumnStatistics
    clusters: tuple[np.ndarray, np.ndarray] | None = None

    def bounds(
        self, reward_bounds: tuple[float, float] | None = None
    ) -> tuple[float, float]:
        """Bounds of every discounted sum of the log's rewards, or of rewards within the
        given bounds.
        """
        going_on = self.going_on.range
        final = self.final.range
        if reward_bounds is not None:
            going_on = reward_bounds
            if self.final.count:
                final = reward_bounds
        return value_bounds(going_on, final, self.gamma)

    @property
    def kind_of_unit(self) -> str:
        """What is independent: clusters if there are any, else episodes, else rows."""
        if self.clusters is not None:
            return "cluster"
        if self.episodes:
            return "episode"
        return "row"

    @property
    def units(self) -> float:
        """Effective number of independent units: clusters if there are any, else
        episodes, else rows.
        """
        if self.clusters is None:
            return self.weights.effective_count
        _, weights = self.clusters
        return float(weights.sum() ** 2 / np.square(weights).sum())

    @property
    def unseen(self) -> float:
        """Share of a constant reward's value that lies beyond the longest episode.

        It is (γ · (1 − share of rows that end an episode))^longest: if episodes can
        end, later rewards count less. 0 without episodes, and if all episodes terminate
        after the same number of steps.
        """
        # all end after the same number of steps
        is_fixed = self.terminated * self.longest == self.rows
        if not self.episodes or is_fixed:
            return 0.0
        return float((self.gamma * (1.0 - self.terminated / self.rows)) ** self.longest)

    @property
    def endings(self) -> int | None:
        """Number of terminated rows if their rewards are all equal, and all other
        rewards too; else None.
        """
        for rewards in (self.going_on, self.final):
            if rewards.minimum < rewards.maximum:
                return None
        return self.terminated

    def __add__(self, other: LogFacts) -> LogFacts:
        added = {
            name: getattr(self, name) + getattr(other, name)
            for name in vars(self).keys() - _NOT_ADDED
        }
        clusters = None
        if self.clusters is not None and other.clusters is not None:
            numbers, weights = self.clusters
            other_numbers, other_weights = other.clusters
            clusters = _clusters(
                np.append(numbers, other_numbers), np.append(weights, other_weights)
            )
        longest = max(self.longest, other.longest)
        return dataclasses.replace(self, **added, longest=longest, clusters=clusters)


def log_facts(part: Any, gamma: float) -> LogFacts:
    """Facts of a part of a log that consists of whole units. part: a
    `koffline.ope.log.working_log.LogPart`.
    """
    log = part.transitions
    weights = log.row_weights
    firsts = log.unit_starts
    lengths = np.diff(np.append(firsts, len(log)))
    rewards = np.asarray(log.rewards, dtype=np.float64)
    terminated = np.asarray(log.terminated)
    of_units = np.add.reduceat(weights, firsts) / lengths
    counted = weights > 0.0
    is_cut = ~terminated[firsts + lengths - 1]
    longest = 0
    returns = np.zeros(0)
    if log.has_episodes:
        longest = int(lengths.max())
        returns = log.returns(gamma)
    beyond = np.where(is_cut, gamma**lengths, 0.0)[: len(returns)]
    clusters = None
    if log.clusters is not None:
        clusters = _clusters(log.clusters[firsts], of_units)
    return LogFacts(
        gamma=gamma,
        rows=len(log),
        episodes=log.n_episodes,
        terminated=int(terminated.sum()),
        truncated=int((log.truncated & ~terminated).sum()),
        starts=int(np.count_nonzero(weights[firsts])),
        longest=longest,
        going_on=ColumnStatistics.of(rewards[counted & ~terminated]),
        final=ColumnStatistics.of(rewards[counted & terminated]),
        returns=ColumnStatistics.of(returns),
        sizes=ColumnStatistics.of(np.abs(returns)),
        beyond=ColumnStatistics.of(beyond),
        weights=ColumnStatistics.of(of_units),
        clusters=clusters,
    )


def _clusters(
    numbers: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct numbers (C,) of clusters and their summed weights, from one entry per
    unit.
    """
    return np.unique(numbers), cluster_sums(numbers, weights)
