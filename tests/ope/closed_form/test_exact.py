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
from tests.ope.bellman_test.problems import known_problem
from tests.ope.closed_form.systems import GAMMA, combined, described, plain, small_system
from tests.ope.intervals.systems import OneHotStates

ENDING = pytest.mark.parametrize("ending", [0.0, 0.1])


def one_hot(ending=0.1):
    """Independent tuples of a random process, its pairs as features: Q^π and d^π/μ are in the class."""
    known = known_problem(0, 400, behavior=True, states=5, ending=ending)
    log, generator = known.transitions, np.random.default_rng(0)
    features = OneHotStates(known.world, log.observations.mean(axis=0), log.observations.std(axis=0))
    problem = prepare_problem(log, known.policy, GAMMA, 1, generator, log.observations[:50])
    options = {"gamma": GAMMA, "constant": False, "instruments": 400, "seed": 3}
    return known, make_feature_system(problem, features, **options)


def certainty_equivalence(known):
    """Value of the empirical process by value iteration from counts, without any feature."""
    log, (states, actions) = known.transitions, known.target.shape
    now, later = (known.world.states_of(part) for part in (log.observations, log.next_observations))
    count, gain = np.zeros((2, states, actions))
    move = np.zeros((states, actions, states))
    for i, pair in enumerate(zip(now, log.actions, strict=True)):
        count[pair] += 1.0
        gain[pair] += log.rewards[i]
        move[(*pair, later[i])] += not log.terminated[i]
    seen, q = np.maximum(count, 1.0), np.zeros((states, actions))
    for _ in range(1000):
        q = gain / seen + GAMMA * (move @ (known.target * q).sum(axis=1)) / seen
    return float((known.target * q).sum(axis=1)[now[:50]].mean())


@ENDING
def test_without_ridge_all_fits_in_one_hot_features_are_certainty_equivalence(ending):
    known, system = one_hot(ending)
    value = certainty_equivalence(known)
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
    """Q^π with empirical next states replaced by expectations: rewards belong to pairs, nothing is left."""
    known, system = one_hot(ending)
    log, mdp, values = known.transitions, known.world.mdp, known.world.mdp.state_values(known.target, GAMMA)
    truth = values[known.world.states_of(log.observations[:50])]
    pair, discounts = (known.world.states_of(log.observations), log.actions), system.discounts.numpy()
    following = GAMMA * (mdp.transition @ values)[pair]
    later = np.divide(following, discounts, out=np.zeros_like(discounts), where=discounts > 0)
    now = np.where(discounts > 0.0, known.q(log.observations, log.actions), log.rewards)
    omega = np.random.default_rng(0).normal(size=len(system))
    found = doubly_robust_value(combined(system, RowValues(now, later, truth, 1.0), omega))
    assert found == pytest.approx(truth.mean(), rel=1e-12)


def test_weights_are_scaled_to_the_right_mass_where_no_constant_sees_to_it():
    _, system = one_hot()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXACT_PROBLEMS))
def test_errors_are_what_the_standard_errors_say(name):
    """In the median of five logs: what is more than two standard errors is what the features miss."""
    errors = {key: [] for key in PATHS}
    for seed in range(5):
        problem, generator = EXACT_PROBLEMS[name](seed, 2000), np.random.default_rng(seed)
        prepared = prepare_problem(problem.transitions, problem.policy, problem.gamma, 8, generator)
        system = make_feature_system(prepared, gamma=problem.gamma, instruments=300, seed=seed)
        for key in PATHS:
            found = closed_form(key, system)
            errors[key].append(abs(found.value - problem.value_at_starts) / found.standard_error)
    assert all(np.median(errors[key]) < 2.5 for key in PATHS), errors
