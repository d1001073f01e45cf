"""Pilots of LunarLander for the benchmark: functions of a batch of observations, as
users write policies.

Observations: x, y, their velocities, angle, its velocity, contact of the left and of
the right leg.
Actions: 0 nothing, 1 left engine, 2 main engine, 3 right engine.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
_SHARPNESS = 12.0


def steady(observations: Array) -> Array:
    """(N, 4) probabilities of a pilot that leans against its drift and brakes its
    fall.
    """
    return _pilot(observations, lean=0.6, brake=0.5)


def late(observations: Array) -> Array:
    """(N, 4): the same pilot, who brakes half as much."""
    return _pilot(observations, lean=0.6, brake=0.25)


def shy(observations: Array) -> Array:
    """(N, 4): one that hovers and hardly leans."""
    return _pilot(observations, lean=0.25, brake=0.8)


def _pilot(observations: Array, lean: float, brake: float) -> Array:
    """Softmax of how much each engine is wanted."""
    x, y, x_speed, y_speed, angle, spin, left, right = observations.astype(np.float64).T
    landed = (left + right) > 0.0
    wanted = np.clip(lean * (x + 2.0 * x_speed), -0.4, 0.4)
    turn = np.where(landed, 0.0, 0.6 * (wanted - angle) - spin)
    height = np.where(landed, 0.0, 0.5 * np.abs(x) - y)
    lift = 0.5 * height - brake * y_speed * np.where(landed, 2.0, 1.0)
    wants = np.stack([np.full_like(turn, 0.05), turn, lift, -turn], axis=1)
    odds = np.exp(_SHARPNESS * (wants - wants.max(axis=1, keepdims=True)))
    return odds / odds.sum(axis=1, keepdims=True)
