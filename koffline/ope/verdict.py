"""Coverage of a policy by a log, and the verdict in words on whether the log answers the question."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from koffline.data.transitions import Transitions
from koffline.errors import counted
from koffline.ope.limits import MUCH_UNSEEN, Limits
from koffline.ope.names import CERTIFIED_KINDS
from koffline.ope.problem import EvaluationProblem
from koffline.ope.results import (
    NOT_ANSWERABLE,
    SUPPORTED,
    WITH_CARE,
    BoundRow,
    Interval,
    PointEstimate,
    Reason,
    Verdict,
    describe_coverage,
    percent,
)
from koffline.policies import DiscretePolicy, Policy

LOW_COVERAGE, NO_COVERAGE = 0.8, 0.5  # below the second the log does not answer
_MUCH_UNLOGGED, _UNLOGGED = 0.1, 0.001  # above the first the log does not answer
_FEW_ROWS, _OVERUSED = 30, 3.0  # limits for actions of which the log tells too little
_REFERENCE_ROWS = 20_000
_QUERY_ROWS = 2_000
_NEAR_QUANTILE = 0.95
FEW_EPISODES = 20.0
_WIDE, _TOO_WIDE = 0.25, 1.0  # half widths in rms returns
_WIDE_OF_USUAL = 0.5  # half width in mean |return|s
_FEW_WEIGHTED, _MASS_OFF, _NEGATIVE = 10.0, 0.2, 0.25  # limits for diagnostics of weights


@dataclass(frozen=True, eq=False)
class Coverage:
    """``fraction`` of the policy's state-actions that lie as near to the log as its own rows do.

    On-policy the fraction is about 0.95 by construction; ``ratios (M,)`` are nearest-neighbour distances
    divided by the log's own 95 % quantile, ``weights (M,)`` the policy's weight of each.
    """

    fraction: float
    ratios: np.ndarray
    weights: np.ndarray

    @property
    def reasons(self) -> list[str]:
        """Clause for a verdict if the log covers too little of the policy; else empty."""
        if self.unlogged > _MUCH_UNLOGGED:
            return [self.told]
        few = f"only {self.fraction:.0%} of the policy's actions lie near logged ones"
        return [few] if self.fraction < NO_COVERAGE else []

    @property
    def told(self) -> str:
        """Clause on actions that the log never takes, or too rarely."""
        share = f"{100.0 * self.unlogged:.3g}%"
        return f"{share} of the policy's actions are ones that the log never or hardly takes"

    @property
    def unlogged(self) -> float:
        """Share of the policy's weight on unknown discrete actions, or those that the log holds once."""
        return float(self.weights[np.isinf(self.ratios)].sum() / max(self.weights.sum(), 1e-300))


def known_actions(policy: Policy, log: Transitions) -> np.ndarray | None:
    """Mask (n,) of the actions whose values the log tells; None of continuous ones, and where it is all.

    It never holds others; or, where a row is followed by more than its end, in fewer than 30 rows and less
    than a third as often as the policy takes them. Nothing bounds their values, and the kernel loss would
    explain residuals of other rows by them.
    """
    if not isinstance(policy, DiscretePolicy):
        return None
    counts = np.bincount(log.actions[log.row_weights > 0.0], minlength=policy.n)
    if counts.min() >= _FEW_ROWS:
        return None
    used = policy.probabilities(log.observations).mean(axis=0) * (not log.terminated.all())
    known = (counts >= _FEW_ROWS) | ((counts > 0) & (counts >= used * counts.sum() / _OVERUSED))
    return None if known.all() else known


def among(policy: Policy, known: np.ndarray) -> DiscretePolicy:
    """The policy, which takes its other actions where it would take an unknown one."""
    return DiscretePolicy(len(known), partial(_among, policy, known), policy.name, policy.observation_shape)


