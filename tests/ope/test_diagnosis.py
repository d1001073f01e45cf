"""A diagnosis finds the error that was put into exact values, and nothing in the exact ones."""

import json

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.ope.cross_fit import cross_fit
from koffline.ope.diagnosis import diagnose
from koffline.ope.findings import Profile, describe_action, describe_place, describe_profile, make_profile
from koffline.report.diagnosis import draw_diagnosis, plot_maps
from tests.exact_problems import _CASES, FiniteCase
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log

CASE = next(case for case in _CASES if case.name == "grid_off_limited")
assert isinstance(CASE, FiniteCase)
POINTS = np.stack([np.arange(16) % 4, np.arange(16) // 4], axis=1) / 3.0
VALUES = CASE.world.mdp.action_values(CASE.target, CASE.gamma)
FIGURES = {"map", "regions", "by_value", "by_step", "residuals", "coverage"}


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


def test_cross_fitted_values_are_shown_by_their_first_model(problem, of_exact) -> None:
    made = cross_fit(problem.transitions, lambda part: exact, folds=2, seed=0)
    found = diagnose(made, problem.transitions, problem.policy, problem.gamma, draws=99)
    assert found.test.n == 1200
    rows = int((made.folds == 0).sum())
    assert f"{rows:,} rows it has not seen" in found.shown
    assert int(found.by_value.rows.sum()) == rows
    assert found.value == pytest.approx(of_exact.value, rel=1e-12)
    assert not any("not known" in sentence for sentence in found.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained_on": discrete_log()}, r"allow_training_rows=True \(--allow-training-rows\)"),
        ({"regions": 0}, "regions is 0"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        diagnose(lambda s, a: s[:, 0], discrete_log(), SOFT, 0.9, **options)


def test_states_of_one_number_get_a_line_and_many_get_places_only() -> None:
    log = discrete_log()
    one = log.replace(observations=log.observations[:, :1], next_observations=log.next_observations[:, :1])
    found = diagnose(lambda s: s[:, 0], one, "uniform", 0.9, on_policy=True)
    assert [(line.action, len(line.axes)) for line in found.maps] == [(None, 1)]
    assert set(draw_diagnosis(found)) == FIGURES - {"map"} | {"line"}
    by_action = diagnose(lambda s, a: s[:, 0] + a, one, "uniform", 0.9)
    assert [line.action for line in by_action.maps] == [0, 1, 2]
    many = np.concatenate([log.observations] * 3, axis=1)
    wide = log.replace(observations=many, next_observations=many)
    assert diagnose(lambda s, a: s[:, 0], wide, "uniform", 0.9).maps == ()


def test_continuous_actions_without_episodes() -> None:
    def error(states, actions):
        return states[:, 0]

    q = lambda s, a: s[:, 0] + a[:, 0]  # noqa: E731
    found = diagnose(q, continuous_log(), NOISY, 0.9, draws=99, alternative=error)
    assert (found.by_step, found.behavior_return) == (None, None)
    assert [one.action for one in found.maps] == [None]
    plain = json.loads(found.to_json())
    assert plain["settings"]["alternative"] == "error"
    assert plain["residual_by_step"] is None


def test_perfect_values_of_a_silent_world_do_not_divide_by_zero() -> None:
    log = discrete_log().replace(rewards=np.zeros(60))
    found = diagnose(lambda s, a: np.zeros(len(s)), log, SOFT, 0.9, draws=99)
    assert not found.test.rejects
    assert json.loads(found.to_json())["kernel_ratio"] is None
    assert draw_diagnosis(found)


def test_sums_over_a_window_are_called_so() -> None:
    several, one = (
        diagnose(
            lambda s, a: 30.0 + s[:, 0], discrete_log(200), SOFT, 0.9, draws=99, on_policy=True, window=w
        )
        for w in (5, 1)
    )
    assert "over 5 steps plus the value after them by" in " ".join(several.findings)
    assert "reward plus discounted next value by" in " ".join(one.findings)
    axes = plot_maps(several).axes
    assert "over 5 steps" in axes[-1].get_ylabel()
    assert axes[0].get_facecolor()[:3] != (1.0, 1.0, 1.0)  # white is the colour of zero


@pytest.mark.parametrize(
    ("mean", "error", "expected"),
    [
        ([0.2, -0.9, 2.0], [0.001, 0.1, 1.5], "around value 1: -0.9 ± 0.1."),  # neither largest z nor chance
        ([0.2, 0.0, 0.0], [0.0, 0.1, 0.1], "around value 0: +0.2 in every row."),
        ([0.1, -0.1, 5.0], [0.1, 0.1, 4.0], None),
    ],
)
def test_the_largest_mean_beyond_chance_is_named(mean, error, expected) -> None:
    bins, numbers = np.arange(3.0), np.array(mean)
    profile = Profile("value", bins, numbers, np.array(error), numbers, numbers, np.full(3, 50))
    said = describe_profile(profile, 0.05)
    assert said is None if expected is None else said.endswith(expected)


def test_bins_by_hand() -> None:
    numbers = np.array([3.0, 1.0, 2.0, 0.0] * 8)
    residuals = np.where(numbers < 2.0, -1.0, 2.0) + np.tile([0.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5], 4)
    found = make_profile("x", numbers, residuals, np.ones(32), bins=2)
    np.testing.assert_allclose(found.center, [0.5, 2.5])
    np.testing.assert_allclose(found.mean, [-1.0, 2.0])
    np.testing.assert_array_equal(found.rows, [16, 16])
    np.testing.assert_allclose(found.standard_error, np.full(2, 0.5 / np.sqrt(15)))
    assert found.z_scores[0] < 0.0 < found.z_scores[1]


def test_equal_numbers_are_never_cut_and_weightless_rows_say_nothing() -> None:
    numbers, last = np.repeat([0.0, 1.0], [90, 10]), np.arange(100) == 99
    found = make_profile("x", numbers, 1e6 * last, 1.0 - last)
    np.testing.assert_array_equal(found.rows, [90, 9])
    np.testing.assert_array_equal(found.mean, [0.0, 0.0])
    np.testing.assert_array_equal(found.z_scores, [0.0, 0.0])


def test_weights_count_as_copies() -> None:
    generator = np.random.default_rng(0)
    numbers, residuals = generator.normal(size=40), generator.normal(size=40)
    counts = generator.integers(1, 4, size=40)
    weighted = make_profile("x", numbers, residuals, counts.astype(np.float64), bins=1)
    copies = (np.repeat(column, counts) for column in (numbers, residuals, np.ones(40)))
    copied = make_profile("x", *copies, bins=1)
    np.testing.assert_allclose(weighted.mean, copied.mean)
    np.testing.assert_allclose(weighted.center, copied.center)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_few_rows_make_one_bin(n) -> None:
    found = make_profile("x", np.arange(float(n)), np.ones(n), np.ones(n))
    np.testing.assert_array_equal(found.rows, [n])
    assert np.isfinite(found.standard_error).all()


def test_equal_residuals_have_no_spread() -> None:
    """Residuals that are 0.2 in every row, up to rounding, are as clear as can be; one row is not."""
    residuals = np.where(np.arange(33) % 2, 0.1 + 0.1, 0.3 - 0.1)
    found = make_profile("x", np.zeros(33), residuals, np.random.default_rng(0).uniform(1.0, 2.0, 33))
    assert (found.standard_error[0], found.z_scores[0]) == (0.0, np.inf)
    assert make_profile("x", np.zeros(1), np.ones(1), np.ones(1)).z_scores[0] == 0.0


def test_places_in_few_characters() -> None:
    assert describe_place(np.array([1.23456, -0.5])) == "(1.23, -0.5)"
    assert describe_place(np.arange(8.0)) == "(0, 1, 2, 3, 4, 5, …)"
    said = [describe_action(action) for action in (None, 2, np.array([0.5]))]
    assert said == ["", "action 2", "action (0.5)"]
