"""Ranking policies: order, pairing, names, bad input; differences by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from koffline.config import EvaluationSettings
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.ope import ranking
from koffline.ope.comparisons import compare_intervals, compare_replicas, holm
from koffline.ope.ranking import select_policies
from koffline.ope.results import Interval
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import NOISY, QUICK, SOFT, continuous_log, discrete_log
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("few_features_of_memory")


def test_the_better_policy_comes_first_and_differs() -> None:
    """A chain whose right end pays: policies that go right more often are worth
    more.
    """
    log = EXACT_PROBLEMS["chain_off"](seed=0, n_rows=600).transitions
    policies = {
        f"right {chance:g}": lambda s, p=chance: np.tile([1 - p, p], (len(s), 1))
        for chance in (0.1, 0.5, 0.9)
    }
    options = {"steps": 100, "full_replicas": 1, "resampled_replicas": 4}
    ranking = select_policies(log, policies, 0.95, seed=5, **options)
    ranked = [(policy.rank, policy.name) for policy in ranking.policies]
    assert ranked == [(1, "right 0.9"), (2, "right 0.5"), (3, "right 0.1")]
    assert ranking.best.maybe_best
    assert not ranking.policies[-1].maybe_best
    assert ranking.candidates[0] is ranking.best
    assert len(json.loads(ranking.to_json())["comparisons"]) == 3
    first, *_, last = ranking.policies
    assert ranking.comparisons[0].difference == pytest.approx(first.value - last.value)


def test_a_policy_that_cannot_be_evaluated_is_named(monkeypatch) -> None:
    evaluate = ranking.evaluate_one_of_several

    def evaluate_but_wild(log, policy, **options):
        if policy.name == "wild":
            raise KofflineError("3 of 3 networks diverged")
        return evaluate(log, policy, **options)

    monkeypatch.setattr(ranking, "evaluate_one_of_several", evaluate_but_wild)
    named = {
        name: DiscretePolicy(
            3, lambda s, a=action: np.tile(np.eye(3)[a], (len(s), 1)), name
        )
        for action, name in enumerate(("a", "wild", "b"))
    }
    of_names = select_policies(discrete_log(), named, 0.9, **QUICK)
    assert {policy.name for policy in of_names.policies} == {"a", "b"}
    assert of_names.unranked == (
        {"name": "wild", "reason": "3 of 3 networks diverged"},
    )
    assert "wild is not ranked: 3 of 3 networks diverged" in of_names.warnings
    with pytest.raises(
        KofflineError,
        match=r"fewer than two policies could be evaluated \(wild: 3 of 3",
    ):
        select_policies(
            discrete_log(), {"a": named["a"], "wild": named["wild"]}, 0.9, **QUICK
        )


def test_a_policy_that_the_log_cannot_answer_comes_last_whatever_its_value() -> None:
    """Action 2 is never logged; its networks say more than those of the others."""
    log = discrete_log()
    log = log.select(np.flatnonzero(log.actions < 2))
    named = {
        f"act {a}": lambda s, a=a: np.tile(np.eye(3)[a], (len(s), 1)) for a in range(3)
    }
    ranking = select_policies(
        log,
        named,
        settings=EvaluationSettings(gamma=0.9, seed=7, **QUICK),
        history=None,
    )
    assert ranking.seed == 7
    last = ranking.policies[-1]
    assert (last.name, last.interval, last.maybe_best) == ("act 2", None, False)
    assert last.verdict.answer.startswith("not answerable")
    (pair,) = ranking.comparisons  # the other two are compared
    assert {pair.better, pair.worse} == {"act 0", "act 1"}
    assert any(text.startswith("act 2: ranked last") for text in ranking.warnings)


def test_estimators_without_replicas_are_compared_by_intervals() -> None:
    ranking = select_policies(
        discrete_log(), ["uniform", SOFT], 0.9, estimator="lstdq", seed=7, **QUICK
    )
    (pair,) = ranking.comparisons
    assert pair.high - pair.low > 0.999 * sum(
        policy.interval.width for policy in ranking.policies
    )
    assert "by the intervals" in ranking.assumptions


def test_policies_that_draw_their_actions_draw_with_the_generator_they_are_given() -> (
    None
):
    ranking, again = (
        select_policies(continuous_log(), [NOISY, "uniform"], 0.9, **QUICK)
        for _ in range(2)
    )
    assert ranking.to_json(timing=False) == again.to_json(timing=False)
    assert len(ranking.comparisons) == 1


def test_every_policy_has_a_name_of_its_own() -> None:
    policies = [dataclasses.replace(SOFT, name=name) for name in ("p", "p (2)", "p")]
    assert list(ranking._named_policies(policies, discrete_log())) == [
        "p",
        "p (2)",
        "p (3)",
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"policies": "uniform"}, ConfigError, "give a list of two or more"),
        ({"policies": ["uniform", "missing.d3"]}, PolicyError, "no such file"),
        (
            {"transitions": discrete_log(weights=np.eye(60)[0])},
            DataError,
            "give at least two rows",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, kind, message) -> None:
    base = {
        "transitions": discrete_log(),
        "policies": ["uniform", "epsilon:0.5:uniform"],
        "gamma": 0.9,
    }
    with refused(kind, message):
        select_policies(**{**base, **QUICK, **changes})


def test_one_pair_by_hand() -> None:
    # Resampled differences 1, 3, 5: deviation 2.
    values = np.array([[3.0, 5.0, 2.0, 2.0, 9.0], [1.0, 1.0, 1.0, -1.0, 4.0]])
    (comparison,) = compare_replicas(("a", "b"), (4.0, 1.0), values, 2, level=0.9)
    error = 2.0 * math.sqrt(1.0 + 1.0 / 2.0)
    assert (comparison.better, comparison.worse, comparison.difference) == (
        "a",
        "b",
        3.0,
    )
    assert comparison.p_value == pytest.approx(2.0 * stats.t.sf(3.0 / error, df=2))
    assert comparison.high - 3.0 == pytest.approx(stats.t.ppf(0.95, df=2) * error)
    assert comparison.low == pytest.approx(6.0 - comparison.high)
    assert comparison.adjusted_p_value == comparison.p_value
    assert not comparison.significant


def test_what_all_replicas_share_cancels_and_equal_policies_do_not_differ() -> None:
    generator = np.random.default_rng(1)
    shared = 100.0 * generator.normal(size=8)
    values = np.array([[1.0], [0.0]]) + shared + 0.01 * generator.normal(size=(2, 8))
    (comparison,) = compare_replicas(("a", "b"), (1.0, 0.0), values, 2)
    assert comparison.significant
    assert comparison.high - comparison.low < 0.2
    same = np.tile(np.arange(6.0), (2, 1))
    (comparison,) = compare_replicas(("a", "b"), (2.5, 2.5), same, 2)
    assert (comparison.difference, comparison.p_value, comparison.significant) == (
        0.0,
        1.0,
        False,
    )
    (sure,) = compare_replicas(
        ("a", "b"), (3.5, 2.5), same + np.array([[1.0], [0.0]]), 2
    )
    assert (sure.p_value, sure.significant) == (0.0, True)


def test_intervals_alone_by_hand() -> None:
    # Standard errors 1 and 2: a difference of 6 is twice their sum.
    z = stats.norm.ppf(0.975)
    intervals = [
        Interval(5.0 - z, 5.0 + z, 0.95, "x"),
        Interval(-1.0 - 2 * z, -1.0 + 2 * z, 0.95, "x"),
    ]
    (comparison,) = compare_intervals("ab", [5.0, -1.0], intervals)
    assert comparison.p_value == pytest.approx(2.0 * stats.norm.sf(2.0))
    assert comparison.high - comparison.low == pytest.approx(6.0 * z)
    assert comparison.significant
    (same,) = compare_intervals("ab", [1.0, 1.0], [Interval(1.0, 1.0, 0.95, "x")] * 2)
    assert same.p_value == 1.0


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.6 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.6; steps never
    # go down.
    assert holm(np.array([0.6, 0.01, 0.03, 0.02])) == pytest.approx(
        [0.6, 0.04, 0.06, 0.06]
    )
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1.0, 1.0])


def test_a_diverged_replica_counts_for_neither() -> None:
    values = np.array([[3.0, 2.0, 4.0, np.nan, 6.0], [1.0, 1.0, 1.0, 1.0, np.nan]])
    both = ("a", "b"), (3.0, 1.0)
    assert compare_replicas(*both, values, 1) == compare_replicas(
        *both, values[:, :3], 1
    )
    with pytest.raises(DataError, match="1 networks in common"):
        compare_replicas(*both, values[:, [0, 1, 3]], 1)
