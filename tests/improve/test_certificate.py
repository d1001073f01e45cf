"""The certificate: its simultaneous bound, what it refuses, and why to keep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import special

import koffline
from koffline.config import EvaluationSettings
from koffline.improvement.certificate import (
    OF_STRUCTURE,
    Certificate,
    Cost,
    certificate_from,
    certify,
    level_of_one,
)
from koffline.improvement.constraint import parse_constraint
from koffline.improvement.keeping import why_keep
from koffline.improvement.logged_probabilities import contradictions
from koffline.improvement.outcome import CandidatePolicy
from koffline.improvement.parts import assign_parts, units_for
from koffline.improvement.screening import ShareScore
from koffline.improvement.search import Scored, choose_finalists
from koffline.ope.groups import GroupValue
from koffline.ope.results import NOT_ANSWERABLE, Interval, Reason, Verdict
from koffline.ope.workspace import SharedByPolicies
from tests.improve.worlds import GAMMA, QUICK, chain_log

FAIR = Verdict("supported", (), "The policy is worth 1.")


def certificate(low: float, uplift: float, **changes: object) -> Certificate:
    fields: dict = {
        "value": 2.0 + uplift,
        "value_interval": Interval(1.0, 4.0, 0.9, "bootstrap"),
        "uplift": uplift,
        "interval": Interval(low, 2 * uplift - low, 0.9, "bootstrap"),
        "behavior_value": 2.0,
        "verdict": FAIR,
        **changes,
    }
    return Certificate(**fields)


def settings(level: float) -> EvaluationSettings:
    return EvaluationSettings(gamma=0.9, level=level)


@pytest.mark.parametrize("finalists", [1, 2, 3, 5])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_all_lower_ends_hold_together(finalists: int, correlation: float) -> None:
    """Estimates of k uplifts with Student t intervals of their own replicas, as
    `FittedValues.interval` makes them: some lower end is above its truth in at most 5 %
    of the logs.
    """
    generator = np.random.default_rng(finalists)
    draws = 4000
    replicas = 12
    level = level_of_one(settings(0.95), finalists)
    quantile = special.stdtrit(replicas - 1, 0.5 + level / 2.0)

    def correlated(shape: tuple[int, ...]) -> np.ndarray:
        common = generator.normal(size=(*shape, 1))
        each_one = generator.normal(size=(*shape, finalists))
        return np.sqrt(correlation) * common + np.sqrt(1 - correlation) * each_one

    errors = correlated((draws,))
    spread = correlated((draws, replicas)).std(axis=1, ddof=1)
    misses = (errors - quantile * spread > 0.0).any(axis=1).mean()
    # three standard errors above the level
    assert misses < 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)
    if correlation == 0.0:
        assert misses > 0.03  # and not much wider than it must be


def test_levels() -> None:
    assert level_of_one(settings(0.95), 1) == 0.9
    assert level_of_one(settings(0.95), 2) == 0.95
    assert level_of_one(settings(0.95), 3) == 0.9667
    assert level_of_one(settings(0.4), 1) > 0.0
    assert level_of_one(settings(0.999999), 3) < 1.0


NOT_ANSWERED = "not answerable from this log"
CASES = [
    (certificate(0.1, 1.0), None),
    (certificate(-0.1, 1.0), "size"),
    (certificate(-3.0, -1.0), "noise"),
    (certificate(0.1, 1.0, interval=None), "size"),
    (
        certificate(0.1, 1.0, verdict=Verdict(NOT_ANSWERED, (Reason("support", ""),))),
        "support",
    ),
    (
        certificate(0.1, 1.0, verdict=Verdict(NOT_ANSWERED, (Reason("size", ""),))),
        "size",
    ),
    (certificate(0.1, 1.0, cost=Cost(1.0, 2.0), cost_limit=1.5), "constraint"),
    (certificate(0.1, 1.0, cost=Cost(1.0, None), cost_limit=1.5), "constraint"),
    (certificate(0.1, 1.0, cost=Cost(1.0, 1.4), cost_limit=1.5), None),
]


@pytest.mark.parametrize(("issued", "expected"), CASES)
def test_what_speaks_against_a_finalist(issued: Certificate, expected: str) -> None:
    assert issued.why_not == expected
    assert issued.passes == (expected is None)


@pytest.mark.parametrize("kind", sorted(OF_STRUCTURE))
def test_reasons_that_question_the_log_refuse(kind: str) -> None:
    doubtful = Verdict("with care", (Reason("size", "few"), Reason(kind, "odd")))
    issued = certificate(0.5, 1.0, verdict=doubtful)
    assert issued.why_not == "log"
    candidates = [finalist("a", issued)]
    reason = why_keep(candidates, {"a": issued}, units=30, tried=4)
    assert reason.kind == "log"
    assert f"{kind}: odd" in reason.text


def finalist(name: str, issued: Certificate) -> CandidatePolicy:
    return CandidatePolicy(
        name=name,
        share=1.0,
        stage="certify",
        value=issued.value,
        uplift=issued.uplift,
        interval=issued.interval,
        certified=issued.passes,
        note=issued.why_not or "",
    )


def test_a_reason_of_size_says_how_long_a_log_would_tell() -> None:
    issued = certificate(-1.0, 1.0)  # twice the half width: four times the log
    reason = why_keep([finalist("a", issued)], {"a": issued}, units=30, tried=4)
    assert reason.kind == "size"
    assert "about 4 times as long" in reason.remedy
    assert "a seems to gain 1, with a lower end of -1" in reason.text


def test_a_reason_of_size_says_why_a_lower_end_above_zero_does_not_count() -> None:
    verdict = Verdict(NOT_ANSWERED, (Reason("interval", NO_SPREAD),))
    issued = certificate(0.5, 1.0, verdict=verdict)
    reason = why_keep([finalist("a", issued)], {"a": issued}, units=30, tried=4)
    assert reason.kind == "size"
    assert reason.text.endswith(f"with a lower end of 0.5, but {NO_SPREAD}")


def test_reasons_in_order() -> None:
    cases = {
        "a": certificate(-3.0, -1.0),
        "b": certificate(
            0.1, 1.0, verdict=Verdict(NOT_ANSWERED, (Reason("support", "far"),))
        ),
    }
    candidates = [finalist(name, issued) for name, issued in cases.items()]
    assert why_keep(candidates, cases, units=30, tried=2).kind == "support"
    assert why_keep(candidates[:1], cases, units=30, tried=2).kind == "noise"
    assert why_keep([], {}, units=30, tried=0).kind == "support"
    unsupported = CandidatePolicy("c", 1.0, "choose", 1.0, 1.0, None, note="support")
    assert why_keep([unsupported], {}, units=30, tried=1).kind == "support"
    idle = CandidatePolicy("d", 1.0, "choose", 1.0, -1.0, None)
    assert why_keep([unsupported, idle], {}, units=30, tried=2).kind == "noise"


NO_SPREAD = "rewards and endings are the same in all rows"


@pytest.mark.parametrize(
    ("tried", "failure", "words"),
    [
        (0, "", "could be valued on this log"),
        (0, "rewards reaches 1e300", "on this log: rewards reaches 1e300"),
    ],
)
def test_a_reason_without_candidates(tried: int, failure: str, words: str) -> None:
    reason = why_keep([], {}, units=30, tried=tried, failure=failure)
    assert words in reason.text
    assert ("koffline data validate" in reason.remedy) == bool(failure)


def test_a_reason_of_size_says_why_there_is_no_interval() -> None:
    verdict = Verdict(NOT_ANSWERED, (Reason("interval", NO_SPREAD),))
    issued = certificate(0.0, 0.0, interval=None, verdict=verdict)
    reason = why_keep([finalist("a", issued)], {"a": issued}, units=30, tried=4)
    assert reason.kind == "size"
    assert NO_SPREAD in reason.text


@pytest.mark.parametrize(("bound", "text"), [(2.5, "2.5"), (1234567.5, "1234567.5")])
def test_a_constraint_is_shown_with_its_bound(bound: float, text: str) -> None:
    assert parse_constraint(f"cost <= {bound!r}").text == f"cost <= {text}"


def score(candidate: str, low: float, **changes: object) -> Scored:
    fields: dict = {"share": 1.0, "value": 1.0, "uplift": low + 1.0, "high": low + 2.0}
    return Scored(candidate, ShareScore(**{**fields, "low": low, **changes}))


def test_finalists_are_the_largest_lower_ends_that_are_supported_and_better() -> None:
    scored = [
        score("a", 3.0),
        score("a", 2.5, share=0.5),
        score("a", 2.4, share=0.25),
        score("b", 5.0, refused="support"),
        score("c", 2.0),
        score("d", -4.0),
    ]
    chosen = choose_finalists(scored, 4)
    assert [item.name for item in chosen] == ["a", "c"]
    assert [item.name for item in choose_finalists(scored, 1)] == ["a"]
    costly = [score("a", 3.0, cost=2.0), score("b", 1.0, cost=0.5)]
    assert [item.name for item in choose_finalists(costly, 2, at_most=1.0)] == ["b"]


def test_a_certificate_is_read_back_from_its_json() -> None:
    issued = certificate(
        0.1,
        1.0,
        verdict=Verdict("with care", (Reason("size", "few"),), "Worth 3."),
        groups=(
            GroupValue("x", 3, 1.0, Interval(0.0, 2.0, 0.9, "bootstrap")),
            GroupValue("y", 1, reason="few"),
        ),
        warnings=("careful",),
        cost=Cost(1.0, 2.0),
        cost_limit=3.0,
    )
    again = certificate_from(issued.as_dict())
    assert again.as_dict() == issued.as_dict()
    assert again.groups == issued.groups
    assert again.passes


@pytest.mark.parametrize(
    ("units", "effective", "expected"),
    [
        (8, 8.0, "size"),
        (19, 19.0, "size"),
        (19, None, "size"),  # what an earlier version wrote
        (40, 19.9, "size"),
        (20, 20.0, None),
        (20, None, None),
        (300, 250.0, None),
    ],
)
def test_few_units_recommend_nothing(
    units: int, effective: float | None, expected: str | None
) -> None:
    issued = certificate(0.1, 1.0, units=units, effective_units=effective)
    assert issued.why_not == expected
    assert certificate_from(issued.as_dict()).why_not == expected


@pytest.mark.parametrize(
    ("low", "units", "effective", "words", "remedy"),
    [
        (
            0.5,
            8,
            8.0,
            ["8 units to certify on are fewer", "43%"],
            ["at least 40 units"],
        ),
        (0.5, 19, 19.0, ["lower end of 0.5", "14%"], ["at least 40 units"]),
        (-1.0, 12, 12.0, ["lower end of -1"], ["at least 40 units", "about 4 times"]),
        # 40 of 100 tell as much as 16: 50 of 125 as much as 20
        (0.5, 40, 16.0, ["effectively 16"], ["at least 125 units"]),
        (0.5, 60, 10.0, ["effectively 10"], ["at least 600 units"]),
    ],
)
def test_a_reason_of_few_units_names_them_and_what_log_would_answer(
    low: float, units: int, effective: float, words: list[str], remedy: list[str]
) -> None:
    issued = certificate(low, 1.0, units=units, effective_units=effective)
    reason = why_keep([finalist("a", issued)], {"a": issued}, units=units, tried=4)
    assert reason.kind == "size"
    for word in words:
        assert word in reason.text
    for word in remedy:
        assert word in reason.remedy


@pytest.mark.parametrize(
    "wanted", [1.0, 20.0, 21.0, 24.0, 40.0, 59.0, 60.0, 61.0, 400.0]
)
def test_the_log_that_is_asked_for_has_units_enough(wanted: float) -> None:
    assert np.count_nonzero(assign_parts(units_for(wanted), seed=0) == 2) >= wanted


ODD = ("Ratios of policy to behavior average 0.8 ± 0.01, not 1.",)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ((), "log"),
        ((Reason("contradiction", "the doubly robust estimate lies outside"),), "log"),
        # the policy does what the log does not hold: ratios below 1 are no error then
        ((Reason("support", "the log hardly takes its actions"),), "support"),
    ],
)
def test_logged_probabilities_that_contradict_the_actions_refuse(
    reasons: tuple[Reason, ...], expected: str
) -> None:
    care = Verdict("with care", reasons)
    assert certificate(0.1, 1.0, verdict=care).why_not is None
    issued = certificate(0.1, 1.0, verdict=care, probabilities=ODD)
    assert issued.why_not == expected
    assert certificate_from(issued.as_dict()).why_not == expected
    reason = why_keep([finalist("a", issued)], {"a": issued}, units=30, tried=4)
    assert reason.kind == expected
    if expected == "log":
        assert "Ratios of policy to behavior average 0.8" in reason.text
        assert "leave them out" in reason.remedy
    else:
        assert "hardly takes" in reason.text


def offers(stated: tuple[float, float, float] | None) -> koffline.Transitions:
    """Three offers made at random, of which the third pays most; what the log says of
    their chances.
    """
    generator = np.random.default_rng(0)
    rows = 500
    states = generator.normal(size=(rows, 2))
    actions = generator.integers(3, size=rows)
    chances = np.where(actions == 2, 0.5, 0.2)
    logged = None
    if stated is not None:
        logged = np.log(np.asarray(stated)[actions])
    return koffline.Transitions(
        observations=states,
        actions=actions,
        rewards=(generator.random(rows) < chances).astype(float),
        next_observations=states,
        terminated=np.ones(rows, bool),
        truncated=np.zeros(rows, bool),
        episode_ids=np.arange(rows),
        behavior_log_probabilities=logged,
        action_space=koffline.Discrete(3),
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ((1 / 3, 1 / 3, 1 / 3), None),
        ((0.6, 0.3, 0.1), "log"),
        ((1 / 6, 1 / 6, 1 / 6), "log"),
        ((0.5, 0.5, 0.5), "log"),
        # the remedy: networks answer without them
        (None, None),
    ],
)
def test_a_log_with_wrong_probabilities_certifies_nothing(
    stated: tuple[float, float, float] | None, expected: str | None
) -> None:
    def mostly_third(observations: np.ndarray) -> np.ndarray:
        return np.tile([0.1, 0.1, 0.8], (len(observations), 1))

    policy = koffline.policies.DiscretePolicy(3, mostly_third)
    quick = EvaluationSettings(
        gamma=0.9,
        steps=300,
        full_replicas=2,
        resampled_replicas=8,
        hidden_units=(16,),
        cores=1,
    )
    issued = certify(offers(stated), policy, 2, quick, SharedByPolicies())
    assert issued.why_not == expected
    assert issued.effective_units == 500.0


def test_no_number_of_a_log_with_wrong_probabilities_reads_like_a_gain() -> None:
    settings = {**QUICK, "candidates": ("kernel_policy_iteration-1",), "shares": (0.5,)}
    settings |= {"choosing_steps": 100, "certifying_steps": 100, "folds": 5}
    result = koffline.improve(offers((0.6, 0.3, 0.1)), settings=settings, cores=1)
    assert result.reason.kind == "log"
    assert result.verdict.answer == NOT_ANSWERABLE
    assert [reason.kind for reason in result.verdict.reasons] == ["log"]
    assert " more than the policy that wrote the log" not in result.verdict.sentence


def taken(chances: np.ndarray, logged: np.ndarray, seed: int) -> koffline.Transitions:
    """Rows (N,) whose actions are drawn by ``chances (N, 3)``, and what the log says."""
    generator = np.random.default_rng(seed)
    count = len(chances)
    sums = chances.cumsum(axis=1)
    actions = (generator.random((count, 1)) > sums).sum(axis=1).clip(0, 2)
    states = generator.normal(size=(count, 1))
    return koffline.Transitions(
        observations=states,
        actions=actions,
        rewards=np.zeros(count),
        next_observations=states,
        terminated=np.ones(count, bool),
        truncated=np.zeros(count, bool),
        episode_ids=np.arange(count),
        behavior_log_probabilities=np.log(logged[np.arange(count), actions]),
        action_space=koffline.Discrete(3),
    )


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_logged_probabilities_by_which_actions_were_drawn_are_no_contradiction(
    spread: float,
) -> None:
    logits = spread * np.random.default_rng(1).normal(size=(1000, 3))
    chances = special.softmax(logits, axis=1)
    for seed in range(30):
        assert contradictions(taken(chances, chances, seed)) == ()
        # rounded to two digits
        rounded = np.maximum(chances.round(2), 0.01)
        assert contradictions(taken(chances, rounded, seed)) == ()


def test_logged_probabilities_that_are_a_quarter_too_small_are_one() -> None:
    equal = np.full((1000, 3), 1 / 3)
    logged = np.tile([0.375, 0.375, 0.25], (1000, 1))
    log = taken(equal, logged, 0)
    (sentence,) = contradictions(log)
    times = 4.0 * np.mean(np.asarray(log.actions) == 2)
    assert sentence.startswith(f"Action 2 was taken {times:.3g} times as often")
    # copies are no further evidence
    few = log.select(np.arange(100))
    copies = few.select(np.arange(1000) % 100).replace(episode_ids=np.arange(1000))
    assert contradictions(few) == ()
    assert contradictions(copies) == ()
    issued = certificate(0.1, 1.0).doubting((sentence,))
    assert issued.why_not == "log"
    assert sentence in (issued.doubt_of_log or "")
    assert certificate(0.1, 1.0).doubting(()).passes


def test_actions_that_some_states_forbid_are_no_contradiction() -> None:
    chances = np.full((1000, 3), 1 / 3)
    chances[:500] = [0.5, 0.5, 0.0]
    assert contradictions(taken(chances, chances, 0)) == ()


def test_of_what_is_not_recommended_the_verdict_says_so() -> None:
    result = koffline.improve(
        offers((1 / 3, 1 / 3, 1 / 3)).select(np.arange(120)),
        settings={**QUICK, "shares": (0.5,)},
        cores=1,
    )
    assert result.reason.kind == "size"
    named = f"{result.finalists[0].name} is not recommended (size)."
    assert result.verdict.sentence.startswith(f"{named} The policy is worth")


@pytest.mark.parametrize(("level", "of_interval"), [(0.95, "90%"), (0.8, "60%")])
def test_the_level_of_an_interval_is_said_where_it_is_not_that_of_the_end(
    level: float, of_interval: str
) -> None:
    settings = {**QUICK, "shares": (1.0,)}
    result = koffline.improve(
        chain_log(right=0.5).log, gamma=GAMMA, settings=settings, level=level, cores=1
    )
    assert result.recommended
    assert len(result.finalists) == 1
    certainty = f"at least {result.interval.low:.4g} more with {level:.0%} certainty"
    of_one = f"{certainty} (the lower end of an interval of {of_interval})."
    assert result.sentences[0].endswith(of_one)
    promise = f"The lower end holds with {level:.0%}."
    assert result.interval.assumptions.startswith(promise)
    # as of two finalists
    equal = dataclasses.replace(result.interval, level=level)
    of_two = dataclasses.replace(result, interval=equal)
    assert of_two.sentences[0].endswith(f"{certainty}.")
