"""Each estimator against plain loops, against expectations that are exact, and against scope-rl."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.importance.episode_estimates import episode_estimates
from koffline.ope.importance.estimators import (
    doubly_robust,
    per_decision_is,
    per_decision_wis,
    trajectory_is,
    trajectory_wis,
    weighted_doubly_robust,
)
from koffline.ope.importance.weights import make_weights
from koffline.ope.names import OVER_EPISODES
from koffline.ope.row_values import RowValues
from koffline.ope.value_sources import as_value_function
from tests import reference_importance as reference
from tests.ope.importance.cases import Case, enumerated, random_case


@pytest.fixture(params=[0, 1, 2, 3], ids=["plain", "other", "zeros", "more zeros"])
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(request.param, zeros=request.param >= 2)


@pytest.mark.parametrize("name", ["trajectory_is", "trajectory_wis", "per_decision_is", "per_decision_wis"])
def test_estimator_without_model_equals_loops(case: Case, name: str) -> None:
    estimator = {
        "trajectory_is": trajectory_is,
        "trajectory_wis": trajectory_wis,
        "per_decision_is": per_decision_is,
        "per_decision_wis": per_decision_wis,
    }[name]
    expected = getattr(reference, name)(case.episodes, case.shares, case.gamma)
    found = estimator(case.weights, case.rewards, case.gamma).value
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_doubly_robust_equals_backward_recursion(case: Case) -> None:
    expected = reference.doubly_robust(case.episodes, case.shares, case.model.starts, case.gamma)
    found = doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model).value
    assert found == pytest.approx(expected, rel=1e-10)


def test_weighted_doubly_robust_equals_loops(case: Case) -> None:
    expected = reference.weighted_doubly_robust(case.episodes, case.shares, case.model.starts, case.gamma)
    found = weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model).value
    assert found == pytest.approx(expected, rel=1e-10)


def test_two_episodes_by_hand() -> None:
    """Ratios 2, 1/2 and 3; rewards 1, 4 and 2; γ = 1/2; the first episode is cut after two steps."""
    log = _log([[1.0, 4.0], [2.0]])
    weights = make_weights(log, np.log([2.0, 0.5, 3.0]))
    rewards = np.asarray(log.rewards)
    # whole weights 1 and 3, returns 1 + 4/2 = 3 and 2
    assert trajectory_is(weights, rewards, 0.5).value == pytest.approx((1 * 3 + 3 * 2) / 2)
    assert trajectory_wis(weights, rewards, 0.5).value == pytest.approx((1 * 3 + 3 * 2) / 4)
    # weights by step: 2 and 3, then 1 and still 3
    assert per_decision_is(weights, rewards, 0.5).value == pytest.approx((2 * 1 + 0.5 * 1 * 4 + 3 * 2) / 2)
    by_step = (2 * 1 + 3 * 2) / 5 + 0.5 * (1 * 4) / 4
    assert per_decision_wis(weights, rewards, 0.5).value == pytest.approx(by_step)
    model = RowValues(np.array([1.0, 2.0, 3.0]), np.array([6.0, 8.0, 5.0]), np.array([0.5, 1.5]))
    discounts = np.array([0.5, 0.5, 0.0])
    first = 0.5 + 2 * (1 + 3 - 1) + 0.5 * 1 * (4 + 4 - 2)
    second = 1.5 + 3 * (2 - 3)
    assert doubly_robust(weights, rewards, discounts, 0.5, model).value == pytest.approx((first + second) / 2)


@pytest.mark.parametrize("name", ["is", "pdis", "wis", "wpdis"])
def test_expectation_without_model_is_exact(name: str) -> None:
    """Over all paths with their probabilities every weight averages one, so even the ratios are exact."""
    world = enumerated()
    found = episode_estimates(world.transitions, world.policy, 0.9, names=[name], draws=10)[name]
    assert found.value == pytest.approx(world.finite_value(0.9, np.zeros(3)), abs=1e-12)


@pytest.mark.parametrize("name", ["dr", "wdr"])
def test_expectation_with_any_model_is_exact(name: str) -> None:
    """A wrong model cancels up to the cut; there its value of the last state stands in for the rest."""
    world = enumerated()
    table = np.array([[0.4, -1.0], [2.0, 0.7], [5.0, -3.0]])
    q = as_value_function(
        lambda observations, actions: table[world.states(observations), actions], Discrete(2), (3,)
    )
    at_cut = np.sum(world.target * table, axis=1)
    found = episode_estimates(world.transitions, world.policy, 0.9, q=q, names=[name], draws=10)[name]
    assert found.value == pytest.approx(world.finite_value(0.9, at_cut), abs=1e-12)


@pytest.mark.parametrize("name", ["dr", "wdr", "magic"])
def test_true_values_make_the_cut_harmless(name: str) -> None:
    world = enumerated(horizon=2)
    table = world.mdp.action_values(world.target, 0.9)
    q = as_value_function(
        lambda observations, actions: table[world.states(observations), actions], Discrete(2), (3,)
    )
    found = episode_estimates(world.transitions, world.policy, 0.9, q=q, names=[name], draws=20)[name]
    assert found.value == pytest.approx(world.mdp.policy_value(world.target, 0.9), abs=1e-10)


def test_a_model_of_zeros_leaves_plain_estimators(case: Case) -> None:
    zeros = RowValues(
        *(np.zeros(len(part)) for part in (case.model.now, case.model.later, case.model.starts))
    )
    arguments = case.weights, case.rewards, case.discounts, case.gamma, zeros
    plain = per_decision_is(case.weights, case.rewards, case.gamma)
    assert doubly_robust(*arguments).value == pytest.approx(plain.value)
    weighted = per_decision_wis(case.weights, case.rewards, case.gamma)
    assert weighted_doubly_robust(*arguments).value == pytest.approx(weighted.value)


def test_on_policy_everything_is_the_mean_return() -> None:
    case = random_case(4)
    log = case.transitions.replace(weights=None)
    weights = make_weights(log, np.zeros(len(log)))
    mean = float(np.mean(log.returns(case.gamma)))
    for estimator in (trajectory_is, trajectory_wis, per_decision_is, per_decision_wis):
        assert estimator(weights, case.rewards, case.gamma).value == pytest.approx(mean)


def test_order_of_episodes_does_not_matter() -> None:
    case = random_case(5)
    order = np.random.default_rng(0).permutation(case.transitions.n_episodes)
    shuffled = case.transitions.select_episodes(order)
    parts = np.split(case.log_ratios, case.transitions.episode_starts[1:])
    log_ratios = np.concatenate([parts[i] for i in order])
    for estimator in (trajectory_wis, per_decision_wis):
        moved = estimator(make_weights(shuffled, log_ratios), np.asarray(shuffled.rewards), case.gamma)
        assert moved.value == pytest.approx(estimator(case.weights, case.rewards, case.gamma).value)


def test_model_of_another_length_is_refused() -> None:
    case = random_case(6)
    short = RowValues(case.model.now[1:], case.model.later, case.model.starts)
    with pytest.raises(DataError, match="rows and 9 starts"):
        doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, short)
    with pytest.raises(DataError, match="not finite"):
        RowValues(np.array([np.nan]), np.zeros(1), np.zeros(1))


@pytest.fixture(scope="module")
def scope_rl():
    """scope-rl's estimators of discrete actions, without gym's notice."""
    with contextlib.redirect_stderr(io.StringIO()):
        return pytest.importorskip("scope_rl.ope.discrete")


SCOPE_NAMES = {
    "is": "TrajectoryWiseImportanceSampling",
    "pdis": "PerDecisionImportanceSampling",
    "wpdis": "SelfNormalizedPDIS",
    "wis": "SelfNormalizedTIS",
    "dr": "DoublyRobust",
    "wdr": "SelfNormalizedDR",
}


@pytest.mark.parametrize("name", [*SCOPE_NAMES])
def test_agrees_with_scope_rl(scope_rl, name: str) -> None:
    """Episodes of one length that end there, the only ones it knows; its 1e-10 in a ratio allows 1e-8."""
    generator = np.random.default_rng(7)
    episodes, steps, gamma = 6, 4, 0.9
    rows = episodes * steps
    behavior = generator.dirichlet(np.ones(3), size=rows)
    target = generator.dirichlet(np.ones(3), size=rows)
    actions = generator.integers(3, size=rows)
    log = Transitions(
        observations=np.arange(rows)[:, None].astype(float),
        actions=actions,
        rewards=generator.standard_normal(rows),
        next_observations=np.arange(1, rows + 1)[:, None].astype(float),
        terminated=np.arange(rows) % steps == steps - 1,
        truncated=np.zeros(rows, dtype=bool),
        action_space=Discrete(3),
        episode_ids=np.repeat(np.arange(episodes), steps),
    )
    values = generator.standard_normal((rows, 3))
    chance = behavior[np.arange(rows), actions]
    theirs = getattr(scope_rl, SCOPE_NAMES[name])().estimate_policy_value(
        step_per_trajectory=steps,
        action=actions,
        reward=np.asarray(log.rewards),
        pscore=chance,
        evaluation_policy_action_dist=target,
        gamma=gamma,
        **({"state_action_value_prediction": values} if name in ("dr", "wdr") else {}),
    )
    v = np.sum(target * values, axis=1)
    model = RowValues(values[np.arange(rows), actions], np.append(v[1:], 0.0), v[::steps])
    weights = make_weights(log, np.log(target[np.arange(rows), actions]) - np.log(chance))
    rewards, discounts = np.asarray(log.rewards), gamma * (1.0 - np.asarray(log.terminated))
    ours = {
        "is": lambda: trajectory_is(weights, rewards, gamma),
        "wis": lambda: trajectory_wis(weights, rewards, gamma),
        "pdis": lambda: per_decision_is(weights, rewards, gamma),
        "wpdis": lambda: per_decision_wis(weights, rewards, gamma),
        "dr": lambda: doubly_robust(weights, rewards, discounts, gamma, model),
        "wdr": lambda: weighted_doubly_robust(weights, rewards, discounts, gamma, model),
    }[name]()
    assert ours.value == pytest.approx(theirs, rel=1e-8)


def test_every_name_is_tried() -> None:
    assert {*SCOPE_NAMES, "magic"} == {*OVER_EPISODES}


def _log(rewards: list[list[float]]) -> Transitions:
    lengths = [len(part) for part in rewards]
    rows = sum(lengths)
    ends = np.cumsum(lengths) - 1
    terminated = np.zeros(rows, dtype=bool)
    terminated[ends[-1]] = True
    truncated = np.zeros(rows, dtype=bool)
    truncated[ends[:-1]] = True
    return Transitions(
        observations=np.zeros((rows, 1)),
        actions=np.zeros(rows, dtype=int),
        rewards=np.concatenate(rewards),
        next_observations=np.zeros((rows, 1)),
        terminated=terminated,
        truncated=truncated,
        action_space=Discrete(2),
        episode_ids=np.repeat(np.arange(len(rewards)), lengths),
    )
