"""Finite-sample bounds: by hand, the inequality behind them enumerated, exact finite problems."""

import itertools
import math

import numpy as np
import pytest
import torch

from koffline.ope.intervals.kernel_sets import (
    independent_threshold,
    martingale_threshold,
    start_deviation,
    target_range,
)
from tests.ope.intervals.systems import finite_system, true_parameters

_ONES = torch.ones(100, dtype=torch.float64)


def test_by_hand() -> None:
    # R = 2, n = 100, δ = 2/e²: λ = 4 · 2 · (1/100) / 2 = 0.04
    assert martingale_threshold(2.0, _ONES, 2.0 / math.e**2) == pytest.approx(0.04)
    # log(1/δ) = 1: 4 · (0.99 · 2 · sqrt(1/100) + 1/100) = 0.832
    assert independent_threshold(2.0, _ONES, 1.0 / math.e) == pytest.approx(0.832)
    # values in [−1, 2], four start states, log(2/δ) = 2: 3 · sqrt(2 · (1/4) / 2) = 1.5
    assert start_deviation((-1.0, 2.0), _ONES[:4], 2.0 / math.e**2) == pytest.approx(1.5)


def test_weights_count_by_their_squares() -> None:
    weights = torch.cat([2.0 * _ONES[:50], 0.0 * _ONES[:50]])  # fifty rows, each twice
    assert martingale_threshold(1.0, weights, 0.1) == pytest.approx(
        martingale_threshold(1.0, _ONES[:50], 0.1)
    )
    assert start_deviation((0.0, 1.0), 3.0 * weights, 0.1) == pytest.approx(
        start_deviation((0.0, 1.0), _ONES[:50], 0.1)
    )


@pytest.mark.parametrize(
    ("rewards", "values", "may_end", "length"),
    [
        ((0.0, 1.0), (0.0, 10.0), False, 10.0),
        ((-1.0, 1.0), (-10.0, 10.0), True, 20.0),
        ((-2.0, -1.0), (-20.0, -10.0), False, 10.0),
        ((-2.0, -1.0), (-20.0, 0.0), True, 19.0),  # −2 − 18 … −1
        ((1.0, 2.0), (10.0, 20.0), True, 19.0),  # an ended row pays 1, another up to 2 + 18
    ],
)
def test_target_range(
    rewards: tuple[float, float], values: tuple[float, float], may_end: bool, length: float
) -> None:
    assert target_range(rewards, values, 0.9, may_end) == pytest.approx(length)


@pytest.mark.parametrize("chance", [0.5, 0.2, 0.05])
def test_the_mean_of_cosh_grows_as_the_derivation_says(chance: float) -> None:
    """All outcomes of a walk in the plane: E cosh(t‖S‖) ≤ exp(t² R² n/8), steps of range R, mean zero."""
    n, length = 6, 1.0
    steps = (length * (1.0 - chance), -length * chance)
    directions = np.exp(2.3j * np.arange(n) ** 2)
    for t in (0.3, 1.0, 3.0, 6.0):
        mean = 0.0
        for outcome in itertools.product((0, 1), repeat=n):
            likely = math.prod(chance if up == 0 else 1.0 - chance for up in outcome)
            total = sum(steps[up] * direction for up, direction in zip(outcome, directions, strict=True))
            mean += likely * math.cosh(t * abs(total))
        assert mean <= math.exp(t**2 * length**2 * n / 8.0) * (1.0 + 1e-12)


@pytest.mark.parametrize("name", ["chain_tuples", "chain_off_limited", "grid_on"])
def test_the_kernel_loss_of_the_true_values_stays_below(name: str) -> None:
    """A bound this loose is never reached in a few draws; the loss itself is not zero."""
    for seed in range(3):
        _, system = finite_system(name, seed)
        gap = system.projected[:, -1] - system.projected[:, :-1] @ true_parameters(name)
        loss = float(gap.square().sum())
        length = target_range((-0.5, 3.0), system.value_bounds, system.gamma, True)
        assert 0.0 < loss <= martingale_threshold(length, system.row_weights, 0.05)
        assert martingale_threshold(length, system.row_weights, 0.05) < independent_threshold(
            length, system.row_weights, 0.05
        )
