"""A diagnosis finds the error that was put into exact values, and nothing in the exact ones."""

import json

import numpy as np
import pytest

from koffline.ope.bellman_test.witness import make_profile
from koffline.ope.diagnosis import diagnose
from koffline.report.diagnosis import draw_diagnosis
from tests.exact_problems import _CASES, FiniteCase

CASE = next(case for case in _CASES if case.name == "grid_off_limited")
assert isinstance(CASE, FiniteCase)
POINTS = np.stack([np.arange(16) % 4, np.arange(16) // 4], axis=1) / 3.0
VALUES = CASE.world.mdp.action_values(CASE.target, CASE.gamma)
FIGURES = {"map", "by_value", "by_step", "residuals", "coverage"}


def cell(states):
    return np.argmin(((np.asarray(states)[:, None] - POINTS[None]) ** 2).sum(-1), axis=1)


def exact(states, actions):
    return VALUES[cell(states), actions]


def wrong(states, actions):
    """Too high by one in one state, for one action."""
    return exact(states, actions) + ((cell(states) == 5) & (actions == 1))


@pytest.fixture(scope="module")
def problem():
    return CASE(0, 1200)


@pytest.fixture(scope="module")
def of_exact(problem):
    return diagnose(exact, problem.transitions, problem.policy, problem.gamma, draws=99)


def test_an_error_in_one_place_is_found_there(problem) -> None:
    found = diagnose(wrong, problem.transitions, problem.policy, problem.gamma, draws=199)
    assert found.test.rejects
    assert found.test.kernel_ratio > 2.0
    assert found.regions[0].is_significant
    above = next(region for region in found.regions if region.mean_residual < 0.0)  # before it: below
    assert above.is_significant
    assert above.action == 1
    assert np.linalg.norm(above.center - POINTS[5]) < 0.2
    assert "The error is clearest near state" in " ".join(found.findings)
    worst = min(found.maps, key=lambda one: float(np.nanmin(one.values.mean)))
    assert worst.action == 1
    assert any("not known which rows" in sentence for sentence in found.warnings)
    assert set(draw_diagnosis(found)) == FIGURES


def test_exact_values_are_left_alone_and_worth_what_they_are(problem, of_exact) -> None:
    assert not of_exact.test.rejects
    assert 0.2 < of_exact.test.kernel_ratio < 2.0
    assert not any(region.is_significant for region in of_exact.regions)
    assert of_exact.value == pytest.approx(problem.value_at_starts, abs=0.02)  # up to the jitter's cells
    text = json.loads(of_exact.to_json())
    assert text["settings"]["draws"] == 99
    assert text["test"]["rejects"] is False
    assert text["coverage"] == of_exact.coverage.fraction
    assert text["residual_by_step"]["mean"] == of_exact.by_step.mean.tolist()
    assert "rows" not in text["regions"][0]
    assert "not rejected" in str(of_exact)


def test_bins_by_hand() -> None:
    numbers = np.array([3.0, 1.0, 2.0, 0.0] * 8)
    residuals = np.where(numbers < 2.0, -1.0, 2.0) + np.tile([0.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5], 4)
    found = make_profile("x", numbers, residuals, np.ones(32), bins=2)
    np.testing.assert_allclose(found.center, [0.5, 2.5])
    np.testing.assert_allclose(found.mean, [-1.0, 2.0])
    np.testing.assert_array_equal(found.rows, [16, 16])
    np.testing.assert_allclose(found.standard_error, np.full(2, 0.5 / np.sqrt(15)))
