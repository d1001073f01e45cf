"""The doubly robust sums against loops in numpy, and their value with the true Q on a finite process."""

import dataclasses

import numpy as np
import pytest

from koffline.ope.importance.problem import RowValues
from koffline.ope.out_of_bag import RowSums, drl
from koffline.ope.problem import prepare_problem
from tests import reference_closed_form as reference
from tests.ope.bellman_test.problems import known_problem
from tests.ope.problems import NOISY, SOFT, uneven_log

GAMMA = 0.9


def asked(kind, starts=None):
    """A problem with values and weights of its rows, and the same as plain columns."""
    policy = SOFT if kind == "discrete" else NOISY
    problem = prepare_problem(uneven_log(kind, 12), policy, GAMMA, 3, np.random.default_rng(0), starts)
    generator, n = np.random.default_rng(1), problem.n_rows
    values = RowValues(
        generator.normal(size=n),
        generator.normal(size=n),
        generator.normal(size=len(problem.start_weights)),
        weights=generator.gamma(2.0, size=n),
    )
    columns = {
        "rewards": problem.rewards * problem.reward_scale,
        "discounts": problem.discounts,
        "weights": problem.row_weights,
        "start_weights": problem.start_weights,
    }
    return problem, values, columns


@pytest.mark.parametrize("kind", ["discrete", "continuous", "rows"])
@pytest.mark.parametrize("starts", [None, np.random.default_rng(2).normal(size=(7, 2))])
def test_value_and_standard_error_are_those_of_sums_over_units(kind, starts):
    problem, values, columns = asked(kind, starts)
    sums = RowSums.of(problem, values)
    expected = reference.doubly_robust(values.weights, columns, values.now, values.later, values.starts)
    assert sums.value == pytest.approx(expected, rel=1e-12)
    terms = values.weights * (columns["rewards"] + columns["discounts"] * values.later - values.now)
    error = reference.standard_error(
        columns, problem.episode_starts, terms, values.starts, problem.fixed_starts
    )
    assert sums.standard_error() == pytest.approx(error, rel=1e-12)
    assert drl(sums, spread=2.0 * error).standard_error == pytest.approx(2.0 * error)
    mass = np.average(values.weights * (1.0 - problem.discounts), weights=problem.row_weights)
    assert sums.diagnostics()["mass"] == pytest.approx(mass)


def test_sums_of_parts_add_up_and_given_starts_count_once():
    problem, values, _ = asked("discrete", np.zeros((5, 2)))
    whole = RowSums.of(problem, values)
    doubled = dataclasses.replace(
        whole + whole, start_value=whole.start_value, start_weight=whole.start_weight
    )
    assert doubled.value == pytest.approx(whole.value)
    assert doubled.count == 2 * whole.count


@pytest.mark.parametrize("ending", [0.0, 0.1])
def test_exact_with_the_true_q_and_any_weights_but_for_noise(ending):
    """Q^π with empirical next states replaced by expectations: rewards belong to pairs, nothing is left."""
    known = known_problem(0, 400, behavior=True, states=5, ending=ending)
    log, mdp = known.transitions, known.world.mdp
    states = mdp.state_values(known.target, GAMMA)
    truth = states[known.world.states_of(log.observations[:50])]
    generator = np.random.default_rng(0)
    problem = prepare_problem(log, known.policy, GAMMA, 1, generator, log.observations[:50])
    pair = (known.world.states_of(log.observations), log.actions)
    following, discounts = GAMMA * (mdp.transition @ states)[pair], problem.discounts
    later = np.divide(following, discounts, out=np.zeros_like(discounts), where=discounts > 0)
    now = np.where(discounts > 0.0, known.q(log.observations, log.actions), log.rewards)
    values = RowValues(now, later, truth, weights=generator.normal(size=len(log)))
    assert RowSums.of(problem, values).value == pytest.approx(truth.mean(), rel=1e-12)
