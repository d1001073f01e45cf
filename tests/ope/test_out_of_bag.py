"""Passes over rows against double loops: residuals, out-of-bag values, held-out loss,
doubly robust sums.

Tolerances: the held-out loss is a small difference of large sums.
"""

import dataclasses

import numpy as np
import pytest
import torch

from koffline.config import EvaluationSettings
from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.estimators.doubly_robust import drl
from koffline.ope.log.problem import prepare_problem
from koffline.ope.log.row_values import RowValues
from koffline.ope.networks.out_of_bag import RowSums, pass_over_rows
from koffline.ope.networks.resampling import Resampling, start_values
from koffline.ope.workspace import open_workspace
from tests import reference_closed_form as reference
from tests.ope.bellman_test.problems import known_problem
from tests.ope.problems import (
    NOISY,
    SOFT,
    discrete_log,
    plain_q,
    prepared,
    stack,
    uneven_log,
)

KINDS = ("discrete", "continuous")
GAMMA = 0.9


def plain_residuals(problem, network, replica):
    residuals = []
    for row in range(problem.n_rows):
        now = plain_q(network, replica, problem.inputs[row : row + 1])[0]
        later = plain_q(network, replica, problem.next_inputs[row])  # (m, n)
        if problem.readout is None:
            value = now[0]
            following = later[:, 0].mean()
        else:
            value = now @ problem.readout[row]
            following = later[0] @ problem.next_probabilities[row]
        residuals.append(
            problem.rewards[row] + problem.discounts[row] * following - value
        )
    return np.array(residuals)


