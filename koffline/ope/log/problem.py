"""A log and a policy prepared for value functions: standardised, with the policy's
actions attached.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.log.bounds import value_bounds
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy
from koffline.untrusted.limits import check_fits

_FAR = 10.0  # bound of standardised numbers, so that no outlier dominates a network
_MOST_INPUTS = 4096
_START_DRAWS = 16_384  # draws of a continuous policy's actions over all start states
_LARGEST = 1e100  # largest number whose squares and discounted sums are finite
# Outliers beyond `_FAR` with a larger share of a column's variance are left out of its
# scale.
_HIDING = 0.25
_ROUNDING = 1e-8  # deviation relative to the mean below which a column is constant


@dataclass(frozen=True, eq=False, kw_only=True)
class Measures:
    """Location and scale of a log's columns; a part of the log uses those of the whole.

    ``input_location (d,)`` or (d + k,) is subtracted from states and continuous
    actions, which are then divided by ``input_scale``; rewards are divided by
    ``reward_scale``, weights by ``weight_scale``.
    ``value_bounds``: bounds of any discounted sum of scaled rewards. ``fixed_starts``:
    start states were given, and are not resampled with the log. ``n_actions``: None if
    continuous. ``history``: number of previous rows in the state; if positive, location
    and scale have one more entry, for rewards. ``is_one_step``: whether every row of
    the log terminates, so that Q(s, a) is the mean reward.
    """

    input_location: np.ndarray
    input_scale: np.ndarray
    weight_scale: float
    reward_scale: float
    value_bounds: tuple[float, float]
    fixed_starts: bool
    n_actions: int | None = None
    history: int = 0
    is_one_step: bool = False

    def standardise(
        self, observations: np.ndarray, actions: np.ndarray | None = None
    ) -> np.ndarray:
        """Standardise observations (M, ...), with continuous actions (M, k)
        appended.
        """
        columns = _flat(observations)
        if self.n_actions is None and actions is not None:
            columns = np.concatenate(
                [columns, np.asarray(actions, dtype=np.float64)], axis=1
            )
        count = columns.shape[1]
        location = self.input_location[:count]
        scale = self.input_scale[:count]
        return np.clip((columns - location) / scale, -_FAR, _FAR)

    def standardise_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """Standardise rewards (N,) as inputs; only with a ``history``."""
        location = self.input_location[-1]
        scale = self.input_scale[-1]
        return np.clip((rewards - location) / scale, -_FAR, _FAR)

    @property
    def measures(self) -> dict[str, Any]:
        """The fields of `Measures` by name, without any rows."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Measures)
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationProblem(Measures):
    """Arrays of N rows that estimators, kernels and diagnostics share.

    A value function is Q(s, a) = Σ_a' readout_a' · net(inputs)_a'; its expectation
    under the policy uses the policy's probabilities as readout. Discrete actions (n):
    ``inputs (N, d)`` are standardised observations, readouts are one-hot rows or
    probabilities. Continuous actions: ``inputs (N, d + k)`` include the action,
    ``next_inputs (N, m, d + k)`` and ``start_inputs (E, m', d + k)`` hold m and m'
    draws of the policy's actions, and readouts are None. ``episode_starts``: first row
    of each unit of resampling (an episode, or a row if there are no episodes);
    ``units``: their numbers in the log; ``clusters``: the numbers by which they are
    resampled, those of the log's clusters if any. ``row_weights (N,)``: the log's, of
    mean one. ``start_weights (E,)``: of the rows that hold the start states; ones for
    given ones. With a ``history``, inputs end with the previous rows
    (`with_previous_rows`).
    """

    inputs: np.ndarray
    next_inputs: np.ndarray
    start_inputs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    episode_starts: np.ndarray
    units: np.ndarray
    clusters: np.ndarray
    row_weights: np.ndarray
    start_weights: np.ndarray
    readout: np.ndarray | None = None
    next_probabilities: np.ndarray | None = None
    start_probabilities: np.ndarray | None = None

    @property
    def n_rows(self) -> int:
        """Number N of rows."""
        return len(self.rewards)

    @cached_property
    def kernel_inputs(self) -> Float[np.ndarray, "row column"]:
        """Inputs of the kernel: states and actions, discrete actions one-hot."""
        if self.readout is None:
            return self.inputs
        return np.concatenate([self.inputs, self.readout], axis=1)

    @cached_property
    def lengths(self) -> Int[np.ndarray, " unit"]:
        """Number of rows of each unit."""
        return np.diff(np.append(self.episode_starts, self.n_rows))

    @cached_property
    def steps(self) -> Int[np.ndarray, " row"]:
        """Steps since the start of the row's unit."""
        return np.arange(self.n_rows) - np.repeat(self.episode_starts, self.lengths)

    @property
    def start_units(self) -> Int[np.ndarray, " start"]:
        """Number of each start state's unit, or of the start state itself if start
        states were given.
        """
        if self.fixed_starts:
            return np.arange(len(self.start_inputs))
        return self.units

    @property
    def kind(self) -> str:
        """What is resampled: clusters, episodes or rows."""
        if not np.array_equal(self.clusters, self.units):
            return "clusters"
        if len(self.units) == self.n_rows:
            return "rows"
        return "episodes"


