"""Estimated behavior probabilities: near the truth, held out by episode, and said to be estimated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from koffline.data.transitions import ActionSpace, Continuous, Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.importance.behavior import _gaussian_log_likelihood, estimate_behavior
from koffline.policies.distributions import gaussian_log_density

ROWS, LENGTH = 1200, 6


def log_of(observations: np.ndarray, actions: np.ndarray, space: ActionSpace) -> Transitions:
    n = len(observations)
    last = np.arange(n) % LENGTH == LENGTH - 1
    return Transitions(
        observations=observations,
        actions=actions,
        rewards=np.zeros(n),
        next_observations=observations,
        terminated=last,
        truncated=np.zeros(n, dtype=bool),
        action_space=space,
        episode_ids=np.arange(n) // LENGTH,
    )


def discrete_case(seed: int = 0) -> tuple[Transitions, np.ndarray]:
    """Three actions, chances that bend with the state; true log probabilities of what was taken."""
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 2))
    logits = np.stack([np.zeros(ROWS), 2.0 * np.sin(2.0 * states[:, 0]), states[:, 1] ** 2 - 1.0], axis=1)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions = (generator.random((ROWS, 1)) >= chances.cumsum(axis=1)).sum(axis=1)
    log = log_of(10.0 + 3.0 * states, actions, Discrete(3))
    return log, np.log(chances[np.arange(ROWS), actions])


def gaussian_case(seed: int = 1, bound: float = np.inf) -> tuple[Transitions, np.ndarray]:
    """Two action numbers, mean and deviation bend with the state; cut off at ± bound."""
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 1))
    mean = np.concatenate([np.sin(states), 0.5 * states], axis=1) * 100.0
    deviation = np.exp(0.3 * states) * np.array([[30.0, 50.0]])
    actions = np.clip(mean + deviation * generator.standard_normal((ROWS, 2)), -bound, bound)
    low, high = (None, None) if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    truth = gaussian_log_density(actions, mean, deviation, low, high)
    return log_of(states, actions, Continuous(2, -bound, bound)), truth


def test_discrete_probabilities_are_near_the_truth() -> None:
    log, truth = discrete_case()
    found = estimate_behavior(log)
    # The lost likelihood is the mean divergence: an eighth of what ignoring the state would lose.
    constant = found.diagnostics["behavior_log_likelihood_constant"]
    assert truth.mean() - found.log_probabilities.mean() < (truth.mean() - constant) / 8.0
    assert (found.log_probabilities < 0.0).all()
    assert "estimated from the log (multinomial logistic, 2-fold cross-fitted" in found.warnings[0]


def test_a_behavior_that_ignores_the_state_is_found_to() -> None:
    generator = np.random.default_rng(3)
    log = log_of(generator.standard_normal((ROWS, 2)), generator.integers(4, size=ROWS), Discrete(4))
    found = estimate_behavior(log)
    assert found.diagnostics["behavior_penalty"] is None
    np.testing.assert_allclose(found.log_probabilities, np.log(0.25), atol=0.15)


@pytest.mark.parametrize("bound", [np.inf, 120.0], ids=["free", "cut off"])
def test_densities_are_near_the_truth(bound: float) -> None:
    log, truth = gaussian_case(bound=bound)
    box = None if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    found = estimate_behavior(log, cut_to=box)
    constant = found.diagnostics["behavior_log_likelihood_constant"]
    assert truth.mean() - found.log_probabilities.mean() < (truth.mean() - constant) / 6.0
    assert "conditional Gaussian" in found.warnings[0]


def test_likelihood_of_both_libraries_is_one() -> None:
    log, _ = gaussian_case(bound=120.0)
    actions = np.asarray(log.actions)[:50]
    box = np.full(2, -120.0), np.full(2, 120.0)
    parameters = np.random.default_rng(0).normal(size=(1, 4)) * np.array([[30.0, 30.0, 0.3, 0.3]])
    mean, deviation = parameters[:, :2], np.exp(parameters[:, 2:])
    place = (actions >= 120.0).astype(float) - (actions <= -120.0)
    assert place.any()
    ours = _gaussian_log_likelihood(
        torch.from_numpy(parameters),
        torch.ones((50, 1), dtype=torch.float64),
        torch.from_numpy(np.stack([actions, place], axis=2)),
        *map(torch.from_numpy, box),
    )
    np.testing.assert_allclose(ours.numpy(), gaussian_log_density(actions, mean, deviation, *box), rtol=1e-10)


def test_no_episode_sees_itself() -> None:
    """Change the actions of one episode: its own model was fitted without it, so only other folds move."""
    log, _ = discrete_case(4)
    actions = np.asarray(log.actions).copy()
    actions[:LENGTH] = (actions[:LENGTH] + 1) % 3
    here, there = estimate_behavior(log), estimate_behavior(log.replace(actions=actions))
    moved = np.abs(here.log_probabilities - there.log_probabilities) > 1e-12
    by_episode = moved.reshape(-1, LENGTH).any(axis=1)
    share = by_episode[1:].mean()
    assert 0.3 < share < 0.7  # about half of the episodes share no fold with it


def test_same_seed_same_probabilities() -> None:
    log, _ = discrete_case(5)
    first, second = estimate_behavior(log, seed=1), estimate_behavior(log, seed=1)
    np.testing.assert_array_equal(first.log_probabilities, second.log_probabilities)


def test_a_single_episode_is_fitted_on_itself_and_that_is_said() -> None:
    log, _ = discrete_case(6)
    single = log.select_episodes([0])
    found = estimate_behavior(single)
    assert np.isfinite(found.log_probabilities).all()
    assert "on its only episode" in found.warnings[0]


def test_images_and_lone_rows_are_refused() -> None:
    log, _ = discrete_case(7)
    with pytest.raises(DataError, match="needs episodes"):
        estimate_behavior(log.replace(episode_ids=None, steps=None))
    images = log_of(np.zeros((12, 3, 64, 64), dtype=np.uint8), np.zeros(12, dtype=int), Discrete(2))
    with pytest.raises(DataError, match="store behavior_log_probabilities"):
        estimate_behavior(images)
