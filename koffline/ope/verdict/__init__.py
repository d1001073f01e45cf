"""The verdict on whether the log answers the question, with reasons if it does not
fully.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from koffline.errors import counted
from koffline.ope.estimators.doubly_robust import drl
from koffline.ope.log.coverage import Coverage, visited_holes
from koffline.ope.log.facts import Limits
from koffline.ope.names import CERTIFIED_KINDS, EPISODES, NETWORKS, needs_of
from koffline.ope.results import (
    NOT_ANSWERABLE,
    SUPPORTED,
    WITH_CARE,
    BoundRow,
    Interval,
    PointEstimate,
    Reason,
    Verdict,
)
from koffline.ope.verdict.reasons import (
    doubts_of_estimate,
    doubts_of_rows,
    why_not_answerable,
)
from koffline.ope.verdict.sentence import plus_minus, sentence_on_value
from koffline.ope.workspace import Workspace

__all__ = [
    "NOT_ANSWERABLE",
    "SUPPORTED",
    "WITH_CARE",
    "judge",
    "plus_minus",
    "verdict_on",
    "without_guess",
    "without_guesswork",
]


def verdict_on(workspace: Workspace, estimate: PointEstimate) -> Verdict:
    """Whether the log answers the question."""
    robust = None
    visits = None
    needs = needs_of(estimate.name)
    if NETWORKS in needs and EPISODES not in needs:
        # from the rows in memory; all rows would need another pass
        robust = drl(
            workspace.held_sums,
            least=workspace.fitted.half_width,
            level=workspace.settings.level,
        )
        visits = workspace.held_values.weights
    doubts = list(doubts_of_rows(workspace, estimate.interval, robust))
    problem = workspace.problem
    holes = visited_holes(problem, visits, workspace.settings.seed)
    coverage = dataclasses.replace(workspace.coverage, holes=holes)
    return judge(
        estimate, workspace.limits, coverage, problem.reward_scale, robust, doubts
    )


def judge(
    estimate: PointEstimate,
    limits: Limits,
    coverage: Coverage,
    scale: float,
    robust: PointEstimate | None = None,
    gaps: Sequence[Reason] = (),
) -> Verdict:
    """Judge an estimate as *supported*, *with care* or *not answerable from this log*,
    with reasons.

    scale: the rms return. robust: the doubly robust estimate by the same networks; its
    weights show whether the log visits the states and actions that the policy does.
    gaps: reasons for care that come from the data.
    """
    hopeless = why_not_answerable(estimate, coverage, scale)
    if hopeless is not None:
        what_fails = "result" if hopeless.kind == "interval" else "log"
        of_training = [gap for gap in gaps if gap.kind == "training"]
        return Verdict(
            answer=NOT_ANSWERABLE,
            reasons=(hopeless, *of_training),
            sentence=f"This {what_fails} does not say what the policy is worth:"
            f" {hopeless.text}.",
        )
    interval = estimate.interval
    assert interval is not None  # without one, the log does not answer
    doubts = [
        *gaps,
        *doubts_of_estimate(estimate, interval, limits, coverage, scale, robust),
    ]
    value = sentence_on_value(estimate, interval)
    if not doubts:
        good = f"coverage is good ({coverage.fraction:.0%})"
        return Verdict(SUPPORTED, (), f"{value}; {good}.")
    further = ""
    if len(doubts) > 1:
        further = f" (and {counted(len(doubts) - 1, 'more reason')})"
    care = f"take it with care: {doubts[0].text}{further}"
    return Verdict(WITH_CARE, tuple(doubts), f"{value}; {care}.")


def without_guesswork(estimate: PointEstimate, verdict: Verdict) -> PointEstimate:
    """The estimate without uplift and interval if the log does not answer.

    A certified interval without guessed bounds is kept. So is an interval whose width
    is itself the reason.
    """
    if not verdict.is_open:
        return estimate
    interval = estimate.interval
    if interval is not None and _stands(interval, verdict):
        if interval.kind in CERTIFIED_KINDS:
            return dataclasses.replace(estimate, uplift=None)
        return estimate
    diagnostics = {
        key: value
        for key, value in estimate.diagnostics.items()
        if key not in ("interval", "intervals")
    }
    return dataclasses.replace(
        estimate, interval=None, uplift=None, diagnostics=diagnostics
    )


def without_guess(bound: BoundRow, verdict: Verdict) -> BoundRow:
    """`without_guesswork` for an interval that belongs to no estimator."""
    if not verdict.is_open or bound.interval is None:
        return bound
    if _stands(bound.interval, verdict):
        return bound
    return BoundRow(
        bound.kind,
        None,
        "the log does not answer, and the interval would rest on it alone",
    )


def _stands(interval: Interval, verdict: Verdict) -> bool:
    """Whether an interval rests on no guess, or is itself the reason why there is no
    answer.
    """
    if interval.kind in CERTIFIED_KINDS:
        return not interval.is_guess
    return verdict.reasons[0].kind == "size"