@dataclass(frozen=True, eq=False)
class ProblemInputs:
    """Inputs of networks at rows, next states and start states, with their readouts.

    Fields and shapes are those of `EvaluationProblem` with the same names.
    """

    inputs: np.ndarray
    next_inputs: np.ndarray
    start_inputs: np.ndarray
    readout: np.ndarray | None = None
    next_probabilities: np.ndarray | None = None
    start_probabilities: np.ndarray | None = None


@runtime_checkable
class ActionDraws(Protocol):
    """Draws of a continuous policy's actions in the states of a problem."""

    @property
    def count(self) -> int:
        """Number m of draws in each next state."""

    def in_next_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (N, m, k) in the next states (N, ...) of the rows."""

    def in_start_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (E, m', k) in start states (E, ...)."""


@dataclass(frozen=True, eq=False)
class DrawsInOrder:
    """Draws from a policy with one generator, in the order of the calls.

    ``count``: draws in each next state; ``start_count``: in each start state.
    """

    policy: Policy
    generator: np.random.Generator
    count: int = 1
    start_count: int = 1

    def in_next_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (N, count, k): the policy is asked ``count`` times for all states."""
        return self._one_call_a_draw(states, self.count)

    def in_start_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (E, start_count, k).

        Where start states have more draws than next states, the policy is asked once
        for all of them: thousands of calls would take long.
        """
        if self.start_count <= self.count:
            return self._one_call_a_draw(states, self.start_count)
        repeated = np.repeat(states, self.start_count, axis=0)
        drawn = self.policy.sample(repeated, self.generator)
        return drawn.reshape(len(states), self.start_count, -1)

    def _one_call_a_draw(self, states: np.ndarray, count: int) -> np.ndarray:
        draws = [self.policy.sample(states, self.generator) for _ in range(count)]
        return np.stack(draws, axis=1)


def prepare_problem(
    transitions: Transitions,
    policy: Policy,
    gamma: float,
    action_draws: int,
    generator: np.random.Generator,
    initial_observations: np.ndarray | None = None,
    history: int = 0,
    numbers: np.ndarray | None = None,
) -> EvaluationProblem:
    """Standardise states and actions, scale rewards, and evaluate the policy at next
    and initial states.

    Only ``terminated`` ends the future; time limits do not. A row of weight two counts
    as two rows, also as a start state.

    action_draws: draws of a stochastic continuous policy's actions in each next state,
    made with ``generator``; a deterministic policy is asked once.
    initial_observations (E, ...): replace the log's own start states.
    history: number of previous rows in the state, which the policy does not see.
    numbers (U,): of the units in the log, by default 0, 1, 2, …
    Raises DataError for rows that no value function can be fitted to.
    """
    _check_rows(transitions, history)
    first_weights = transitions.row_weights[transitions.unit_starts]
    if initial_observations is None and not first_weights.any():
        raise DataError(
            "weights are zero in the first row of every episode; give start states"
            " (initial_observations) or a first row a positive weight"
        )
    measures = _measure(
        transitions,
        policy,
        gamma,
        fixed_starts=initial_observations is not None,
        history=history,
    )
    starts = _start_states(transitions, initial_observations)
    if isinstance(policy, DiscretePolicy) or policy.deterministic:
        draws = DrawsInOrder(policy, generator)
    else:
        # few start states get more draws each
        start_count = max(math.ceil(_START_DRAWS / len(starts)), action_draws)
        draws = DrawsInOrder(policy, generator, action_draws, start_count)
    inputs = _inputs(transitions, policy, measures, starts, draws)
    return _assemble(
        transitions, gamma, measures, inputs, initial_observations, numbers
    )


