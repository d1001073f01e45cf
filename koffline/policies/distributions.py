"""Policies that need no file, uniform and mixtures with it, and densities of Gaussian actions; in float64.

Where draws are cut off at a bound, probability collects there: the density then counts volume inside the
bounds and one unit for each action number on a bound. Ratios of two such densities are importance ratios
as long as both are cut off at the same bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import Actions, ContinuousPolicy, DiscretePolicy, Policy

_NEAR = 1e-6  # of the box: actions went through float32
_LARGEST_SQUASHED = 1.0 - 1e-6  # tanh of anything beyond 7.25 is stored as ±1
_HALF_LOG_TAU = 0.5 * float(np.log(2.0 * np.pi))


def uniform_policy(action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """Equal probabilities, or uniform in the box of a continuous space.

    Raises PolicyError when the box is not finite.
    """
    shape = tuple(observation_shape)
    if isinstance(action_space, Discrete):
        n = action_space.n
        return DiscretePolicy(n, lambda rows: np.full((len(rows), n), 1.0 / n), "uniform", shape)
    low, high = finite_box(action_space, "uniform")
    return ContinuousPolicy(
        action_space.k,
        lambda rows: np.tile((low + high) / 2, (len(rows), 1)),
        lambda rows, generator: generator.uniform(low, high, (len(rows), action_space.k)),
        "uniform",
        shape,
        density_function=lambda _, actions: _uniform_log_density(actions, low, high),
    )


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
    shape, rows = base.observation_shape, base.chunk_rows
    return ContinuousPolicy(base.k, mean, sample, name, shape, rows, density, base.cut_to)


def finite_box(action_space: Continuous, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper action bounds, (k,) each; PolicyError when one is infinite."""
    sides = (action_space.low, action_space.high)
    low, high = (np.broadcast_to(np.asarray(side, float), action_space.k) for side in sides)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise PolicyError(
            f"{name}: a uniform action needs finite bounds, the log declares low={action_space.low} and "
            f"high={action_space.high}; declare the action bounds in the log"
        )
    return low, high


def _uniform_log_density(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(N,) minus the log volume of the box; −inf outside, up to float32 rounding."""
    slack = _NEAR * (high - low)
    inside = ((actions >= low - slack) & (actions <= high + slack)).all(axis=1)
    return np.where(inside, -float(np.log(high - low).sum()), -np.inf)


def at_bounds(actions: Actions, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which numbers of actions lie on the lower and upper bound, up to rounding; none on infinite ones."""
    low, high = np.broadcast_to(low, actions.shape[1:]), np.broadcast_to(high, actions.shape[1:])
    slack = _NEAR * np.where(np.isfinite(high - low), high - low, 0.0)
    return actions <= low + slack, actions >= high - slack


def gaussian_log_density(
    actions: Actions,
    mean: np.ndarray,
    deviation: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> Float[np.ndarray, " row"]:
    """log N(a; mean, deviation²) summed over action numbers; with bounds, log of the mass beyond them there.

    ``mean``, ``deviation``, ``low``, ``high``: scalar, (k,) or (N, k). Actions outside the bounds have −inf.
    """
    scaled = (actions - mean) / deviation
    logs = -0.5 * np.square(scaled) - np.log(deviation) - _HALF_LOG_TAU
    if low is not None and high is not None:
        from scipy.special import log_ndtr  # takes as long as all of koffline to import

        below, above = at_bounds(actions, np.asarray(low), np.asarray(high))
        logs = np.where(below, log_ndtr((low - mean) / deviation), logs)
        logs = np.where(above, log_ndtr((mean - high) / deviation), logs)
        slack = _NEAR * (np.asarray(high) - np.asarray(low))
        logs = np.where((actions < low - slack) | (actions > high + slack), -np.inf, logs)
    return logs.sum(axis=1)


def squashed_gaussian_log_density(
    actions: Actions, mean: Actions, deviation: np.ndarray
) -> Float[np.ndarray, " row"]:
    """Log density of tanh(z), z ~ N(mean, deviation²), summed over action numbers; −inf outside [−1, 1]."""
    inside = np.clip(actions, -_LARGEST_SQUASHED, _LARGEST_SQUASHED)
    logs = gaussian_log_density(np.arctanh(inside), mean, deviation)
    logs = logs - np.log1p(-np.square(inside)).sum(axis=1)
    return np.where((np.abs(actions) > 1.0 + _NEAR).any(axis=1), -np.inf, logs)