@pytest.mark.parametrize("kind", KINDS)
def test_start_values_are_expectations_also_where_no_return_is_so_low(kind):
    problem = dataclasses.replace(prepared(kind), value_bounds=(1e6, 1e6 + 1.0))
    network, _ = stack(problem)
    for start in range(3):
        outputs = plain_q(network, 1, problem.start_inputs[start])
        if problem.readout is None:
            plain = outputs[:, 0].mean()
        else:
            plain = outputs[0] @ problem.start_probabilities[start]
        expected = plain * problem.reward_scale
        assert float(start_values(network, problem)[1, start]) == pytest.approx(
            expected, abs=1e-12
        )


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_loss_is_the_u_statistic_of_unseen_rows(kind, monkeypatch):
    monkeypatch.setattr("koffline.ope.networks.resampling._MOST_ROWS", 13)
    problem = prepared(kind)
    network, table = stack(problem, replicas=3)
    drawn = Resampling.draw(problem, 1, 2, seed=5)
    instruments = random_fourier_features(
        Gaussian(1.0),
        table.kernel_inputs.shape[1],
        60,
        torch.Generator().manual_seed(1),
    )
    resampling = Resampling(5, 0, drawn.streams)
    duals = torch.ones(2, 60).double()
    passed = pass_over_rows(network, 1, resampling, instruments, duals, problem)
    measured = passed.diagnostics(problem.reward_scale)
    psi = instruments(table.kernel_inputs).numpy()
    losses = []
    ratios = []
    for replica in (1, 2):
        unseen = np.flatnonzero(drawn.row_counts(problem)[replica] == 0)
        residual = plain_residuals(problem, network, replica)
        pairs = [(i, j) for i in unseen for j in unseen if i != j]
        off = sum(psi[i] @ psi[j] * residual[i] * residual[j] for i, j in pairs)
        diagonal = sum(residual[i] ** 2 for i in unseen)
        losses.append(off / len(pairs))
        ratios.append((off + diagonal) / diagonal)
    assert measured["held_out_kernel_loss"] == pytest.approx(
        np.mean(losses) * problem.reward_scale**2, rel=1e-4
    )
    assert measured["held_out_kernel_ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
    of_network = plain_residuals(problem, network, 0) * problem.reward_scale
    assert measured["residual_mean"] == pytest.approx(of_network.mean(), abs=1e-5)
    assert measured["residual_rms"] == pytest.approx(
        np.sqrt(np.mean(of_network**2)), rel=1e-5
    )
    np.testing.assert_allclose(
        passed.sample(problem.reward_scale), of_network, atol=1e-5
    )


def test_means_over_the_networks_that_left_the_episode_out() -> None:
    settings = EvaluationSettings(
        gamma=0.9, steps=20, full_replicas=1, resampled_replicas=4
    )
    with open_workspace(discrete_log(), SOFT, settings) as workspace, torch.no_grad():
        fitted = workspace.fitted
        values = workspace.row_values
        problem = workspace.problem
    network = fitted.heads["kloss"]
    counts = fitted.resampling.row_counts(problem)[1:]
    for row in range(problem.n_rows):
        unseen = [
            replica for replica in range(4) if counts[replica, row] == 0
        ] or range(4)
        for predicted, inputs, readout in (
            (values.now, problem.inputs[row], problem.readout),
            (values.later, problem.next_inputs[row, 0], problem.next_probabilities),
        ):
            outputs = np.mean(
                [plain_q(network, 1 + replica, inputs) for replica in unseen], axis=0
            )
            expected = outputs @ readout[row] * problem.reward_scale
            np.testing.assert_allclose(predicted[row], expected, rtol=1e-10, atol=1e-12)
    assert values.unseen == np.mean((counts == 0).any(axis=0))


def asked(kind, starts=None):
    """A problem with values and weights of its rows, and the same as plain columns."""
    policy = SOFT if kind == "discrete" else NOISY
    problem = prepare_problem(
        uneven_log(kind, 12), policy, GAMMA, 3, np.random.default_rng(0), starts
    )
    generator = np.random.default_rng(1)
    n = problem.n_rows
    drawn = (generator.normal(size=size) for size in (n, n, len(problem.start_weights)))
    values = RowValues(*drawn, weights=generator.gamma(2.0, size=n))
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
    expected = reference.doubly_robust(
        values.weights, columns, values.now, values.later, values.starts
    )
    assert sums.value == pytest.approx(expected, rel=1e-12)
    terms = values.weights * (
        columns["rewards"] + columns["discounts"] * values.later - values.now
    )
    arguments = (
        columns,
        problem.episode_starts,
        terms,
        values.starts,
        problem.fixed_starts,
    )
    error = reference.standard_error(*arguments)
    assert sums.standard_error() == pytest.approx(error, rel=1e-12)
    assert drl(sums, least=1e3 * error).interval.width == pytest.approx(2e3 * error)
    mass = np.average(
        values.weights * (1.0 - problem.discounts), weights=problem.row_weights
    )
    assert sums.diagnostics()["mass"] == pytest.approx(mass)


def test_sums_of_parts_add_up_and_given_starts_count_once():
    problem, values, _ = asked("discrete", np.zeros((5, 2)))
    whole = RowSums.of(problem, values)
    other = RowSums.of(
        dataclasses.replace(problem, clusters=problem.units + len(problem.units)),
        values,
    )
    sums = {"start_value": whole.start_value, "start_weight": whole.start_weight}
    doubled = dataclasses.replace(whole + other, **sums)
    assert doubled.value == pytest.approx(whole.value)
    assert doubled.count == 2 * whole.count


@pytest.mark.parametrize("ending", [0.0, 0.1])
def test_exact_with_the_true_q_and_any_weights_but_for_noise(ending):
    """Q^π with empirical next states replaced by expectations: rewards belong to pairs,
    nothing is left.
    """
    known = known_problem(0, 400, behavior=True, states=5, ending=ending)
    log = known.transitions
    mdp = known.world.mdp
    states = mdp.state_values(known.target, GAMMA)
    truth = states[known.world.states_of(log.observations[:50])]
    generator = np.random.default_rng(0)
    problem = prepare_problem(
        log, known.policy, GAMMA, 1, generator, log.observations[:50]
    )
    pair = (known.world.states_of(log.observations), log.actions)
    following = GAMMA * (mdp.transition @ states)[pair]
    discounts = problem.discounts
    later = np.divide(
        following, discounts, out=np.zeros_like(discounts), where=discounts > 0
    )
    now = np.where(discounts > 0.0, known.q(log.observations, log.actions), log.rewards)
    values = RowValues(now, later, truth, weights=generator.normal(size=len(log)))
    assert RowSums.of(problem, values).value == pytest.approx(truth.mean(), rel=1e-12)
