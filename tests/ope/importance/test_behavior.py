"""Behavior probabilities, estimated where the log has none, and the ratios that they
give.
"""

import numpy as np
import pytest

from koffline.data.transitions import ActionSpace, Continuous, Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.importance.ratios import estimate_behavior, importance_ratios
from koffline.policies import DiscretePolicy
from koffline.policies.builtin import gaussian_log_density
from tests.ope.importance.cases import log_of_steps

ROWS = 1200
LENGTH = 6


def log_of(
    observations: np.ndarray, actions: np.ndarray, space: ActionSpace
) -> Transitions:
    columns = {
        "observations": observations,
        "next_observations": observations,
        "action_space": space,
    }
    return log_of_steps(np.zeros(len(actions)), LENGTH, actions, **columns)


def discrete_case(seed: int = 0) -> tuple[Transitions, np.ndarray]:
    """Three actions, chances that bend with the state; true log probabilities of what
    was taken.
    """
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 2))
    logits = np.stack(
        [np.zeros(ROWS), 2.0 * np.sin(2.0 * states[:, 0]), states[:, 1] ** 2 - 1.0],
        axis=1,
    )
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions = (generator.random((ROWS, 1)) >= chances.cumsum(axis=1)).sum(axis=1)
    log = log_of(10.0 + 3.0 * states, actions, Discrete(3))
    return log, np.log(chances[np.arange(ROWS), actions])


def gaussian_case(
    seed: int = 1, bound: float = np.inf
) -> tuple[Transitions, np.ndarray]:
    """Two action numbers, mean and deviation bend with the state; cut off at ±
    bound.
    """
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 1))
    mean = np.concatenate([np.sin(states), 0.5 * states], axis=1) * 100.0
    deviation = np.exp(0.3 * states) * np.array([[30.0, 50.0]])
    actions = np.clip(
        mean + deviation * generator.standard_normal((ROWS, 2)), -bound, bound
    )
    low, high = (
        (None, None) if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    )
    truth = gaussian_log_density(actions, mean, deviation, low, high)
    return log_of(states, actions, Continuous(2, -bound, bound)), truth


@pytest.mark.parametrize(
    ("make_log", "bound", "share", "model"),
    [
        (discrete_case(), np.inf, 8.0, "multinomial logistic"),
        (gaussian_case(), np.inf, 6.0, "conditional Gaussian"),
        (gaussian_case(bound=120.0), 120.0, 6.0, "conditional Gaussian"),
    ],
    ids=["discrete", "free", "cut off"],
)
def test_probabilities_are_near_the_truth(make_log, bound, share, model) -> None:
    """The lost likelihood is the mean divergence: a small share of what ignoring the
    state would lose.
    """
    log, truth = make_log
    cut_to = None if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    logs, estimated = estimate_behavior(log, cut_to=cut_to)
    constant = estimated["behavior_log_likelihood_constant"]
    assert truth.mean() - logs.mean() < (truth.mean() - constant) / share
    assert estimated["behavior_model"].startswith(model)


def test_no_episode_sees_itself() -> None:
    """Change the actions of one episode: its own model was fitted without it, so only
    other folds move.
    """
    log, _ = discrete_case(4)
    actions = np.asarray(log.actions).copy()
    actions[:LENGTH] = (actions[:LENGTH] + 1) % 3
    here, there = (
        estimate_behavior(log_read)[0]
        for log_read in (log, log.replace(actions=actions))
    )
    moved = np.abs(here - there) > 1e-12
    share = moved.reshape(-1, LENGTH).any(axis=1)[1:].mean()
    assert 0.3 < share < 0.7  # about half of the episodes share no fold with it


def test_images_and_lone_rows_are_refused() -> None:
    log, _ = discrete_case(7)
    with pytest.raises(DataError, match="needs episodes"):
        estimate_behavior(log.replace(episode_ids=None, steps=None))
    images = log_of(
        np.zeros((12, 3, 64, 64), dtype=np.uint8), np.zeros(12, dtype=int), Discrete(2)
    )
    with pytest.raises(DataError, match="store behavior_log_probabilities"):
        estimate_behavior(images)


def test_logged_probabilities_win_unless_estimates_are_asked_for() -> None:
    log, truth = discrete_case()
    policy = DiscretePolicy(
        3, lambda observations: np.tile([0.5, 0.3, 0.2], (len(observations), 1))
    )
    assert importance_ratios(log, policy).is_estimated
    logged = log.replace(behavior_log_probabilities=truth)
    assert not importance_ratios(logged, policy).is_estimated
    assert importance_ratios(logged, policy, "estimate").is_estimated
    first = DiscretePolicy(
        3, lambda observations: np.zeros(len(observations), dtype=int)
    )
    ratios = importance_ratios(logged, first)
    taken = np.asarray(log.actions) == 0
    assert (ratios.logs[~taken] == -np.inf).all()  # impossible actions
    np.testing.assert_allclose(ratios.logs[taken], -truth[taken])


def test_ratios_average_one_over_rows_as_they_are_weighed() -> None:
    """Half of the rows with action 1 are lost, and those that are left count twice."""
    actions = np.tile([0, 0, 1], ROWS // 3)
    log = log_of(np.zeros((ROWS, 1)), actions, Discrete(2))
    log = log.replace(behavior_log_probabilities=np.full(ROWS, np.log(0.5)))
    policy = DiscretePolicy(2, lambda states: np.tile([0.1, 0.9], (len(states), 1)))
    weights = np.where(actions == 1, 2.0, 1.0)
    warned = [
        bool(importance_ratios(log_read, policy).warnings)
        for log_read in (log, log.replace(weights=weights))
    ]
    assert warned == [True, False]
