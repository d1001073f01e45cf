"""The measures of a benchmark against plain loops over states and draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from koffline.envs.boxes import to_unit_square
from koffline.experiments.problem import GAMMA, Problem, ProblemSettings, build_problem
from koffline.experiments.value_networks import NAMES, Metrics, held_out_kernel_loss
from koffline.replicas import StackedMLP

SMALL = ProblemSettings("mountain_car", rows=100, held_out_rows=40, truth_repeats=3)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(SMALL)


@pytest.fixture(scope="module")
def network() -> StackedMLP:
    return StackedMLP.initialise((2, 8, 1), [1, 2])


def value_of(network, problem, states, replica):
    inputs = torch.from_numpy(to_unit_square(problem.world, states)).float()
    return 10.0 * network.forward(inputs)[replica, :, 0].double().numpy()


def measured(problem, network):
    with torch.no_grad():
        return dict(zip(NAMES, Metrics(problem, 10.0)(0, network).double().numpy().T, strict=True))


def test_errors_against_both_truths(problem, network):
    found = measured(problem, network)
    for replica in range(2):
        value = value_of(network, problem, problem.log.states, replica)
        error = np.mean((value - problem.monte_carlo.values) ** 2)
        noise = np.mean(problem.monte_carlo.standard_errors**2)
        assert found["mse_monte_carlo"][replica] == pytest.approx(error - noise, rel=1e-4)
        paper = np.mean((value - problem.paper.values) ** 2)
        assert found["mse_paper"][replica] == pytest.approx(paper, rel=1e-4)
        assert found["largest_value"][replica] == pytest.approx(np.abs(value).max(), rel=1e-5)


def test_bellman_error_is_the_product_of_independent_halves(problem, network):
    found, backups = measured(problem, network), problem.backups
    value = value_of(network, problem, backups.states, 1)
    total = 0.0
    for row in range(len(backups.states)):
        halves = []
        for draws in (range(4), range(4, 8)):
            backup = 0.0
            for action in range(3):
                for draw in draws:
                    next_state = backups.next_states[row, action, draw][None]
                    following = value_of(network, problem, next_state, 1)[0]
                    ended = backups.terminated[row, action, draw]
                    target = backups.rewards[row, action, draw] + (0.0 if ended else GAMMA * following)
                    backup += backups.weights[row, action] * target / 4
            halves.append(backup - value[row])
        total += halves[0] * halves[1] / len(backups.states)
    assert found["bellman_error"][1] == pytest.approx(total, rel=1e-3)


def test_losses_and_held_out_loss_are_double_sums(problem, network):
    found = measured(problem, network)

    def residuals(tuples):
        value = value_of(network, problem, tuples.states, 0)
        following = value_of(network, problem, tuples.next_states, 0)
        return tuples.rewards + np.where(tuples.terminated, 0.0, GAMMA * following) - value

    def gram(tuples):
        x = to_unit_square(problem.world, tuples.states)
        return np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=2) / 0.25)

    delta, k = residuals(problem.log), gram(problem.log)
    assert found["kernel_loss"][0] == pytest.approx(delta @ k @ delta / len(delta) ** 2, rel=1e-3)
    assert found["l2_loss"][0] == pytest.approx(np.mean(delta**2), rel=1e-4)
    delta, k = residuals(problem.held_out), gram(problem.held_out)
    np.fill_diagonal(k, 0.0)
    expected = delta @ k @ delta / (len(delta) * (len(delta) - 1))
    assert held_out_kernel_loss(problem, network, 10.0)[0] == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_a_diverged_replica_is_nan_and_leaves_the_other_alone(problem, network):
    broken = network.with_flat(network.flat.clone())
    broken.flat[0] = float("nan")
    found, whole = measured(problem, broken), measured(problem, network)
    for name in NAMES:
        assert np.isnan(found[name][0])
        assert found[name][1] == whole[name][1]


def test_the_same_settings_give_the_same_problem(problem, tmp_path):
    again = build_problem(SMALL)
    np.testing.assert_array_equal(again.log.next_states, problem.log.next_states)
    np.testing.assert_array_equal(again.monte_carlo.values, problem.monte_carlo.values)
    other = build_problem(replace(SMALL, seed=1))
    assert not np.array_equal(other.log.states, problem.log.states)
    problem.save(tmp_path / "problem.npz")
    loaded = Problem.load(tmp_path / "problem.npz", SMALL)
    np.testing.assert_array_equal(loaded.backups.next_states, problem.backups.next_states)
    np.testing.assert_array_equal(loaded.paper.values, problem.paper.values)
