"""The trust region: the coefficient of divergence that the last episodes' returns call for.

(Nachum et al. 2018, as in the code the paper modified; Feng et al. 2019, sec:exp_detail)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.online.config import OnlineConfig

LARGEST = 1000.0
_AT_ONCE = (5, 5, 4)  # 14 halvings, by looks at 31, 31 and 15 points
FEWEST_EPISODES = 8
BEFORE = 500.0  # up to so many episodes
WINDOW = 20  # episodes looked at
SMOOTHING = 0.99


@dataclass(frozen=True)
class Finished:
    """An episode that ended in training: return in the environment's units, length in steps."""

    total: float
    length: int


def divergence(
    returns: Float[np.ndarray, "*run episode"], coefficient: Float[np.ndarray, "*run"]
) -> Float[np.ndarray, "*run"]:
    """D(λ) = E_w[G/λ] − log mean exp(G/λ), w ∝ exp(G/λ): KL from uniform weights to w; falls with λ."""
    scaled = returns / np.asarray(coefficient)[..., None]
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    mean = (weights * shifted).sum(axis=-1) / total
    return np.asarray(mean - np.log(total / returns.shape[-1]))


def solve_coefficients(
    returns: Float[np.ndarray, "run episode"], allowed: Float[np.ndarray, " run"]
) -> Float[np.ndarray, " run"]:
    """λ in [0, 1000] with D(λ) = ``allowed`` for each run, by 14 halvings: exact to 0.03.

    returns: of each run's last episodes; allowed: max_divergence times their mean length. Up to 8 episodes
    say too little: 500.
    """
    if returns.shape[1] <= FEWEST_EPISODES:
        return np.full(len(returns), BEFORE)
    # D falls with λ, so that some halvings are one look at equidistant points.
    low, width = np.zeros(len(returns)), LARGEST
    for halvings in _AT_ONCE:
        width /= 2.0**halvings
        points = low[:, None] + width * np.arange(1, 2**halvings)
        repeated = np.broadcast_to(returns[:, None], (*points.shape, returns.shape[1]))
        low = low + width * np.count_nonzero(divergence(repeated, points) > allowed[:, None], axis=1)
    return low + 0.5 * width


class TrustRegion:
    """Each run's coefficient of divergence, which moves slowly to what its last episodes call for."""

    def __init__(self, configs: Sequence[OnlineConfig]) -> None:
        self.kl_coef = np.array([c.kl_coef_initial for c in configs])
        self.wanted = np.full(len(configs), BEFORE)
        self._reward_scale = np.array([c.reward_scale for c in configs])
        self._max_divergence = np.array([c.max_divergence for c in configs])
        self._least = np.array([c.kl_coef_min for c in configs])

    def update(self, recent: Sequence[Sequence[Finished]], changed: np.ndarray) -> None:
        """One iteration. recent: each run's last episodes; changed: the runs (K,) that finished one in it."""
        by_count: dict[int, list[int]] = {}
        for run in np.flatnonzero(changed).tolist():
            by_count.setdefault(len(recent[run]), []).append(run)
        for runs in by_count.values():
            episodes = [recent[run] for run in runs]
            returns = np.array([[episode.total for episode in each] for each in episodes], dtype=float)
            lengths = np.array([[episode.length for episode in each] for each in episodes], dtype=float)
            allowed = self._max_divergence[runs] * lengths.mean(axis=1)
            self.wanted[runs] = solve_coefficients(returns * self._reward_scale[runs][:, None], allowed)
        self.kl_coef = np.maximum(SMOOTHING * self.kl_coef + (1.0 - SMOOTHING) * self.wanted, self._least)
