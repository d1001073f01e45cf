"""Facts from all rows of a log without a model, and the limits that they set to any estimate.

An interval needs evidence and stays within the possible values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.disk.log import AnyLog, LazyTransitions
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Transitions
from koffline.data.units import cluster_sums
from koffline.errors import DataError
from koffline.ope.results import Interval, PointEstimate

MUCH_UNSEEN = 0.2  # share of the discounted horizon beyond the longest episode that gives a warning
NOTABLE = 0.02  # smallest gap between estimates that is mentioned, in rms returns
_ANY_GAMMA = 0.5
_FEWEST_UNITS = 1.9  # allows two units of slightly different weight
_MOST_UNSEEN = 0.5  # share of the discounted horizon beyond the longest episode
_WHERE = "where rewards like the log's put every value"
_ADDED = ("rows", "episodes", "terminated", "truncated", "starts", "returns", "sizes", "beyond", "weights")
_NEAR = (1e-2, 1e-3)  # tolerances relative to a bound and to the largest value


@dataclass(frozen=True)
class Limits:
    """Limits that a log sets to estimates from it.

    ``facts``: of all its rows. ``bounds``: of every discounted sum of rewards like the log's, or within given
    bounds. ``fixed_starts``: start states were given from outside. ``copies``: share of the rows that are
    copies of others and were not merged.
    """

    facts: LogFacts
    bounds: tuple[float, float]
    fixed_starts: bool = False
    copies: float = 0.0

    def of_logged_returns(self) -> Limits:
        """Limits for returns up to the log's cuts, without a future after them."""
        low, high = self.bounds
        return dataclasses.replace(self, bounds=(min(low, 0.0), max(high, 0.0)))

    def reasons_for_no_interval(self, by_rows: bool = False) -> list[str]:
        """Reasons why the log is no evidence for a calibrated interval; empty if it is.

        by_rows: the interval asks only that rewards and next states are drawn independently, row by row; then
        one episode is enough to tell how the value at given start states varies.
        """
        facts, (low, high) = self.facts, self.facts.bounds()
        kind, unseen = "episode" if facts.episodes else "row", facts.unseen
        kind = "cluster" if facts.clusters is not None else kind
        reasons = {
            f"the log has one {kind} that counts (copies and weights near zero do not): that says nothing of "
            "spread": facts.units < _FEWEST_UNITS and not (by_rows and self.fixed_starts),
            "rewards and endings are the same in all rows, so that nothing in the log tells policies apart; "
            "log rewards that differ": low == high,
            f"{self.copies:.0%} of the rows are copies of others; remove them, or let sample_rows hold all "
            "rows": self.copies > 0.0,
            f"{unseen:.0%} of a constant reward's value lies beyond the longest episode ({facts.longest} "
            "steps); log longer episodes, or ask for a smaller gamma": unseen > _MOST_UNSEEN,
        }
        return [reason for reason, holds in reasons.items() if holds]

    @property
    def _slack(self) -> tuple[float, float]:
        """Distance beyond each bound that rounding and unfinished training alone can explain."""
        of_bound, of_largest = _NEAR
        low, high = map(abs, self.bounds)
        least = of_largest * max(low, high)
        return max(of_bound * low, least), max(of_bound * high, least)

    def settle(self, found: PointEstimate, reasons: list[str] | None) -> PointEstimate:
        """Drop an interval against which there are ``reasons``, or cut it to the bounds.

        reasons: None for a certified interval, which is kept.
        """
        low, high = self.bounds
        warnings, interval, value = list(found.warnings), found.interval, found.value
        impossible = self.impossible(value)
        if impossible is not None:
            warnings.append(f"{impossible}; the nearest possible value is given.")
            reasons = None if reasons is None else [*reasons, "the estimate is impossible"]
        value = min(max(value, low), high)
        why = None
        if interval is not None and reasons:
            why = "; ".join(reasons)
            bare = found.uplift and dataclasses.replace(found.uplift, interval=None, behavior_interval=None)
            found, interval = dataclasses.replace(found, uplift=bare), None
        elif interval is not None:
            interval, note = self.cut(interval)
            why, note = (note, None) if interval is None else (None, note)
            warnings += [note] if note else []
        warnings += [f"No interval: {why}."] if why else []
        if found.uplift is not None and (logged := found.uplift.behavior_interval) is not None:
            uplift = dataclasses.replace(found.uplift, behavior_interval=logged.within(self.bounds))
            found = dataclasses.replace(found, uplift=uplift)
        found = dataclasses.replace(found, value=value, interval=interval, why_no_interval=why)
        return dataclasses.replace(found, warnings=tuple(warnings))

    def impossible(self, value: float) -> str | None:
        """Clause on a value that rewards and γ do not allow; None for a possible value."""
        (low, high), (below, above) = self.bounds, self._slack
        if low - below <= value <= high + above:
            return None
        return f"{value:.4g} lies outside [{low:.4g}, {high:.4g}], {_WHERE}"

    def cut(self, interval: Interval) -> tuple[Interval | None, str | None]:
        """Part of an interval that rewards and γ allow, and a sentence if that is not all of it.

        If nothing of it is, None and a clause.
        """
        (low, high), (below, above) = self.bounds, self._slack
        text = f"[{interval.low:.4g}, {interval.high:.4g}]"
        within = f"[{low:.4g}, {high:.4g}], {_WHERE}"
        if interval.low > high + above or interval.high < low - below:
            return None, f"{text} lies wholly outside {within}"
        is_whole = interval.low >= low - below and interval.high <= high + above
        return interval.within(self.bounds), None if is_whole else f"The interval {text} was cut to {within}."


