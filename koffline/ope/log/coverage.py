"""How well a log covers a policy's actions, and checks of the marginal importance
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from koffline.data.columns import blocks
from koffline.data.transitions import Transitions
from koffline.jobs.cores import each_on_cores
from koffline.ope import thresholds
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.results import Reason
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import ActionMasks, Actions, Observations, pick_actions

_REFERENCE_ROWS = 20_000  # of the log that queries are compared with
_QUERY_ROWS = 2_000
_NEAR_QUANTILE = 0.95
_HOLES_STREAM = 0x686F6C65  # key of the draws of `visited_holes`
_AT_ONCE = 32  # queries: their products fit the cache
_SAME = 1e-6  # relative difference of numbers that are the same
# Rough time to find how near a query is to a row, for each of their columns, and to ask
# whether it is a hole. It only tells whether further cores are worth their start.
_PAIR_SECONDS = 1e-9
_COLUMN_SECONDS = 1e-10
_HOLE_SECONDS = 4e-9

T = TypeVar("T")


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
        if max(self.unlogged, self.holes) > thresholds.MUCH_UNLOGGED:
            if self.unlogged > self.holes:
                return [self.clause_on_unlogged]
            return [clause_on_holes(self.holes)]
        if self.fraction < thresholds.NO_COVERAGE:
            return [
                f"only {self.fraction:.0%} of the policy's actions lie near logged ones"
            ]
        if self.of_starts < thresholds.NO_COVERAGE_OF_STARTS:
            return [self.clause_on_starts]
        return []

    @property
    def clause_on_starts(self) -> str:
        """Clause on start states."""
        return (
            f"only {self.of_starts:.0%} of the policy's actions in start states lie"
            " near logged ones"
        )

    @property
    def clause_on_unlogged(self) -> str:
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
        total = max(self.weights.sum(), 1e-300)
        return float(self.weights[np.isinf(self.ratios)].sum() / total)


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
    is_frequent = counts >= thresholds.FEW_ROWS_OF_ACTION
    if is_frequent.all():
        return None
    is_known = counts > 0
    if not log.terminated.all():
        use = policy.probabilities(log.observations, log.action_mask).mean(axis=0)
        expected = use * counts.sum()
        is_used_alike = counts >= expected / thresholds.OVERUSED
        is_known = is_frequent | (is_known & is_used_alike)
    if is_known.all():
        return None
    return is_known


def among(policy: DiscretePolicy, known: np.ndarray) -> DiscretePolicy:
    """Restrict the policy to the known actions and renormalise its probabilities.

    States where the policy takes no known action get equal probabilities of all known
    actions that are available there; of all known ones if none is.
    """
    return _AmongKnown(
        len(known),
        partial(_among, policy, known),
        policy.name,
        policy.observation_shape,
        takes_mask=True,
    )


class _AmongKnown(DiscretePolicy):
    """A policy among known actions, which takes an unavailable one only where no known
    action is available.
    """

    def probabilities(
        self, observations: Observations, action_mask: ActionMasks | None = None
    ) -> Actions:
        """Action probabilities (N, n), float64, rows sum to one."""
        return self.unmasked_probabilities(observations, action_mask)


def _among(
    policy: DiscretePolicy,
    known: np.ndarray,
    observations: np.ndarray,
    action_mask: np.ndarray,
) -> np.ndarray:
    """Probabilities (N, n) restricted to known actions among the available ones (N, n);
    equal ones where the policy takes none of them.
    """
    usable = known & action_mask
    usable |= known & ~usable.any(axis=1, keepdims=True)
    kept = policy.probabilities(observations, action_mask) * usable + 1e-12 * usable
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
    width = _width_of_row(problem)
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    groups = _groups_by_action(problem, rows, width, known)

    def ask_next_states(weights: np.ndarray) -> _Queries:
        return _draw_queries(
            problem.next_inputs[:, :, :width],
            problem.next_probabilities,
            weights,
            generator,
        )

    def ask_start_states() -> _Queries:
        return _draw_queries(
            problem.start_inputs[:, :, :width],
            problem.start_probabilities,
            problem.start_weights,
            generator,
        )

    goes_on = np.where(problem.discounts > 0.0, problem.row_weights, 0.0)
    if not goes_on.any():
        queries = ask_start_states()
        coverage = _compare(groups, _spacing(groups, generator), queries)
        return replace(coverage, of_starts=coverage.fraction)
    queries = ask_next_states(goes_on)
    spacing = _spacing(groups, generator)
    coverage = _compare(groups, spacing, queries)
    of_starts = _compare(groups, spacing, ask_start_states())
    return replace(coverage, of_starts=of_starts.fraction)


@dataclass(frozen=True, eq=False)
class _Queries:
    """States with actions that are looked up in the log.

    ``places`` (q, d): standardised, with the action if it is continuous. ``weights``
    (q, g): the policy's weight of each in each of the g groups of rows.
    """

    places: np.ndarray
    weights: np.ndarray


def _width_of_row(problem: EvaluationProblem) -> int:
    """Number of the inputs that are of the row itself, not of previous ones."""
    if problem.history > 0:  # the last scale is that of previous rewards
        return len(problem.input_scale) - 1
    return len(problem.input_scale)


def _groups_by_action(
    problem: EvaluationProblem,
    rows: np.ndarray,
    width: int,
    known: np.ndarray | None,
) -> list[np.ndarray]:
    """Inputs (·, width) of these rows by discrete action, those of unknown ones empty;
    one group for continuous actions.
    """
    logged = problem.inputs[rows, :width]
    if problem.n_actions is None:
        return [logged]
    actions = problem.actions[rows]
    groups = []
    for action in range(problem.n_actions):
        if known is None or known[action]:
            groups.append(logged[actions == action])
        else:
            groups.append(logged[:0])
    return groups


def _draw_queries(
    inputs: np.ndarray,
    probabilities: np.ndarray | None,
    weights: np.ndarray,
    generator: np.random.Generator,
) -> _Queries:
    """A sample of states of positive weight, with the policy's actions there.

    inputs (N, m, d): with m draws of continuous actions, of which one is taken.
    probabilities (N, n): of discrete actions; None for continuous ones. weights (N,).
    """
    states = _choice(np.flatnonzero(weights), _QUERY_ROWS, generator)
    if probabilities is None:
        draw = generator.integers(inputs.shape[1])
        return _Queries(inputs[states, draw], weights[states, None])
    return _Queries(inputs[states, 0], probabilities[states] * weights[states, None])


def clause_on_holes(share: float) -> str:
    """Clause on visits to states where the log does not take the policy's actions."""
    return (
        f"about {share:.0%} of the policy's visits are where the log hardly ever takes"
        " its action"
    )


