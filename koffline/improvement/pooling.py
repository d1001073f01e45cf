"""One certificate of the mixture that draws one of several policies, from the
certificates of these policies on folds of a log.

In a one-step log a draw anew in every row is a draw anew in every episode, so that the
mixture's value is the weighted mean of its policies' values. Given the other folds,
each fold's interval is that of a policy that was fixed before. Their ends are pooled by
the method of variance estimates recovery: low = θ − √Σ w² (θ_k − low_k)² (Zou & Donner
2008, Construction of confidence limits about effect measures). That keeps the
asymmetry of the folds' intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from koffline.errors import counted, listed
from koffline.improvement.certificate import Certificate, Cost
from koffline.improvement.parts import UnitCount
from koffline.ope.groups import GroupValue
from koffline.ope.results import (
    NOT_ANSWERABLE,
    SUPPORTED,
    WITH_CARE,
    Interval,
    PointEstimate,
    Reason,
    Uplift,
    Verdict,
)
from koffline.ope.verdict.sentence import sentence_on_value

_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
POOLED = "pooled"  # kind of an interval from folds with intervals of different kinds
_ASSUMPTIONS = (
    "The lower end holds with {level:.10g}% for the mixture of the {folds} folds'"
    " policies, from the folds' intervals. It covers the sampling of {units}s, not what"
    " the log lacks or no network can express."
)


def pooled_certificate(
    certificates: Sequence[Certificate],
    shares: Sequence[float],
    units: UnitCount,
    level: float,
) -> Certificate:
    """The certificate of the mixture of the folds' policies.

    certificates: of each fold, at the level of one policy. shares: of the folds in the
    weight of all rows, with sum 1; each is the probability of the fold's policy. units:
    of all folds together. level: of the lower end. A fold without an answer leaves none
    for the mixture.
    """
    value = _mean([item.value for item in certificates], shares)
    uplift = _mean_if_known([item.uplift for item in certificates], shares)
    behavior_value = _mean_if_known(
        [item.behavior_value for item in certificates], shares
    )
    value_interval = pooled_interval(
        [item.value for item in certificates],
        [item.value_interval for item in certificates],
        shares,
    )
    moved = min(0.0, _correction(certificates, shares))
    interval = pooled_interval(
        [item.uplift for item in certificates],
        [_before_move(item) for item in certificates],
        shares,
    )
    if interval is not None:
        interval = Interval(
            low=interval.low + moved,
            high=interval.high,
            level=interval.level,
            kind=interval.kind,
            assumptions=_ASSUMPTIONS.format(
                level=100.0 * level, folds=len(certificates), units=units.kind
            ),
        )
    cost_limits = [item.cost_limit for item in certificates]
    return Certificate(
        value=value,
        value_interval=value_interval,
        uplift=uplift,
        interval=interval,
        behavior_value=behavior_value,
        verdict=_pooled_verdict(
            certificates, value, value_interval, uplift, interval, behavior_value
        ),
        moved=moved,
        scale=_mean([item.scale for item in certificates], shares),
        units=units.number,
        effective_units=units.effective,
        warnings=_of_folds([item.warnings for item in certificates]),
        probabilities=_of_folds([item.probabilities for item in certificates]),
        groups=_pooled_groups([item.groups for item in certificates], shares),
        cost=_pooled_cost([item.cost for item in certificates], shares),
        cost_limit=cost_limits[0],
    )


def pooled_interval(
    values: Sequence[float | None],
    intervals: Sequence[Interval | None],
    shares: Sequence[float],
) -> Interval | None:
    """The interval of Σ share · value, from independent intervals of the values; None if
    one is missing. (Zou & Donner 2008)
    """
    squares_below = 0.0
    squares_above = 0.0
    total = 0.0
    measured = []
    for value, interval, share in zip(values, intervals, shares, strict=True):
        if value is None or interval is None:
            return None
        ends = interval.as_measured
        total += share * value
        squares_below += (share * max(0.0, value - ends.low)) ** 2
        squares_above += (share * max(0.0, ends.high - value)) ** 2
        measured.append(ends)
    kinds = {ends.kind for ends in measured}
    kind = POOLED
    if len(kinds) == 1:
        kind = measured[0].kind
    return Interval(
        low=total - math.sqrt(squares_below),
        high=total + math.sqrt(squares_above),
        level=min(ends.level for ends in measured),
        kind=kind,
    )


def _before_move(certificate: Certificate) -> Interval | None:
    """The interval of the uplift without the move by the doubly robust estimate: that is
    no error of sampling, which the folds' independence would make smaller.
    """
    interval = certificate.interval
    if interval is None:
        return None
    return Interval(
        low=interval.low - certificate.moved,
        high=interval.high,
        level=interval.level,
        kind=interval.kind,
    )


def _correction(certificates: Sequence[Certificate], shares: Sequence[float]) -> float:
    """By how much the doubly robust estimate of the mixture's value is larger."""
    total = 0.0
    for certificate, share in zip(certificates, shares, strict=True):
        if certificate.robust is not None:
            total += share * (certificate.robust - certificate.value)
    return total


