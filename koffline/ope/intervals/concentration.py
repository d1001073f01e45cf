"""How large the kernel loss of the true value function can be by chance: finite-sample bounds.

At the true Q the residual δ_i = y_i − E[y_i | x_i] is noise, with y = r + discount · E_{a'~π} Q(s', a')
inside an interval of length R. The instruments have length one, so S = Σ w_i ψ(x_i) δ_i is a sum of steps of
known direction and random size, and n² V̂ = ‖S‖².
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def target_range(
    rewards: tuple[float, float], values: tuple[float, float], gamma: float, may_end: bool
) -> float:
    """R: the length of an interval that holds r + discount · V(s') for rewards and values in these ranges.

    ``may_end``: some rows are terminal and have no future. With rewards in [a, b] and values in
    [a, b]/(1 − γ) this is (b − a)/(1 − γ), since a + γ a/(1 − γ) = a/(1 − γ).
    """
    low, high = rewards[0] + gamma * values[0], rewards[1] + gamma * values[1]
    if may_end:
        low, high = min(low, rewards[0]), max(high, rewards[1])
    return high - low


def martingale_threshold(length: float, row_weights: Float[Tensor, " row"], delta: float) -> float:
    """λ with V̂(Q^π) ≤ λ with probability 1 − delta; no independence between rows is needed.

    λ = R² log(2/δ) Σw² / (2n²). Derivation: E cosh(t‖S‖) grows by at most exp(t² w_i² R²/8) per row. For a
    unit vector ψ, u(z) = cosh(t‖S + zψ‖) satisfies u'' ≤ t²u and |u'| ≤ tu, hence u(z) is at most
    u(0) cosh(tz) + u'(0) sinh(tz)/t, a non-negative mixture of exp(±tz); Hoeffding's lemma bounds the mean of
    each for z = w_i δ_i. So P(‖S‖ ≥ q) ≤ 2 exp(−2q²/(R² Σw²)). A bound for steps of any direction with
    ‖w_i ψ_i δ_i‖ ≤ w_i R (Pinelis 1994) has R² log(2/δ) · 2Σw²/n², four times as much.
    (Feng et al. 2021, on the same statistic)
    """
    squares = float(row_weights.square().sum()) / len(row_weights) ** 2
    return length**2 * math.log(2.0 / delta) * squares / 2.0


def independent_threshold(length: float, row_weights: Float[Tensor, " row"], delta: float) -> float:
    """λ with V̂(Q^π) ≤ λ with probability 1 − delta for independent rows, by Hoeffding's U-statistic bound.

    V̂ = (1 − 1/n) Û + n⁻² Σ w_i² δ_i² with E Û = 0 and |w_i w_j δ_i k_ij δ_j| ≤ R² max w², so
    λ = R² [(1 − 1/n) 2 max w² sqrt(log(1/δ) / (2⌊n/2⌋)) + Σw²/n²]. It falls as n^(−1/2), the martingale
    bound as 1/n under weaker assumptions: this one is kept for comparison.
    (Feng et al. 2020, on the same statistic; one side is enough as the true loss is zero)
    """
    n = len(row_weights)
    largest = float(row_weights.max()) ** 2
    pairs = math.sqrt(math.log(1.0 / delta) / (2.0 * max(n // 2, 1)))
    own = float(row_weights.square().sum()) / n**2
    return length**2 * ((1.0 - 1.0 / n) * 2.0 * largest * pairs + own)


def start_deviation(
    values: tuple[float, float], start_weights: Float[Tensor, " start"], delta: float
) -> float:
    """How far the mean of V over drawn start states may be from its expectation (Hoeffding, both sides)."""
    share = start_weights / start_weights.sum()
    return (values[1] - values[0]) * math.sqrt(math.log(2.0 / delta) * float(torch.square(share).sum()) / 2.0)
