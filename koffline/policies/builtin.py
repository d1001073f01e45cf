"""Policies that need no file: uniform, and the mixture of any policy with uniform."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import ActionSpace, ContinuousPolicy, DiscretePolicy, Policy
from koffline.policies.densities import at_bounds


def uniform_policy(action_space: ActionSpace, observation_shape: Sequence[int] | None = None) -> Policy:
    """Equal probabilities, or uniform in the box of a continuous space.

    Raises PolicyError when the box is not finite.
    """
    shape = None if observation_shape is None else tuple(observation_shape)
    if isinstance(action_space, Discrete):
        n = action_space.n
        return DiscretePolicy(
            n, lambda observations: np.full((len(observations), n), 1.0 / n), "uniform", shape
        )
    low, high = finite_box(action_space, "uniform")

    def mean(observations: np.ndarray) -> np.ndarray:
        return np.tile((low + high) / 2, (len(observations), 1))

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(low, high, (len(observations), action_space.k))

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return _uniform_log_density(actions, low, high)

    return ContinuousPolicy(action_space.k, mean, sample, "uniform", shape, density_function=log_density)


def epsilon_policy(epsilon: float, base: Policy, action_space: ActionSpace) -> Policy:
    """With probability epsilon a uniform action, otherwise the base policy's.

    Raises PolicyError for epsilon outside [0, 1] and for a continuous box that is not finite.
    """
    name = f"epsilon:{epsilon:g}:{base.name}"
    if not 0.0 <= epsilon <= 1.0:
        raise PolicyError(f"{name}: epsilon is {epsilon:g}; give a probability in [0, 1]")
    if isinstance(base, DiscretePolicy):
        n = base.n

        def probabilities(observations: np.ndarray) -> np.ndarray:
            return epsilon / n + (1.0 - epsilon) * base.probabilities(observations)

        return DiscretePolicy(n, probabilities, name, base.observation_shape, base.chunk_rows)
    assert isinstance(action_space, Continuous), "the base policy was checked against the space"
    if epsilon == 0.0:
        return base
    return _continuous_mixture(epsilon, base, action_space, name)


def _continuous_mixture(
    epsilon: float, base: ContinuousPolicy, action_space: Continuous, name: str
) -> ContinuousPolicy:
    low, high = finite_box(action_space, name)

    def mean(observations: np.ndarray) -> np.ndarray:
        return epsilon * (low + high) / 2 + (1.0 - epsilon) * base.mean(observations)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        actions = base.sample(observations, generator)
        explore = generator.random((len(actions), 1)) < epsilon
        return np.where(explore, generator.uniform(low, high, actions.shape), actions)

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        uniform = math.log(epsilon) + _uniform_log_density(actions, low, high)
        if base.cut_to is not None:
            # Where the base collects probability on a bound, a uniform draw never falls.
            below, above = at_bounds(actions, *base.cut_to)
            uniform = np.where((below | above).any(axis=1), -np.inf, uniform)
        if epsilon == 1.0:
            return uniform
        return np.logaddexp(uniform, math.log1p(-epsilon) + base.log_density(observations, actions))

    density = log_density if base.has_density else None
    return ContinuousPolicy(
        base.k, mean, sample, name, base.observation_shape, base.chunk_rows, density, base.cut_to
    )


def _uniform_log_density(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(N,) minus the log volume of the box; −inf outside, up to float32 rounding."""
    slack = 1e-6 * (high - low)
    inside = ((actions >= low - slack) & (actions <= high + slack)).all(axis=1)
    return np.where(inside, -float(np.log(high - low).sum()), -np.inf)


def finite_box(action_space: Continuous, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper action bounds, (k,) each; PolicyError when one is infinite."""
    low, high = (
        np.broadcast_to(np.asarray(side, float), action_space.k)
        for side in (action_space.low, action_space.high)
    )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise PolicyError(
            f"{name}: a uniform action needs finite bounds, the log declares low={action_space.low} and "
            f"high={action_space.high}; declare the action bounds in the log"
        )
    return low, high
