"""How well a log covers a policy's actions, and checks of the marginal importance
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from koffline.data.columns import blocks
from koffline.data.transitions import Transitions
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.results import Reason
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import pick_actions

NO_COVERAGE = 0.5  # below it the log does not answer
# the same of start states, few as they are; below the first: with care
LOW_START = 0.5
_NO_START = 0.2
MUCH_UNLOGGED = 0.1  # above it the log does not answer
# limits below which the log says too little about an action
_FEW_ROWS = 30
_OVERUSED = 3.0
_REFERENCE_ROWS = 20_000
_QUERY_ROWS = 2_000
_NEAR_QUANTILE = 0.95
# key of draws; limits for discrete, continuous actions
_HOLES = 0x686F6C65
_HOLES_MATTER = (0.02, 0.06)
_AT_ONCE = 32  # queries: their products fit the cache
_SAME = 1e-6  # relative difference of numbers that are the same
# deviations of like actions; expected number of rows with them
_LIKE = 0.5
_EXPECTED = 5.0
# limits for diagnostics of weights
FEW_WEIGHTED = 10.0
_MASS_OFF = 0.2
_NEGATIVE = 0.25


@dataclass(frozen=True, eq=False)
class Coverage:
    """``fraction``: share of the policy's state-actions that lie as near to the log as
    its own rows do.

    On-policy the fraction is about 0.95 by construction; ``ratios (M,)`` are
    nearest-neighbour distances divided by the log's own 95 % quantile, ``weights (M,)``
    the policy's weight of each. ``of_starts``: the fraction in start states. ``holes``:
    as `visited_holes` finds them.
    """

    fraction: float
    ratios: np.ndarray
    weights: np.ndarray
    of_starts: float = 1.0
    holes: float = 0.0

    @property
    def reasons(self) -> list[str]:
        """Clause for a verdict if the log covers too little of the policy; else
        empty.
        """
        if max(self.unlogged, self.holes) > MUCH_UNLOGGED:
            return [
                self.told if self.unlogged > self.holes else told_of_holes(self.holes)
            ]
        if self.fraction < NO_COVERAGE:
            return [
                f"only {self.fraction:.0%} of the policy's actions lie near logged ones"
            ]
        if self.of_starts < _NO_START:
            return [self.told_of_starts]
        return []

    @property
    def told_of_starts(self) -> str:
        """Clause on start states."""
        return (
            f"only {self.of_starts:.0%} of the policy's actions in start states lie"
            " near logged ones"
        )

    @property
    def told(self) -> str:
        """Clause on how often the policy takes actions that the log never or hardly
        takes.
        """
        return (
            f"{100 * self.unlogged:.3g}% of the policy's actions are ones the log never"
            " or hardly takes"
        )

    @property
    def unlogged(self) -> float:
        """Share of the policy's weight on unknown actions, and on those that the log
        holds only once.
        """
        return float(
            self.weights[np.isinf(self.ratios)].sum() / max(self.weights.sum(), 1e-300)
        )


def known_actions(policy: Policy, log: Transitions) -> np.ndarray | None:
    """Mask (n,) of the actions whose values the log can tell; None if all are, or if
    actions are continuous.

    An action is unknown if the log never takes it. In logs of more than one step it is
    also unknown if it occurs in fewer than 30 rows and less than a third as often as
    the policy takes it. Nothing bounds the values of unknown actions, and the kernel
    loss would use them to explain residuals of other rows.
    """
    if not isinstance(policy, DiscretePolicy):
        return None
    counts = np.bincount(log.actions[log.row_weights > 0.0], minlength=policy.n)
    if counts.min() >= _FEW_ROWS:
        return None
    used = policy.probabilities(log.observations).mean(axis=0) * (
        not log.terminated.all()
    )
    known = (counts >= _FEW_ROWS) | (
        (counts > 0) & (counts >= used * counts.sum() / _OVERUSED)
    )
    if known.all():
        return None
    return known


def among(policy: Policy, known: np.ndarray) -> DiscretePolicy:
    """Restrict the policy to the known actions and renormalise its probabilities.

    States where the policy takes no known action get equal probabilities of all known
    actions.
    """
    return DiscretePolicy(
        len(known),
        partial(_among, policy, known),
        policy.name,
        policy.observation_shape,
    )


def _among(policy: Any, known: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """Probabilities (N, n) restricted to known actions; equal ones where the policy
    takes none of them.
    """
    kept = policy.probabilities(observations) * known + 1e-12 * known
    return kept / kept.sum(axis=1, keepdims=True)


def measure_coverage(
    problem: EvaluationProblem,
    generator: np.random.Generator,
    known: np.ndarray | None = None,
) -> Coverage:
    """Nearest-neighbour coverage of (s', a' ~ π) and of (s0, a ~ π) by the logged (s,
    a), standardised.

    Only next states that do not end an episode count; if every row ends its episode,
    start states take their place. Discrete actions are compared with rows of the same
    action only. Actions that the log holds less than twice, or outside ``known (n,)``,
    count as infinitely far. A small Bellman error says nothing about what lies outside
    the log (Fujimoto et al. 2022).
    """
    # inputs without the previous rows
    own = len(problem.input_scale) - (problem.history > 0)
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    logged = problem.inputs[rows, :own]
    n = problem.n_actions

    def ask(which: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some states with actions (q, own), and the policy's weight of each in each
        group of rows.
        """
        inputs = getattr(problem, f"{which}_inputs")
        some = _choice(np.flatnonzero(weights), _QUERY_ROWS, generator)
        acted = inputs[
            some, 0 if n is not None else generator.integers(inputs.shape[1]), :own
        ]
        if n is None:
            shares = 1.0
        else:
            shares = getattr(problem, f"{which}_probabilities")[some]
        return acted, shares * weights[some, None]

    groups = [logged]
    if n is not None:
        every = np.ones(n, dtype=bool) if known is None else known
        groups = [
            logged[(problem.actions[rows] == action) & every[action]]
            for action in range(n)
        ]
    weights = problem.row_weights * (problem.discounts > 0.0)
    if weights.any():
        following = ask("next", weights)
    else:
        following = ask("start", problem.start_weights)
    spacing = _spacing(groups, generator)
    found = _compare(groups, spacing, *following)
    if weights.any():
        starts = _compare(groups, spacing, *ask("start", problem.start_weights))
    else:
        starts = found
    return replace(found, of_starts=starts.fraction)


