"""What a search has found, in three parts or in folds, and the result that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koffline.improvement.budget import Unreached
from koffline.improvement.certificate import Certificate
from koffline.improvement.differences import Differences
from koffline.improvement.keeping import CONSTRAINT, why_keep
from koffline.improvement.outcome import CandidatePolicy, Improvement, KeepReason
from koffline.improvement.parts import CHOOSE, UnitCount
from koffline.improvement.screening import LEVEL
from koffline.improvement.search import Scored, Search
from koffline.ope.groups import By, GroupValues
from koffline.ope.names import BOOTSTRAP
from koffline.ope.results import Interval, Verdict, describe_log
from koffline.policies import Mixture, Policy


@dataclass(frozen=True, eq=False)
class Recommended:
    """The policy that is certified, as a mixture of networks, and where it acts
    differently from the present one.
    """

    name: str
    policy: Policy
    mixture: Mixture
    differences: Differences


@dataclass(frozen=True, eq=False)
class Findings:
    """What every part of the log has said.

    ``candidates``: all that was tried, those that were certified on first.
    ``leading``: the most promising of these; None if nothing went on to be certified.
    ``certificates``: by name, of the candidates that may be recommended.
    ``recommended``: the leading one, if it is certified. ``dropped``: why others were
    not tried, by name. ``parts``: rows and units of each part. ``units``: to certify
    on. ``tried``: number of mixtures that were valued. ``failure``: why none was, or
    empty. ``unreached``: what the budget did not reach.
    """

    candidates: Sequence[CandidatePolicy]
    leading: CandidatePolicy | None
    certificates: Mapping[str, Certificate]
    recommended: Recommended | None
    dropped: Mapping[str, str]
    parts: dict[str, dict[str, int]]
    units: UnitCount
    tried: int
    failure: str = ""
    folds: int = 1
    unreached: Unreached | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether a longer budget may go on from here: the rows to certify on were not
        looked at.
        """
        return self.unreached is not None and self.leading is None


def improvement_of(findings: Findings, search: Search, started: float) -> Improvement:
    """The result. search: the one, or that of any fold. started: by
    `time.perf_counter`.
    """
    about = describe_log(search.log, search.evaluation.seed, started)
    about["notes"] = (*about["notes"], *search.parts.notes)
    about |= {
        "gamma": search.evaluation.gamma,
        "settings": search.settings.model_dump(mode="json"),
        "level": search.evaluation.level,
        "candidates": tuple(findings.candidates),
        "dropped": tuple(
            {"name": name, "reason": why} for name, why in findings.dropped.items()
        ),
        "parts": findings.parts,
        "by": name_of_groups(search.by),
        "kind_of_unit": findings.units.kind,
        "folds": findings.folds,
    }
    reason = None
    if findings.recommended is None:
        reason = why_keep(
            # of folds, only the mixture of their policies may be recommended
            [item for item in findings.candidates if _is_judged(item, findings)],
            findings.certificates,
            units=findings.units.number,
            tried=findings.tried,
            failure=findings.failure,
            kind=findings.units.kind,
        )
    if findings.may_go_on and findings.unreached is not None and reason is not None:
        reason = findings.unreached.reason(reason)
    leading = findings.leading
    if leading is None:
        assert reason is not None
        return Improvement(
            recommended=False,
            name=None,
            value=None,
            behavior_value=None,
            uplift=None,
            interval=None,
            verdict=reason.as_verdict(),
            reason=reason,
            constraint=_cost_of(search, None),
            **about,
        )
    certificate = findings.certificates[leading.name]
    of_policy: dict[str, Any] = {"name": None}
    recommended = findings.recommended
    if recommended is not None:
        of_policy = {
            "name": recommended.name,
            "policy": recommended.policy,
            "mixture": recommended.mixture,
            "groups": GroupValues(certificate.groups),
            "differences": recommended.differences,
        }
    return Improvement(
        recommended=recommended is not None,
        value=certificate.value,
        behavior_value=certificate.behavior_value,
        uplift=certificate.uplift,
        interval=certificate.interval,
        verdict=_verdict_on(leading, certificate, reason),
        reason=reason,
        warnings=certificate.warnings,
        constraint=_cost_of(search, certificate),
        **of_policy,
        **about,
    )


def _verdict_on(
    leading: CandidatePolicy, certificate: Certificate, reason: KeepReason | None
) -> Verdict:
    """The verdict on the leading finalist. reason: why it is not recommended, None if
    it is.
    """
    verdict = certificate.verdict
    if reason is None:
        return verdict
    if reason.kind == "log":  # no number from it counts
        return reason.as_verdict()
    kept = f"{leading.name} is not recommended ({reason.kind})"
    sentence = f"{kept}. {verdict.sentence}"
    return dataclasses.replace(verdict, sentence=sentence)


def _is_judged(candidate: CandidatePolicy, findings: Findings) -> bool:
    """Whether a candidate was only chosen among, or may itself be recommended."""
    return candidate.stage == CHOOSE or candidate.name in findings.certificates


def candidate_on_choose(
    item: Scored, policy: Policy, most_cost: float | None, fold: int | None = None
) -> CandidatePolicy:
    """A mixture that did not go on to be certified. most_cost: of a constraint. fold:
    of which it is, from 1.
    """
    score = item.score
    note = score.refused
    if score.seems_better and not score.keeps(most_cost):
        note = CONSTRAINT
    return CandidatePolicy(
        name=item.name,
        share=score.share,
        stage=CHOOSE,
        value=score.value,
        uplift=score.uplift,
        interval=Interval(score.low, score.high, LEVEL, BOOTSTRAP),
        note=note,
        chosen_by=score.low,
        policy=policy,
        fold=fold,
    )


def low_of(candidate: CandidatePolicy) -> float:
    """The lower end of a candidate's uplift; −∞ if it is unknown."""
    if candidate.interval is None:
        return -float("inf")
    return candidate.interval.low


def name_of_groups(by: By | None) -> str | None:
    """The name of a grouping."""
    if by is None:
        return None
    if isinstance(by, Mapping):
        return str(next(iter(by)))
    return str(by)


def _cost_of(search: Search, certificate: Certificate | None) -> dict[str, Any] | None:
    """The constraint, with the second return of the leading finalist; None without
    one.
    """
    if search.limit is None:
        return None
    cost: dict[str, Any] = {
        "constraint": search.limit.text,
        "value": None,
        "high": None,
    }
    if certificate is not None and certificate.cost is not None:
        cost |= {"value": certificate.cost.value, "high": certificate.cost.high}
    return cost