def _among(policy: Any, known: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """Probabilities (N, n) of known actions; equal ones where the policy takes none of them."""
    kept = policy.probabilities(observations) * known + 1e-12 * known
    return kept / kept.sum(axis=1, keepdims=True)


def measure_coverage(
    problem: EvaluationProblem, generator: np.random.Generator, known: np.ndarray | None = None
) -> Coverage:
    """Nearest-neighbour coverage of (s', a' ~ π) by the logged (s, a), standardised coordinates.

    Next states count where the episode went on, since after its end the policy does nothing; where no row
    goes on, start states stand in. Discrete actions are compared only with rows of the same action; an
    action that the log holds less than twice, or not ``known (n,)``, counts as infinitely far. Follows the
    caution of Fujimoto et al. (2022): a small Bellman error says nothing about what is outside the log.
    """
    own = len(problem.input_scale) - (problem.history > 0)  # what rows before left behind does not count
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    inputs, probabilities = problem.next_inputs, problem.next_probabilities
    weights = problem.row_weights * (problem.discounts > 0.0)
    if not weights.any():
        inputs, probabilities = problem.start_inputs, problem.start_probabilities
        weights = problem.start_weights
    some = _choice(np.flatnonzero(weights), _QUERY_ROWS, generator)
    inputs, shares, logged = inputs[some, :, :own], weights[some, None], problem.inputs[rows, :own]
    if problem.n_actions is None or probabilities is None:
        return _summarise([logged], inputs[:, generator.integers(inputs.shape[1])], shares, generator)
    known = np.ones(problem.n_actions, dtype=bool) if known is None else known
    same = [logged[(problem.actions[rows] == action) & known[action]] for action in range(problem.n_actions)]
    return _summarise(same, inputs[:, 0], probabilities[some] * shares, generator)


def _summarise(
    references: list[np.ndarray], queries: np.ndarray, cares: np.ndarray, generator: np.random.Generator
) -> Coverage:
    """Distances of queries to the nearest reference row of a group, divided by one common spacing.

    cares (query, group): the policy's weight of a query in each group.
    The spacing is the 95 % quantile of the rows' distances to their nearest neighbours in the same group.
    With a spacing per group, a rare action would cover everything between its few rows.
    """
    from scipy.spatial import cKDTree

    own, ratios, total = [], [], sum(map(len, references))
    trees = [cKDTree(rows) if len(rows) > 1 else None for rows in references]
    for rows, tree in zip(references, trees, strict=True):
        some = _choice(np.arange(len(rows)), math.ceil(_QUERY_ROWS * len(rows) / total), generator)
        own.append(np.full(len(rows), np.inf) if tree is None else tree.query(rows[some], k=2)[0][:, 1])
    # Repeated rows make the own distance zero (small state spaces): anything as near as rounding is near.
    spacing = np.quantile(np.concatenate(own), _NEAR_QUANTILE, method="lower")
    scale = max(float(spacing), 1e-6)
    for tree, care in zip(trees, cares.T, strict=True):
        nearest = None if tree is None or not care.any() else tree.query(queries, k=1)[0]
        ratios.append(np.full(len(queries), np.inf) if nearest is None else nearest / scale)
    distances, weights = np.concatenate(ratios), cares.T.ravel()
    fraction = float(np.average(distances <= 1.0, weights=weights)) if weights.sum() > 0 else 0.0
    return Coverage(fraction, distances, weights)


def _choice(rows: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most ``size`` of the row numbers, drawn at random."""
    return rows if len(rows) <= size else generator.choice(rows, size, replace=False)


def judge(
    found: PointEstimate,
    limits: Limits,
    coverage: Coverage,
    scale: float,
    robust: PointEstimate | None = None,
    gaps: Sequence[Reason] = (),
) -> Verdict:
    """Judge an estimate as *supported*, *with care* or *not answerable from this log*, with reasons.

    scale: the rms return. robust: the doubly robust estimate by the same networks, whose weights say whether
    the log visits what the policy does. gaps: what its reader found missing or unknown inside episodes.
    """
    if hopeless := _why_not(found, coverage, scale):
        what = "result" if hopeless.kind == "interval" else "log"
        why = f"This {what} does not say what the policy is worth: {hopeless.text}."
        return Verdict(NOT_ANSWERABLE, (hopeless,), why)
    doubts = [*gaps, *_doubts(found, limits, coverage, scale, robust)]
    near = f"{coverage.fraction:.0%}"
    more = f" (and {counted(len(doubts) - 1, 'more reason')})" if len(doubts) > 1 else ""
    care = f"take it with care: {doubts[0].text}{more}" if doubts else f"coverage is good ({near})"
    return Verdict(WITH_CARE if doubts else SUPPORTED, tuple(doubts), f"{_finding(found)}; {care}.")


def _finding(found: PointEstimate) -> str:
    """Sentence on the policy's value, with that of the logging policy if known."""
    assert found.interval is not None
    worth = f"The policy is worth {plus_minus(found.value, found.interval)}"
    level, uplift = percent(found.interval.level), found.uplift
    if uplift is None or (gap := uplift.interval) is None:
        return f"{worth} ({level} interval)"
    size, side = uplift.value, "more"
    if gap.holds(0.0):
        more = f"not clearly more or less ({plus_minus(size, gap)})"
    else:
        if size < 0.0:
            size, gap, side = -size, Interval(-gap.high, -gap.low, gap.level, gap.kind), "less"
        more = f"{plus_minus(size, gap)} {side}"
    return f"{worth}, {more} than the policy that wrote the log ({level} intervals)"


def plus_minus(value: float, interval: Interval) -> str:
    """``42.73 ± 0.83``, two digits of the half width; with both ends where the value is not in the middle."""
    half = 0.5 * interval.width
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0.0 else 3
    shown, low, high = (f"{number:,.{min(digits, 12)}f}" for number in (value, interval.low, interval.high))
    is_middle = abs(value - 0.5 * (interval.low + interval.high)) <= 0.02 * half
    return f"{shown} ± {half:,.{min(digits, 12)}f}" if is_middle else f"{shown} ({low} to {high})"


def _why_not(found: PointEstimate, coverage: Coverage, scale: float) -> Reason | None:
    """Reason why the log does not answer; None if it does."""
    if coverage.reasons:
        return Reason("support", coverage.reasons[0])
    if found.interval is None:
        told = f": {found.why_no_interval}" if found.why_no_interval else ""
        return Reason("interval", f"there is no interval{told}")
    if 0.5 * found.interval.width > _TOO_WIDE * scale:
        return Reason("size", "the interval is wider than the returns; log more episodes")
    return None


def _doubts(
    found: PointEstimate, limits: Limits, coverage: Coverage, scale: float, robust: PointEstimate | None
) -> Iterator[Reason]:
    """Yield reasons to act on an answer with care."""
    assert found.interval is not None
    if coverage.fraction < LOW_COVERAGE:
        yield Reason("support", describe_coverage(coverage.fraction))
    if coverage.unlogged > _UNLOGGED:
        yield Reason("support", f"{coverage.told}; it is valued as if it took its others there")
    if limits.facts.units < FEW_EPISODES:
        units = counted(round(limits.facts.units), "independent unit")
        yield Reason("size", f"{units} (episodes, rows or clusters) in the log")
    if limits.facts.endings is not None and limits.facts.endings < _FEW_WEIGHTED:
        which = counted(limits.facts.endings, "episode", "ends by itself", "end by themselves")
        yield Reason("size", f"only {which}, and no reward tells policies apart")
    if limits.facts.unseen >= MUCH_UNSEEN:
        share = f"{limits.facts.unseen:.0%}"
        yield Reason("horizon", f"{share} of a constant reward lies beyond the longest episode")
    if 0.5 * found.interval.width > _WIDE * scale:
        half = 0.5 * found.interval.width / scale
        yield Reason("size", f"the interval reaches {half:.0%} of the rms return either way")
    elif limits.facts.episodes and 0.5 * found.interval.width > _WIDE_OF_USUAL * float(
        limits.facts.sizes.mean
    ):
        told = "the interval reaches half of the mean |return| either way"
        yield Reason("size", f"{told}: few returns make up the value")
    if robust is None:
        size = found.effective_sample_size
        if size is not None and size < _FEW_WEIGHTED:
            yield Reason("support", f"only {size:.1f} episodes (effective number) carry the weight")
        for deviation in found.diagnostics.get("probabilities", ()):
            yield Reason("contradiction", deviation.rstrip("."))
        return
    if not found.interval.holds(robust.value):
        told = f"the doubly robust estimate {robust.value:.4g}"
        yield Reason("contradiction", f"{told} lies outside the interval")
    yield from doubts_of_weights(robust.diagnostics)


def doubts_of_weights(weights: dict[str, Any]) -> Iterator[Reason]:
    """Yield what the diagnostics of marginal weights say against them."""
    units, mass, negative = (weights[name] for name in ("effective_units", "mass", "negative_share"))
    if units < _FEW_WEIGHTED:
        few = f"only {units:.1f} episodes or rows (effective number)"
        yield Reason("support", f"{few} carry the policy's visits")
    if abs(mass - 1.0) > _MASS_OFF:
        yield Reason("support", f"the log's weights for the policy's visits average {mass:.2f}, not 1")
    if negative > _NEGATIVE:
        yield Reason("support", f"{negative:.0%} of the log's weights for the policy's visits are negative")


def without_guesswork(found: PointEstimate, verdict: Verdict) -> PointEstimate:
    """The estimate without uplift and interval if the log does not answer.

    A certificate without guesses stays. So does an interval that is itself the reason: it is too wide.
    """
    if not verdict.is_open:
        return found
    if _stands(found.interval, verdict):
        is_certified = found.interval is not None and found.interval.kind in CERTIFIED_KINDS
        return dataclasses.replace(found, uplift=None) if is_certified else found
    bare = {key: value for key, value in found.diagnostics.items() if key not in ("interval", "intervals")}
    return dataclasses.replace(found, interval=None, uplift=None, diagnostics=bare)


def without_guess(bound: BoundRow, verdict: Verdict) -> BoundRow:
    """`without_guesswork` for an interval that belongs to no estimator."""
    if not verdict.is_open or bound.interval is None or _stands(bound.interval, verdict):
        return bound
    return BoundRow(bound.kind, None, "the log does not answer, and the interval would rest on it alone")


def _stands(interval: Interval | None, verdict: Verdict) -> bool:
    """Whether an interval rests on no guess, or is itself the reason why there is no answer."""
    if interval is None:
        return False
    if interval.kind in CERTIFIED_KINDS:
        return not interval.is_guess
    return verdict.reasons[0].kind == "size"
