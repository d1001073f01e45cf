"""Certified and simultaneous intervals: bounds and extremes by hand, by brute force,
alarms.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from koffline.ope.intervals.base import KernelIntervalSettings, best_constant
from koffline.ope.intervals.kernel_sets import (
    Feasible,
    feature_interval,
    martingale_threshold,
    start_deviation,
    target_range,
)
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS
from tests.ope.intervals.systems import finite_system, small_system, true_parameters

_ONES = torch.ones(100, dtype=torch.float64)


def test_by_hand() -> None:
    # R = 2, n = 100, δ = 2/e²: λ = 4 · 2 · (1/100) / 2 = 0.04
    assert martingale_threshold(2.0, _ONES, 2.0 / math.e**2) == pytest.approx(0.04)
    # values in [−1, 2], four start states, log(2/δ) = 2: 3 · sqrt(2 · (1/4) / 2) = 1.5
    assert start_deviation((-1.0, 2.0), _ONES[:4], 2.0 / math.e**2) == pytest.approx(
        1.5
    )


@pytest.mark.parametrize(
    ("rewards", "values", "may_end", "length"),
    [
        ((0.0, 1.0), (0.0, 10.0), False, 10.0),
        ((-1.0, 1.0), (-10.0, 10.0), True, 20.0),
        ((-2.0, -1.0), (-20.0, -10.0), False, 10.0),
        ((-2.0, -1.0), (-20.0, 0.0), True, 19.0),  # −2 − 18 … −1
        # an ended row pays 1, another up to 2 + 18
        (
            (1.0, 2.0),
            (10.0, 20.0),
            True,
            19.0,
        ),
    ],
)
def test_target_range(rewards, values, may_end, length):
    assert target_range(rewards, values, 0.9, may_end) == pytest.approx(length)


@pytest.mark.parametrize("name", ["chain_tuples", "chain_off_limited", "grid_on"])
def test_the_kernel_loss_of_the_true_values_stays_below(name: str) -> None:
    """A bound this loose is never reached in a few draws; the loss itself is not
    zero.
    """
    for seed in range(3):
        _, system = finite_system(name, seed)
        gap = system.projected[:, -1] - system.projected[:, :-1] @ true_parameters(name)
        length = target_range((-0.5, 3.0), system.value_bounds, system.gamma, True)
        assert (
            0.0
            < float(gap.square().sum())
            <= martingale_threshold(length, system.row_weights, 0.05)
        )


def test_parts_add_up() -> None:
    _, system = finite_system("chain_tuples", rows=2000)
    settings = KernelIntervalSettings(
        value_bounds=(-0.5, 1.0), norm_bound=3.0, level=0.9, reward_bounds=(-0.6, 1.0)
    )
    result = feature_interval(system, KERNEL_CERTIFIED, settings)
    length = (1.0 + 0.95 * 1.0) - (-0.6 - 0.95 * 0.5)
    assert result.threshold == pytest.approx(
        martingale_threshold(length, system.row_weights, 0.05)
    )
    margin = start_deviation((-0.5, 1.0), system.start_weights, 0.05)
    extremes = Feasible.of(system).value_range(result.threshold, 3.0)
    assert result.interval.low == pytest.approx(max(extremes[0] - margin, -0.5))
    assert result.interval.high == pytest.approx(min(extremes[1] + margin, 1.0))
    assert "given" in result.interval.assumptions


def test_a_class_that_cannot_explain_the_log_is_an_alarm() -> None:
    """A reward that depends on what no feature sees: the best constant leaves too large
    a kernel loss.
    """
    _, system = finite_system("chain_tuples", rows=2000)
    flat = torch.ones(len(system), 1, dtype=torch.float64)
    poor = dataclasses.replace(
        system,
        now=flat,
        later=flat,
        starts=flat,
        rewards=system.rewards + 5.0 * system.kernel_inputs[:, 0],
    )
    for kind in (KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS):
        result = feature_interval(
            poor, kind, KernelIntervalSettings(draws=99, value_bounds=(-10.0, 10.0))
        )
        assert result.interval is None
        assert result.misspecified
        assert result.least_loss > result.threshold
        assert "cannot explain" in result.warnings[0]
        json.dumps(result.as_dict(), allow_nan=False)


def _loss(system, theta: np.ndarray) -> float:
    psi = system.instruments(system.kernel_inputs)
    rows = zip(system.row_weights, system.rewards, system.difference, psi, strict=True)
    total = sum(
        w * (r - z @ torch.as_tensor(theta)) * instrument
        for w, r, z, instrument in rows
    )
    return float(total @ total) / len(system) ** 2


@pytest.mark.parametrize(
    ("seed", "constants", "extra", "norm"),
    [(0, 0, 0.05, 2.0), (1, 0, 0.5, 0.8), (2, 1, 100.0, 0.5)],
)
def test_extremes_agree_with_brute_force(
    seed: int, constants: int, extra: float, norm: float
) -> None:
    system = small_system(seed, constants=constants)
    feasible = Feasible.of(system)
    centre = best_constant(system).numpy()
    threshold = feasible.least_loss(norm) + extra
    extremes = feasible.value_range(threshold, norm)
    direction = system.start_mean.numpy()
    limits = [
        {"type": "ineq", "fun": lambda theta: threshold - _loss(system, theta)},
        {"type": "ineq", "fun": lambda theta: norm**2 - np.sum((theta - centre) ** 2)},
    ]
    ends = {}
    precise = {
        "constraints": limits,
        "method": "SLSQP",
        "options": {"maxiter": 500, "ftol": 1e-13},
    }
    begins = [
        centre + 0.3 * norm * np.random.default_rng(k).standard_normal(3)
        for k in range(4)
    ]
    for sign in (1.0, -1.0):
        tries = [
            minimize(lambda theta, s=sign: -s * direction @ theta, at, **precise)
            for at in begins
        ]
        ends[sign] = max(
            -t.fun
            for t in tries
            if t.success and all(g["fun"](t.x) > -1e-7 for g in limits)
        )
    assert extremes[1] == pytest.approx(ends[1.0], abs=1e-5)
    assert extremes[0] == pytest.approx(-ends[-1.0], abs=1e-5)


def test_one_parameter_by_hand() -> None:
    # V̂(θ) = (1 − 2θ)², c = 3: |1 − 2θ| ≤ 0.2 gives θ in [0.4, 0.6]
    feasible = Feasible(
        np.array([4.0]), np.array([2.0]), np.array([3.0]), loss=1.0, offset=10.0
    )
    assert feasible.value_range(0.04, 100.0) == pytest.approx((11.2, 11.8), abs=1e-6)
    # the ball cuts at 0.5
    assert feasible.value_range(0.04, 0.5) == pytest.approx((11.2, 11.5), abs=1e-6)
    # only the ball binds
    assert feasible.value_range(9.0, 0.5) == pytest.approx((8.5, 11.5), abs=1e-12)


def test_nothing_is_feasible() -> None:
    feasible = Feasible(
        np.array([4.0]), np.array([2.0]), np.array([3.0]), loss=1.5, offset=0.0
    )
    assert feasible.value_range(0.4, 100.0) is None  # the least loss is 0.5
    assert feasible.least_loss(100.0) == pytest.approx(0.5, abs=1e-9)
    # (1 − 2·¼)² + ½
    assert feasible.least_loss(0.25) == pytest.approx(1.5 - 1.0 + 0.25, abs=1e-4)
    assert feasible.value_range(0.7, 0.25) is None
    assert feasible.value_range(0.8, 0.25) is not None
