"""A log and a policy made ready for value functions: standardised, with the policy's actions attached."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.limits import reward_range, value_bounds
from koffline.policies import ContinuousPolicy, DiscretePolicy

# Standardised next states and policy actions are cut here, so that one far outlier cannot blow a network up.
_FAR = 10.0
_MOST_INPUTS = 4096
_START_DRAWS = 16_384  # of a continuous policy's actions, over all start states
_LARGEST = 1e100  # squares and discounted sums of anything below stay finite


@dataclass(frozen=True, eq=False)
class EvaluationProblem:
    """Evaluate a policy from N rows: arrays that the estimators, the kernel and the diagnostics share.

    A value function is Q(s, a) = Σ_a' readout_a' · net(inputs)_a'; its expectation under the policy is the
    same with the policy's readout. For n discrete actions: ``inputs (N, d)`` are standardised observations,
    readouts are one-hot rows and probabilities. For continuous actions ``inputs (N, d + k)`` hold the
    actions too, ``next_inputs (N, m, d + k)`` and ``start_inputs (E, m', d + k)`` m and m' draws of the
    policy's actions, and readouts are None. ``rewards`` are divided by ``reward_scale``.
    """

    inputs: np.ndarray
    next_inputs: np.ndarray
    start_inputs: np.ndarray
    actions: np.ndarray
    n_actions: int | None
    readout: np.ndarray | None
    next_probabilities: np.ndarray | None
    start_probabilities: np.ndarray | None
    rewards: np.ndarray
    discounts: np.ndarray
    reward_scale: float
    value_bounds: tuple[float, float]
    kernel_inputs: np.ndarray
    episode_starts: np.ndarray  # first row of each unit of resampling: episodes, or rows where there are none
    row_weights: np.ndarray  # (N,) the log's own weights, scaled to mean one
    start_weights: np.ndarray  # (E,) the weight of the row a start state was logged in; ones from outside
    fixed_starts: bool  # start states were given from outside: resampling the log leaves them alone
    input_location: np.ndarray  # (d,) or (d + k,): what `inputs` subtracted from states and actions,
    input_scale: np.ndarray  # and divided by
    weight_scale: float  # and row weights

    def standardise(self, observations: np.ndarray, actions: np.ndarray | None = None) -> np.ndarray:
        """Any observations (M, ...), with continuous actions (M, k) beside them, as ``inputs`` are."""
        columns = _flat(observations)
        if self.n_actions is None and actions is not None:
            columns = np.concatenate([columns, np.asarray(actions, dtype=np.float64)], axis=1)
        return _standardise(columns, self.input_location, self.input_scale)

    def without_rows(self) -> EvaluationProblem:
        """Its units alone, so that what needs no more does not keep a log alive."""
        emptied: dict[str, Any] = {
            field.name: getattr(self, field.name)[:0]
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray) and not field.name.startswith("input_")
        }
        return dataclasses.replace(self, **emptied)

    @property
    def n_rows(self) -> int:
        """N."""
        return len(self.rewards)

    @property
    def effective_units(self) -> float:
        """(Σw)² / Σw² over episodes (rows, where there are none), w the mean weight of an episode's rows."""
        lengths = np.diff(np.append(self.episode_starts, self.n_rows))
        weights = np.add.reduceat(self.row_weights, self.episode_starts) / lengths
        return float(weights.sum() ** 2 / np.square(weights).sum())


def prepare_problem(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    gamma: float,
    action_draws: int,
    generator: np.random.Generator,
    initial_observations: np.ndarray | None = None,
    like: EvaluationProblem | None = None,
) -> EvaluationProblem:
    """Standardise states and actions, scale rewards, and ask the policy at next and initial states.

    ``initial_observations`` (E, ...) replaces the log's own. Time limits do not cut the future:
    only ``terminated`` does. A row of weight two counts as two rows, as a start state too. like: the rows are
    a part of the log of this problem, and are measured in its units; where its start states were given, those
    of the part mean nothing.
    """
    log = transitions
    _check_magnitude(
        observations=log.observations,
        actions=log.actions,
        rewards=log.rewards,
        next_observations=log.next_observations,
    )
    starts = log.initial_observations() if initial_observations is None else initial_observations
    units = log.episode_starts if log.has_episodes else np.arange(len(log))
    weights, weight_scale = _weights(log, like)
    start_weights = weights[units] if initial_observations is None else np.ones(len(starts))
    if like is None and not start_weights.any():
        raise DataError(
            "weights are zero in the first row of every episode; give start states (initial_observations) "
            "or a first row a positive weight"
        )
    units_of_inputs = _input_units(log, weights) if like is None else (like.input_location, like.input_scale)
    if isinstance(policy, DiscretePolicy):
        columns = _discrete_columns(log, starts, units_of_inputs, policy)
    else:
        drawn_starts = _START_DRAWS if like is None else 0  # a part is one of many: its starts need fewer
        columns = _continuous_columns(
            log, starts, units_of_inputs, policy, action_draws, drawn_starts, generator
        )
    rewards, discounts = np.asarray(log.rewards, dtype=np.float64), gamma * (1.0 - log.terminated)
    if like is None:
        reward_scale = _reward_scale(log, gamma, discounts, weights)
        bounds = _value_bounds(rewards / reward_scale, log.terminated, weights > 0.0, gamma)
    else:
        reward_scale, bounds = like.reward_scale, like.value_bounds
    return EvaluationProblem(
        **columns,
        actions=np.asarray(log.actions),
        rewards=rewards / reward_scale,
        discounts=discounts,
        reward_scale=reward_scale,
        value_bounds=bounds,
        episode_starts=units,
        row_weights=weights,
        start_weights=start_weights,
        fixed_starts=initial_observations is not None or (like is not None and like.fixed_starts),
        input_location=units_of_inputs[0],
        input_scale=units_of_inputs[1],
        weight_scale=weight_scale,
    )


def _input_units(log: Transitions, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Location and scale of observations, with those of continuous actions beside them."""
    units = [_location_and_scale(_flat(log.observations), weights)]
    if not isinstance(log.action_space, Discrete):
        units.append(_location_and_scale(np.asarray(log.actions, dtype=np.float64), weights))
    return np.concatenate([mean for mean, _ in units]), np.concatenate([spread for _, spread in units])


def _discrete_columns(
    log: Transitions, starts: np.ndarray, units: tuple[np.ndarray, np.ndarray], policy: DiscretePolicy
) -> dict[str, Any]:
    """The action reads out one of n outputs."""
    mean, spread = units
    inputs, following, first = (
        _standardise(_flat(part), mean, spread) for part in (log.observations, log.next_observations, starts)
    )
    readout = np.eye(policy.n)[np.asarray(log.actions)]
    return {
        "inputs": inputs,
        "next_inputs": following[:, None],
        "start_inputs": first[:, None],
        "n_actions": policy.n,
        "readout": readout,
        "next_probabilities": policy.probabilities(log.next_observations),
        "start_probabilities": policy.probabilities(starts),
        "kernel_inputs": np.concatenate([inputs, readout], axis=1),
    }


def _continuous_columns(
    log: Transitions,
    starts: np.ndarray,
    units: tuple[np.ndarray, np.ndarray],
    policy: ContinuousPolicy,
    action_draws: int,
    drawn_starts: int,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """The action is among the inputs; a deterministic policy is asked once, any other for several draws."""
    logged = np.asarray(log.actions, dtype=np.float64)

    def beside(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(M, d + k)"""
        return _standardise(np.concatenate([_flat(observations), actions], axis=1), *units)

    def with_draws(observations: np.ndarray) -> np.ndarray:
        """(M, draws, d + k): the same states beside independent draws of the policy's actions."""
        count = 1 if policy.deterministic else action_draws
        return np.stack(
            [beside(observations, policy.sample(observations, generator)) for _ in range(count)], axis=1
        )

    def starts_with_draws() -> np.ndarray:
        """The same of start states, each with so many draws that few states have enough."""
        count = math.ceil(drawn_starts / len(starts))
        if policy.deterministic or count <= action_draws:
            return with_draws(starts)
        repeated = np.repeat(starts, count, axis=0)
        drawn = beside(repeated, policy.sample(repeated, generator))
        return drawn.reshape(len(starts), count, -1)

    inputs = beside(log.observations, logged)
    return {
        "inputs": inputs,
        "next_inputs": with_draws(log.next_observations),
        "start_inputs": starts_with_draws(),
        "n_actions": None,
        "readout": None,
        "next_probabilities": None,
        "start_probabilities": None,
        "kernel_inputs": inputs,
    }


def _check_magnitude(**columns: np.ndarray) -> None:
    """DataError for numbers whose squares would overflow."""
    for name, column in columns.items():
        if column.dtype == np.float64 and max(abs(float(column.min())), abs(float(column.max()))) > _LARGEST:
            row = int(np.argmax(np.abs(column).reshape(len(column), -1).max(axis=1)))
            raise DataError(
                f"{name} reaches {np.abs(column[row]).max():.3g} in row {row}; rescale it below 1e100"
            )


def _flat(observations: np.ndarray) -> np.ndarray:
    """(N, ...) as float64 (N, d); DataError where a kernel over raw inputs has no meaning."""
    check_observation_shape(observations.shape[1:])
    return np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)


def check_observation_shape(shape: tuple[int, ...]) -> None:
    """DataError for observations with too many numbers, such as images."""
    numbers = math.prod(shape)
    if numbers > _MOST_INPUTS:
        raise DataError(
            f"observations have {numbers} numbers each (shape {shape}), more than "
            f"{_MOST_INPUTS}; embed images first and store the embedding as the observation"
        )


def _location_and_scale(columns: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per column; a constant column keeps the scale 1.

    Constant means: no spread beyond rounding, relative to the numbers themselves, whatever their unit.
    """
    share = weights / weights.sum()
    mean = share @ columns  # (N,) @ (N, d) = (d,)
    spread = np.sqrt(share @ np.square(columns - mean))
    return mean, np.where(spread <= 1e-8 * np.abs(mean), 1.0, spread)


def _standardise(columns: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    return np.clip((columns - mean) / spread, -_FAR, _FAR)


def _reward_scale(log: Transitions, gamma: float, discounts: np.ndarray, weights: np.ndarray) -> float:
    """Root mean square of the logged return-to-go; of r/(1−discount) without episodes. Never zero."""
    rewards = np.asarray(log.rewards, dtype=np.float64)
    values = log.returns_to_go(gamma) if log.has_episodes else rewards / (1.0 - discounts)
    largest = float(np.abs(values).max())
    if largest == 0.0:
        return 1.0
    return largest * math.sqrt(float(np.average(np.square(values / largest), weights=weights))) or 1.0


def _weights(log: Transitions, like: EvaluationProblem | None) -> tuple[np.ndarray, float]:
    """Weights of rows (N,) of mean one, and what they were divided by. DataError when all are zero."""
    weights = np.ones(len(log)) if log.weights is None else np.asarray(log.weights, dtype=np.float64)
    if like is not None:
        return weights / like.weight_scale, like.weight_scale
    if not weights.any():
        raise DataError("weights are all zero; give at least one row a positive weight or leave them out")
    largest = float(weights.max())  # so that no sum overflows
    scale = largest * float((weights / largest).mean())
    return weights / scale, scale


def _value_bounds(
    rewards: np.ndarray, terminated: np.ndarray, counted: np.ndarray, gamma: float
) -> tuple[float, float]:
    return value_bounds(
        reward_range(rewards[counted & ~terminated]), reward_range(rewards[counted & terminated]), gamma
    )
