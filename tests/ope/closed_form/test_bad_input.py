"""What logs and weights too poor for an estimate give: a sentence, or a warning inside it; never NaN."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from koffline.errors import ConfigError, DataError
from koffline.ope.closed_form.estimates import CLOSED_FORMS, drl
from koffline.ope.closed_form.sums import warnings_of_weights
from koffline.ope.features import make_feature_system
from koffline.ope.problem import prepare_problem
from koffline.ope.value_functions import RowValues
from koffline.solvers.features import RandomFourierFeatures
from tests.ope.closed_form.systems import GAMMA, described, small_system
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_one_episode_has_an_estimate_and_no_spread(name):
    log = discrete_log(60, length=60)
    problem = prepare_problem(log, SOFT, GAMMA, 1, np.random.default_rng(0), np.zeros((1, 2)))
    features = RandomFourierFeatures(1.5, 6, seed=1)
    estimate = CLOSED_FORMS[name](make_feature_system(problem, features, gamma=GAMMA, instruments=40))
    assert math.isfinite(estimate.value)
    assert estimate.standard_error is None
    assert estimate.interval is None
    assert any("single episode" in warning for warning in estimate.warnings)


def test_more_parameters_than_rows():
    problem = prepare_problem(continuous_log(20), NOISY, GAMMA, 3, np.random.default_rng(0))
    features = RandomFourierFeatures(0.3, 100, seed=1)
    system = make_feature_system(problem, features, gamma=GAMMA, instruments=200, seed=2)
    for estimator in CLOSED_FORMS.values():
        estimate = estimator(system)
        assert math.isfinite(estimate.value)
        assert estimate.standard_error is None or math.isfinite(estimate.standard_error)
    spent = CLOSED_FORMS["lstdq"](system, ridge=0.0)
    assert spent.standard_error is None
    assert any("degrees of freedom" in warning for warning in spent.warnings)


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_weights_that_are_none(weight):
    with pytest.raises(DataError, match="all zero or not finite"):
        described(small_system("discrete"), np.full(60, weight))


def test_values_that_have_seen_their_rows_are_said_to():
    system = small_system("discrete")
    n, starts = len(system), len(system.start_weights)
    for unseen in (0.0, 1.0):
        zeros = RowValues(np.zeros(n), np.zeros(n), np.zeros(starts), unseen)
        warned = any("has seen the rows" in warning for warning in drl(system, zeros).warnings)
        assert warned == (unseen == 0.0)


def test_a_log_that_never_goes_where_the_policy_goes_is_reported():
    """Weights that put everything on one row, and too much of it."""
    system = small_system("continuous")
    one = np.zeros(len(system))
    one[3] = 20.0 * len(system)
    found = described(system, one)
    assert found["effective_units"] == pytest.approx(1.0)
    sentences = " ".join(warnings_of_weights(found, len(system)))
    for words in ("a few of them decide", "where 1 is right", "does not cover the policy"):
        assert words in sentences
    assert "negative" not in sentences
    assert "100% of the weights are negative" in warnings_of_weights(described(system, -one), 50)[-1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mql", {"level": 1.5}, r"level is 1\.5"),
        ("mql", {"ridge": -1.0}, "ridge is -1"),
        ("lstdq", {"ridge": -1.0}, "ridge is -1"),
    ],
)
def test_level_and_ridge_are_checked(name, options, message):
    with pytest.raises(ConfigError, match=message):
        CLOSED_FORMS[name](small_system("discrete"), **options)


def test_rewards_that_are_all_zero_are_worth_nothing():
    system = small_system("discrete")
    silent = dataclasses.replace(system, rewards=torch.zeros_like(system.rewards), value_bounds=(0.0, 0.0))
    for estimator in CLOSED_FORMS.values():
        estimate = estimator(silent)
        assert estimate.value == pytest.approx(0.0, abs=1e-12)
        assert estimate.standard_error == pytest.approx(0.0, abs=1e-12)
