"""Verdict in words on whether a log answers the question, from the log's own evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from koffline.data.columns import counted
from koffline.ope.coverage import LOW_COVERAGE, Coverage
from koffline.ope.limits import MUCH_UNSEEN, NO_INTERVAL, Limits
from koffline.ope.names import CERTIFIED_KINDS, READ_OFF
from koffline.ope.results import (
    BoundRow,
    Interval,
    PointEstimate,
    Uplift,
    Verdict,
    describe_coverage,
    percent,
)

SUPPORTED, WITH_CARE, NOT_ANSWERABLE = "supported", "with care", "not answerable from this log"
FEW_EPISODES = 20.0
_WIDE, _TOO_WIDE = 0.25, 1.0  # half widths in rms returns
_FEW_WEIGHTED, _MASS_OFF, _NEGATIVE = 10.0, 0.2, 0.25  # limits for diagnostics of weights


def judge(
    found: PointEstimate,
    limits: Limits,
    coverage: Coverage,
    scale: float,
    robust: PointEstimate | None = None,
    gaps: Sequence[str] = (),
) -> Verdict:
    """Judge an estimate as *supported*, *with care* or *not answerable from this log*, with reasons.

    scale: the rms return. robust: the doubly robust estimate by the same networks, whose weights say whether
    the log visits what the policy does. gaps: what its reader found missing or unknown inside episodes.
    """
    hopeless = list(_why_not(found, coverage, scale))
    if hopeless:
        why = f"This log does not say what the policy is worth: {_detail(hopeless[0])}."
        return Verdict(NOT_ANSWERABLE, tuple(hopeless), why)
    doubts = [*gaps, *_doubts(found, limits, coverage.fraction, scale, robust)]
    near = f"{coverage.fraction:.0%}"
    more = f" (and {counted(len(doubts) - 1, 'more reason')})" if len(doubts) > 1 else ""
    care = f"take it with care: {_detail(doubts[0])}{more}" if doubts else f"coverage is good ({near})"
    return Verdict(WITH_CARE if doubts else SUPPORTED, tuple(doubts), f"{_finding(found)}; {care}.")


def _detail(reason: str) -> str:
    """Text of a reason without its leading keyword."""
    return reason.partition(": ")[2]


def _finding(found: PointEstimate) -> str:
    """Sentence on the policy's value, with that of the logging policy if known."""
    assert found.interval is not None
    worth = f"The policy is worth {plus_minus(found.value, found.interval)}"
    level, uplift = percent(found.interval.level), found.uplift
    if uplift is None or uplift.interval is None:
        return f"{worth} ({level} interval)"
    return f"{worth}, {_compared(uplift)} the policy that wrote the log ({level} intervals)"


def _compared(uplift: Uplift) -> str:
    assert uplift.interval is not None
    if uplift.interval.holds(0.0):
        return f"not clearly more or less ({plus_minus(uplift.value, uplift.interval)}) than"
    turned = uplift.interval
    if uplift.value < 0.0:
        turned = Interval(-turned.high, -turned.low, turned.level, turned.kind)
    return f"{plus_minus(abs(uplift.value), turned)} {'less' if uplift.value < 0.0 else 'more'} than"


def plus_minus(value: float, interval: Interval) -> str:
    """``42.73 ± 0.83``, two digits of the half width; with both ends where the value is not in the middle."""
    half = 0.5 * interval.width
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0.0 else 3
    shown, low, high = (f"{number:,.{min(digits, 12)}f}" for number in (value, interval.low, interval.high))
    is_middle = abs(value - 0.5 * (interval.low + interval.high)) <= 0.02 * half
    return f"{shown} ± {half:,.{min(digits, 12)}f}" if is_middle else f"{shown} ({low} to {high})"


