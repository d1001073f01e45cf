"""Units in which candidates are trained, and back: standardised observations, actions
in [−1, 1], returns of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.errors import DataError
from koffline.policies.builtin import Mlp

RETURN_SIZE = 10.0  # root mean square return of the scaled rewards
_ROUNDING = 1e-8
_FAR = 10.0  # bound of standardised numbers
Layers = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class LogScaling:
    """``location``, ``scale`` (d,): of flat observations; ``centre``, ``half`` (k,):
    middle and half width of the range of continuous actions; ``reward_scale``: what
    rewards are divided by.
    """

    location: np.ndarray
    scale: np.ndarray
    centre: np.ndarray
    half: np.ndarray
    reward_scale: float

    @classmethod
    def of(cls, log: Transitions, gamma: float) -> LogScaling:
        """The scaling of a log."""
        flat = _flat(log.observations)
        share = log.row_weights / log.row_weights.sum()
        location = share @ flat
        scale = np.sqrt(share @ np.square(flat - location))
        is_constant = scale <= _ROUNDING * np.maximum(np.abs(location), 1.0)
        centre = np.zeros(0)
        half = np.ones(0)
        if isinstance(log.action_space, Continuous):
            centre, half = _box(log)
        return cls(
            location=location,
            scale=np.where(is_constant, 1.0, scale),
            centre=centre,
            half=half,
            reward_scale=_reward_scale(log, gamma),
        )

    def inputs(self, observations: np.ndarray) -> Float[np.ndarray, "row input"]:
        """Standardised observations (N, d)."""
        return np.clip((_flat(observations) - self.location) / self.scale, -_FAR, _FAR)

    def scaled_actions(self, actions: np.ndarray) -> Float[np.ndarray, "row action"]:
        """Continuous actions (N, k) in [−1, 1]."""
        return (np.asarray(actions, np.float64) - self.centre) / self.half

    def scaled_log(self, log: Transitions) -> Transitions:
        """The log in the units in which candidates are trained."""
        changes: dict[str, Any] = {
            "observations": self.inputs(log.observations).astype(np.float32),
            "next_observations": self.inputs(log.next_observations).astype(np.float32),
            "rewards": np.asarray(log.rewards, np.float64) / self.reward_scale,
        }
        if not isinstance(log.action_space, Discrete):
            size = len(self.half)
            scaled = np.clip(self.scaled_actions(log.actions), -1.0, 1.0)
            changes["actions"] = scaled.astype(np.float32)
            changes["action_space"] = Continuous(size, (-1.0,) * size, (1.0,) * size)
        return log.replace(**changes)

    def mlp(self, layers: Layers, output: str, temperature: float = 1.0) -> Mlp:
        """A network of scaled observations as one of the log's own; "tanh" acts within
        the range of actions.
        """
        low = None
        high = None
        if output == "tanh":
            low = self.centre - self.half
            high = self.centre + self.half
        return Mlp(
            weights=tuple(weight for weight, _ in layers),
            biases=tuple(bias for _, bias in layers),
            output=output,
            temperature=temperature,
            observation_mean=self.location,
            observation_std=self.scale,
            action_low=low,
            action_high=high,
        )

    def native_layers(self, layers: Layers) -> Layers:
        """Layers whose outputs are actions in [−1, 1] as layers whose outputs are
        actions in their own units.
        """
        *before, (weight, bias) = layers
        return [*before, (weight * self.half, bias * self.half + self.centre)]

    def gaussian(self, layers: Layers, deviation: np.ndarray) -> Mlp:
        """A Gaussian policy whose draws are cut off at the range of actions.

        layers: with outputs in the units of actions. deviation (k,): in [−1, 1].
        """
        return replace(
            self.clipped(layers), output="gaussian", std=deviation * self.half
        )

    def clipped(self, layers: Layers) -> Mlp:
        """A deterministic policy whose actions are cut off at their range.

        layers: with outputs in the units of actions.
        """
        return replace(
            self.mlp(layers, "identity"),
            action_low=self.centre - self.half,
            action_high=self.centre + self.half,
        )


def _flat(observations: np.ndarray) -> np.ndarray:
    return np.asarray(observations, np.float64).reshape(len(observations), -1)


def _box(log: Transitions) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half width (k,) of the range of actions: the declared one, or that of
    the log where none is declared.
    """
    space = log.action_space
    assert isinstance(space, Continuous)
    actions = np.asarray(log.actions, np.float64)
    low = np.where(np.isfinite(space.low), space.low, actions.min(axis=0))
    high = np.where(np.isfinite(space.high), space.high, actions.max(axis=0))
    half = 0.5 * (high - low)
    return 0.5 * (high + low), np.where(half > 0.0, half, 1.0)


def _reward_scale(log: Transitions, gamma: float) -> float:
    """What rewards are divided by, so that the root mean square return is
    `RETURN_SIZE`. Raises DataError where squares are not finite.
    """
    rewards = np.asarray(log.rewards, np.float64)
    if log.has_episodes:
        returns = log.returns_to_go(gamma)
    else:
        returns = np.where(log.terminated, rewards, rewards / (1.0 - gamma))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.average(np.square(returns), weights=log.row_weights)
    if not np.isfinite(squares):
        raise DataError(
            "the squares of the rewards' sums are too large for numbers; rescale the"
            " rewards below 1e100"
        )
    size = math.sqrt(float(squares))
    if not size > 0.0:
        return 1.0
    return size / RETURN_SIZE