def visited_holes(
    problem: EvaluationProblem, visits: np.ndarray | None, seed: int
) -> float:
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
    generator = np.random.default_rng([seed, _HOLES_STREAM])
    rows = _choice(np.flatnonzero(problem.row_weights), _REFERENCE_ROWS, generator)
    visited = _visited_places(problem, visits, generator)
    like = _like_actions(problem, rows, visited, generator)
    state_width = like.state_width
    logged_states = problem.inputs[rows, :state_width]
    visited_states = visited.places[:, :state_width]
    spacing = _spacing(like.groups, generator)
    # ‖x − y‖² / 2 = ‖x‖² / 2 − xᵀy + ‖y‖² / 2, whose last part is the same for all x
    half_squares = 0.5 * np.square(logged_states).sum(axis=1)
    count = len(visited_states)

    def holes_in(block: slice) -> int:
        """Number of the visits of a block that count."""
        states = visited_states[block]
        gaps = half_squares - states @ logged_states.T
        is_like = like.pairs(block)
        nearest_like = np.where(is_like, gaps, np.inf).min(axis=1)
        is_nearer = gaps < nearest_like[:, None]
        expected = is_nearer.sum(axis=1) * is_like.mean(axis=1)
        squares = 2.0 * nearest_like + np.square(states).sum(axis=1)
        distance = np.sqrt(np.maximum(squares, 0.0))
        is_hole = (expected > thresholds.EXPECTED_LIKE) & (distance > spacing)
        is_hole |= ~is_like.any(axis=1)
        return int(is_hole.sum())

    holes = sum(_on_blocks(holes_in, visited_states, logged_states, _HOLE_SECONDS))
    if problem.n_actions is None:
        least = thresholds.HOLES_OF_CONTINUOUS
    else:
        least = thresholds.HOLES_OF_DISCRETE
    if holes > least * count:
        return holes / count
    return 0.0


