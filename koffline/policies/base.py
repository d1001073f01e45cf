"""The two kinds of policy that everything above works with: functions called in chunks, outputs checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import KofflineError, PolicyError
from koffline.policies.outputs import (
    continuous_actions,
    continuous_output,
    discrete_output,
    discrete_probabilities,
    log_densities,
    one_line,
)

CHUNK_ROWS = 4096
# Wide observations (images) go in smaller chunks: about 64 MB of float32 at a time.
CHUNK_NUMBERS = 1 << 24


def chunk_rows_for(observation_shape: Sequence[int], repeats: int = 1) -> int:
    """Rows in one call, so that memory stays bounded; `repeats` is how often the function copies each row."""
    numbers = max(1, math.prod(observation_shape)) * repeats
    return max(1, min(CHUNK_ROWS // repeats, CHUNK_NUMBERS // numbers))


@dataclass(frozen=True, eq=False)
class DiscretePolicy:
    """A distribution over n actions for each observation.

    function: observations (N, ...) -> probabilities (N, n), or action indices (N,) for a greedy policy.
    observation_shape: shape of one observation, checked on each call; None accepts any.
    """

    n: int
    function: Callable[..., Any] = field(repr=False)
    name: str = "policy"
    observation_shape: tuple[int, ...] | None = None
    chunk_rows: int = CHUNK_ROWS

    def probabilities(
        self, observations: Shaped[np.ndarray, "row *observation"]
    ) -> Float[np.ndarray, "row action"]:
        """Action probabilities (N, n), float64, rows sum to one. Raises PolicyError."""
        _check_observations(self, observations)
        result = np.empty((len(observations), self.n))
        for rows in _chunks(len(observations), self.chunk_rows):
            raw = _call(self.function, self.name, observations[rows])
            result[rows] = discrete_probabilities(raw, rows.stop - rows.start, self.n, self.name)
        return result

    def sample(
        self, observations: Shaped[np.ndarray, "row *observation"], generator: np.random.Generator
    ) -> Int[np.ndarray, " row"]:
        """One action index per observation, drawn from `probabilities`. Raises PolicyError."""
        return pick_actions(self.probabilities(observations), generator.random(len(observations)))


def pick_actions(
    probabilities: Float[np.ndarray, "row action"], numbers: Float[np.ndarray, " row"]
) -> Int[np.ndarray, " row"]:
    """Action indices (N,) by inverting the cumulated probabilities (N, n) at numbers (N,) in [0, 1)."""
    cumulative = probabilities.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]  # exactly one at the end: an action of probability 0 is never drawn
    return (numbers[:, None] >= cumulative).sum(axis=1)


@dataclass(frozen=True, eq=False)
class ContinuousPolicy:
    """A mean action, and draws, of k numbers for each observation.

    mean_function: observations (N, ...) -> actions (N, k).
    sample_function: (observations, generator) -> actions (N, k); None for a deterministic policy.
    observation_shape: shape of one observation, checked on each call; None accepts any.
    density_function: (observations, actions) -> log density (N,) of what `sample_function` draws; None where
    it is unknown.
    cut_to: bounds (low, high) at which draws are cut off, so that probability collects there (see
    `koffline.policies.densities`); None where there are none.
    """

    k: int
    mean_function: Callable[..., Any] = field(repr=False)
    sample_function: Callable[..., Any] | None = field(default=None, repr=False)
    name: str = "policy"
    observation_shape: tuple[int, ...] | None = None
    chunk_rows: int = CHUNK_ROWS
    density_function: Callable[..., Any] | None = field(default=None, repr=False)
    cut_to: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    @property
    def deterministic(self) -> bool:
        """True when `sample` returns the mean action."""
        return self.sample_function is None

    def mean(self, observations: Shaped[np.ndarray, "row *observation"]) -> Float[np.ndarray, "row action"]:
        """Mean (for a deterministic policy: the) actions (N, k), float64. Raises PolicyError."""
        return self._actions(self.mean_function, observations)

    def sample(
        self, observations: Shaped[np.ndarray, "row *observation"], generator: np.random.Generator
    ) -> Float[np.ndarray, "row action"]:
        """One draw (N, k), float64, per observation; the same generator state gives the same draws."""
        if self.sample_function is None:
            return self.mean(observations)
        return self._actions(self.sample_function, observations, generator)

    @property
    def has_density(self) -> bool:
        """Whether `log_density` is known."""
        return not self.why_no_density

    @property
    def why_no_density(self) -> str:
        """Why `log_density` raises; empty where it does not."""
        if self.deterministic:
            return "it is deterministic: its actions have no density"
        if self.density_function is None:
            return "the density of its actions is unknown (a function may have an attribute log_density)"
        return ""

    def log_density(
        self, observations: Shaped[np.ndarray, "row *observation"], actions: Float[np.ndarray, "row action"]
    ) -> Float[np.ndarray, " row"]:
        """Log density (N,) of given actions (N, k); −inf for impossible ones. Raises PolicyError."""
        if self.density_function is None or self.deterministic:
            raise PolicyError(f"{self.name}: {self.why_no_density}; use a method that only draws actions")
        _check_observations(self, observations)
        if actions.shape != (len(observations), self.k):
            raise PolicyError(
                f"{self.name}: actions have shape {actions.shape} for {len(observations)} observations and "
                f"{self.k} action dimensions; pass one action per observation"
            )
        result = np.empty(len(observations))
        for rows in _chunks(len(observations), self.chunk_rows):
            raw = _call(
                self.density_function, self.name, observations[rows], actions[rows].astype(np.float64)
            )
            result[rows] = log_densities(raw, rows.stop - rows.start, self.name)
        return result

    def _actions(self, function: Callable[..., Any], observations: np.ndarray, *arguments: Any) -> np.ndarray:
        _check_observations(self, observations)
        result = np.empty((len(observations), self.k))
        for rows in _chunks(len(observations), self.chunk_rows):
            raw = _call(function, self.name, observations[rows], *arguments)
            result[rows] = continuous_actions(raw, rows.stop - rows.start, self.k, self.name)
        return result


Policy = DiscretePolicy | ContinuousPolicy


def check_fits(policy: Policy, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """The policy itself when it fits the log's spaces; PolicyError otherwise."""
    own = Discrete(policy.n) if isinstance(policy, DiscretePolicy) else Continuous(policy.k)
    check_spaces(policy.name, own, policy.observation_shape, action_space, observation_shape)
    return policy


