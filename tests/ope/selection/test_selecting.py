"""Ranking policies of small logs: order, pairing, names, truths, and every kind of bad input."""

import dataclasses
import json

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.ope.selection import selecting
from koffline.ope.selection.selecting import select_policies
from koffline.policies import ContinuousPolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import NOISY, QUICK, SOFT, continuous_log, discrete_log


def always(action: int, n: int = 2):
    return lambda observations: np.tile(np.eye(n)[action], (len(observations), 1))


@pytest.fixture(scope="module")
def walk():
    """A chain whose right end pays: policies that go right more often are worth more."""
    problem = EXACT_PROBLEMS["chain_off"](seed=0, n_rows=600)
    policies = {
        f"right {chance:g}": lambda s, p=chance: np.tile([1 - p, p], (len(s), 1))
        for chance in (0.1, 0.5, 0.9)
    }
    truths = (-0.4, 0.2, 0.7)
    return problem.transitions, policies, truths


def test_the_better_policy_comes_first_and_differs(walk):
    log, policies, truths = walk
    names = list(policies)
    found = select_policies(
        log, policies, 0.95, truths=truths, threshold=0.1, steps=100, full_replicas=1, resampled_replicas=4
    )
    assert [policy.name for policy in found.policies] == names[::-1]
    assert [policy.rank for policy in found.policies] == [1, 2, 3]
    assert found.best.maybe_best
    assert not found.policies[-1].maybe_best
    assert found.candidates[0] is found.best
    assert found.metrics is not None
    assert found.metrics.regret_at_k == (0.0, 0.0, 0.0)
    assert (found.metrics.spearman, found.metrics.kendall) == (1.0, 1.0)
    assert found.best.above_threshold is True
    assert found.policies[-1].above_threshold is False
    record = json.loads(found.to_json())
    assert record["policies"][0]["truth"] == 0.7
    assert len(record["comparisons"]) == 3
    assert str(found).splitlines()[0].startswith("1. right 0.9")


def test_a_policy_is_ranked_by_what_evaluate_says(walk):
    log, policies, _ = walk
    found = select_policies(log, policies, 0.95, seed=5, **QUICK)
    alone = koffline.evaluate(log, policies["right 0.5"], 0.95, seed=5, **QUICK)
    ranked = next(policy for policy in found.policies if policy.name == "right 0.5")
    assert ranked.value == alone.value
    assert (ranked.interval.low, ranked.interval.high) == (alone.interval.low, alone.interval.high)


def test_equal_policies_share_episodes_and_seeds():
    log = discrete_log()
    found = select_policies(log, {"one": SOFT, "two": SOFT}, 0.9, **QUICK)
    assert found.comparisons[0].difference == 0.0
    assert found.comparisons[0].p_value == 1.0
    assert len(found.candidates) == 2


def test_stochastic_policies_do_not_take_draws_from_the_resampling(monkeypatch):
    still = ContinuousPolicy(1, NOISY.mean_function, name="still")
    seen = []
    real = selecting.evaluate

    def spy(*arguments, **options):
        estimate = real(*arguments, **options)
        seen.append(estimate)
        return estimate

    monkeypatch.setattr(selecting, "evaluate", spy)
    copy = ContinuousPolicy(1, NOISY.mean_function, lambda s, generator: NOISY.mean(s), "copy")
    select_policies(continuous_log(), [still, copy, NOISY], 0.9, action_draws=2, **QUICK)
    # `copy` draws nothing, yet has a sampler: the same actions, so the same replicas if episodes are shared.
    assert np.allclose(seen[0].evidence.replica_values, seen[1].evidence.replica_values, rtol=1e-4)
    assert not np.allclose(seen[0].evidence.replica_values, seen[2].evidence.replica_values, rtol=1e-4)


def test_a_policy_that_cannot_be_evaluated_is_named(monkeypatch):
    def evaluate(log, policy, gamma, **options):
        if policy.name == "wild":
            raise KofflineError("3 of 3 networks diverged")
        return koffline.evaluate(log, policy, gamma, **{**options, **QUICK})

    monkeypatch.setattr(selecting, "evaluate", evaluate)
    policies = {"a": always(0, 3), "wild": always(1, 3), "b": always(2, 3)}
    named = {name: koffline.policies.DiscretePolicy(3, call, name) for name, call in policies.items()}
    found = select_policies(discrete_log(), named, 0.9, truths={"a": 1.0, "b": 0.0, "wild": 9.0})
    assert {policy.name for policy in found.policies} == {"a", "b"}
    assert found.unranked == (("wild", "3 of 3 networks diverged"),)
    assert "wild is not ranked: 3 of 3 networks diverged" in found.warnings
    with pytest.raises(KofflineError, match=r"fewer than two policies could be evaluated \(wild: 3 of 3"):
        select_policies(discrete_log(), {"a": named["a"], "wild": named["wild"]}, 0.9)


@pytest.mark.parametrize("keeps_interval", [True, False])
def test_estimators_without_replicas_are_compared_by_intervals(monkeypatch, keeps_interval):
    def evaluate(log, policy, gamma, **options):
        estimate = koffline.evaluate(log, policy, gamma, **options)
        interval = estimate.interval if keeps_interval else None
        return dataclasses.replace(estimate, evidence=None, interval=interval)

    monkeypatch.setattr(selecting, "evaluate", evaluate)
    found = select_policies(
        discrete_log(), ["uniform", SOFT], 0.9, truths=[0.0, 1.0], threshold=0.0, seed=7, **QUICK
    )
    assert found.metrics is not None
    if keeps_interval:
        (pair,) = found.comparisons
        widths = [policy.interval.width for policy in found.policies]
        assert pair.high - pair.low == pytest.approx(sum(widths))
        assert "by the intervals" in found.assumptions
    else:
        assert found.comparisons == ()
        assert found.best.above_threshold is None
        assert found.metrics.coverage is None
        assert "not judged" in found.assumptions
        assert len(str(found).splitlines()) == 2


def test_policies_without_names_of_their_own_are_numbered():
    log = discrete_log()
    found = select_policies(log, ["uniform", "uniform", SOFT], 0.9, **QUICK)
    assert {policy.name for policy in found.policies} == {"uniform", "uniform (2)", "policy"}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"policies": ["uniform"]}, ConfigError, "1 policy was given"),
        ({"policies": "uniform"}, ConfigError, "give a list of two or more"),
        ({"policies": ["uniform", "missing.d3"]}, PolicyError, "no such file"),
        ({"truths": [1.0]}, ConfigError, "1 truths for 2 policies"),
        ({"truths": [1.0, float("nan")]}, ConfigError, "finite"),
        ({"truths": {"uniform": 1.0}}, ConfigError, "policies differ in epsilon:0.5:uniform"),
        ({"top_k": 0}, ConfigError, "top_k is 0"),
        ({"threshold": float("nan")}, ConfigError, "threshold is nan"),
        ({"gamma": 1.5}, ConfigError, "gamma"),
        ({"nonsense": 1}, ConfigError, "unknown option 'nonsense'"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, kind, message):
    arguments = {"policies": ["uniform", "epsilon:0.5:uniform"], "gamma": 0.9, **QUICK, **changes}
    with pytest.raises(kind, match=message) as caught:
        select_policies(discrete_log(), **arguments)
    assert "\n" not in str(caught.value)


def test_a_log_without_weight_is_refused():
    with pytest.raises(DataError, match="fewer than 2 rows"):
        select_policies(discrete_log(weights=np.eye(60)[0]), ["uniform", SOFT], 0.9, **QUICK)
