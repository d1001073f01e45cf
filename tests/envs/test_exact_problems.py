"""The exact problems: their answers agree with rollouts, and their logs are what they claim to be."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.envs.rollouts import monte_carlo_value
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS, FiniteCase


@pytest.fixture(params=EXACT_PROBLEMS)
def case(request):
    return EXACT_PROBLEMS[request.param]


def test_rollouts_of_the_policy_reach_the_value(case):
    problem = case(seed=0, n_rows=100)
    generator = np.random.default_rng(1)
    if isinstance(case, FiniteCase) and case.time_limit is None:
        start = case.world.log_tuples(case.behavior, 4000, generator).start_states
    else:
        start = case.world.reset(4000, generator)
    policy = problem.policy
    player = policy.probabilities if isinstance(policy, DiscretePolicy) else policy
    value = monte_carlo_value(case.world, player, case.gamma, start, generator)
    assert value.value == pytest.approx(problem.value, abs=4 * value.standard_error)  # four standard errors
    assert value.standard_error < 0.1 * abs(problem.value)


def test_log_is_as_declared(case):
    problem = case(seed=0, n_rows=600)
    log = problem.transitions
    assert len(log) == 600
    assert log.has_episodes == (case.time_limit is not None)
    if case.time_limit is None:
        assert not log.truncated.any()
        assert len(log.initial_observations()) == 600
    else:
        # the log's own end may cut the last episode anywhere
        assert np.all(np.asarray(log.steps)[:-1][log.truncated[:-1]] == case.time_limit - 1)
    assert log.terminated.any() == (isinstance(case, FiniteCase) and case.world.mdp.terminal.any())


def test_value_at_starts_is_near_the_value(case):
    near = case(seed=1, n_rows=20_000)
    deviation = abs(near.value_at_starts - near.value)
    count = len(near.transitions.initial_observations())
    # starts are independent draws; values here spread by at most about 1.5 times their mean's size plus one
    assert deviation <= 4 * (1.5 * abs(near.value) + 1.0) / np.sqrt(count)


def test_on_policy_logs_have_the_policys_actions():
    problem = EXACT_PROBLEMS["chain_on"](seed=0, n_rows=4000)
    assert problem.is_on_policy
    chances = problem.policy.probabilities(problem.transitions.observations)
    assert np.mean(problem.transitions.actions) == pytest.approx(chances[:, 1].mean(), abs=0.03)
    assert not EXACT_PROBLEMS["chain_off"](seed=0, n_rows=100).is_on_policy


def test_every_kind_is_there():
    problems = [make(seed=0, n_rows=50) for make in EXACT_PROBLEMS.values()]
    assert {problem.is_on_policy for problem in problems} == {True, False}
    assert {problem.transitions.has_episodes for problem in problems} == {True, False}
    assert {type(problem.transitions.action_space).__name__ for problem in problems} == {
        "Discrete",
        "Continuous",
    }


def test_same_seed_same_log(case):
    one, same, other = (case(seed=seed, n_rows=80).transitions.sha256 for seed in (0, 0, 1))
    assert one == same != other