def prepare_part(
    transitions: Transitions,
    policy: Policy,
    gamma: float,
    measures: Measures,
    draws: ActionDraws | None = None,
    initial_observations: np.ndarray | None = None,
    numbers: np.ndarray | None = None,
) -> EvaluationProblem:
    """`prepare_problem` for rows that are a part of a log, with the ``measures`` of the
    whole log.

    If the whole log's start states were given, those of the part have no meaning.

    draws: of a continuous policy's actions; by default one in each state, which is all
    that a deterministic policy needs. initial_observations (E, ...) and numbers (U,):
    as in `prepare_problem`. Raises DataError.
    """
    _check_rows(transitions, measures.history)
    starts = _start_states(transitions, initial_observations)
    if draws is None:
        draws = DrawsInOrder(policy, np.random.default_rng(0))
    inputs = _inputs(transitions, policy, measures, starts, draws)
    return _assemble(
        transitions, gamma, measures, inputs, initial_observations, numbers
    )


def _check_rows(log: Transitions, history: int) -> None:
    """Raise DataError for a history of rows that stand alone, and for numbers whose
    squares would not be finite.
    """
    if history and not log.has_episodes:
        raise DataError(
            f"history is {history}, but rows stand alone in this log; leave it out"
        )
    for name in ("observations", "actions", "rewards", "next_observations"):
        column = getattr(log, name)
        if column.dtype != np.float64:
            continue
        largest = max(abs(float(column.min())), abs(float(column.max())))
        if largest > _LARGEST:
            by_row = np.abs(column).reshape(len(column), -1).max(axis=1)
            row = int(np.argmax(by_row))
            raise DataError(
                f"{name} reaches {by_row[row]:.3g} in row {row}; rescale below 1e100"
            )


def _start_states(
    log: Transitions, initial_observations: np.ndarray | None
) -> np.ndarray:
    """The given start states, else the log's own.

    Raises DataError for given ones of a log with masks: those of the states are unknown.
    """
    if initial_observations is None:
        return log.initial_observations()
    if log.action_mask is not None:
        raise DataError(
            "the log has an action_mask, and which actions are available in the given"
            " start states is unknown; leave initial_observations out, so that episodes"
            " start where the log's do"
        )
    return initial_observations


def _inputs(
    log: Transitions,
    policy: Policy,
    measures: Measures,
    starts: np.ndarray,
    draws: ActionDraws,
) -> ProblemInputs:
    """Inputs and readouts of rows, next states and start states (E, ...)."""
    if isinstance(policy, DiscretePolicy):
        inputs = _discrete_inputs(log, policy, measures, starts)
    else:
        inputs = _continuous_inputs(log, policy, measures, starts, draws)
    if not measures.history:
        return inputs
    rewards = np.asarray(log.rewards, dtype=np.float64)
    return with_previous_rows(
        inputs,
        rewards=measures.standardise_rewards(rewards),
        unit_starts=log.unit_starts,
        count=measures.history,
    )


def _discrete_inputs(
    log: Transitions, policy: DiscretePolicy, measures: Measures, starts: np.ndarray
) -> ProblemInputs:
    """Observations as inputs; the action reads out one of n outputs.

    starts (E, ...): those of the log, if it has masks of available actions.
    """
    start_mask = log.initial_action_mask()
    return ProblemInputs(
        inputs=measures.standardise(log.observations),
        next_inputs=measures.standardise(log.next_observations)[:, None],
        start_inputs=measures.standardise(starts)[:, None],
        readout=np.eye(policy.n)[np.asarray(log.actions)],
        next_probabilities=policy.probabilities(
            log.next_observations, log.next_action_mask
        ),
        start_probabilities=policy.probabilities(starts, start_mask),
    )


def _continuous_inputs(
    log: Transitions,
    policy: ContinuousPolicy,
    measures: Measures,
    starts: np.ndarray,
    draws: ActionDraws,
) -> ProblemInputs:
    """Observations with actions as inputs: the log's, and draws of the policy's.

    Raises DataError if the drawn rows do not fit the memory.
    """
    numbers_of_a_row = math.prod(log.observation_shape) + policy.k
    check_fits(
        8.0 * draws.count * len(log) * numbers_of_a_row,
        f"action_draws is {draws.count}, and the log has {len(log)} rows of"
        f" {numbers_of_a_row} numbers",
        "lower action_draws",
    )
    next_actions = draws.in_next_states(log.next_observations)
    start_actions = draws.in_start_states(starts)
    return ProblemInputs(
        inputs=measures.standardise(log.observations, log.actions),
        next_inputs=_with_actions(measures, log.next_observations, next_actions),
        start_inputs=_with_actions(measures, starts, start_actions),
    )


