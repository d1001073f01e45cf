"""Identities on finite processes whose pairs are the features: certainty equivalence, true q, true ω."""

import numpy as np
import pytest

from koffline.ope.closed_form import closed_form, doubly_robust_value
from koffline.ope.closed_form.fits import PATHS, fit, whitened_path
from koffline.ope.closed_form.moments import whole_moments
from koffline.ope.features import make_feature_system
from koffline.ope.importance.problem import RowValues
from koffline.ope.problem import prepare_problem
from tests import reference_closed_form as reference
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.closed_form.systems import GAMMA, combined, described, one_hot_problem, plain, small_system

ENDING = pytest.mark.parametrize("ending", [0.0, 0.1])


@ENDING
def test_without_ridge_all_fits_in_one_hot_features_are_certainty_equivalence(ending):
    problem = one_hot_problem(ending=ending)
    system, value = problem.system, problem.certainty_equivalence()
    for name in ("mql", "lstdq", "mwl"):
        found = fit(name, system, 0.0)
        assert system.value(found.theta) == pytest.approx(value, rel=1e-8)
        weighted = reference.weighted_reward(found.weights(system).numpy(), plain(system))
        assert weighted == pytest.approx(value, rel=1e-8)
    # where ζ can tell all pairs apart, its own small ridge moves nothing that has an exact solution
    dice = whitened_path(1e-6, system, whole_moments(system)).theta(0.0)
    assert system.value(dice) == pytest.approx(value, rel=1e-6)


@ENDING
def test_the_doubly_robust_value_is_exact_with_the_true_q_and_any_weights_but_for_noise(ending):
    """With Q^π and the empirical next states replaced by expectations every correction vanishes."""
    problem = one_hot_problem(ending=ending)
    q, system = problem.q, problem.system
    truth = (problem.target * q).sum(axis=1)
    expected_reward = np.einsum("sat,sat->sa", problem.mdp.transition, problem.mdp.reward)
    following = np.einsum("sat,t->sa", problem.mdp.transition, truth)
    pair = problem.states, problem.actions
    noise = problem.rewards - expected_reward[pair]
    np.testing.assert_allclose(noise, 0.0, atol=1e-12)  # this process pays by the pair
    discounts = system.discounts.numpy()
    later = np.divide(GAMMA * following[pair], discounts, out=np.zeros_like(discounts), where=discounts > 0)
    rows = discounts > 0.0
    values = RowValues(np.where(rows, q[pair], problem.rewards), later, truth[problem.start_states], 1.0)
    omega = np.random.default_rng(0).normal(size=len(system))
    assert doubly_robust_value(combined(system, values, omega)) == pytest.approx(
        truth[problem.start_states].mean(), rel=1e-12
    )


def test_weights_are_scaled_to_the_right_mass_where_no_constant_sees_to_it():
    system = one_hot_problem().system
    weights = fit("mwl", system, 0.1).weights(system).numpy()
    mass = described(system, weights)["mass"]
    assert abs(mass - 1.0) > 0.01
    found = closed_form("mwl", system, ridge=0.1)
    raw = reference.weighted_reward(weights, plain(system))
    assert found.value == pytest.approx(raw / mass, rel=1e-10)
    assert found.diagnostics["mass"] == pytest.approx(1.0)
    with_constant = small_system("discrete")
    weights = fit("mwl", with_constant, 1.0).weights(with_constant).numpy()
    assert described(with_constant, weights)["mass"] == pytest.approx(1.0, rel=1e-8)


def errors(name, seed, rows):
    """Error of every estimator against the value at the log's starts: relative, and in standard errors."""
    problem = EXACT_PROBLEMS[name](seed, rows)
    generator = np.random.default_rng(seed)
    prepared = prepare_problem(problem.transitions, problem.policy, problem.gamma, 8, generator)
    system = make_feature_system(prepared, gamma=problem.gamma, instruments=300, seed=seed)
    found = {key: closed_form(key, system) for key in PATHS}
    off = {key: abs(estimate.value - problem.value_at_starts) for key, estimate in found.items()}
    return {
        key: (off[key] / abs(problem.value_at_starts), off[key] / found[key].standard_error) for key in found
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXACT_PROBLEMS))
def test_errors_are_what_the_standard_errors_say(name):
    """In the median of five logs: what is more than two standard errors is what the features miss."""
    found = [errors(name, seed, 2000) for seed in range(5)]
    for key in PATHS:
        assert np.median([log[key][1] for log in found]) < 2.5, key
