"""Evaluation of policies where actions are available in some states only."""

from typing import Any

import numpy as np
import pytest
import torch

import koffline
from koffline.errors import DataError, PolicyError
from koffline.ope import names
from koffline.ope.importance.classifiers import held_out_chances
from koffline.ope.importance.ratios import estimate_behavior
from koffline.ope.log.coverage import among
from koffline.ope.log.problem import prepare_problem
from koffline.policies.base import DiscretePolicy, among_available
from koffline.policies.builtin import epsilon_policy, uniform_policy
from koffline.policy_specs import as_policy
from tests.ope.masked_world import (
    ACTIONS,
    GAMMA,
    MASKS,
    STATES,
    MaskedWorld,
    target,
)
from tests.ope.problems import QUICK, SOFT, discrete_log

WORLD = MaskedWorld.make()
BRIEF = {"steps": 800, "full_replicas": 1, "resampled_replicas": 3}
# The largest error of all estimators over five other logs was 0.087, sampling errors
# alone; without masks errors were 0.23 to 0.30 over three.
TOLERANCE = 0.12
OWN = names.ESTIMATORS


@pytest.fixture(scope="module")
def log() -> koffline.Transitions:
    return WORLD.log(500)


def without_masks(log: koffline.Transitions) -> koffline.Transitions:
    return log.replace(action_mask=None, next_action_mask=None)


def test_every_estimator_finds_the_value_of_a_masked_world(
    log: koffline.Transitions,
) -> None:
    table = koffline.estimate_all(log, target, GAMMA, seed=3, **BRIEF)
    values = {row.name: row.estimate.value for row in table if row.estimate}
    assert set(values) == set(OWN)
    for name, value in values.items():
        assert value == pytest.approx(WORLD.value(), abs=TOLERANCE), name
    assert not table.verdict.is_open
    (note,) = [note for note in table.notes if "not available" in note]
    states = log.observations.argmax(axis=1)
    share = np.where(MASKS[states], 0.0, target(log.observations)).sum(axis=1).mean()
    assert f"{share:.2%} of" in note
    assert table.diagnostics["actions"]["0"]["policy"] == pytest.approx(
        among_available(target(np.eye(STATES)), MASKS, "it")[states, 0].mean()
    )


def test_without_masks_it_is_said_that_the_log_does_not_answer(
    log: koffline.Transitions,
) -> None:
    estimate = koffline.evaluate(without_masks(log), target, GAMMA, seed=3, **BRIEF)
    assert estimate.verdict.is_open
    assert abs(estimate.value - WORLD.value()) > TOLERANCE


def test_a_policy_that_knows_masks_gives_the_same(log: koffline.Transitions) -> None:
    """A function that gets masks, in any place among its parameters."""

    def knowing(
        observations: np.ndarray, weight: float = 1.0, *, action_mask: np.ndarray
    ) -> np.ndarray:
        odds = target(observations) * action_mask * weight
        return odds / odds.sum(axis=1, keepdims=True)

    estimates = [
        koffline.evaluate(log, policy, GAMMA, seed=3, **QUICK)
        for policy in (target, knowing)
    ]
    assert estimates[0].value == pytest.approx(estimates[1].value, abs=1e-6)
    assert not any("not available" in note for note in estimates[1].notes)


@pytest.mark.parametrize("name", OWN)
def test_masks_that_are_all_true_change_no_digit(name: str) -> None:
    plain = discrete_log(behavior_log_probabilities=np.full(60, -np.log(3.0)))
    masks = np.ones((60, 3), bool)
    masked = plain.replace(action_mask=masks, next_action_mask=masks)
    results = []
    for log in (plain, masked):
        estimate = koffline.evaluate(log, SOFT, 0.9, estimator=name, **QUICK)
        written = estimate.to_dict()
        for key in ("data", "seconds", "sha256", "created"):
            written.pop(key, None)
        results.append(written)
    assert results[0]["value"] == results[1]["value"]
    assert results[0]["interval"] == results[1]["interval"]
    assert results[0]["diagnostics"] == results[1]["diagnostics"]
    assert results[0]["notes"] == results[1]["notes"]


@pytest.mark.parametrize("model", [None, "sklearn.linear_model:LogisticRegression"])
def test_estimated_behavior_gives_unavailable_actions_no_chance(
    log: koffline.Transitions, model: Any
) -> None:
    options = {"estimator": "wis", "behavior": "estimate", "behavior_model": model}
    value = koffline.evaluate(log, target, GAMMA, seed=3, **options).value
    assert value == pytest.approx(WORLD.value(), abs=TOLERANCE)
    if model is None:
        logs, _ = estimate_behavior(log)
        # without masks a chance is spread over the actions of similar states
        states = log.observations.argmax(axis=1)
        expected = 1.0 / MASKS[states].sum(axis=1)
        assert np.abs(np.exp(logs) - expected).mean() < 0.05
        return
    from sklearn.linear_model import LogisticRegression

    chances = held_out_chances(LogisticRegression(), log, None)
    assert (chances[~log.action_mask] == 0.0).all()
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    shares = held_out_chances(None, log, None)
    assert (shares[~log.action_mask] == 0.0).all()


