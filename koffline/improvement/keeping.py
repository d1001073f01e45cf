"""Why to keep the present policy, and what log would answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from koffline.errors import counted
from koffline.improvement.certificate import Certificate
from koffline.improvement.outcome import CandidatePolicy, KeepReason
from koffline.improvement.parts import CERTIFY

_MEND = (
    "mend the log first (koffline data validate LOG, koffline evaluate shows the signs)"
)
_EXPLORE = (
    "log more of other actions: let the present policy take them now and then, and"
    " record their probabilities"
)
_MORE = "log more episodes, or more varied actions"
_MOST_TIMES = 1000.0  # as long a log; beyond, nothing is said


def why_keep(
    candidates: Sequence[CandidatePolicy],
    certificates: Mapping[str, Certificate],
    units: int,
    tried: int,
    failure: str = "",
) -> KeepReason:
    """The reason, from what the parts of the log said of all candidates.

    units: of the certify part. tried: number of mixtures. failure: why the first
    candidate could not be trained or valued, or empty.
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
        doubt = certificates[by_kind["log"][0].name].doubt_of_log
        return KeepReason("log", doubt or "", _MEND)
    if "constraint" in by_kind:
        best = by_kind["constraint"][0]
        certificate = certificates[best.name]
        high = "unknown"
        if certificate.cost is not None and certificate.cost.high is not None:
            high = f"{certificate.cost.high:.4g}"
        return KeepReason(
            "constraint",
            f"{best.name} is better, but the upper end of its cost is {high}, above"
            f" {certificate.cost_limit:.4g}",
            "loosen the constraint, or log more episodes",
        )
    if "size" in by_kind:
        return _of_size(by_kind["size"], certificates, units)
    if "support" in by_kind:
        verdict = certificates[by_kind["support"][0].name].verdict
        return KeepReason("support", verdict.reasons[0].text, _EXPLORE)
    refused = [candidate for candidate in candidates if candidate.note == "support"]
    if not by_kind and len(refused) == len(candidates):
        return KeepReason(
            "support",
            f"the log hardly holds what any of {counted(tried, 'mixture')} would do",
            _EXPLORE,
        )
    where = "on the part of the log to choose on"
    if by_kind:
        where = "on the part of the log to certify on"
    return KeepReason(
        "noise",
        f"none of {counted(tried, 'mixture')} seems better {where}",
        f"the present policy may be as good as this log can show: {_MORE}",
    )


def _of_size(
    finalists: Sequence[CandidatePolicy],
    certificates: Mapping[str, Certificate],
    units: int,
) -> KeepReason:
    """The reason of finalists that seem better, with lower ends below 0."""
    best = max(finalists, key=lambda item: _signal(item))
    if best.interval is None or best.uplift is None or best.uplift <= 0.0:
        text = f"{counted(units, 'unit')} to certify on allow no interval"
        verdict = certificates[best.name].verdict
        if verdict.is_open and verdict.reasons:
            text = verdict.reasons[0].text
        return KeepReason("size", text, _MORE)
    below = best.uplift - best.interval.low
    text = (
        f"{best.name} seems to gain {best.uplift:.4g}, with a lower end of"
        f" {best.interval.low:.4g}"
    )
    times = (below / best.uplift) ** 2
    if not 1.0 <= times < _MOST_TIMES:
        return KeepReason("size", text, _MORE)
    remedy = (
        f"a log about {math.ceil(10.0 * times) / 10.0:g} times as long would tell, if"
        " the gain is real"
    )
    return KeepReason("size", text, remedy)


def _signal(candidate: CandidatePolicy) -> float:
    """Uplift in units of its distance from the lower end."""
    if candidate.interval is None or candidate.uplift is None:
        return -math.inf
    return candidate.uplift / max(candidate.uplift - candidate.interval.low, 1e-300)
