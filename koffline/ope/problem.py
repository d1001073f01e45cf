"""A log and a policy made ready for value functions: standardised, with the policy's actions attached."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.policies import ContinuousPolicy, DiscretePolicy

# Standardised next states and policy actions are cut here, so that one far outlier cannot blow a network up.
_FAR = 10.0
_MOST_INPUTS = 4096
_LARGEST = 1e100  # squares and discounted sums of anything below stay finite


@dataclass(frozen=True, eq=False)
class EvaluationProblem:
    """Evaluate a policy from N rows: arrays that the estimators, the kernel and the diagnostics share.

    A value function is Q(s, a) = Σ_a' readout_a' · net(inputs)_a'; its expectation under the policy is the
    same with the policy's readout. For n discrete actions: ``inputs (N, d)`` are standardised observations,
    readouts are one-hot rows and probabilities. For continuous actions ``inputs (N, d + k)`` hold the
    actions too, ``next_inputs (N, m, d + k)`` and ``start_inputs (E, m, d + k)`` m draws of the policy's
    actions, and readouts are None. ``rewards`` are divided by ``reward_scale``.
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
    episode_starts: (
        np.ndarray
    )  # (E,) first row of each resampling unit; every row where there are no episodes
    row_weights: np.ndarray | None  # (N,) the log's own weights, scaled to mean one
    fixed_starts: bool  # start states were given from outside: resampling the log leaves them alone

    @property
    def n_rows(self) -> int:
        """N."""
        return len(self.rewards)

    def resample(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Counts of rows (N,) and of start states (E,) in one bootstrap draw of episodes (or rows)."""
        n_units = len(self.episode_starts)
        counts = np.bincount(generator.integers(n_units, size=n_units), minlength=n_units)
        lengths = np.diff(np.append(self.episode_starts, self.n_rows))
        if self.fixed_starts:
            n_starts = len(self.start_inputs)
            starts = np.bincount(generator.integers(n_starts, size=n_starts), minlength=n_starts)
        else:
            starts = counts
        return np.repeat(counts, lengths), starts


def prepare_problem(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    gamma: float,
    action_draws: int,
    generator: np.random.Generator,
    initial_observations: np.ndarray | None = None,
) -> EvaluationProblem:
    """Standardise states and actions, scale rewards, and ask the policy at next and initial states.

    ``initial_observations`` (E, ...) replaces the log's own. Time limits do not cut the future:
    only ``terminated`` does.
    """
    log = transitions
    _check_magnitude(
        observations=log.observations, rewards=log.rewards, next_observations=log.next_observations
    )
    starts = log.initial_observations() if initial_observations is None else initial_observations
    mean, spread = _location_and_scale(_flat(log.observations))
    observations, following, first = (
        _standardise(_flat(part), mean, spread) for part in (log.observations, log.next_observations, starts)
    )
    probabilities: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if isinstance(policy, DiscretePolicy):
        probabilities = policy.probabilities(log.next_observations), policy.probabilities(starts)
        readout = np.eye(policy.n)[np.asarray(log.actions)]
        inputs, next_inputs, start_inputs = observations, following[:, None], first[:, None]
        kernel_inputs = np.concatenate([observations, readout], axis=1)
    else:
        readout = None  # the action is among the inputs
        actions = _PolicyActions(policy, np.asarray(log.actions, dtype=np.float64), action_draws, generator)
        inputs = kernel_inputs = np.concatenate([observations, actions.logged], axis=1)
        next_inputs = actions.beside(following, log.next_observations)
        start_inputs = actions.beside(first, starts)
    rewards = np.asarray(log.rewards, dtype=np.float64)
    reward_scale = _reward_scale(log, gamma)
    return EvaluationProblem(
        inputs=inputs,
        next_inputs=next_inputs,
        start_inputs=start_inputs,
        actions=np.asarray(log.actions),
        n_actions=policy.n if isinstance(policy, DiscretePolicy) else None,
        readout=readout,
        next_probabilities=probabilities[0],
        start_probabilities=probabilities[1],
        rewards=rewards / reward_scale,
        discounts=gamma * (1.0 - log.terminated),
        reward_scale=reward_scale,
        value_bounds=_value_bounds(rewards / reward_scale, np.asarray(log.terminated), gamma),
        kernel_inputs=kernel_inputs,
        episode_starts=log.episode_starts if log.has_episodes else np.arange(len(log)),
        row_weights=_mean_one(log.weights),
        fixed_starts=initial_observations is not None,
    )


class _PolicyActions:
    """Standardised actions of the log (N, k), and draws of a continuous policy on the same scale."""

    def __init__(
        self, policy: ContinuousPolicy, actions: np.ndarray, draws: int, generator: np.random.Generator
    ) -> None:
        self._policy, self._generator = policy, generator
        self._mean, self._spread = _location_and_scale(actions)
        self._draws = 1 if policy.deterministic else draws
        self.logged = _standardise(actions, self._mean, self._spread)

    def beside(self, standardised: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """(M, draws, d + k): the same states beside independent draws of the policy's actions."""
        parts = []
        for _ in range(self._draws):
            sampled = self._policy.sample(observations, self._generator)
            parts.append(
                np.concatenate([standardised, _standardise(sampled, self._mean, self._spread)], axis=1)
            )
        return np.stack(parts, axis=1)


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
    flat = np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
    if flat.shape[1] > _MOST_INPUTS:
        raise DataError(
            f"observations have {flat.shape[1]} numbers each (shape {observations.shape[1:]}), more than "
            f"{_MOST_INPUTS}; embed images first and store the embedding as the observation"
        )
    return flat


def _location_and_scale(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per column; a constant column keeps the scale 1."""
    mean, spread = columns.mean(axis=0), columns.std(axis=0)
    constant = spread <= 1e-8 * np.maximum(1.0, np.abs(mean))
    return mean, np.where(constant, 1.0, spread)


def _standardise(columns: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    return np.clip((columns - mean) / spread, -_FAR, _FAR)


def _reward_scale(log: Transitions, gamma: float) -> float:
    """Root mean square of the logged return-to-go; of r/(1−γ) where there are no episodes. Never zero."""
    values = log.returns_to_go(gamma) if log.has_episodes else np.asarray(log.rewards) / (1.0 - gamma)
    scale = math.sqrt(float(np.mean(np.square(values, dtype=np.float64))))
    return scale if scale > 0.0 else 1.0


def _mean_one(weights: np.ndarray | None) -> np.ndarray | None:
    """Weights scaled to mean one; a log holds at least one positive weight."""
    if weights is None:
        return None
    return np.asarray(weights, dtype=np.float64) / np.mean(weights, dtype=np.float64)


def _value_bounds(rewards: np.ndarray, terminated: np.ndarray, gamma: float) -> tuple[float, float]:
    """Bounds of any discounted sum of rewards like the logged ones; an episode may end, then zeros follow."""
    low, high = float(rewards.min()), float(rewards.max())
    if terminated.any():
        low, high = min(low, 0.0), max(high, 0.0)
    return low / (1.0 - gamma), high / (1.0 - gamma)
