"""The verdict on whether the log answers the question, with reasons if it does not
fully.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from koffline.data.raw import CAUTIONS
from koffline.data.spaces import ACTIONS
from koffline.errors import counted, percent
from koffline.ope import thresholds
from koffline.ope.cross_fit import share_seen
from koffline.ope.diagnose.action_order import find_other_order, usual_orders
from koffline.ope.estimators.doubly_robust import drl
from koffline.ope.log.coverage import (
    Coverage,
    clause_on_holes,
    describe_coverage,
    doubts_of_weights,
    visited_holes,
)
from koffline.ope.log.limits import Limits
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
from koffline.ope.workspace import Workspace
from koffline.policies import DiscretePolicy


def verdict_on(workspace: Workspace, found: PointEstimate) -> Verdict:
    """Whether the log answers the question."""
    robust = None
    # from the rows in memory; all rows would need another pass
    needs = needs_of(found.name)
    if NETWORKS in needs and EPISODES not in needs:
        robust = drl(
            workspace.held_sums, workspace.fitted.half_width, workspace.settings.level
        )
    noted = (note.partition(": ") for note in workspace.log.log.metadata.notes)
    gaps = [Reason(kind, text) for kind, _, text in noted if kind in CAUTIONS]
    gaps += [
        *training_rows(workspace),
        *structure_reasons(workspace),
        *order_of_actions(workspace),
    ]
    if robust is not None and found.interval is not None:
        gaps += failed_assumptions(robust.value, found.interval, workspace)
    problem = workspace.problem
    if robust is None:
        visits = None
    else:
        visits = workspace.held_values.weights
    holes = visited_holes(problem, visits, workspace.settings.seed)
    coverage = dataclasses.replace(workspace.coverage, holes=holes)
    return judge(found, workspace.limits, coverage, problem.reward_scale, robust, gaps)


def judge(
    found: PointEstimate,
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
    hopeless = _why_not(found, coverage, scale)
    if hopeless:
        what = "result" if hopeless.kind == "interval" else "log"
        why = f"This {what} does not say what the policy is worth: {hopeless.text}."
        return Verdict(
            NOT_ANSWERABLE,
            (hopeless, *(gap for gap in gaps if gap.kind == "training")),
            why,
        )
    doubts = [*gaps, *_doubts(found, limits, coverage, scale, robust)]
    if len(doubts) > 1:
        more = f" (and {counted(len(doubts) - 1, 'more reason')})"
    else:
        more = ""
    good = f"coverage is good ({coverage.fraction:.0%})"
    if doubts:
        care = f"take it with care: {doubts[0].text}{more}"
    else:
        care = good
    return Verdict(
        WITH_CARE if doubts else SUPPORTED, tuple(doubts), f"{_finding(found)}; {care}."
    )


def _finding(found: PointEstimate) -> str:
    """Sentence on the policy's value, compared with the logging policy's if known."""
    assert found.interval is not None
    worth = f"The policy is worth {plus_minus(found.value, found.interval)}"
    level = percent(found.interval.level)
    uplift = found.uplift
    if uplift is None or (gap := uplift.interval) is None:
        return f"{worth} ({level} interval)"
    size = uplift.value
    side = "more"
    if gap.holds(0.0):
        more = f"not clearly more or less ({plus_minus(size, gap)})"
    else:
        if size < 0.0:
            size = -size
            gap = Interval(-gap.high, -gap.low, gap.level, gap.kind)
            side = "less"
        more = f"{plus_minus(size, gap)} {side}"
    return f"{worth}, {more} than the policy that wrote the log ({level} intervals)"


def plus_minus(value: float, interval: Interval) -> str:
    """``42.73 ± 0.83``, two digits of the half width; with both ends if the value is
    not in the middle.
    """
    half = 0.5 * interval.width
    if half > 0.0:
        digits = max(0, 1 - math.floor(math.log10(half)))
    else:
        digits = 3
    shown, low, high = (
        f"{number:,.{min(digits, 12)}f}"
        for number in (value, interval.low, interval.high)
    )
    is_middle = abs(value - 0.5 * (interval.low + interval.high)) <= 0.02 * half
    if is_middle:
        return f"{shown} ± {half:,.{min(digits, 12)}f}"
    return f"{shown} ({low} to {high})"


def _why_not(found: PointEstimate, coverage: Coverage, scale: float) -> Reason | None:
    """Reason why the log does not answer; None if it does."""
    if coverage.reasons:
        return Reason("support", coverage.reasons[0])
    if found.interval is None:
        if found.why_no_interval:
            told = f", because {found.why_no_interval}"
        else:
            told = ""
        return Reason("interval", f"there is no interval{told}")
    if 0.5 * found.interval.width > thresholds.TOO_WIDE * scale:
        return Reason(
            "size", "the interval is wider than the returns; log more episodes"
        )
    return None


def _doubts(  # noqa: C901
    found: PointEstimate,
    limits: Limits,
    coverage: Coverage,
    scale: float,
    robust: PointEstimate | None,
) -> Iterator[Reason]:
    """Yield reasons to act on an answer with care."""
    assert found.interval is not None
    if coverage.fraction < thresholds.LOW_COVERAGE:
        yield Reason("support", describe_coverage(coverage.fraction))
    if coverage.of_starts < thresholds.LOW_COVERAGE_OF_STARTS:
        yield Reason("support", coverage.clause_on_starts)
    if coverage.holes:
        yield Reason("support", clause_on_holes(coverage.holes))
    if coverage.unlogged > thresholds.SOME_UNLOGGED:
        yield Reason(
            "support",
            f"{coverage.clause_on_unlogged}; it is valued as if it took its others there",
        )
    if limits.facts.units < thresholds.FEW_UNITS:
        units = counted(round(limits.facts.units), "independent unit")
        yield Reason("size", f"{units} (episodes, rows or clusters) in the log")
    if (
        limits.facts.endings is not None
        and limits.facts.endings < thresholds.FEW_WEIGHTED
    ):
        which = counted(
            limits.facts.endings, "episode", "ends by itself", "end by themselves"
        )
        yield Reason("size", f"only {which}, and no reward tells policies apart")
    if limits.facts.unseen >= thresholds.MUCH_UNSEEN:
        told = "of a constant reward lies beyond the longest episode"
        yield Reason("horizon", f"{limits.facts.unseen:.0%} {told}")
    if 0.5 * found.interval.width > thresholds.WIDE * scale:
        half = 0.5 * found.interval.width / scale
        yield Reason(
            "size", f"the interval reaches {half:.0%} of the rms return either way"
        )
    elif (
        limits.facts.episodes
        and 0.5 * found.interval.width
        > thresholds.WIDE_OF_USUAL * limits.facts.sizes.mean
    ):
        told = "the interval reaches half of the mean |return| either way"
        yield Reason("size", f"{told}: few returns make up the value")
    if robust is None:
        size = found.effective_sample_size
        if size is not None and size < thresholds.FEW_WEIGHTED:
            yield Reason(
                "support",
                f"only {size:.1f} episodes (effective number) carry the weight",
            )
        for deviation in found.diagnostics.get("probabilities", ()):
            yield Reason("contradiction", deviation.rstrip("."))
        return
    # neither is cut at what the rewards allow
    if not found.interval.as_measured.holds(robust.value):
        told = f"the doubly robust estimate {robust.value:.4g}"
        yield Reason("contradiction", f"{told} lies outside the interval")
    yield from doubts_of_weights(robust.diagnostics)


def without_guesswork(found: PointEstimate, verdict: Verdict) -> PointEstimate:
    """The estimate without uplift and interval if the log does not answer.

    A certified interval without guessed bounds is kept. So is an interval whose width
    is itself the reason.
    """
    if not verdict.is_open:
        return found
    if _stands(found.interval, verdict):
        is_certified = (
            found.interval is not None and found.interval.kind in CERTIFIED_KINDS
        )
        if is_certified:
            return dataclasses.replace(found, uplift=None)
        return found
    bare = {
        key: value
        for key, value in found.diagnostics.items()
        if key not in ("interval", "intervals")
    }
    return dataclasses.replace(found, interval=None, uplift=None, diagnostics=bare)


def without_guess(bound: BoundRow, verdict: Verdict) -> BoundRow:
    """`without_guesswork` for an interval that belongs to no estimator."""
    if (
        not verdict.is_open
        or bound.interval is None
        or _stands(bound.interval, verdict)
    ):
        return bound
    return BoundRow(
        bound.kind,
        None,
        "the log does not answer, and the interval would rest on it alone",
    )


def _stands(interval: Interval | None, verdict: Verdict) -> bool:
    """Whether an interval rests on no guess, or is itself the reason why there is no
    answer.
    """
    if interval is not None and interval.kind in CERTIFIED_KINDS:
        return not interval.is_guess
    return interval is not None and verdict.reasons[0].kind == "size"


def structure_reasons(workspace: Workspace) -> list[Reason]:
    """Reasons for care that the rows show: signs that the log is not what it says it
    is.
    """
    return [Reason(symptom.kind, symptom.text) for symptom in workspace.symptoms]


def order_of_actions(workspace: Workspace) -> Iterator[Reason]:
    """Yield a reason for care if the policy's columns seem to be in another order than
    the log's actions.
    """
    log = workspace.transitions
    policy = workspace.policy
    names = workspace.log.log.metadata.extra.get(ACTIONS)
    if (
        not isinstance(policy, DiscretePolicy)
        or not isinstance(names, list)
        or len(names) != policy.n
    ):
        return
    texts = list(map(str, names))
    if len(set(texts)) < len(texts) or not any(usual_orders(log.actions, texts)):
        return
    probabilities = policy.probabilities(log.observations)
    other = find_other_order(probabilities, log.actions, log.units, texts)
    if other is not None:
        yield Reason("actions", str(other))


def training_rows(workspace: Workspace) -> Iterator[Reason]:
    """Yield a reason for care if the policy was trained on these rows."""
    trained = workspace.policy.trained_on
    if trained is None:
        return
    share, _, is_more = share_seen(trained.fingerprints, workspace.transitions)
    # of a world that repeats itself
    if trained.sha256 == workspace.log.log.sha256 and not is_more:
        share = 1.0
        is_more = True
    if is_more and share > thresholds.FEW_SEEN:
        told = (
            f"the policy was trained on {share:.0%} of these rows, on which it looks"
            " better than it is"
        )
        remedy = (
            "train on one part of the log and evaluate on the other (koffline data"
            " split)"
        )
        yield Reason("training", f"{told}; {remedy}")


def failed_assumptions(
    value: float, interval: Interval, workspace: Workspace
) -> Iterator[Reason]:
    """Yield reasons for care if the logged state is not Markov, or the world changes
    along the log.
    """
    shift = workspace.memory_shift
    if shift is not None and shift.matters(interval):
        rows = shift.rows + (workspace.settings.history or 0)
        if rows == 1:
            part = "the row before"
        else:
            part = f"{rows} rows before"
        remedy = f"try --set history={rows}"
        if shift.rows == 0:
            part = "sums over the rows before"
            remedy = "add to it what adds up (a sum, a count, the step)"
        if shift.of_step:
            part = "the step"
            remedy = (
                "add the step to it, or flag ends truncated that are limits of time"
            )
        told = (
            f"with {part} as part of it the value would be about"
            f" {value + shift.value:.4g}"
        )
        log = workspace.transitions
        is_last = (log.episode_lengths == log.episode_lengths.max()) & log.truncated[
            log.episode_ends
        ]
        # would extrapolate to unseen later steps
        if shift.of_step and is_last.mean() > thresholds.MANY_CUT:
            told = "the step does"
            remedy = "log what changes with it (a phase, the day of the week)"
        yield Reason(
            "state",
            f"what happened earlier matters beyond the logged state; {told}: {remedy}",
        )
    shift = workspace.drift_shift
    if shift is not None and shift.matters(interval):
        told = (
            "the world changes along the log; if evenly, the value where the log ends"
            " is about"
        )
        remedy = "evaluate the later part of the log by itself"
        yield Reason("drift", f"{told} {value + shift.value:.4g}: {remedy}")
