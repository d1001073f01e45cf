"""A diagnosis finds the error that was put into exact values, and nothing in the exact
ones.
"""

import json

import numpy as np
import pytest

import koffline
from koffline.ope.bellman_test.witness import make_profile
from koffline.ope.cross_fit import cross_fit
from koffline.ope.diagnosis import diagnose
from tests.exact_problems import CASES, FiniteCase
from tests.ope.problems import mortal_log

CASE = next(case for case in CASES if case.name == "grid_off_limited")
assert isinstance(CASE, FiniteCase)
VALUES = CASE.world.mdp.action_values(CASE.target, CASE.gamma)


def exact(states, actions):
    return VALUES[CASE.world.states_of(states), actions]


def wrong(states, actions):
    """Too high by one in one state, for one action."""
    return exact(states, actions) + (
        (CASE.world.states_of(states) == 5) & (actions == 1)
    )


@pytest.fixture(scope="module")
def problem():
    return CASE(0, 1200)


def test_an_error_in_one_place_is_found_there(problem) -> None:
    diagnosis = diagnose(
        wrong, problem.transitions, problem.policy, problem.gamma, draws=199
    )
    assert diagnosis.test.rejects
    assert diagnosis.test.kernel_ratio > 2.0
    assert diagnosis.regions[0].is_significant
    # before it: below
    above = next(region for region in diagnosis.regions if region.mean_residual < 0.0)
    assert above.is_significant
    assert above.action == 1
    assert np.linalg.norm(above.center - CASE.world.coordinates[5]) < 0.2
    assert (
        min(
            diagnosis.maps, key=lambda panel: float(np.nanmin(panel.values.mean))
        ).action
        == 1
    )
    assert any("not known which rows" in sentence for sentence in diagnosis.warnings)


def test_exact_values_are_left_alone_and_worth_what_they_are(problem) -> None:
    diagnosis = diagnose(
        exact, problem.transitions, problem.policy, problem.gamma, draws=99
    )
    assert not diagnosis.test.rejects
    assert 0.2 < diagnosis.test.kernel_ratio < 2.0
    assert not any(region.is_significant for region in diagnosis.regions)
    # up to the jitter's cells
    assert diagnosis.value == pytest.approx(problem.value_at_starts, abs=0.02)
    record = json.loads(diagnosis.to_json())
    assert record["test"]["rejects"] is False
    assert record["residual_by_step"]["mean"] == diagnosis.by_step.mean.tolist()


def test_bins_by_hand() -> None:
    numbers = np.array([3.0, 1.0, 2.0, 0.0] * 8)
    residuals = np.where(numbers < 2.0, -1.0, 2.0) + np.tile(
        [0.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5], 4
    )
    profile = make_profile(numbers, residuals, np.ones(32))
    np.testing.assert_allclose(profile.center, [0.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(profile.mean, [-1.0, -1.0, 2.0, 2.0])
    np.testing.assert_array_equal(profile.rows, [8] * 4)
    np.testing.assert_allclose(profile.standard_error, np.full(4, 0.5 / np.sqrt(7)))


def test_the_truth_is_not_rejected_where_recording_stops() -> None:
    """At the stop only rows where the world ended are left; their residuals have
    another mean.
    """
    log = mortal_log(rows_after=False)

    def truth(states, actions):
        return np.full(len(states), 1 / 0.28)

    parts = cross_fit(log, lambda rows: truth)
    for test in (
        diagnose(truth, log, "uniform", 0.9).test,
        diagnose(parts, log, "uniform", 0.9).test,
    ):
        assert not test.rejects
    for q in (truth, parts):
        assert not koffline.bellman_test(q, log, "uniform", 0.9).rejects
    assert diagnose(
        lambda states, actions: np.full(len(states), 3.0), log, "uniform", 0.9
    ).test.rejects