@dataclass(frozen=True, eq=False)
class _Visited:
    """A sample of q places that the policy visits.

    ``places`` (q, d): as in `_Queries`. ``probabilities`` (q, n): of discrete actions.
    """

    places: np.ndarray
    probabilities: np.ndarray | None


def _visited_places(
    problem: EvaluationProblem,
    visits: np.ndarray | None,
    generator: np.random.Generator,
) -> _Visited:
    """Places drawn by the policy's visits: next states by ``visits`` (N,) of their
    rows, None if unknown, and start states.
    """
    width = _width_of_row(problem)
    if visits is None:
        of_rows = np.zeros(problem.n_rows)
    else:
        of_rows = np.maximum(visits, 0.0) * problem.row_weights
    of_next = of_rows * problem.discounts / problem.row_weights.sum()
    of_starts = problem.start_weights / problem.start_weights.sum()
    weights = np.concatenate([of_next, of_starts])
    drawn = generator.choice(len(weights), _QUERY_ROWS, p=weights / weights.sum())
    next_rows = drawn[drawn < problem.n_rows]
    starts = drawn[drawn >= problem.n_rows] - problem.n_rows
    places = [
        problem.next_inputs[next_rows, 0, :width],
        problem.start_inputs[starts, 0, :width],
    ]
    probabilities = None
    if problem.next_probabilities is not None:
        assert problem.start_probabilities is not None
        probabilities = np.concatenate(
            [problem.next_probabilities[next_rows], problem.start_probabilities[starts]]
        )
    return _Visited(np.concatenate(places), probabilities)


@dataclass(frozen=True, eq=False)
class _LikeActions:
    """Which of M logged rows have an action like that of a visit.

    ``logged`` (M, k) and ``visited`` (q, k): actions; ``tolerance`` (k,): difference
    in each dimension up to which they are alike. ``groups``: inputs of the rows whose
    distances to each other count. ``state_width``: number of the inputs that are of
    the state.
    """

    logged: np.ndarray
    visited: np.ndarray
    tolerance: np.ndarray
    groups: list[np.ndarray]
    state_width: int

    def pairs(self, block: slice) -> np.ndarray:
        """Mask (b, M) for a block of the visits."""
        is_like = np.ones((len(self.visited[block]), len(self.logged)), dtype=bool)
        for dimension, tolerance in enumerate(self.tolerance):
            logged = self.logged[:, dimension]
            visited = self.visited[block, dimension]
            is_like &= np.abs(logged - visited[:, None]) <= tolerance
        return is_like


def _like_actions(
    problem: EvaluationProblem,
    rows: np.ndarray,
    visited: _Visited,
    generator: np.random.Generator,
) -> _LikeActions:
    """Actions of logged rows and of visits, and how near they must be to be alike.

    A discrete action of each visit is drawn with its probabilities. Continuous actions
    are alike within half a deviation in each dimension; where the log holds a single
    value, within rounding.
    """
    width = _width_of_row(problem)
    if visited.probabilities is not None:
        uniform = generator.random(len(visited.places))
        return _LikeActions(
            logged=problem.actions[rows, None],
            visited=pick_actions(visited.probabilities, uniform)[:, None],
            tolerance=np.array([thresholds.LIKE_ACTIONS]),
            groups=_groups_by_action(problem, rows, width, known=None),
            state_width=width,
        )
    state_width = width - math.prod(problem.actions.shape[1:])
    logged = problem.inputs[rows, :width]
    actions = logged[:, state_width:]
    rounding = _SAME * np.abs(problem.input_location[state_width:width])
    varies = np.ptp(actions, axis=0) > rounding
    return _LikeActions(
        logged=actions,
        visited=visited.places[:, state_width:],
        tolerance=np.where(varies, thresholds.LIKE_ACTIONS, rounding),
        groups=[logged],
        state_width=state_width,
    )


