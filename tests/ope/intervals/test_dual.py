"""The dual interval: naive sums, strong duality, and bounds that hold wherever the search stops."""

import numpy as np
import pytest

from koffline.ope.intervals.kernel_sets import DUAL_STEPS, dual_interval, feature_interval
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import DualProblem, feasible_set
from tests.ope.intervals.systems import finite_system, small_system


def _problem(system, threshold: float, norm: float):
    return DualProblem.of(system, norm, threshold)


def test_bound_is_the_sum_over_rows() -> None:
    system = small_system(1, rows=7)
    problem = _problem(system, threshold=0.09, norm=2.0)
    alpha = np.random.default_rng(0).standard_normal(12)
    psi = system.instruments(system.kernel_inputs).numpy()
    total, balance = 0.0, system.start_mean.numpy().copy()
    for i in range(7):
        weight = float(system.row_weights[i]) * float(psi[i] @ alpha)  # w_i ω(x_i)
        total += weight * float(system.rewards[i]) / 7
        balance -= weight * system.difference[i].numpy() / 7
    expected = total + 2.0 * np.linalg.norm(balance) + 0.3 * np.linalg.norm(alpha)
    assert problem.bound(alpha) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("seed", "extra", "norm"), [(0, 0.02, 1.5), (1, 0.3, 5.0), (3, 50.0, 0.7)])
def test_strong_duality(seed: int, extra: float, norm: float) -> None:
    """The optimum equals the extreme of cᵀθ over the feasible set, found by another way."""
    system = small_system(seed, constants=seed % 2)
    feasible = feasible_set(system)
    threshold = feasible.least_loss(norm) + extra
    found = feasible.value_range(threshold, norm)
    problem = _problem(system, threshold, norm)
    assert problem.bound(problem.minimise(DUAL_STEPS)) == pytest.approx(found.high, abs=1e-5)
    mirrored = problem.mirrored()
    assert -mirrored.bound(mirrored.minimise(DUAL_STEPS)) == pytest.approx(found.low, abs=1e-5)


@pytest.mark.parametrize("name", ["chain_tuples", "grid_on"])
def test_equals_the_certified_interval_and_stops_anywhere(name: str) -> None:
    _, system = finite_system(name, rows=2000)
    known = {"chain_tuples": (-0.5, 1.0), "grid_on": (-2.0, 3.0)}[name]
    settings = KernelIntervalSettings(value_bounds=known)
    certified = feature_interval(system, settings=settings).interval
    highs = []
    for steps in (0, 3, 500):
        result = dual_interval(system, settings, steps).interval
        assert result.high >= certified.high - 1e-6
        assert result.low <= certified.low + 1e-6
        highs.append(result.high - result.low)
    assert highs == sorted(highs, reverse=True)
    assert (result.low, result.high) == pytest.approx((certified.low, certified.high), abs=1e-4)
    assert result.kind == "dual"