def check_spaces(
    name: str,
    own_space: ActionSpace,
    own_shape: Sequence[int] | None,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
) -> None:
    """Raise PolicyError unless a policy's action size and observation shape are those of the log."""
    own, log = describe_actions(own_space), describe_actions(action_space)
    if own != log:
        raise PolicyError(f"{name}: the policy has {own}, the log {log}; give a policy trained for this log")
    if own_shape is not None and tuple(own_shape) != tuple(observation_shape):
        raise PolicyError(
            f"{name}: the policy takes observations of shape {tuple(own_shape)}, the log has "
            f"{tuple(observation_shape)}; give a policy trained for this log"
        )


def check_output_shape(policy: Policy, observation_shape: Sequence[int]) -> Policy:
    """Check the shape of what the policy returns for two rows of zeros; for files that do not say it.

    The values are not checked: zeros need not be a valid observation. Raises PolicyError; returns the policy.
    """
    zeros = np.zeros((2, *observation_shape), np.float32)
    if isinstance(policy, DiscretePolicy):
        discrete_output(_call(policy.function, policy.name, zeros), 2, policy.n, policy.name)
    else:
        continuous_output(_call(policy.mean_function, policy.name, zeros), 2, policy.k, policy.name)
    return policy


def describe_actions(space: ActionSpace) -> str:
    """`4 discrete actions` or `2 continuous action dimensions`."""
    if isinstance(space, Discrete):
        return f"{space.n} discrete actions"
    return f"{space.k} continuous action dimensions"


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _check_observations(policy: Policy, observations: np.ndarray) -> None:
    shape = policy.observation_shape
    if shape is not None and observations.shape[1:] != shape:
        raise PolicyError(
            f"{policy.name}: the policy takes observations of shape (N, {', '.join(map(str, shape))}), "
            f"received {observations.shape}; pass one row per observation"
        )


def _call(function: Callable[..., Any], name: str, observations: np.ndarray, *arguments: Any) -> Any:
    try:
        return function(observations, *arguments)
    except KofflineError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"{name}: the policy failed on observations of shape {observations.shape} with "
            f"{one_line(error)}; check that it accepts such a batch"
        ) from error