def _with_actions(
    measures: Measures, states: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Standardised (N, m, d + k): each state (N, d) with each of its actions (N, m, k)
    appended.
    """
    repeated = np.repeat(states, actions.shape[1], axis=0)
    rows = measures.standardise(repeated, actions.reshape(len(repeated), -1))
    return rows.reshape(*actions.shape[:2], -1)


def with_previous_rows(
    inputs: ProblemInputs,
    rewards: np.ndarray,
    unit_starts: np.ndarray,
    count: int,
) -> ProblemInputs:
    """Append the ``count`` previous rows to the inputs of rows and next states; start
    states get zeros.

    A previous row is a one, its state and action, and its reward; zeros where there is
    none. rewards (N,): standardised. unit_starts (U,): first row of each unit.
    """
    columns = [np.ones((len(rewards), 1)), inputs.inputs]
    if inputs.readout is not None:
        columns.append(inputs.readout)
    columns.append(rewards[:, None])
    # the row itself, the row before it, the one before that, …
    by_lag = [np.concatenate(columns, axis=1)]
    for _ in range(count):
        earlier = np.roll(by_lag[-1], 1, axis=0)
        earlier[unit_starts] = 0.0
        by_lag.append(earlier)
    before_row = np.concatenate(by_lag[1:], axis=1)
    before_next = np.concatenate(by_lag[:-1], axis=1)
    before_start = np.zeros_like(before_row[:1])
    return replace(
        inputs,
        inputs=np.concatenate([inputs.inputs, before_row], axis=1),
        next_inputs=_append_to_draws(inputs.next_inputs, before_next),
        start_inputs=_append_to_draws(inputs.start_inputs, before_start),
    )


def _append_to_draws(inputs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(N, m, d + c): columns (N, c), or one row of them (1, c), appended to each of the
    m draws of inputs (N, m, d).
    """
    shape = (*inputs.shape[:2], columns.shape[1])
    repeated = np.broadcast_to(columns[:, None], shape)
    return np.concatenate([inputs, repeated], axis=2)


def _assemble(
    log: Transitions,
    gamma: float,
    measures: Measures,
    inputs: ProblemInputs,
    initial_observations: np.ndarray | None,
    numbers: np.ndarray | None,
) -> EvaluationProblem:
    """The problem of a log's rows with these inputs; rewards and weights are scaled
    here.
    """
    unit_starts = log.unit_starts
    weights = log.row_weights / measures.weight_scale
    if initial_observations is None:
        start_weights = weights[unit_starts]
    else:
        start_weights = np.ones(len(initial_observations))
    if numbers is None:
        numbers = np.arange(len(unit_starts))
    if log.clusters is None:
        clusters = numbers
    else:
        clusters = log.clusters[unit_starts]
    return EvaluationProblem(
        **measures.measures,
        inputs=inputs.inputs,
        next_inputs=inputs.next_inputs,
        start_inputs=inputs.start_inputs,
        actions=np.asarray(log.actions),
        rewards=np.asarray(log.rewards, dtype=np.float64) / measures.reward_scale,
        discounts=gamma * (1.0 - log.terminated),
        episode_starts=unit_starts,
        units=numbers,
        clusters=clusters,
        row_weights=weights,
        start_weights=start_weights,
        readout=inputs.readout,
        next_probabilities=inputs.next_probabilities,
        start_probabilities=inputs.start_probabilities,
    )


def _measure(
    log: Transitions,
    policy: Policy,
    gamma: float,
    fixed_starts: bool,
    history: int,
) -> Measures:
    """Measures by which inputs have mean 0 and deviation 1, weights mean 1, and returns
    root mean square 1.

    A column that is constant up to rounding keeps scale 1. Raises DataError if all
    weights are zero.
    """
    log_weights = log.row_weights
    if not log_weights.any():
        raise DataError(
            "weights are all zero; give at least one row a positive weight or leave"
            " them out"
        )
    largest = log_weights.max()
    # divided by the largest first: no sum overflows
    weight_scale = float(largest) * float((log_weights / largest).mean())
    weights = log_weights / weight_scale
    rewards = np.asarray(log.rewards, dtype=np.float64)
    location, deviation = _location_and_deviation(
        log, weights / weights.sum(), with_rewards=history > 0
    )
    is_constant = deviation <= _ROUNDING * np.abs(location)
    reward_scale = _rms_return(log, gamma, weights)
    scaled = rewards / reward_scale
    counted = weights > 0.0
    going_on = ColumnStatistics.of(scaled[counted & ~log.terminated]).range
    final = ColumnStatistics.of(scaled[counted & log.terminated]).range
    return Measures(
        input_location=location,
        input_scale=np.where(is_constant, 1.0, deviation),
        weight_scale=weight_scale,
        reward_scale=reward_scale,
        value_bounds=value_bounds(going_on, final, gamma),
        fixed_starts=fixed_starts,
        n_actions=policy.n if isinstance(policy, DiscretePolicy) else None,
        history=history,
        is_one_step=bool(np.all(log.terminated)),
    )


def _location_and_deviation(
    log: Transitions, share: np.ndarray, with_rewards: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) of the columns of inputs, without outliers.

    share (N,): of the rows in the weight, with sum one. with_rewards: whether inputs
    end with rewards.
    """
    parts = [_flat(log.observations)]
    if not isinstance(log.action_space, Discrete):
        parts.append(np.asarray(log.actions, dtype=np.float64))
    if with_rewards:
        parts.append(np.asarray(log.rewards, dtype=np.float64)[:, None])
    moments = [_robust_moments(share, part) for part in parts]
    location = np.concatenate([mean for mean, _ in moments])
    deviation = np.concatenate([spread for _, spread in moments])
    return location, deviation


def _rms_return(log: Transitions, gamma: float, weights: np.ndarray) -> float:
    """Root mean square of the discounted returns from all rows; 1 if all are zero.

    A row that stands alone counts as if its reward went on for ever.
    """
    if log.has_episodes:
        values = log.returns_to_go(gamma)
    else:
        rewards = np.asarray(log.rewards, dtype=np.float64)
        values = np.where(log.terminated, rewards, rewards / (1.0 - gamma))
    largest = float(np.abs(values).max())
    if not largest > 0.0:
        return 1.0
    # divided by the largest first: no square overflows
    mean_square = float(np.average(np.square(values / largest), weights=weights))
    return largest * math.sqrt(mean_square) or 1.0


def _robust_moments(
    share: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) of columns (N, d), without outliers that would
    hide all other values.

    share (N,): of the rows in the weight, with sum one.
    """
    mean = share @ columns  # (N,) @ (N, d) = (d,)
    gaps = columns - mean
    deviation = np.sqrt(share @ np.square(gaps))
    has_outliers = (np.abs(gaps) > _FAR * deviation).any(axis=0)
    for column in np.flatnonzero(has_outliers):
        mean[column], deviation[column] = _without_outliers(
            share, columns[:, column], mean[column], deviation[column]
        )
    return mean, deviation


def _without_outliers(
    share: np.ndarray, values: np.ndarray, mean: float, deviation: float
) -> tuple[float, float]:
    """Mean and standard deviation of values (N,), again and again without those beyond
    `_FAR` deviations, until the latter make up a small share of the variance.

    share (N,): of the rows in the weight, with sum one. mean, deviation: of all values.
    """
    share = share.copy()
    while True:
        gaps = values - mean
        is_far = np.abs(gaps) > _FAR * deviation
        variance = share @ gaps**2
        far_variance = share[is_far] @ gaps[is_far] ** 2
        if not far_variance > _HIDING * variance:
            return mean, deviation
        share[is_far] = 0.0
        share /= share.sum()
        mean = float(share @ values)
        deviation = float(np.sqrt(share @ (values - mean) ** 2))


def _flat(observations: np.ndarray) -> np.ndarray:
    """(N, ...) as float64 (N, d); DataError where a kernel over raw inputs has no
    meaning.
    """
    shape = observations.shape[1:]
    if math.prod(shape) > _MOST_INPUTS:
        raise DataError(
            f"observations have {math.prod(shape)} numbers each (shape {shape}), more"
            f" than {_MOST_INPUTS}; embed images first and store the embedding as the"
            " observation"
        )
    return np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
