"""Ratios from the log, estimated, or refused with a reason; what is odd about them is said."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.data.transitions import Continuous
from koffline.errors import ConfigError, DataError, PolicyError
from koffline.ope.importance.ratios import action_log_probabilities, importance_ratios
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.policies.distributions import gaussian_log_density
from tests.ope.importance.cases import enumerated
from tests.ope.importance.test_behavior import discrete_case, gaussian_case, log_of
from tests.refusals import refused


def test_ratios_are_quotients_of_probabilities() -> None:
    world = enumerated()
    found = importance_ratios(world.transitions, world.policy)
    states = world.states(world.transitions.observations)
    actions = np.asarray(world.transitions.actions)
    behavior = np.array([[0.5, 0.5], [0.3, 0.7]])[states, actions]
    np.testing.assert_allclose(np.exp(found.logs), world.target[states, actions] / behavior)
    assert not found.is_estimated


def test_logged_probabilities_win_unless_estimates_are_asked_for() -> None:
    log, truth = discrete_case()
    policy = DiscretePolicy(3, lambda observations: np.tile([0.5, 0.3, 0.2], (len(observations), 1)))
    assert importance_ratios(log, policy).is_estimated
    logged = log.replace(behavior_log_probabilities=truth)
    assert not importance_ratios(logged, policy).is_estimated
    assert importance_ratios(logged, policy, "estimate").is_estimated
    with refused(DataError, "no behavior_log_probabilities"):
        importance_ratios(log, policy, "log")
    with refused(ConfigError, "behavior is 'guess'"):
        importance_ratios(log, policy, "guess")


def test_impossible_actions_have_ratio_zero() -> None:
    log, truth = discrete_case()
    policy = DiscretePolicy(3, lambda observations: np.zeros(len(observations), dtype=int))
    found = importance_ratios(log.replace(behavior_log_probabilities=truth), policy)
    taken = np.asarray(log.actions) == 0
    assert (found.logs[~taken] == -np.inf).all()
    np.testing.assert_allclose(found.logs[taken], -truth[taken])


def test_stand_ins_for_zero_and_wrong_probabilities_are_pointed_out() -> None:
    log, truth = discrete_case()
    policy = DiscretePolicy(3, lambda observations: np.full((len(observations), 3), 1 / 3))
    assert importance_ratios(log.replace(behavior_log_probabilities=truth), policy).warnings == ()
    tiny = truth.copy()
    tiny[7] = np.log(1e-10)
    found = importance_ratios(log.replace(behavior_log_probabilities=tiny), policy).warnings
    assert "1 logged actions have a behavior probability below 2e-08 (row 7: 1e-10)" in found[0]
    wrong = np.full(len(log), np.log(0.9))
    found = importance_ratios(log.replace(behavior_log_probabilities=wrong), policy).warnings
    assert "average 0.3704 over rows" in found[0]


def gaussian_policy(bound: float | None = None) -> ContinuousPolicy:
    """Narrower than the behavior of `gaussian_case` and a little to its side: bounded ratios."""
    box = None if bound is None else (np.full(2, -bound), np.full(2, bound))

    def mean(states: np.ndarray) -> np.ndarray:
        return 100.0 * np.concatenate([np.sin(states), 0.5 * states], axis=1) + 5.0

    def deviation(states: np.ndarray) -> np.ndarray:
        return np.exp(0.3 * states) * np.array([[20.0, 35.0]])

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        bounds = (None, None) if box is None else box
        return gaussian_log_density(actions, mean(observations), deviation(observations), *bounds)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        noise = generator.standard_normal((len(observations), 2))
        draws = mean(observations) + deviation(observations) * noise
        return draws if bound is None else np.clip(draws, -bound, bound)

    return ContinuousPolicy(2, mean, sample, "gaussian", density_function=log_density, cut_to=box)


@pytest.mark.parametrize("bound", [None, 120.0], ids=["free", "cut off"])
def test_continuous_ratios_average_one(bound: float | None) -> None:
    """E_β[π/β] = 1 whatever β and π are, masses at the bounds included."""
    log, truth = gaussian_case(bound=np.inf if bound is None else bound)
    logged = importance_ratios(log.replace(behavior_log_probabilities=truth), gaussian_policy(bound))
    ratios = np.exp(logged.logs)
    assert ratios.mean() == pytest.approx(1.0, abs=4.0 * ratios.std() / np.sqrt(len(log)))
    estimated = importance_ratios(log, gaussian_policy(bound))
    gap = np.abs(estimated.logs - logged.logs)
    assert np.median(gap) < 0.2
    assert any("lie on the bounds" in text for text in logged.warnings) == (bound is not None)


def test_mass_on_bounds_that_the_policy_does_not_know_is_pointed_out() -> None:
    log, _ = gaussian_case(bound=120.0)
    found = importance_ratios(log, gaussian_policy())
    assert any("where the policy's draws do not collect" in text for text in found.warnings)


def test_policies_without_density_are_refused() -> None:
    log = log_of(np.zeros((6, 1)), np.zeros((6, 1)), Continuous(1))
    policy = ContinuousPolicy(1, lambda observations: observations[:, :1], name="mean")
    with refused(PolicyError, "mean: it is deterministic"):
        action_log_probabilities(log, policy)