def told_of_holes(share: float) -> str:
    """Clause on visits to states where the log does not take the policy's actions."""
    return (
        f"about {share:.0%} of the policy's visits are where the log hardly ever takes"
        " its action"
    )


def visited_holes(problem: EvaluationProblem, visits: Any, seed: int) -> float:
    """Share of the policy's visits to states near which the log has rows, but none with
    the policy's action.

    0 for a share that is no reason for care.

    visits (N,): marginal importance weights of the rows, None if unknown: then only
    start states count. Rows with the policy's action (continuous: within half a
    deviation in each dimension) have a share p of the log. If the log took that action
    near a state as often as elsewhere, the number m of rows nearer than the nearest
    such row would be geometric, and m p > 5 would have probability exp(−5). A visit
    counts if m p > 5 and the nearest such row is farther than the 95 % quantile of
    distances to nearest neighbours. Coverage weighs states as the log visits them, and
    overlooks a region that the log seldom visits and the policy often.
    """
    own = len(problem.input_scale) - (problem.history > 0)
    generator = np.random.default_rng([seed, _HOLES])
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    if visits is None:
        later = np.zeros(problem.n_rows)
    else:
        later = np.maximum(visits, 0.0) * problem.row_weights
    later = later * problem.discounts / problem.row_weights.sum()
    weights = np.concatenate(
        [later, problem.start_weights / problem.start_weights.sum()]
    )
    some = generator.choice(len(weights), _QUERY_ROWS, p=weights / weights.sum())
    after = some[some < problem.n_rows]
    first = some[some >= problem.n_rows] - problem.n_rows
    asked = np.concatenate(
        [problem.next_inputs[after, 0, :own], problem.start_inputs[first, 0, :own]]
    )
    logged = problem.inputs[rows, :own]
    if problem.next_probabilities is None or problem.start_probabilities is None:
        own -= math.prod(problem.actions.shape[1:])
        taken = logged[:, own:]
        wanted = asked[:, own:]
        groups = [logged]
        # of a dimension with one action
        only = _SAME * np.abs(problem.input_location[own : logged.shape[1]])
        like = np.where(np.ptp(taken, axis=0) > only, _LIKE, only)
    else:
        chances = np.concatenate(
            [problem.next_probabilities[after], problem.start_probabilities[first]]
        )
        taken = problem.actions[rows, None]
        like = np.array([_LIKE])
        wanted = pick_actions(chances, generator.random(len(some)))[:, None]
        groups = [logged[taken[:, 0] == action] for action in range(chances.shape[1])]
    spacing = _spacing(groups, generator)
    half = 0.5 * np.square(logged[:, :own]).sum(axis=1)
    holes = 0
    for block in blocks(len(some), _AT_ONCE):
        gaps = half - asked[block, :own] @ logged[:, :own].T
        pairs = zip(taken.T, wanted[block].T, like, strict=True)  # by dimension
        same = np.logical_and.reduce(
            [np.abs(one - other[:, None]) <= most for one, other, most in pairs]
        )
        nearest = np.where(same, gaps, np.inf).min(axis=1)
        expected = (gaps < nearest[:, None]).sum(axis=1) * same.mean(axis=1)
        reach = np.sqrt(
            np.maximum(2.0 * nearest + np.square(asked[block, :own]).sum(axis=1), 0.0)
        )
        holes += int(
            ((expected > _EXPECTED) & (reach > spacing) | ~same.any(axis=1)).sum()
        )
    return (
        holes
        / len(some)
        * (holes > _HOLES_MATTER[problem.n_actions is None] * len(some))
    )


