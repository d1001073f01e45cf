"""The blend: partial estimates against loops, the quadratic problem against a general solver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from koffline.ope.importance.estimators import weighted_doubly_robust
from koffline.ope.importance.magic import cut_steps, least_error_mix, magic
from koffline.ope.importance.statistics import StepwiseMean
from koffline.ope.row_values import RowValues
from tests import reference_importance as reference
from tests.ope.importance.cases import random_case


@pytest.mark.parametrize("seed", range(4))
def test_mix_is_that_of_a_general_solver(seed: int) -> None:
    generator = np.random.default_rng(seed)
    root = generator.standard_normal((6, 6))
    errors = root @ root.T
    mix = least_error_mix(errors)
    assert mix.sum() == pytest.approx(1.0)
    assert mix.min() >= 0.0
    other = minimize(
        lambda x: x @ errors @ x,
        np.full(6, 1 / 6),
        jac=lambda x: 2.0 * errors @ x,
        bounds=[(0.0, 1.0)] * 6,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1.0},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert mix @ errors @ mix <= other.fun * (1.0 + 1e-6)


def test_two_independent_estimates_mix_by_inverse_variance() -> None:
    np.testing.assert_allclose(least_error_mix(np.diag([1.0, 3.0])), [0.75, 0.25], rtol=1e-6)
    np.testing.assert_allclose(least_error_mix(np.zeros((4, 4))), 0.25)


def test_partial_estimates_equal_loops() -> None:
    case, whole = random_case(1), _whole(1)
    cuts = cut_steps(case.weights.horizon)
    expected = [
        reference.weighted_doubly_robust(case.episodes, case.shares, case.model.starts, case.gamma, cut)
        for cut in cuts
    ]
    np.testing.assert_allclose(whole.partial_values(cuts), expected, rtol=1e-10)


def test_cuts_are_few_and_start_with_the_model_alone() -> None:
    assert cut_steps(1) == (-1, None)
    assert cut_steps(3) == (-1, 0, 1, None)
    long = cut_steps(1000)
    assert len(long) <= 25
    assert long[0] == -1
    assert long[-1] is None
    inner = [cut for cut in long if cut is not None]
    assert inner == sorted(set(inner))


def test_blend_is_no_worse_than_any_of_its_parts_by_its_own_measure() -> None:
    whole, counts = _whole(2), _counts()
    blend = magic(whole, iter([counts]))
    values = whole.partial_values(blend.cuts)
    low, high = np.quantile(whole.resampled(counts), [0.25, 0.75])
    low, high = min(low, whole.value), max(high, whole.value)
    deviations = whole.partial_deviations(blend.cuts)
    covariance = deviations.T @ deviations * 8 / 9
    best = reference.magic_error(values, covariance, low, high, blend.mix)
    for single in np.eye(len(values)):
        assert best <= reference.magic_error(values, covariance, low, high, single) * (1.0 + 1e-8)
    assert blend.value == pytest.approx(blend.mix @ values)


def test_a_far_off_model_gets_no_share() -> None:
    case = random_case(3)
    far = RowValues(case.model.now, case.model.later, case.model.starts + 1e4)
    whole = weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, far)
    # Following the residuals for a step does not mend a first value that is off: all parts are off alike.
    near = replace(whole, rows=whole.rows - 1e4 * (np.asarray(case.transitions.steps) == 0))
    blend = magic(near, iter([_counts()]))
    assert blend.mix[0] < 1e-3


def _whole(seed: int) -> StepwiseMean:
    case = random_case(seed)
    return weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model)


def _counts() -> np.ndarray:
    return np.random.default_rng(0).multinomial(9, np.full(9, 1 / 9), size=100).astype(float)
