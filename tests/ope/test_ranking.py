"""Ranking policies of small logs: order, pairing, names, truths, and every kind of bad input."""

import json

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.ope import ranking
from koffline.ope.ranking import select_policies
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import QUICK, SOFT, discrete_log

TRUTHS = (-0.4, 0.2, 0.7)


@pytest.fixture(scope="module")
def walk():
    """A chain whose right end pays: policies that go right more often are worth more."""
    log = EXACT_PROBLEMS["chain_off"](seed=0, n_rows=600).transitions
    policies = {
        f"right {chance:g}": lambda s, p=chance: np.tile([1 - p, p], (len(s), 1))
        for chance in (0.1, 0.5, 0.9)
    }
    options = {"steps": 100, "full_replicas": 1, "resampled_replicas": 4}
    return select_policies(log, policies, 0.95, truths=TRUTHS, seed=5, **options)


def test_the_better_policy_comes_first_and_differs(walk) -> None:
    found = walk
    assert [policy.name for policy in found.policies] == ["right 0.9", "right 0.5", "right 0.1"]
    assert [policy.rank for policy in found.policies] == [1, 2, 3]
    assert found.best.maybe_best
    assert not found.policies[-1].maybe_best
    assert found.candidates[0] is found.best
    assert found.metrics.regret_at_k == (0.0, 0.0, 0.0)
    assert found.metrics.spearman == 1.0
    record = json.loads(found.to_json())
    assert record["policies"][0]["truth"] == 0.7
    assert len(record["comparisons"]) == 3


def test_a_policy_that_cannot_be_evaluated_is_named(monkeypatch) -> None:
    def evaluate(log, policy, gamma, **options):
        if policy.name == "wild":
            raise KofflineError("3 of 3 networks diverged")
        return koffline.evaluate(log, policy, gamma, **{**options, **QUICK})

    monkeypatch.setattr(ranking, "evaluate", evaluate)
    named = {
        name: DiscretePolicy(3, lambda s, a=action: np.tile(np.eye(3)[a], (len(s), 1)), name)
        for action, name in enumerate(("a", "wild", "b"))
    }
    found = select_policies(discrete_log(), named, 0.9, truths=[1.0, 9.0, 0.0])
    assert {policy.name for policy in found.policies} == {"a", "b"}
    assert found.unranked == ({"name": "wild", "reason": "3 of 3 networks diverged"},)
    assert "wild is not ranked: 3 of 3 networks diverged" in found.warnings
    with pytest.raises(KofflineError, match=r"fewer than two policies could be evaluated \(wild: 3 of 3"):
        select_policies(discrete_log(), {"a": named["a"], "wild": named["wild"]}, 0.9)


def test_estimators_without_replicas_are_compared_by_intervals() -> None:
    found = select_policies(discrete_log(), ["uniform", SOFT], 0.9, estimator="lstdq", seed=7, **QUICK)
    (pair,) = found.comparisons
    assert pair.high - pair.low > 0.999 * sum(policy.interval.width for policy in found.policies)
    assert "by the intervals" in found.assumptions


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"policies": "uniform"}, ConfigError, "give a list of two or more"),
        ({"policies": ["uniform", "missing.d3"]}, PolicyError, "no such file"),
        ({"truths": [1.0]}, ValueError, "argument 2 is shorter"),
        ({"transitions": discrete_log(weights=np.eye(60)[0])}, DataError, "give at least two rows"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, kind, message) -> None:
    base = {"transitions": discrete_log(), "policies": ["uniform", "epsilon:0.5:uniform"], "gamma": 0.9}
    with pytest.raises(kind, match=message) as caught:
        select_policies(**{**base, **QUICK, **changes})
    assert "\n" not in str(caught.value)
