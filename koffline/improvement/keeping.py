"""Why to keep the present policy, and what log would answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from koffline.errors import counted
from koffline.improvement.certificate import CONTRADICTION, Certificate
from koffline.improvement.outcome import CandidatePolicy, KeepReason
from koffline.improvement.parts import (
    CERTIFY,
    UNITS_TO_CERTIFY,
    units_for,
)

_MEND = (
    "mend the log first (koffline data validate LOG, koffline evaluate shows the signs)"
)
_CORRECT = "correct the logged probabilities of actions, or leave them out of the log"
_EXPLORE = (
    "log more of other actions: let the present policy take them now and then, and"
    " record their probabilities"
)
_MORE = "log more episodes, or more varied actions"
# the note of a candidate that does not keep the constraint, and the kind of the reason
CONSTRAINT = "constraint"
_RARE = 0.1  # share of units, in a reason that says what few units miss
_MOST_TIMES = 1000.0  # as long a log; beyond, nothing is said


def why_keep(
    candidates: Sequence[CandidatePolicy],
    certificates: Mapping[str, Certificate],
    units: int,
    tried: int,
    failure: str = "",
    kind: str = "unit",
) -> KeepReason:
    """The reason, from what the parts of the log said of all candidates.

    units: of the certify part. tried: number of mixtures. failure: why the first
    candidate could not be trained or valued, or empty. kind: what a unit is, as
    "episode".
    """
    if not tried and failure:
        return KeepReason(
            "support", f"no candidate could be valued on this log: {failure}", _MEND
        )
    if not tried:
        return KeepReason(
            "support", "no candidate could be valued on this log", _EXPLORE
        )
    by_kind: dict[str, list[CandidatePolicy]] = {}
    for candidate in candidates:
        if candidate.stage == CERTIFY:
            by_kind.setdefault(candidate.note, []).append(candidate)
    if "log" in by_kind:
        return _of_log(certificates[by_kind["log"][0].name])
    if CONSTRAINT in by_kind:
        best = by_kind[CONSTRAINT][0]
        return _of_constraint(best.name, certificates[best.name])
    if "size" in by_kind:
        return _of_size(by_kind["size"], certificates, units, kind)
    if "support" in by_kind:
        certificate = certificates[by_kind["support"][0].name]
        lacking = certificate.doubt_of_support or certificate.verdict.reasons[0].text
        return KeepReason("support", lacking, _EXPLORE)
    refused = [candidate for candidate in candidates if candidate.note == "support"]
    if not by_kind and len(refused) == len(candidates):
        return KeepReason(
            "support",
            f"the log hardly holds what any of {counted(tried, 'mixture')} would do",
            _EXPLORE,
        )
    too_costly = [item for item in candidates if item.note == CONSTRAINT]
    if not by_kind and too_costly:
        return KeepReason(
            CONSTRAINT,
            f"{counted(len(too_costly), 'mixture', 'seems', 'seem')} better on the part"
            " of the log to choose on, but not within the constraint",
            "loosen the constraint, or log more of what costs less",
        )
    where = "on the part of the log to choose on"
    if by_kind:
        where = "on the part of the log to certify on"
    return KeepReason(
        "noise",
        f"none of {counted(tried, 'mixture')} seems better {where}",
        f"the present policy may be as good as this log can show: {_MORE}",
    )


def _of_log(certificate: Certificate) -> KeepReason:
    """The reason of a finalist whose certificate questions the log itself."""
    doubt = certificate.doubt_of_log or ""
    if doubt.startswith(CONTRADICTION):
        return KeepReason("log", doubt, _CORRECT)
    return KeepReason("log", doubt, _MEND)


def _of_constraint(name: str, certificate: Certificate) -> KeepReason:
    """The reason of a finalist that is better and may break the constraint."""
    high = "unknown"
    if certificate.cost is not None and certificate.cost.high is not None:
        high = f"{certificate.cost.high:.4g}"
    return KeepReason(
        CONSTRAINT,
        f"{name} is better, but the upper end of its cost is {high}, above"
        f" {certificate.cost_limit:.4g}",
        "loosen the constraint, or log more episodes",
    )


def _of_size(
    finalists: Sequence[CandidatePolicy],
    certificates: Mapping[str, Certificate],
    units: int,
    kind: str,
) -> KeepReason:
    """The reason of finalists that seem better, on too few units or with lower ends
    below 0.
    """
    best = max(finalists, key=lambda item: _signal(item))
    if best.interval is None or best.uplift is None or best.uplift <= 0.0:
        text = f"{counted(units, kind)} to certify on allow no interval"
        verdict = certificates[best.name].verdict
        if verdict.is_open and verdict.reasons:
            text = verdict.reasons[0].text
        return KeepReason("size", text, _MORE)
    text = (
        f"{best.name} seems to gain {best.uplift:.4g}, with a lower end of"
        f" {best.interval.low:.4g}"
    )
    below = best.uplift - best.interval.low
    times = (below / best.uplift) ** 2
    few = certificates[best.name].few_units
    if few is not None:
        return _of_few_units(text, few, units, times, kind)
    reasons = certificates[best.name].verdict.reasons
    if best.interval.low > 0.0 and reasons:
        text = f"{text}, but {reasons[0].text}"
    if not 1.0 <= times < _MOST_TIMES:
        return KeepReason("size", text, _MORE)
    remedy = (
        f"a log about {math.ceil(10.0 * times) / 10.0:g} times as long would tell, if"
        " the gain is real"
    )
    return KeepReason("size", text, remedy)


def _of_few_units(
    text: str, few: float, units: int, times: float, kind: str
) -> KeepReason:
    """The reason of a finalist with too few units to see rare losses.

    few: effective units to certify on, of ``units`` of a kind. times: how many times as long a
    log would bring the lower end to 0.
    """
    effective = ""
    if few < units - 0.5:
        effective = f" (effectively {few:.3g}, as their weights differ)"
    missed = (1.0 - _RARE) ** few
    text = (
        f"{text}, but {counted(units, kind)} to certify on{effective} are fewer than"
        f" {UNITS_TO_CERTIFY}: they miss what happens in every tenth with a chance of"
        f" {missed:.0%}"
    )
    # of weights that differ as these do
    wanted = units_for(UNITS_TO_CERTIFY * max(1.0, units / few))
    remedy = f"log at least {counted(wanted, kind)}"
    if 1.0 < times < _MOST_TIMES:
        remedy = (
            f"{remedy}, and about {math.ceil(10.0 * times) / 10.0:g} times as many as"
            " now"
        )
    return KeepReason("size", text, remedy)


def _signal(candidate: CandidatePolicy) -> float:
    """Uplift in units of its distance from the lower end."""
    if candidate.interval is None or candidate.uplift is None:
        return -math.inf
    return candidate.uplift / max(candidate.uplift - candidate.interval.low, 1e-300)
