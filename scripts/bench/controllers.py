"""Hand-written policies of the evaluation benchmark: frozen records, so that their repr
names them exactly.

Discrete ones map observations (N, d) to probabilities (N, n) when called; continuous
ones have ``mean``, ``sample`` and ``deterministic``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

Array = np.ndarray


@dataclass(frozen=True)
class LinearSoftmax:
    """Two actions; the log-odds of action 1 are a linear function of the
    observation.
    """

    weights: tuple[float, ...]

    def __call__(self, observations: Array) -> Array:
        odds = observations.astype(np.float64) @ np.asarray(self.weights)
        right = 1.0 / (1.0 + np.exp(-np.clip(odds, -60, 60)))
        return np.stack([1.0 - right, right], axis=1)


@dataclass(frozen=True)
class Fixed:
    """The same probabilities everywhere."""

    chances: tuple[float, ...]

    def __call__(self, observations: Array) -> Array:
        return np.tile(np.asarray(self.chances), (len(observations), 1))


@dataclass(frozen=True)
class Mixed:
    """Each step: with probability ``epsilon`` a uniformly random action, else the
    policy's own.
    """

    epsilon: float
    policy: Any

    def __call__(self, observations: Array) -> Array:
        probabilities = self.policy(observations)
        return (
            1.0 - self.epsilon
        ) * probabilities + self.epsilon / probabilities.shape[1]


@dataclass(frozen=True)
class PushAlong:
    """Three actions (−, 0, +): push in the direction of one observed velocity, which
    pumps energy.
    """

    column: int
    sharpness: float

    def __call__(self, observations: Array) -> Array:
        drive = np.tanh(
            self.sharpness * observations[:, self.column].astype(np.float64)
        )
        forward = np.maximum(drive, 0.0)
        backward = np.maximum(-drive, 0.0)
        return np.stack([backward, 1.0 - forward - backward, forward], axis=1)


@dataclass(frozen=True)
class GoDiagonal:
    """Four moves (up, right, down, left): up or right by which coordinate lags."""

    sharpness: float

    def __call__(self, observations: Array) -> Array:
        lag = self.sharpness * (observations[:, 0] - observations[:, 1]).astype(
            np.float64
        )
        up = 1.0 / (1.0 + np.exp(-lag))
        nothing = np.zeros_like(up)
        return np.stack([up, 1.0 - up, nothing, nothing], axis=1)


@dataclass(frozen=True)
class SwingUp:
    """Pendulum torque: pump energy while low, proportional-derivative hold near the
    top.
    """

    pump: float = 1.0
    hold: tuple[float, float] = (10.0, 2.0)
    limit: float = 2.0

    def __call__(self, observations: Array) -> Array:
        cos, sin, velocity = observations.astype(np.float64).T
        missing_energy = 15.0 * (1.0 - cos) - 0.5 * velocity**2
        swing = self.pump * np.sign(missing_energy) * np.sign(velocity) * self.limit
        angle = np.arctan2(sin, cos)
        steady = -self.hold[0] * angle - self.hold[1] * velocity
        near_top = cos > 0.8
        return np.clip(np.where(near_top, steady, swing), -self.limit, self.limit)[
            :, None
        ]


@dataclass(frozen=True)
class Gaussian:
    """Continuous policy: a controller's action plus Gaussian noise, clipped to the
    bounds.
    """

    controller: Any
    deviation: float
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def deterministic(self) -> bool:
        return self.deviation == 0.0

    def mean(self, observations: Array) -> Array:
        return np.clip(self.controller(observations), self.low, self.high)

    def sample(self, observations: Array, generator: np.random.Generator) -> Array:
        centre = self.controller(observations)
        noise = self.deviation * generator.standard_normal(centre.shape)
        return np.clip(centre + noise, self.low, self.high)


@dataclass(frozen=True)
class PushSometimes:
    """Continuous policy: with probability ``epsilon`` uniform in the bounds, else the
    policy's own.
    """

    epsilon: float
    policy: Gaussian
    deterministic: bool = False

    def mean(self, observations: Array) -> Array:
        middle = (np.asarray(self.policy.low) + np.asarray(self.policy.high)) / 2
        return (1.0 - self.epsilon) * self.policy.mean(
            observations
        ) + self.epsilon * middle

    def sample(self, observations: Array, generator: np.random.Generator) -> Array:
        actions = self.policy.sample(observations, generator)
        random = generator.uniform(
            self.policy.low, self.policy.high, size=actions.shape
        )
        return np.where(
            generator.random((len(actions), 1)) < self.epsilon, random, actions
        )


@dataclass(frozen=True)
class Scores:
    """Softmax over n actions of linear scores: a row of ``weights`` (n, d + 1) each,
    the constant last.
    """

    weights: tuple[tuple[float, ...], ...]

    def __call__(self, observations: Array) -> Array:
        table = np.asarray(self.weights)
        score = observations.astype(np.float64) @ table[:, :-1].T + table[:, -1]
        return softmax(score, axis=1)


@dataclass(frozen=True)
class NearestTo:
    """Softmax over listed values by their distance from a controller's wish (N, 1)."""

    values: tuple[float, ...]
    controller: Any
    sharpness: float

    def __call__(self, observations: Array) -> Array:
        score = (
            -self.sharpness
            * (self.controller(observations) - np.asarray(self.values)) ** 2
        )
        return softmax(score, axis=1)


@dataclass(frozen=True)
class Linear:
    """Controller ``gain`` (k, d) · observation + ``constant`` (k,)."""

    gain: tuple[tuple[float, ...], ...]
    constant: tuple[float, ...] = (0.0,)

    def __call__(self, observations: Array) -> Array:
        return observations.astype(np.float64) @ np.asarray(self.gain).T + np.asarray(
            self.constant
        )


@dataclass(frozen=True)
class OrderUpTo:
    """Five order sizes 0 … 20: aim at a level of stock that follows the season."""

    level: float
    season: float
    sharpness: float

    def __call__(self, observations: Array) -> Array:
        stock, coming, sine, _ = (20.0 * observations.astype(np.float64)).T
        wish = np.clip(
            self.level + self.season * sine / 20.0 - stock - coming, 0.0, 20.0
        )
        score = -self.sharpness * (wish[:, None] - 5.0 * np.arange(5)) ** 2
        return softmax(score, axis=1)
