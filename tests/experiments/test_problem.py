"""Truths against exact values of a finite chain in disguise; measures against plain
loops.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from koffline.envs.boxes import BoxWorld, Outcome
from koffline.experiments import benchmark as problems
from koffline.experiments.benchmark import (
    GAMMA,
    MEASURES,
    Metrics,
    Problem,
    build_problem,
    monte_carlo_values,
)
from koffline.replicas import StackedMLP

SMALL = problems.ProblemSettings(
    "mountain_car", rows=60, held_out_rows=40, truth_repeats=3
)


@dataclass(frozen=True)
class Corridor(BoxWorld):
    """Cells 0 … 4 along the first axis; action 1 moves right with probability 0.8; the
    last cell ends.
    """

    noise: float = 0.0
    low = (0.0, 0.0)
    high = (5.0, 1.0)
    grid = (5, 1)
    reward_scale = 1.0
    n_actions = 2

    def reset(self, n, generator):
        return np.full((n, 2), 0.5)

    def step(self, state, action, generator):
        moved = (generator.random(len(state)) < 0.8) & (action == 1)
        following = state + np.stack([moved, np.zeros(len(state))], axis=1)
        return Outcome(following, -1.0 - state[:, 0] // 1, self.is_terminal(following))

    def is_terminal(self, state):
        return state[:, 0] >= 4.0


def half(observations):
    return np.full((len(observations), 2), 0.5)


def exact(gamma):
    """V of cells 0 … 3 by hand: −1 − i + γ (0.4 V(i + 1) + 0.6 V(i))."""
    values = [0.0]
    for cell in (3, 2, 1, 0):
        values.append((-1.0 - cell + gamma * 0.4 * values[-1]) / (1.0 - gamma * 0.6))
    return np.array(values[:0:-1])


STATES = np.array([[0.5, 0.2], [1.5, 0.9], [2.5, 0.5], [3.5, 0.1]])


def test_the_grid_is_exact_where_cells_are_states():
    actual = problems.grid_values(
        Corridor(), half, STATES, 0.9, np.random.default_rng(0), samples=20_000
    )
    np.testing.assert_allclose(actual.values, exact(0.9), atol=0.15)
    assert actual.noise == 0.0


def test_monte_carlo_is_unbiased_and_knows_its_error():
    """Means of independent repetitions scatter around the exact values by the reported
    error.
    """
    generator = np.random.default_rng(1)
    runs = [
        monte_carlo_values(Corridor(), half, STATES, 0.9, generator, repeats=50)
        for _ in range(100)
    ]
    values = np.array([run.values for run in runs])
    scatter = values.std(axis=0, ddof=1)
    reported = np.mean([run.standard_errors for run in runs], axis=0)
    # 100 draws: a standard error of 7 %
    np.testing.assert_allclose(scatter, reported, rtol=0.3)
    # Four standard errors of the mean of 100 runs; one in 4000 such tests of four
    # states fails.
    assert (np.abs(values.mean(axis=0) - exact(0.9)) < 4.0 * scatter / 10.0).all()


def test_variance_leaves_the_noise_out():
    generator = np.random.default_rng(2)
    noisy = monte_carlo_values(
        Corridor(), half, np.repeat(STATES, 4000, axis=0), 0.9, generator, repeats=3
    )
    # three standard errors
    assert noisy.variance == pytest.approx(exact(0.9).var(), rel=0.15)
    assert noisy.values.var() > 1.5 * noisy.variance


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(SMALL)


@pytest.fixture(scope="module")
def network() -> StackedMLP:
    return StackedMLP.initialise((2, 8, 1), [1, 2])


def value_of(network, problem, states, replica):
    inputs = torch.from_numpy(problems.to_unit_square(problem.world, states)).float()
    return 10.0 * network.forward(inputs)[replica, :, 0].double().numpy()


def measured(problem, network):
    with torch.no_grad():
        return dict(
            zip(
                MEASURES,
                Metrics(problem, 10.0)(0, network).double().numpy().T,
                strict=True,
            )
        )


def test_errors_against_both_truths(problem, network):
    actual = measured(problem, network)
    for replica in range(2):
        value = value_of(network, problem, problem.log.states, replica)
        error = np.mean((value - problem.monte_carlo.values) ** 2)
        noise = np.mean(problem.monte_carlo.standard_errors**2)
        assert actual["mse_monte_carlo"][replica] == pytest.approx(
            error - noise, rel=1e-4
        )
        paper = np.mean((value - problem.paper.values) ** 2)
        assert actual["mse_paper"][replica] == pytest.approx(paper, rel=1e-4)
        assert actual["largest_value"][replica] == pytest.approx(
            np.abs(value).max(), rel=1e-5
        )


def test_bellman_error_is_the_product_of_independent_halves(problem, network):
    actual = measured(problem, network)
    backups = problem.backups
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
                    target = backups.rewards[row, action, draw] + (
                        0.0 if ended else GAMMA * following
                    )
                    backup += backups.weights[row, action] * target / 4
            halves.append(backup - value[row])
        total += halves[0] * halves[1] / len(backups.states)
    assert actual["bellman_error"][1] == pytest.approx(total, rel=1e-3)


def test_losses_and_held_out_loss_are_double_sums(problem, network):
    actual = measured(problem, network)

    def residuals(tuples):
        value = value_of(network, problem, tuples.states, 0)
        following = value_of(network, problem, tuples.next_states, 0)
        return (
            tuples.rewards + np.where(tuples.terminated, 0.0, GAMMA * following) - value
        )

    def gram(tuples):
        x = problems.to_unit_square(problem.world, tuples.states)
        return np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=2) / 0.25)

    delta = residuals(problem.log)
    k = gram(problem.log)
    assert actual["kernel_loss"][0] == pytest.approx(
        delta @ k @ delta / len(delta) ** 2, rel=1e-3
    )
    assert actual["l2_loss"][0] == pytest.approx(np.mean(delta**2), rel=1e-4)
    delta = residuals(problem.held_out)
    k = gram(problem.held_out)
    np.fill_diagonal(k, 0.0)
    expected = delta @ k @ delta / (len(delta) * (len(delta) - 1))
    assert Metrics(problem, 10.0).held_out_loss(network)[0] == pytest.approx(
        expected, rel=1e-4, abs=1e-8
    )


def test_the_same_settings_give_the_same_problem(problem, tmp_path):
    again = build_problem(SMALL)
    np.testing.assert_array_equal(again.log.next_states, problem.log.next_states)
    np.testing.assert_array_equal(again.monte_carlo.values, problem.monte_carlo.values)
    assert not np.array_equal(
        build_problem(replace(SMALL, seed=1)).log.states, problem.log.states
    )
    Problem.write(tmp_path / "problem.npz", SMALL)
    loaded = Problem.load(tmp_path / "problem.npz", SMALL)
    np.testing.assert_array_equal(
        loaded.backups.next_states, problem.backups.next_states
    )
    np.testing.assert_array_equal(loaded.paper.values, problem.paper.values)