def _spacing(groups: list[np.ndarray], generator: np.random.Generator) -> float:
    """The 95 % quantile of the rows' distances to their nearest neighbours in the same
    group.

    One for all: with a spacing per group, a rare action would cover everything between
    its few rows.
    """
    share = _QUERY_ROWS / sum(map(len, groups))
    some = [
        _choice(np.arange(len(rows)), math.ceil(share * len(rows)), generator)
        for rows in groups
    ]
    own = [
        _nearest(rows, rows[picked], picked)
        for rows, picked in zip(groups, some, strict=True)
    ]
    # Repeated rows make the distance zero (small state spaces): anything as near as
    # rounding is near.
    return max(
        float(np.quantile(np.concatenate(own), _NEAR_QUANTILE, method="lower")), 1e-6
    )


def _compare(
    groups: list[np.ndarray], spacing: float, queries: np.ndarray, cares: np.ndarray
) -> Coverage:
    """Distances of queries to the nearest row of each group. cares (query, group): the
    policy's weights.
    """
    pairs = zip(groups, cares.T, strict=True)
    near = [
        _nearest(rows if care.any() else rows[:0], queries) / spacing
        for rows, care in pairs
    ]
    distances = np.concatenate(near)
    weights = cares.T.ravel()
    if weights.sum() > 0:
        fraction = float(np.average(distances <= 1.0, weights=weights))
    else:
        fraction = 0.0
    return Coverage(fraction, distances, weights)


def _nearest(
    rows: np.ndarray, queries: np.ndarray, own: np.ndarray | None = None
) -> np.ndarray:
    """Distance (q,) of each query to the nearest row; own: numbers of the rows that
    queries are, left out.

    Infinite for fewer than two rows. Trees take longer from a dozen columns on, and
    overflow the stack where denormal numbers count as zero
    (`koffline.fitting.threads`).
    """
    if len(rows) < 2:
        return np.full(len(queries), np.inf)
    best = np.empty(len(queries), dtype=np.int64)
    half = 0.5 * np.square(rows).sum(axis=1)
    for block in blocks(len(queries), _AT_ONCE):
        gaps = half - queries[block] @ rows.T
        if own is not None:
            gaps[np.arange(len(gaps)), own[block]] = np.inf
        best[block] = gaps.argmin(axis=1)
    return np.asarray(np.sqrt(np.square(rows[best] - queries).sum(axis=1)))


def _choice(rows: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most ``size`` of the row numbers, drawn at random."""
    if len(rows) <= size:
        return rows
    return generator.choice(rows, size, replace=False)


def describe_coverage(fraction: float) -> str:
    """Text on the share of the policy's actions near logged ones, with the share
    expected on-policy.
    """
    return (
        f"{fraction:.0%} of the policy's actions lie near logged ones (95 % if it had"
        " written the log)"
    )


def doubts_of_weights(weights: dict[str, Any]) -> Iterator[Reason]:
    """Yield reasons to doubt marginal importance weights, from their diagnostics."""
    units, mass, negative = (
        weights[name] for name in ("effective_units", "mass", "negative_share")
    )
    if units < FEW_WEIGHTED:
        few = f"only {units:.1f} episodes or rows (effective number)"
        yield Reason("support", f"{few} carry the policy's visits")
    if abs(mass - 1.0) > _MASS_OFF:
        yield Reason(
            "support",
            f"the log's weights for the policy's visits average {mass:.2f}, not 1",
        )
    if negative > _NEGATIVE:
        yield Reason(
            "support",
            f"{negative:.0%} of the log's weights for the policy's visits are negative",
        )
