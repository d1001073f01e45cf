"""The certificate: its simultaneous bound, what it refuses, and why to keep."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from koffline.config import EvaluationSettings
from koffline.improvement.certificate import (
    OF_STRUCTURE,
    Certificate,
    Cost,
    certificate_from,
    level_of_one,
)
from koffline.improvement.constraint import parse_constraint
from koffline.improvement.keeping import why_keep
from koffline.improvement.outcome import CandidatePolicy
from koffline.improvement.screening import ShareScore
from koffline.improvement.search import Scored, choose_finalists
from koffline.ope.groups import GroupValue
from koffline.ope.results import Interval, Reason, Verdict

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
