"""The benchmark's evaluation problems: consistent logs, policies that fit, truths that are kept and right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from koffline.envs.linear_quadratic import LinearQuadratic
from scripts.bench.problems import DEVELOPMENT, HELD_OUT

ALL = {**DEVELOPMENT, **HELD_OUT}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOFFLINE_BENCH_CACHE", str(tmp_path))
    return tmp_path


def small(name, **changes):
    """The named problem with few rollouts and an early end, for looking at its log."""
    return replace(ALL[name], n_starts=20, gamma=0.9, **changes)


def test_held_out_problems_are_others():
    assert len(DEVELOPMENT) >= 6
    assert len(HELD_OUT) >= 6
    assert not set(DEVELOPMENT) & set(HELD_OUT)
    assert all(0.95 <= spec.gamma <= 0.99 for spec in ALL.values())


@pytest.mark.parametrize("name", ALL)
def test_log_is_consistent(name):
    problem = small(name, time_limit=30)(seed=1, n_rows=200)
    rows = len(problem.rewards)
    assert rows == 200
    for column in (problem.observations, problem.next_observations, problem.rewards):
        assert len(column) == rows
        assert np.all(np.isfinite(column))
    same = problem.episode_ids[1:] == problem.episode_ids[:-1]
    np.testing.assert_array_equal(problem.observations[1:][same], problem.next_observations[:-1][same])
    np.testing.assert_array_equal(problem.terminated | problem.truncated, ~np.append(same, False))
    assert problem.steps.max() < 30
    assert np.isfinite(problem.truth)
    assert np.isfinite(problem.truth_at_starts)


@pytest.mark.parametrize("name", ALL)
def test_policies_fit_the_actions(name):
    problem = small(name)(n_rows=100)
    for policy in (problem.target, problem.behavior):
        if problem.n_actions is not None:
            chances = policy(problem.observations)
            assert chances.shape == (100, problem.n_actions)
            assert np.all(chances >= 0)
            np.testing.assert_allclose(chances.sum(axis=1), 1.0, atol=1e-12)
            assert problem.actions.max() < problem.n_actions
        else:
            draws = policy.sample(problem.observations, np.random.default_rng(0))
            assert draws.shape == policy.mean(problem.observations).shape == problem.actions.shape
            for actions in (draws, problem.actions):
                assert np.all(actions >= problem.low)
                assert np.all(actions <= problem.high)
            assert policy.deterministic == bool(np.array_equal(draws, policy.mean(problem.observations)))


@pytest.mark.parametrize("name", ["cartpole", "navigation", "linear_quadratic"])
def test_as_record_and_policy(name):
    problem = small(name)(n_rows=60)
    log, policy = problem.transitions(), problem.policy()
    assert (len(log), log.n_episodes, log.metadata.gamma) == (60, problem.n_episodes, problem.gamma)
    np.testing.assert_array_equal(log.actions, problem.actions)
    if problem.n_actions is None:
        assert (log.action_space.low, log.action_space.high) == (problem.low, problem.high)
        assert not policy.deterministic
        np.testing.assert_array_equal(policy.mean(log.observations), problem.target.mean(log.observations))
    else:
        assert log.action_space.n == problem.n_actions
        expected = problem.target(log.observations)
        np.testing.assert_allclose(policy.probabilities(log.observations), expected, atol=1e-12)


def test_truth_is_kept_and_belongs_to_the_problem(own_cache):
    spec = small("chain")
    first = spec(seed=0, n_rows=100)
    kept = {path: path.stat().st_mtime_ns for path in own_cache.iterdir()}
    again, other_seed = spec(seed=0, n_rows=100), spec(seed=1, n_rows=100)
    assert first.truth == again.truth == other_seed.truth
    assert first.truth_at_starts == again.truth_at_starts != other_seed.truth_at_starts
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    other_policy = replace(spec, target=spec.behavior)(seed=0, n_rows=100)
    assert other_policy.truth != first.truth


def test_same_seed_same_log():
    one, same, other = (small("pendulum")(seed=seed, n_rows=50) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.actions, same.actions)
    assert not np.array_equal(one.actions, other.actions)


def test_truth_of_the_linear_system_is_the_closed_form():
    spec = replace(HELD_OUT["linear_quadratic"], n_starts=1000)
    assert isinstance(spec.world, LinearQuadratic)
    truth = spec.truth()
    exact = spec.world.policy_value(spec.target, spec.gamma)
    assert truth.value == pytest.approx(exact, abs=4 * truth.standard_error)


def test_truth_of_the_finite_process_is_the_linear_solve():
    spec = replace(HELD_OUT["random_finite"], n_starts=1000)
    truth = spec.truth()
    priced, policy = spec.world, spec.target
    exact = priced.world.mdp.policy_value(policy.table, spec.gamma) + priced.offset / (1 - spec.gamma)
    assert truth.value == pytest.approx(exact, abs=4 * truth.standard_error)


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("_on")])
def test_on_policy_returns_agree_with_the_truth(name):
    """Where the log is the target's own and most episodes end, its mean return is close to the value."""
    problem = replace(ALL[name], n_starts=500)(n_rows=20_000)
    returns = np.bincount(problem.episode_ids, weights=problem.rewards * problem.gamma**problem.steps)
    error = np.hypot(returns.std(ddof=1) / np.sqrt(problem.n_episodes), problem.truth_se)
    assert problem.terminated.sum() > 0.9 * problem.n_episodes
    # four standard errors, and one per cent for the few cut by the time limit
    assert returns.mean() == pytest.approx(problem.truth, abs=4 * error + 0.01 * abs(problem.truth))