def usual_gamma(log: AnyLog, given: float | None = None) -> float | None:
    """The given one, else the log's hint; any where every row ends its episode: then nothing is discounted.

    Raises DataError for what is no log.
    """
    if not isinstance(log, (Transitions, LazyTransitions)):
        raise DataError(f"the log is a {type(log).__name__}; open a path with koffline.open_transitions")
    blocks = (block for shard in range(len(log.shard_names)) for block in log.shard_blocks(shard))
    if (gamma := log.metadata.gamma if given is None else given) is None:
        return _ANY_GAMMA if all(block.terminated.all() for block in blocks) else None
    return gamma


def contradiction(intervals: Mapping[str, Interval], scale: float, steps: int) -> list[str]:
    """Sentence if the intervals of two heads of the same networks are disjoint. scale: the rms return."""
    low = min(intervals.items(), key=lambda item: item[1].high)
    high = max(intervals.items(), key=lambda item: item[1].low)
    if not high[1].low - low[1].high > NOTABLE * scale:
        return []
    texts = [f"{head} says [{one.low:.4g}, {one.high:.4g}]" for head, one in (low, high)]
    what = f"after {steps} steps two last layers of the same networks disagree"
    return [f"{what} ({', '.join(texts)}): train longer, or log more episodes"]


def value_bounds(
    going_on: tuple[float, float], final: tuple[float, float], gamma: float
) -> tuple[float, float]:
    """Bounds of any discounted sum of rewards like these: the least and the largest.

    going_on: range of the rewards of steps after which an episode goes on, final: of those that end one.
    V = max(final, going_on + γV) at its largest.
    """
    least, most = (reward / (1.0 - gamma) for reward in going_on)
    return min(final[0], least), max(final[1], most)


def reward_range(rewards: np.ndarray) -> tuple[float, float]:
    """Smallest and largest reward; of none, from ∞ to −∞."""
    return float(rewards.min(initial=math.inf)), float(rewards.max(initial=-math.inf))


