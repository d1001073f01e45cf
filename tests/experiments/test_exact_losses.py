"""The exact minimisers of the losses, against losses that are summed term by term and
minimised by a general optimiser.
"""

import numpy as np
import pytest
from scipy.optimize import minimize

from koffline.envs.boxes import make_world
from koffline.envs.finite import Grid
from koffline.experiments.benchmark import GAMMA, Problem, SoftmaxProblem, build_problem
from koffline.experiments.choices_traits import _bellman_operator
from koffline.experiments.exact_losses import (
    DIAG_WEIGHTS,
    ExactCell,
    Moments,
    measure_losses,
    measures_of,
    moments_of,
)

STATES = 4


def drawn_transitions(seed: int) -> list[list[tuple[float, int | None, float]]]:
    """From each state three transitions (probability, next state or None, reward)."""
    generator = np.random.default_rng(seed)
    transitions = []
    for _ in range(STATES):
        shares = generator.dirichlet(np.ones(3)).tolist()
        ends: list[int | None] = [*generator.integers(STATES, size=2).tolist(), None]
        rewards = generator.normal(size=3).tolist()
        transitions.append(list(zip(shares, ends, rewards, strict=True)))
    return transitions


def residual(values: np.ndarray, state: int, end: int | None, reward: float) -> float:
    future = 0.0
    if end is not None:
        future = GAMMA * values[end]
    return reward + future - values[state]


def naive_loss(transitions, gram, weight, values) -> float:
    """(1 − w) U + w · mean squared residual, by loops over states and transitions."""
    means = np.zeros(STATES)
    squares = np.zeros(STATES)
    for state, outcomes in enumerate(transitions):
        for share, end, reward in outcomes:
            delta = residual(values, state, end, reward)
            means[state] += share * delta
            squares[state] += share * delta**2
    pairs = 0.0
    for i in range(STATES):
        for j in range(STATES):
            pairs += gram[i, j] * means[i] * means[j] / STATES**2
    return (1.0 - weight) * pairs + weight * squares.mean()


def moments_by_hand(transitions) -> Moments:
    bellman = np.zeros((STATES, STATES))
    second = np.zeros((STATES, STATES))
    gain = np.zeros(STATES)
    cross = np.zeros(STATES)
    squared = 0.0
    for state, outcomes in enumerate(transitions):
        for share, end, reward in outcomes:
            step = np.eye(STATES)[state]
            if end is not None:
                step = step - GAMMA * np.eye(STATES)[end]
            bellman[state] += share * step
            gain[state] += share * reward
            second += share * np.outer(step, step)
            cross += share * step * reward
            squared += share * reward**2
    return Moments(bellman, gain, second, cross, squared)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", [1.0, 0.3, 1.0 / 150.0])
def test_minimisers_are_those_of_a_general_optimiser(seed: int, weight: float) -> None:
    transitions = drawn_transitions(seed)
    moments = moments_by_hand(transitions)
    places = np.random.default_rng(seed).uniform(size=STATES)
    gram = np.exp(-((places[:, None] - places[None, :]) ** 2) / 0.01)
    exact = moments.minimiser(gram, weight)

    def loss(values: np.ndarray) -> float:
        return naive_loss(transitions, gram, weight, values)

    reached = minimize(loss, np.zeros(STATES), method="BFGS", options={"gtol": 1e-10}).x
    assert loss(exact) <= loss(reached) + 1e-12
    np.testing.assert_allclose(exact, reached, atol=2e-3)
    gap = loss(exact + 0.1) - loss(exact)
    form = moments.quadratic_form(gram, weight)
    assert gap == pytest.approx(0.01 * form.sum(), rel=1e-8)


def test_values_have_no_mean_residual_and_the_rest_is_noise() -> None:
    transitions = drawn_transitions(5)
    moments = moments_by_hand(transitions)
    values = moments.values
    variances = []
    for state, outcomes in enumerate(transitions):
        deltas = [residual(values, state, end, reward) for _, end, reward in outcomes]
        shares = [share for share, _, _ in outcomes]
        assert np.dot(shares, deltas) == pytest.approx(0.0, abs=1e-12)
        variances.append(np.dot(shares, np.square(deltas)))
    assert moments.squared_residual(values) == pytest.approx(np.mean(variances))


def test_without_noise_every_loss_has_the_true_values() -> None:
    """A deterministic ring: double sampling costs nothing."""
    transitions = [[(1.0, (s + 1) % STATES, float(s))] for s in range(STATES)]
    gram = np.eye(STATES) + 0.5
    measures = measures_of(moments_by_hand(transitions), gram)
    np.testing.assert_allclose(measures.errors, 0.0, atol=1e-18)
    assert measures.residual_share == pytest.approx(0.0, abs=1e-12)


def test_moments_of_puddle_world_agree_with_its_grid_process() -> None:
    """Another discretisation, other random numbers, the same values and matrix."""
    settings = SoftmaxProblem(
        "puddle_world",
        noise=0.01,
        rows=40,
        held_out_rows=20,
        truth_repeats=2,
        temperature=3.0,
    )
    problem: Problem = build_problem(settings)
    operator, expected, _ = _bellman_operator(problem)
    world = make_world("puddle_world")
    grid = Grid(world.low, world.high, (25, 20))
    moments = moments_of(problem.world, settings.target_policy(), grid)
    np.testing.assert_allclose(moments.bellman, operator, atol=0.15)
    assert np.abs(moments.bellman - operator).mean() < 1e-3
    gap = moments.values - expected
    assert (gap**2).mean() < 0.01 * expected.var()


def test_softer_policies_bias_residual_gradient_and_hardly_the_kernel_loss() -> None:
    """The noise of single transitions is about the same share of Var V; what double
    sampling makes of it is not.
    """
    measured = {
        temperature: measure_losses(
            ExactCell(
                SoftmaxProblem("puddle_world", noise=0.01, temperature=temperature),
                "unit",
            )
        )
        for temperature in (0.3, 3.0)
    }
    names = list(DIAG_WEIGHTS)
    firm = dict(zip(names, measured[0.3].errors, strict=True))
    soft = dict(zip(names, measured[3.0].errors, strict=True))
    assert measured[3.0].residual_share < 2.0 * measured[0.3].residual_share
    assert soft["rg"] > 100.0 * firm["rg"]
    assert soft["rg"] > 10.0 * soft["kloss"] > 10.0 * soft["kloss_mixture"] / 2.0
    for result in measured.values():
        spread = dict(zip(names, result.spread, strict=True))
        assert spread["kloss_mixture"] > 10.0 * spread["kloss"]
