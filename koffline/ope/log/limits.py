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
from koffline.ope.results import Interval, PointEstimate

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
        low, high = self.facts.bounds()
        kind = "episode" if facts.episodes else "row"
        unseen = facts.unseen
        kind = "cluster" if facts.clusters is not None else kind
        reasons: list[str] = []
        if facts.units < thresholds.FEWEST_UNITS and not (
            by_rows and self.fixed_starts
        ):
            reasons.append(
                f"the log has one {kind} that counts (copies and weights near zero do"
                " not): that says nothing of spread"
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

    def settle(self, found: PointEstimate, reasons: list[str] | None) -> PointEstimate:
        """Clip both policies' values to the bounds. With ``reasons``, drop the
        interval, else clip it too.

        reasons: None for a certified interval, which is never dropped for such reasons.
        """
        low, high = self.bounds
        warnings = list(found.warnings)
        interval = found.interval
        value = found.value
        impossible = self.impossible(value)
        if impossible is not None:
            warnings.append(f"{impossible}; the nearest possible value is given.")
            if reasons is None:
                reasons = None
            else:
                reasons = [*reasons, "the estimate is impossible"]
        value = min(max(value, low), high)
        why = None
        if interval is not None and reasons:
            why = "; ".join(reasons)
            bare = found.uplift and dataclasses.replace(
                found.uplift, interval=None, behavior_interval=None
            )
            found = dataclasses.replace(found, uplift=bare)
            interval = None
        elif interval is not None:
            interval, note = self.cut(interval)
            why, note = (note, None) if interval is None else (None, note)
            warnings += [note] if note else []
        warnings += [f"No interval: {why}."] if why else []
        uplift = found.uplift
        if uplift is not None:
            logged = uplift.behavior_interval
            uplift = dataclasses.replace(
                uplift,
                behavior_value=min(max(uplift.behavior_value, low), high),
                behavior_interval=(
                    None if logged is None else logged.within(self.bounds)
                ),
            )
            found = dataclasses.replace(found, uplift=uplift)
        found = dataclasses.replace(
            found, value=value, interval=interval, why_no_interval=why
        )
        return dataclasses.replace(found, warnings=tuple(warnings))

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
        is_whole = interval.low >= low - below and interval.high <= high + above
        return interval.within(self.bounds), (
            None if is_whole else f"The interval {text} was cut to {within}."
        )


def usual_gamma(log: AnyLog, given: float | None = None) -> float | None:
    """The given gamma, else the log's hint. None if neither is known.

    If every row ends its episode, nothing is discounted, and any gamma serves. Raises
    DataError if ``log`` is no log.
    """
    if not isinstance(log, (Transitions, LazyTransitions)):
        raise no_log(log)
    blocks = (
        block
        for shard in range(len(log.shard_names))
        for block in log.shard_blocks(shard)
    )
    gamma = log.metadata.gamma if given is None else given
    if gamma is None:
        if all(block.terminated.all() for block in blocks):
            return ANY_GAMMA
        return None
    return gamma


def contradiction(
    intervals: Mapping[str, Interval], scale: float, steps: int
) -> list[str]:
    """A sentence if the intervals of two heads of the same networks are disjoint; else
    empty.

    scale: the root mean square return; smaller gaps than a share of it do not count.
    """
    low = min(intervals.items(), key=lambda item: item[1].high)
    high = max(intervals.items(), key=lambda item: item[1].low)
    if not high[1].low - low[1].high > thresholds.NOTABLE * scale:
        return []
    texts = [
        f"{head} says [{one.low:.4g}, {one.high:.4g}]" for head, one in (low, high)
    ]
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
    clusters: tuple[np.ndarray, ...] | None = None

    def bounds(self, given: tuple[float, float] | None = None) -> tuple[float, float]:
        """Bounds of every discounted sum of the log's rewards, or of rewards within the
        given bounds.
        """
        if given is None:
            return value_bounds(self.going_on.range, self.final.range, self.gamma)
        return value_bounds(
            given, given if self.final.count else self.final.range, self.gamma
        )

    @property
    def units(self) -> float:
        """Effective number of independent units: clusters if there are any, else
        episodes, else rows.
        """
        if self.clusters is None:
            return self.weights.effective_count
        return float(self.clusters[1].sum() ** 2 / np.square(self.clusters[1]).sum())

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
        tells = any(each.minimum < each.maximum for each in (self.going_on, self.final))
        if tells:
            return None
        return self.terminated

    def __add__(self, other: LogFacts) -> LogFacts:
        added = {
            name: getattr(self, name) + getattr(other, name)
            for name in vars(self).keys() - _NOT_ADDED
        }
        clusters = self.clusters and _clusters(
            *map(np.append, self.clusters, other.clusters or ())
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
    if log.has_episodes:
        returns = log.returns(gamma)
    else:
        returns = np.zeros(0)
    of_units = np.add.reduceat(weights, firsts) / lengths
    counted = weights > 0.0
    is_cut = ~terminated[firsts + lengths - 1]
    return LogFacts(
        gamma=gamma,
        rows=len(log),
        episodes=log.n_episodes,
        terminated=int(terminated.sum()),
        truncated=int((log.truncated & ~terminated).sum()),
        starts=int(np.count_nonzero(weights[firsts])),
        longest=int(lengths.max()) if log.has_episodes else 0,
        going_on=ColumnStatistics.of(rewards[counted & ~terminated]),
        final=ColumnStatistics.of(rewards[counted & terminated]),
        returns=ColumnStatistics.of(returns),
        sizes=ColumnStatistics.of(np.abs(returns)),
        beyond=ColumnStatistics.of(
            np.where(is_cut, gamma**lengths, 0.0)[: len(returns)]
        ),
        weights=ColumnStatistics.of(of_units),
        clusters=(
            None if log.clusters is None else _clusters(log.clusters[firsts], of_units)
        ),
    )


def _clusters(numbers: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    return np.unique(numbers), cluster_sums(numbers, weights)