def test_expectations_are_those_of_the_masked_policy(log: koffline.Transitions) -> None:
    policy = as_policy(target, log.action_space, (STATES,))
    assert isinstance(policy, DiscretePolicy)
    problem = prepare_problem(log, policy, GAMMA, 1, np.random.default_rng(0))
    for probabilities, states, is_free in (
        (problem.next_probabilities, log.next_observations, log.terminated),
        (
            problem.start_probabilities,
            log.initial_observations(),
            np.zeros(log.n_episodes, bool),
        ),
    ):
        assert probabilities is not None
        for row in range(0, len(states), 97):
            state = states[row].argmax()
            odds = target(np.eye(STATES)[[state]])[0]
            if not is_free[row]:
                odds = odds * MASKS[state]
            np.testing.assert_allclose(probabilities[row], odds / odds.sum())


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_among_available_actions_against_a_loop(seed: int) -> None:
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(ACTIONS), 20)
    mask = generator.random((20, ACTIONS)) < 0.5
    mask[:, 1] = True
    masked = among_available(probabilities, mask, "it")
    for row in range(20):
        available = [a for a in range(ACTIONS) if mask[row, a]]
        total = sum(probabilities[row, a] for a in available)
        for action in range(ACTIONS):
            expected = 0.0
            if action in available:
                expected = probabilities[row, action] / total
            assert masked[row, action] == pytest.approx(expected)
    everything = np.ones((20, ACTIONS), bool)
    np.testing.assert_array_equal(
        among_available(probabilities, everything, "it"), probabilities
    )
    # what is masked once stays as it is
    np.testing.assert_array_equal(among_available(masked, mask, "it"), masked)


def test_known_actions_are_taken_among_available_ones() -> None:
    policy = DiscretePolicy(ACTIONS, target)
    known = np.array([True, True, False, True])
    probabilities = among(policy, known).probabilities(np.eye(STATES), MASKS)
    usable = MASKS & known
    np.testing.assert_allclose(probabilities[~usable], 0.0, atol=1e-9)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    # where no known action is available: all known ones alike
    only = np.zeros_like(MASKS)
    only[:, 2] = True
    probabilities = among(policy, known).probabilities(np.eye(STATES), only)
    np.testing.assert_allclose(probabilities, np.tile(known / 3.0, (STATES, 1)))


GREEDY = np.argmax(target(np.eye(STATES)), axis=1)


def values_of(observations: Any) -> Any:
    return np.log(target(np.asarray(observations)))


class Network(torch.nn.Module):
    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values_of(observations.numpy()))


@pytest.mark.parametrize("model", [values_of, Network()])
def test_policies_of_outputs_choose_among_available_actions(model: Any) -> None:
    space = koffline.Discrete(ACTIONS)
    greedy = as_policy(koffline.greedy_policy(model), space, (STATES,))
    assert isinstance(greedy, DiscretePolicy)
    chosen = greedy.probabilities(np.eye(STATES), MASKS).argmax(axis=1)
    expected = np.where(MASKS, target(np.eye(STATES)), 0.0).argmax(axis=1)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_array_equal(
        greedy.probabilities(np.eye(STATES)).argmax(axis=1), GREEDY
    )
    soft = as_policy(koffline.softmax_policy(model), space, (STATES,))
    assert isinstance(soft, DiscretePolicy)
    np.testing.assert_allclose(
        soft.probabilities(np.eye(STATES), MASKS),
        among_available(target(np.eye(STATES)), MASKS, "it"),
        rtol=1e-5,
    )


def test_epsilon_hands_masks_on() -> None:
    def knowing(observations: np.ndarray, action_mask: np.ndarray) -> np.ndarray:
        return action_mask / action_mask.sum(axis=1, keepdims=True)

    space = koffline.Discrete(ACTIONS)
    base = as_policy(knowing, space, (STATES,))
    mixed = epsilon_policy(0.2, base, space)
    assert isinstance(mixed, DiscretePolicy)
    uniform = uniform_policy(space, (STATES,))
    assert isinstance(uniform, DiscretePolicy)
    np.testing.assert_allclose(
        mixed.probabilities(np.eye(STATES), MASKS),
        uniform.probabilities(np.eye(STATES), MASKS),
    )


def test_what_cannot_be_evaluated_is_refused(log: koffline.Transitions) -> None:
    def greedy(observations: np.ndarray) -> np.ndarray:
        return target(observations).argmax(axis=1)

    with pytest.raises(
        PolicyError, match="greedy takes no available action in"
    ) as error:
        koffline.evaluate(log, greedy, GAMMA, **QUICK)
    assert "koffline.greedy_policy" in str(error.value)
    assert "\n" not in str(error.value)
    # the remedy
    koffline.evaluate(log, koffline.greedy_policy(values_of), GAMMA, **QUICK)
    with pytest.raises(DataError, match="given start states is unknown"):
        koffline.evaluate(
            log, target, GAMMA, initial_observations=np.eye(STATES), **QUICK
        )


def test_a_value_function_is_tested_with_the_masked_policy(
    log: koffline.Transitions,
) -> None:
    """The exact Q passes the test of Bellman's equation only with the masked policy."""
    chance = among_available(target(np.eye(STATES)), MASKS, "it")
    following = 0.75 * GAMMA * np.einsum("sat,tb->satb", WORLD.chances, chance)
    matrix = np.eye(STATES * ACTIONS) - following.reshape(STATES * ACTIONS, -1)
    exact = np.linalg.solve(matrix, WORLD.rewards.ravel()).reshape(STATES, ACTIONS)

    def q(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return exact[observations.argmax(axis=1), actions]

    masked = koffline.bellman_test(q, log, target, GAMMA)
    plain = koffline.bellman_test(q, without_masks(log), target, GAMMA)
    assert masked.p_value > 0.01
    assert plain.p_value < 0.01