def _why_not(found: PointEstimate, coverage: Coverage, scale: float) -> Iterator[str]:
    """Yield reasons why the log does not answer."""
    if coverage.reasons:
        yield f"support: {coverage.reasons[0]}"
    elif found.interval is None:
        told = [text.removeprefix(NO_INTERVAL) for text in found.warnings if text.startswith(NO_INTERVAL)]
        yield f"interval: there is no interval{': ' if told else ''}{'; '.join(told).strip(' .')}"
    elif 0.5 * found.interval.width > _TOO_WIDE * scale:
        yield "size: the interval is wider than returns themselves; log more episodes"


def _doubts(
    found: PointEstimate, limits: Limits, coverage: float, scale: float, robust: PointEstimate | None
) -> Iterator[str]:
    """Yield reasons to act on an answer with care."""
    assert found.interval is not None
    if coverage < LOW_COVERAGE:
        yield f"support: {describe_coverage(coverage)}"
    if limits.units < FEW_EPISODES:
        yield f"size: {counted(round(limits.units), 'independent unit')} (episodes or rows) in the log"
    if limits.endings is not None and limits.endings < _FEW_WEIGHTED:
        which = counted(limits.endings, "episode", "ends by itself", "end by themselves")
        yield f"size: only {which}, and no reward tells policies apart"
    if limits.unseen >= MUCH_UNSEEN:
        yield f"horizon: {limits.unseen:.0%} of a constant reward lies beyond what any episode shows"
    if 0.5 * found.interval.width > _WIDE * scale:
        half = 0.5 * found.interval.width / scale
        yield f"size: the interval reaches {half:.0%} of the rms return either way"
    if robust is None:
        size = found.effective_sample_size
        if size is not None and size < _FEW_WEIGHTED:
            yield f"support: {size:.1f} episodes carry the weight"
        for deviation in found.diagnostics.get("probabilities", ()):
            yield f"contradiction: {deviation.rstrip('.')}"
        return
    if not found.interval.holds(robust.value):
        yield f"contradiction: the doubly robust estimate is {robust.value:.4g}"
    yield from doubts_of_weights(robust.diagnostics)


def doubts_of_weights(weights: dict[str, Any]) -> Iterator[str]:
    """Yield what the diagnostics of marginal weights say against them."""
    units, mass, negative = (weights[name] for name in ("effective_units", "mass", "negative_share"))
    if units < _FEW_WEIGHTED:
        yield f"support: weighted as the policy would visit them, the log's units count as {units:.1f}"
    if abs(mass - 1.0) > _MASS_OFF:
        yield f"support: the log accounts for {mass:.2f} of the policy's visits, where 1 is right"
    if negative > _NEGATIVE:
        yield f"support: {negative:.0%} of the weights of its rows are negative, which no visits are"


def without_guesswork(found: PointEstimate, verdict: Verdict) -> PointEstimate:
    """The estimate without uplift and interval if the log does not answer.

    A certificate without guesses stays. So does an interval that is itself the reason: it is too wide.
    """
    if verdict.answer != NOT_ANSWERABLE:
        return found
    if _stands(found.interval, verdict):
        is_certified = found.interval is not None and found.interval.kind in CERTIFIED_KINDS
        return dataclasses.replace(found, uplift=None) if is_certified else found
    bare = {key: value for key, value in found.diagnostics.items() if not key.startswith("interval")}
    return dataclasses.replace(found, interval=None, uplift=None, diagnostics=bare)


def without_guess(bound: BoundRow, verdict: Verdict) -> BoundRow:
    """`without_guesswork` for an interval that belongs to no estimator."""
    if verdict.answer != NOT_ANSWERABLE or bound.interval is None or _stands(bound.interval, verdict):
        return bound
    return BoundRow(bound.kind, None, "the log does not answer, and the interval would rest on it alone")


def _stands(interval: Interval | None, verdict: Verdict) -> bool:
    """Whether an interval rests on no guess, or is itself the reason why there is no answer."""
    if interval is None:
        return False
    if interval.kind in CERTIFIED_KINDS:
        return not interval.assumptions.startswith(READ_OFF)
    return verdict.reasons[0].startswith("size: ")
