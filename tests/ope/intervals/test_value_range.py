"""The extremes over the feasible set: brute force, hand-computed cases, what no θ can satisfy."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from koffline.ope.intervals.value_range import Feasible, best_constant
from tests.ope.intervals.systems import small_system


def _loss(system, theta: np.ndarray) -> float:
    psi = system.instruments(system.kernel_inputs).numpy()
    total = np.zeros(psi.shape[1])
    for i in range(len(system)):
        delta = float(system.rewards[i]) - float(system.difference[i].numpy() @ theta)
        total += float(system.row_weights[i]) * delta * psi[i]
    return float(total @ total) / len(system) ** 2


@pytest.mark.parametrize(
    ("seed", "constants", "extra", "norm"), [(0, 0, 0.05, 2.0), (1, 0, 0.5, 0.8), (2, 1, 100.0, 0.5)]
)
def test_extremes_agree_with_brute_force(seed: int, constants: int, extra: float, norm: float) -> None:
    system = small_system(seed, constants=constants)
    feasible = Feasible.of(system)
    centre = best_constant(system).numpy()
    threshold = feasible.least_loss(norm) + extra
    found = feasible.value_range(threshold, norm)
    direction = system.start_mean.numpy()
    limits = [
        {"type": "ineq", "fun": lambda theta: threshold - _loss(system, theta)},
        {"type": "ineq", "fun": lambda theta: norm**2 - np.sum((theta - centre) ** 2)},
    ]
    ends = {}
    for sign in (1.0, -1.0):
        tries = [
            minimize(
                lambda theta, sign=sign: -sign * direction @ theta,
                centre + 0.3 * norm * np.random.default_rng(k).standard_normal(3),
                constraints=limits,
                method="SLSQP",
                options={"maxiter": 500, "ftol": 1e-13},
            )
            for k in range(4)
        ]
        ends[sign] = max(-t.fun for t in tries if t.success and all(g["fun"](t.x) > -1e-7 for g in limits))
    assert found["high"] == pytest.approx(ends[1.0], abs=1e-5)
    assert found["low"] == pytest.approx(-ends[-1.0], abs=1e-5)


def test_one_parameter_by_hand() -> None:
    # V̂(θ) = (1 − 2θ)², c = 3: |1 − 2θ| ≤ 0.2 gives θ in [0.4, 0.6]
    feasible = Feasible(np.array([2.0]), np.array([1.0]), 0.0, np.array([3.0]), offset=10.0)
    found = feasible.value_range(0.04, 100.0)
    assert (found["low"], found["high"]) == pytest.approx((11.2, 11.8), abs=1e-6)
    found = feasible.value_range(0.04, 0.5)  # the ball cuts at 0.5
    assert (found["low"], found["high"]) == pytest.approx((11.2, 11.5), abs=1e-6)
    found = feasible.value_range(9.0, 0.5)  # only the ball binds
    assert (found["low"], found["high"]) == pytest.approx((8.5, 11.5), abs=1e-12)
    assert math.isinf(found["tau_high"])


def test_nothing_is_feasible() -> None:
    feasible = Feasible(np.array([2.0]), np.array([1.0]), math.sqrt(0.5), np.array([3.0]), offset=0.0)
    assert feasible.value_range(0.4, 100.0) is None  # the least loss is 0.5
    assert feasible.least_loss(100.0) == pytest.approx(0.5, abs=1e-9)
    assert feasible.least_loss(0.25) == pytest.approx(1.5 - 1.0 + 0.25, abs=1e-4)  # (1 − 2·¼)² + ½
    assert feasible.value_range(0.7, 0.25) is None
    assert feasible.value_range(0.8, 0.25) is not None
