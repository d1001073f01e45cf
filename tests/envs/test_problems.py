"""The benchmark's evaluation problems: consistent logs, policies that fit, truths that
are kept and right.
"""

from dataclasses import replace

import numpy as np
import pytest

from koffline.policies import DiscretePolicy
from scripts.bench.problems import DEVELOPMENT, HELD_OUT
from scripts.bench.rollouts import monte_carlo_value
from tests.exact_problems import EXACT_PROBLEMS, FiniteCase

ALL = {**DEVELOPMENT, **HELD_OUT}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOFFLINE_BENCH_CACHE", str(tmp_path))
    return tmp_path


def small(name, **changes):
    """The named problem with few rollouts and an early end, for looking at its log."""
    return replace(ALL[name], n_starts=20, gamma=0.9, **changes)


@pytest.mark.parametrize("name", ALL)
def test_log_is_consistent(name):
    problem = small(name, time_limit=30)(seed=1, n_rows=200)
    log = problem.log
    for column in (log.observations, log.next_observations, log.rewards):
        assert len(column) == 200
        assert np.all(np.isfinite(column))
    same = log.episode_ids[1:] == log.episode_ids[:-1]
    np.testing.assert_array_equal(
        log.observations[1:][same], log.next_observations[:-1][same]
    )
    np.testing.assert_array_equal(
        log.terminated | log.truncated, ~np.append(same, False)
    )
    assert log.steps.max() < 30
    assert np.isfinite(problem.truth.value)
    assert np.isfinite(problem.at_starts.value)


def test_truth_is_kept_and_belongs_to_the_problem(own_cache):
    spec = small("chain")
    first = spec(seed=0, n_rows=100)
    kept = {path: path.stat().st_mtime_ns for path in own_cache.iterdir()}
    again = spec(seed=0, n_rows=100)
    other_seed = spec(seed=1, n_rows=100)
    assert first.truth == again.truth == other_seed.truth
    assert first.at_starts == again.at_starts != other_seed.at_starts
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    other_policy = replace(spec, target=spec.behavior)(seed=0, n_rows=100)
    assert other_policy.truth != first.truth


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("_on")])
def test_on_policy_returns_agree_with_the_truth(name):
    """Where the log is the target's own and most episodes end, its mean return is close
    to the value.
    """
    problem = replace(ALL[name], n_starts=300)(n_rows=20_000)
    log = problem.transitions()
    truth = problem.truth
    returns = log.returns(problem.spec.gamma)
    error = np.hypot(
        returns.std(ddof=1) / np.sqrt(log.n_episodes), truth.standard_error
    )
    assert log.terminated.sum() > 0.9 * log.n_episodes
    # four standard errors, and one per cent for the few cut by the time limit
    assert returns.mean() == pytest.approx(
        truth.value, abs=4 * error + 0.01 * abs(truth.value)
    )


@pytest.mark.parametrize("name", EXACT_PROBLEMS)
def test_rollouts_of_the_policy_reach_the_value(name):
    case = EXACT_PROBLEMS[name]
    problem = case(seed=0, n_rows=100)
    generator = np.random.default_rng(1)
    if isinstance(case, FiniteCase) and case.time_limit is None:
        start = case.world.log_tuples(case.behavior, 1000, generator).start_states
    else:
        start = case.world.reset(1000, generator)
    policy = problem.policy
    player = policy.probabilities if isinstance(policy, DiscretePolicy) else policy
    value = monte_carlo_value(case.world, player, case.gamma, start, generator)
    # four standard errors
    assert value.value == pytest.approx(problem.value, abs=4 * value.standard_error)
    assert value.standard_error < 0.2 * abs(problem.value)
