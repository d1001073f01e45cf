"""Certified and simultaneous intervals: bounds by hand, the inequality behind them, alarms."""

import dataclasses
import json
import math

import pytest
import torch

from koffline.ope.intervals.kernel_sets import (
    feature_interval,
    martingale_threshold,
    start_deviation,
    target_range,
)
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import Feasible
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS
from tests.ope.intervals.systems import finite_system, true_parameters

_ONES = torch.ones(100, dtype=torch.float64)


def test_by_hand() -> None:
    # R = 2, n = 100, δ = 2/e²: λ = 4 · 2 · (1/100) / 2 = 0.04
    assert martingale_threshold(2.0, _ONES, 2.0 / math.e**2) == pytest.approx(0.04)
    # values in [−1, 2], four start states, log(2/δ) = 2: 3 · sqrt(2 · (1/4) / 2) = 1.5
    assert start_deviation((-1.0, 2.0), _ONES[:4], 2.0 / math.e**2) == pytest.approx(1.5)


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


@pytest.mark.parametrize("name", ["chain_tuples", "chain_off_limited", "grid_on"])
def test_the_kernel_loss_of_the_true_values_stays_below(name: str) -> None:
    """A bound this loose is never reached in a few draws; the loss itself is not zero."""
    for seed in range(3):
        _, system = finite_system(name, seed)
        gap = system.projected[:, -1] - system.projected[:, :-1] @ true_parameters(name)
        loss = float(gap.square().sum())
        length = target_range((-0.5, 3.0), system.value_bounds, system.gamma, True)
        assert 0.0 < loss <= martingale_threshold(length, system.row_weights, 0.05)


def test_parts_add_up() -> None:
    _, system = finite_system("chain_tuples", rows=2000)
    settings = KernelIntervalSettings(
        value_bounds=(-0.5, 1.0), norm_bound=3.0, level=0.9, reward_bounds=(-0.6, 1.0)
    )
    result = feature_interval(system, KERNEL_CERTIFIED, settings)
    length = (1.0 + 0.95 * 1.0) - (-0.6 - 0.95 * 0.5)
    assert result.threshold == pytest.approx(martingale_threshold(length, system.row_weights, 0.05))
    margin = start_deviation((-0.5, 1.0), system.start_weights, 0.05)
    found = Feasible.of(system).value_range(result.threshold, 3.0)
    assert result.interval.low == pytest.approx(max(found["low"] - margin, -0.5))
    assert result.interval.high == pytest.approx(min(found["high"] + margin, 1.0))
    assert "given" in result.interval.assumptions


def test_a_class_that_cannot_explain_the_log_is_an_alarm() -> None:
    """A reward that depends on what no feature sees: the best constant leaves too large a kernel loss."""
    _, system = finite_system("chain_tuples", rows=2000)
    size = len(system)
    flat = torch.ones(size, 1, dtype=torch.float64)
    poor = dataclasses.replace(
        system, now=flat, later=flat, starts=flat, rewards=system.rewards + 5.0 * system.kernel_inputs[:, 0]
    )
    for kind in (KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS):
        settings = KernelIntervalSettings(draws=99, value_bounds=(-10.0, 10.0))
        result = feature_interval(poor, kind, settings)
        assert result.interval is None
        assert result.misspecified
        assert result.least_loss > result.threshold
        assert "cannot explain" in result.warnings[0]
        json.dumps(result.as_dict(), allow_nan=False)