def _spacing(groups: list[np.ndarray], generator: np.random.Generator) -> float:
    """The 95 % quantile of the rows' distances to their nearest neighbours in the same
    group.

    One for all: with a spacing per group, a rare action would cover everything between
    its few rows.
    """
    share = _QUERY_ROWS / sum(map(len, groups))
    samples = [
        _choice(np.arange(len(rows)), math.ceil(share * len(rows)), generator)
        for rows in groups
    ]
    distances = [
        _nearest(rows, rows[sample], itself=sample)
        for rows, sample in zip(groups, samples, strict=True)
    ]
    nearest = np.concatenate(distances)
    quantile = np.quantile(nearest, _NEAR_QUANTILE, method="lower")
    has_neighbour = np.isfinite(nearest)
    if not np.isfinite(quantile) and has_neighbour.any():
        # many rows are alone with their action, and say nothing of what is near
        quantile = np.quantile(nearest[has_neighbour], _NEAR_QUANTILE, method="lower")
    # Repeated rows make the distance zero (small state spaces): anything as near as
    # rounding is near.
    return max(float(quantile), 1e-6)


def _compare(groups: list[np.ndarray], spacing: float, queries: _Queries) -> Coverage:
    """Coverage of queries by the nearest row of each group; one that the policy never
    asks about is not searched.
    """
    ratios = []
    for rows, weights in zip(groups, queries.weights.T, strict=True):
        searched = rows if weights.any() else rows[:0]
        with np.errstate(invalid="ignore"):
            # no neighbours anywhere: ∞ / ∞ is no number, and not near
            ratios.append(_nearest(searched, queries.places) / spacing)
    distances = np.concatenate(ratios)
    weights = queries.weights.T.ravel()
    fraction = 0.0
    if weights.sum() > 0:
        fraction = float(np.average(distances <= 1.0, weights=weights))
    return Coverage(fraction, distances, weights)


def _nearest(
    rows: np.ndarray, queries: np.ndarray, itself: np.ndarray | None = None
) -> np.ndarray:
    """Distance (q,) of each query (q, d) to the nearest of the rows (M, d).

    itself (q,): number of the row that the query is, which is left out; None if queries
    are no rows. Infinite for fewer than two rows. Trees take longer from a dozen
    columns on, and overflow the stack where denormal numbers count as zero
    (`koffline.fitting.threads`).
    """
    if len(rows) < 2:
        return np.full(len(queries), np.inf)
    half_squares = 0.5 * np.square(rows).sum(axis=1)

    def nearest_of(block: slice) -> np.ndarray:
        """Number (b,) of the row that is nearest to each query of a block."""
        gaps = half_squares - queries[block] @ rows.T
        if itself is not None:
            gaps[np.arange(len(gaps)), itself[block]] = np.inf
        return gaps.argmin(axis=1)

    best = np.concatenate(_on_blocks(nearest_of, queries, rows))
    return np.asarray(np.sqrt(np.square(rows[best] - queries).sum(axis=1)))


def _on_blocks(
    call: Callable[[slice], T],
    queries: np.ndarray,
    rows: np.ndarray,
    further_seconds: float = 0.0,
) -> list[T]:
    """``call(block)`` for blocks that cover the queries (q, d), in their order, divided
    among the cores.

    rows (M, d): that each query is compared with. further_seconds: rough time for each
    pair beside that of their distance.
    """
    of_pair = _PAIR_SECONDS + further_seconds + rows.shape[1] * _COLUMN_SECONDS
    return each_on_cores(
        call,
        items=list(blocks(len(queries), _AT_ONCE)),
        seconds=len(queries) * len(rows) * of_pair,
    )


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


def doubts_of_weights(weights: Mapping[str, float]) -> Iterator[Reason]:
    """Yield reasons to doubt marginal importance weights, from their diagnostics."""
    units = weights["effective_units"]
    mass = weights["mass"]
    negative = weights["negative_share"]
    if units < thresholds.FEW_WEIGHTED:
        yield Reason(
            "support",
            f"only {units:.1f} episodes or rows (effective number) carry the policy's"
            " visits",
        )
    if abs(mass - 1.0) > thresholds.MASS_OFF:
        yield Reason(
            "support",
            f"the log's weights for the policy's visits average {mass:.2f}, not 1",
        )
    if negative > thresholds.MUCH_NEGATIVE:
        yield Reason(
            "support",
            f"{negative:.0%} of the log's weights for the policy's visits are negative",
        )
