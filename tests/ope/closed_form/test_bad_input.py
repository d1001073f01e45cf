"""What logs and weights too poor for an estimate give: a sentence, or a warning inside it; never NaN."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from koffline.errors import ConfigError, DataError
from koffline.ope.closed_form.estimates import CLOSED_FORMS, drl, lstdq, mql
from koffline.ope.closed_form.weights import describe_weights
from koffline.ope.features import make_feature_system
from koffline.ope.problem import prepare_problem
from koffline.ope.row_values import RowValues
from koffline.solvers.features import RandomFourierFeatures
from tests.ope.closed_form.systems import GAMMA, small_system
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log


def zeros(system, unseen=1.0):
    n, starts = len(system), len(system.start_weights)
    return RowValues(np.zeros(n), np.zeros(n), np.zeros(starts), unseen)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_one_episode_has_an_estimate_and_no_spread(name):
    problem = prepare_problem(
        discrete_log(60, length=60), SOFT, GAMMA, 1, np.random.default_rng(0), np.zeros((1, 2))
    )
    system = make_feature_system(
        problem, RandomFourierFeatures(1.5, 6, seed=1), gamma=GAMMA, instruments=40, seed=2
    )
    estimate = CLOSED_FORMS[name](system)
    assert math.isfinite(estimate.value)
    assert estimate.standard_error is None
    assert estimate.interval is None
    assert any("single episode" in warning for warning in estimate.warnings)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_more_parameters_than_rows(name):
    problem = prepare_problem(continuous_log(20), NOISY, GAMMA, 3, np.random.default_rng(0))
    system = make_feature_system(
        problem, RandomFourierFeatures(0.3, 100, seed=1), gamma=GAMMA, instruments=200, seed=2
    )
    estimate = CLOSED_FORMS[name](system)
    assert math.isfinite(estimate.value)
    assert estimate.standard_error is None or math.isfinite(estimate.standard_error)


def test_a_fit_that_spends_all_degrees_of_freedom_has_no_standard_error():
    problem = prepare_problem(continuous_log(20), NOISY, GAMMA, 3, np.random.default_rng(0))
    system = make_feature_system(
        problem, RandomFourierFeatures(0.3, 100, seed=1), gamma=GAMMA, instruments=200, seed=2
    )
    estimate = lstdq(system, ridge=0.0)
    assert estimate.standard_error is None
    assert any("degrees of freedom" in warning for warning in estimate.warnings)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (np.zeros(60), "all zero"),
        (np.full(60, np.nan), "not finite"),
        (np.ones(59), r"\(59,\)"),
    ],
)
def test_weights_that_are_none(weights, sentence):
    system = small_system("discrete")
    with pytest.raises(DataError, match=sentence):
        describe_weights(system, weights)
    with pytest.raises(DataError, match=sentence):
        drl(system, zeros(system), weights)


def test_values_of_another_log():
    system = small_system("discrete")
    with pytest.raises(DataError, match="59"):
        drl(system, dataclasses.replace(zeros(system), now=np.zeros(59)), np.ones(60))


def test_values_that_have_seen_their_rows_are_said_to():
    system = small_system("discrete")
    assert any("has seen the rows" in warning for warning in drl(system, zeros(system, 0.0)).warnings)
    assert not any("has seen the rows" in warning for warning in drl(system, zeros(system)).warnings)


def test_a_log_that_never_goes_where_the_policy_goes_is_reported():
    """Weights that put everything on one row, and too much of it."""
    system = small_system("continuous")
    one = np.zeros(len(system))
    one[3] = 20.0 * len(system)
    estimate = drl(system, zeros(system), one)
    assert estimate.effective_sample_size == pytest.approx(1.0)
    sentences = " ".join(estimate.warnings)
    assert "a few of them decide" in sentences
    assert "where 1 is right" in sentences
    assert "does not cover the policy" in sentences


def test_level_and_ridge_are_checked():
    system = small_system("discrete")
    with pytest.raises(ConfigError, match=r"level is 1\.5"):
        mql(system, level=1.5)
    with pytest.raises(ConfigError, match="ridge is -1"):
        mql(system, ridge=-1.0)
    with pytest.raises(ConfigError, match="ridge is -1"):
        lstdq(system, ridge=-1.0)


def test_rewards_that_are_all_zero_are_worth_nothing():
    system = small_system("discrete")
    silent = dataclasses.replace(system, rewards=torch.zeros_like(system.rewards), value_bounds=(0.0, 0.0))
    for estimator in CLOSED_FORMS.values():
        estimate = estimator(silent)
        assert estimate.value == pytest.approx(0.0, abs=1e-12)
        assert estimate.standard_error == pytest.approx(0.0, abs=1e-12)