@dataclass(frozen=True)
class LogFacts:
    """Additive facts of a log at a ``gamma``. ``returns``: discounted, of episodes up to their cuts.
    ``sizes``: |return|. ``beyond``: share γ^length of the horizon after a cut, 0 after a termination.
    ``weights``: mean weight of each unit's rows. ``clusters``: numbers (C,) and sums of these, if any.

    ``starts``: start states with weight. ``going_on`` and ``final``: range of the rewards of rows with
    weight, of those after which an episode goes on and of those that end one, as by `reward_range`.
    """

    gamma: float
    rows: int
    episodes: int
    terminated: int
    truncated: int
    starts: int
    longest: int
    going_on: tuple[float, float]
    final: tuple[float, float]
    returns: ColumnStatistics
    sizes: ColumnStatistics
    beyond: ColumnStatistics
    weights: ColumnStatistics
    clusters: tuple[np.ndarray, ...] | None = None

    def bounds(self, given: tuple[float, float] | None = None) -> tuple[float, float]:
        """Bounds of every discounted sum of such rewards, or of rewards within the given bounds."""
        if given is None:
            return value_bounds(self.going_on, self.final, self.gamma)
        return value_bounds(given, given if self.final[0] <= self.final[1] else self.final, self.gamma)

    @property
    def units(self) -> float:
        """Effective number of clusters, episodes or rows: the parts that are independent."""
        if self.clusters is None:
            return self.weights.effective_count
        return float(self.clusters[1].sum() ** 2 / np.square(self.clusters[1]).sum())

    @property
    def unseen(self) -> float:
        """Share of a constant reward's value that lies beyond what any episode shows.

        (γ · (1 − share of rows that end an episode))^longest: a process that ends has less of a future. 0
        without episodes, and where all end by themselves after the same step.
        """
        is_fixed = self.terminated * self.longest == self.rows  # as many ends as episodes of that length
        if not self.episodes or is_fixed:
            return 0.0
        return float((self.gamma * (1.0 - self.terminated / self.rows)) ** self.longest)

    @property
    def endings(self) -> int | None:
        """Rows that end an episode where rewards tell nothing else: all before an end are the same, and all
        at an end. None where they differ.
        """
        tells = self.going_on[0] < self.going_on[1] or self.final[0] < self.final[1]
        return None if tells else self.terminated

    def __add__(self, other: LogFacts) -> LogFacts:
        return LogFacts(
            gamma=self.gamma,
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            longest=max(self.longest, other.longest),
            going_on=_joined(self.going_on, other.going_on),
            final=_joined(self.final, other.final),
            clusters=self.clusters and _clusters(*map(np.append, self.clusters, other.clusters or ())),
        )


def log_facts(part: Any, gamma: float) -> LogFacts:
    """Facts of whole units. part: a `koffline.ope.working_log.LogPart`."""
    log = part.transitions
    weights, firsts = log.row_weights, log.unit_starts
    lengths = np.diff(np.append(firsts, len(log)))
    rewards, terminated = np.asarray(log.rewards, dtype=np.float64), np.asarray(log.terminated)
    returns = log.returns(gamma) if log.has_episodes else np.zeros(0)
    of_units = np.add.reduceat(weights, firsts) / lengths
    counted, is_cut = weights > 0.0, ~terminated[firsts + lengths - 1]
    return LogFacts(
        gamma=gamma,
        rows=len(log),
        episodes=log.n_episodes,
        terminated=int(terminated.sum()),
        truncated=int((log.truncated & ~terminated).sum()),
        starts=int(np.count_nonzero(weights[firsts])),
        longest=int(lengths.max()) if log.has_episodes else 0,
        going_on=reward_range(rewards[counted & ~terminated]),
        final=reward_range(rewards[counted & terminated]),
        returns=ColumnStatistics.of(returns),
        sizes=ColumnStatistics.of(np.abs(returns)),
        beyond=ColumnStatistics.of(np.where(is_cut, gamma**lengths, 0.0)[: len(returns)]),
        weights=ColumnStatistics.of(of_units),
        clusters=None if log.clusters is None else _clusters(log.clusters[firsts], of_units),
    )


def _clusters(numbers: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    return np.unique(numbers), cluster_sums(numbers, weights)


def _joined(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])
