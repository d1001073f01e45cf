"""The trust region: the coefficient of divergence that the last episodes' returns call for.

(Nachum et al. 2018, as in the code the paper modified; Feng et al. 2019, sec:exp_detail)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

LARGEST = 1000.0
HALVINGS = 14
_AT_ONCE = 7
FEWEST_EPISODES = 8
BEFORE = 500.0  # up to so many episodes
WINDOW = 20  # episodes looked at
SMOOTHING = 0.99


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


def solve_coefficient(returns: Float[np.ndarray, " episode"], allowed: float) -> float:
    """λ in [0, 1000] with D(λ) = ``allowed``, by 14 halvings: exact to 0.03.

    returns: of the last episodes, (n,); allowed: max_divergence times their mean length. Up to 8 episodes
    say too little: 500.
    """
    if len(returns) <= FEWEST_EPISODES:
        return BEFORE
    # D falls with λ, so that seven halvings are one look at 127 points.
    low, width = 0.0, LARGEST
    for _ in range(HALVINGS // _AT_ONCE):
        width /= 2.0**_AT_ONCE
        points = low + width * np.arange(1, 2**_AT_ONCE)
        found = divergence(np.broadcast_to(returns, (len(points), len(returns))), points)
        low += width * np.count_nonzero(found > allowed)
    return low + 0.5 * width
