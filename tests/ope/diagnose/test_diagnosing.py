"""A diagnosis finds the error that was put into exact values, and nothing in the exact ones."""

import json

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.ope.cross_fit import cross_fit
from koffline.ope.diagnose.diagnosing import diagnose
from koffline.report.diagnosis_plots import draw_diagnosis
from tests.exact_problems import _CASES, FiniteCase
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log

CASE = next(case for case in _CASES if case.name == "grid_off_limited")
assert isinstance(CASE, FiniteCase)
POINTS = np.stack([np.arange(16) % 4, np.arange(16) // 4], axis=1) / 3.0
VALUES = CASE.world.mdp.action_values(CASE.target, CASE.gamma)


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


def test_an_error_in_one_place_is_found_there(problem) -> None:
    found = diagnose(wrong, problem.transitions, problem.policy, problem.gamma, draws=199)
    assert found.test.rejects
    assert found.kernel_ratio > 2.0
    assert found.regions[0].is_significant
    above = next(region for region in found.regions if region.mean_residual < 0.0)  # before it: below
    assert above.is_significant
    assert above.action == 1
    assert np.linalg.norm(above.center - POINTS[5]) < 0.2
    assert "The error is clearest near state" in " ".join(found.findings)
    worst = min(found.maps, key=lambda one: float(np.nanmin(one.values.mean)))
    assert worst.action == 1
    assert any("not known which rows" in sentence for sentence in found.warnings)
    assert set(draw_diagnosis(found)) == {"map", "regions", "by_value", "by_step", "residuals", "coverage"}


def test_exact_values_are_left_alone_and_worth_what_they_are(problem) -> None:
    found = diagnose(exact, problem.transitions, problem.policy, problem.gamma, draws=199)
    assert not found.test.rejects
    assert 0.2 < found.kernel_ratio < 2.0
    assert not any(region.is_significant for region in found.regions)
    assert found.value == pytest.approx(
        problem.value_at_starts, abs=0.02
    )  # the same up to the jitter's cells
    text = json.loads(found.to_json())
    assert text["settings"]["draws"] == 199
    assert text["test"]["rejects"] is False
    assert text["coverage"] == found.coverage.fraction
    assert len(text["residual_by_step"]["mean"]) == len(found.by_step.mean)
    assert "not rejected" in str(found)


def test_cross_fitted_values_are_shown_by_their_first_model(problem) -> None:
    made = cross_fit(problem.transitions, lambda part: exact, folds=2, seed=0)
    found = diagnose(made, problem.transitions, problem.policy, problem.gamma, draws=99)
    assert found.test.n == 1200
    rows = int((made.folds == 0).sum())
    assert f"{rows:,} rows it has not seen" in found.shown
    assert int(found.by_value.rows.sum()) == rows
    plain = diagnose(exact, problem.transitions, problem.policy, problem.gamma, draws=99)
    assert found.value == pytest.approx(plain.value, rel=1e-12)
    assert not any("not known" in sentence for sentence in found.warnings)


def test_training_rows_are_refused(problem) -> None:
    log = problem.transitions
    with pytest.raises(ConfigError, match=r"allow_training_rows=True \(--allow-training-rows\)"):
        diagnose(exact, log, problem.policy, problem.gamma, trained_on=log)
    allowed = diagnose(
        exact, log, problem.policy, problem.gamma, trained_on=log, allow_training_rows=True, draws=99
    )
    assert allowed.test.held_out is False
    with pytest.raises(ConfigError, match="regions is 0"):
        diagnose(exact, log, problem.policy, problem.gamma, regions=0)


def test_states_of_one_number_get_a_line_and_many_get_places_only() -> None:
    log = discrete_log()
    one = log.replace(observations=log.observations[:, :1], next_observations=log.next_observations[:, :1])
    policy = np.full(3, 1.0 / 3.0)
    found = diagnose(lambda s: s[:, 0], one, lambda s: np.tile(policy, (len(s), 1)), 0.9, on_policy=True)
    assert [line.action for line in found.lines] == [None]
    assert not found.maps
    assert "line" in draw_diagnosis(found)
    by_action = diagnose(lambda s, a: s[:, 0] + a, one, lambda s: np.tile(policy, (len(s), 1)), 0.9)
    assert [line.action for line in by_action.lines] == [0, 1, 2]
    many = np.concatenate([log.observations] * 3, axis=1)
    wide = log.replace(observations=many, next_observations=many)
    found = diagnose(lambda s, a: s[:, 0], wide, lambda s: np.tile(policy, (len(s), 1)), 0.9)
    assert not found.maps
    assert not found.lines


def test_continuous_actions_without_episodes() -> None:
    def error(states, actions):
        return states[:, 0]

    found = diagnose(
        lambda s, a: s[:, 0] + a[:, 0], continuous_log(), NOISY, 0.9, draws=99, alternative=error
    )
    assert json.loads(found.to_json())["settings"]["alternative"] == "error"
    assert found.by_step is None
    assert found.behavior_return is None
    assert len(found.maps) == 1
    assert found.maps[0].action is None
    assert json.loads(found.to_json())["residual_by_step"] is None


def test_perfect_values_of_a_silent_world_do_not_divide_by_zero() -> None:
    log = discrete_log().replace(rewards=np.zeros(60))
    found = diagnose(lambda s, a: np.zeros(len(s)), log, SOFT, 0.9, draws=99)
    assert not found.test.rejects
    assert json.loads(found.to_json())["kernel_ratio"] is None
    assert draw_diagnosis(found)