def _pooled_cost(costs: Sequence[Cost | None], shares: Sequence[float]) -> Cost | None:
    """The second return of the mixture, with its upper end; None without a constraint."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    value = _mean([cost.value for cost in known], shares)
    squares = 0.0
    correction = 0.0
    for cost, share in zip(known, shares, strict=True):
        if cost.high is None:
            return Cost(value, None)
        high = cost.high
        if cost.robust is not None:
            correction += share * (cost.robust - cost.value)
            high -= max(0.0, cost.robust - cost.value)
        squares += (share * max(0.0, high - cost.value)) ** 2
    return Cost(value, value + math.sqrt(squares) + max(0.0, correction))


def _pooled_groups(
    groups: Sequence[tuple[GroupValue, ...]], shares: Sequence[float]
) -> tuple[GroupValue, ...]:
    """The mixture's value from the start states of each group; none where a fold cannot
    say what its policy is worth there.
    """
    names = sorted({row.group for of_fold in groups for row in of_fold})
    pooled = []
    for name in names:
        rows = []
        for of_fold in groups:
            rows.append(next((row for row in of_fold if row.group == name), None))
        starts = sum(row.starts for row in rows if row is not None)
        pooled.append(_pooled_group(name, starts, rows, shares))
    return tuple(pooled)


def _pooled_group(
    name: str,
    starts: int,
    rows: Sequence[GroupValue | None],
    shares: Sequence[float],
) -> GroupValue:
    """The value of one group. rows: of each fold; None where it has no such state."""
    values = []
    intervals = []
    reasons = []
    for number, row in enumerate(rows, 1):
        if row is None or row.value is None:
            reason = "it has no such start state"
            if row is not None and row.reason is not None:
                reason = row.reason
            return GroupValue(name, starts, reason=f"fold {number}: {reason}")
        values.append(row.value)
        intervals.append(row.interval)
        of_fold = []
        if row.reason is not None:
            of_fold.append(row.reason)
        reasons.append(of_fold)
    notes = _of_folds(reasons)
    note = None
    if notes:
        note = notes[0]
    return GroupValue(
        group=name,
        starts=starts,
        value=_mean(values, shares),
        interval=pooled_interval(values, intervals, shares),
        reason=note,
    )


def _pooled_verdict(
    certificates: Sequence[Certificate],
    value: float,
    value_interval: Interval | None,
    uplift: float | None,
    interval: Interval | None,
    behavior_value: float | None,
) -> Verdict:
    """The worst of the folds' answers, with the reasons of that answer first."""
    answers = {item.verdict.answer for item in certificates}
    answer = next(
        known for known in (NOT_ANSWERABLE, WITH_CARE, SUPPORTED) if known in answers
    )
    reasons = _pooled_reasons(certificates, answer)
    if answer == NOT_ANSWERABLE or value_interval is None:
        text = ""
        if reasons:
            text = f": {reasons[0].text}"
        return Verdict(
            answer=answer,
            reasons=reasons,
            sentence=f"This log does not say what the policy is worth{text}.",
        )
    of_log = None
    if uplift is not None and behavior_value is not None:
        of_log = Uplift(uplift, interval, behavior_value, None)
    estimate = PointEstimate("pooled", value, interval=value_interval, uplift=of_log)
    worth = sentence_on_value(estimate, value_interval)
    if not reasons:
        return Verdict(answer, (), f"{worth}; every fold supports it.")
    further = ""
    if len(reasons) > 1:
        further = f" (and {counted(len(reasons) - 1, 'more reason')})"
    care = f"take it with care: {reasons[0].text}{further}"
    return Verdict(answer, reasons, f"{worth}; {care}.")


def _pooled_reasons(
    certificates: Sequence[Certificate], answer: str
) -> tuple[Reason, ...]:
    """One reason of each kind, with the folds that have it; those of folds with this
    answer come first.
    """
    worst = [item for item in certificates if item.verdict.answer == answer]
    milder = [item for item in certificates if item.verdict.answer != answer]
    texts: dict[str, str] = {}
    for certificate in (*worst, *milder):
        for reason in certificate.verdict.reasons:
            texts.setdefault(reason.kind, reason.text)
    reasons = []
    for kind, text in texts.items():
        with_it = [
            number
            for number, certificate in enumerate(certificates, 1)
            if any(reason.kind == kind for reason in certificate.verdict.reasons)
        ]
        reasons.append(Reason(kind, _in_folds(text, with_it, len(certificates))))
    return tuple(reasons)


def _of_folds(texts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Texts of all folds, each once with the folds that it is of. Of texts that differ
    in their numbers alone, the first.
    """
    by_fold = list(texts)
    alike: dict[str, dict[int, str]] = {}  # texts by fold
    for number, of_fold in enumerate(by_fold, 1):
        for text in of_fold:
            without_numbers = _NUMBER.sub("0", text)
            alike.setdefault(without_numbers, {}).setdefault(number, text)
    merged = []
    for of_folds in alike.values():
        first, text = next(iter(of_folds.items()))
        of_first = ""
        if len(set(of_folds.values())) > 1:
            of_first = f" (numbers of fold {first})"
        merged.append(_in_folds(text, list(of_folds), len(by_fold), of_first))
    return tuple(merged)


def _in_folds(text: str, numbers: Sequence[int], folds: int, of_first: str = "") -> str:
    """The text with the folds that it is of, if not of all. of_first: whose numbers
    stand in it, or empty.
    """
    if len(numbers) == 1:
        return f"in fold {numbers[0]}: {text}"
    if len(numbers) == folds:
        if not of_first:
            return text
        return f"in every fold{of_first}: {text}"
    return f"in folds {listed(list(map(str, numbers)), folds)}{of_first}: {text}"


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _mean_if_known(
    values: Sequence[float | None], shares: Sequence[float]
) -> float | None:
    """The weighted mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return _mean(known, shares)
