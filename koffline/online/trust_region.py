"""The trust region: the divergence coefficient of K runs, from the returns of each
run's last episodes.

(Nachum et al. 2018, as in the code the paper modified; Feng et al. 2019,
sec:exp_detail)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from koffline.online.config import OnlineConfig

PerRun = Float[np.ndarray, " run"]
Coefficients = Float[np.ndarray, " *run"]
LARGEST = 1000.0
_AT_ONCE = (5, 5, 4)  # 14 halvings in three steps, of 31, 31 and 15 points
FEWEST_EPISODES = 8
BEFORE = 500.0  # coefficient with at most FEWEST_EPISODES episodes
SMOOTHING = 0.99
# return in the environment's units and length of ended ones, in order
Episodes = list[tuple[float, int]]


def divergence(
    returns: Float[np.ndarray, "*run episode"], coefficient: Coefficients
) -> Coefficients:
    """D(λ) = E_w[G/λ] − log mean exp(G/λ), w ∝ exp(G/λ), in nats: how far w, weights of
    the episodes by their returns G, are from uniform ones; falls with λ.

    returns: G. coefficient: λ > 0 of each run.
    """
    scaled = returns / np.asarray(coefficient)[..., None]
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    mean = (weights * shifted).sum(axis=-1) / total
    return np.asarray(mean - np.log(total / returns.shape[-1]))


def solve_coefficients(
    returns: Float[np.ndarray, "run episode"], allowed: PerRun
) -> PerRun:
    """λ in [0, 1000] with `divergence` D(λ) = ``allowed`` for each run, by 14
    bisections: exact to 0.03.

    returns: of each run's last episodes. allowed: divergence in nats. With at most 8
    episodes λ is 500.
    """
    if returns.shape[1] <= FEWEST_EPISODES:
        return np.full(len(returns), BEFORE)
    # D falls with λ: the solution lies above all points at which D is too large. So
    # several halvings are one evaluation at equidistant points.
    low = np.zeros(len(returns))
    width = LARGEST
    for halvings in _AT_ONCE:
        width /= 2.0**halvings
        points = low[:, None] + width * np.arange(1, 2**halvings)
        repeated = np.broadcast_to(returns[:, None], (*points.shape, returns.shape[1]))
        is_too_large = divergence(repeated, points) > allowed[:, None]
        low = low + width * np.count_nonzero(is_too_large, axis=1)
    return low + 0.5 * width


class TrustRegion:
    """Divergence coefficient ``kl_coef`` (K,) of each run, which slowly follows the
    solution for its last episodes, ``wanted`` (K,).

    A run without max_divergence keeps its kl_coef. ``is_inert`` (K,): more divergence
    is allowed than weighted episodes can have (the log of their number); the
    coefficient then falls to kl_coef.
    """

    kept = ("kl_coef", "wanted")

    def __init__(self, configs: Sequence[OnlineConfig]) -> None:
        self._is_on = np.array([c.max_divergence is not None for c in configs])
        self._least = np.array([c.kl_coef for c in configs])
        self.kl_coef = np.where(
            self._is_on, [c.kl_coef_initial for c in configs], self._least
        )
        self.wanted = np.where(self._is_on, BEFORE, self._least)
        self.is_inert = np.zeros(len(configs), dtype=bool)
        self._reward_scale = np.array([c.reward_scale for c in configs])
        self._max_divergence = np.array([c.max_divergence or 0.0 for c in configs])
        self._is_per_step = np.array([c.divergence_per == "step" for c in configs])

    def update(self, recent: Sequence[Episodes], changed: np.ndarray) -> None:
        """Update after an iteration. recent: each run's last episodes; changed (K,):
        where one ended.
        """
        by_count: dict[int, list[int]] = {}
        for run in np.flatnonzero(changed & self._is_on).tolist():
            by_count.setdefault(len(recent[run]), []).append(run)
        # Runs with as many episodes are solved together.
        for runs in by_count.values():
            episodes = np.array([recent[run] for run in runs], dtype=float)
            returns = episodes[:, :, 0]  # (R, n)
            lengths = episodes[:, :, 1]
            mean_length = np.where(self._is_per_step[runs], lengths.mean(axis=1), 1.0)
            allowed = self._max_divergence[runs] * mean_length
            self.is_inert[runs] = allowed >= np.log(returns.shape[1])
            scaled = returns * self._reward_scale[runs][:, None]
            self.wanted[runs] = solve_coefficients(scaled, allowed)
        moved = SMOOTHING * self.kl_coef + (1.0 - SMOOTHING) * self.wanted
        self.kl_coef = np.where(
            self._is_on, np.maximum(moved, self._least), self._least
        )
