"""The certificate: a lower bound of the uplift on rows that took no part in learning
or in choosing, for all finalists together.

Of k finalists each gets an interval of level 1 − 2 α / k, so that all lower ends hold
together with probability 1 − α (Bonferroni). The interval is that of
`koffline.evaluate` on the certify part: paired with the behavior policy's value by the
same resampled episodes. Where the doubly robust estimate by the same networks is
smaller, the lower end is moved down by the difference: a bias of the networks that the
rows themselves contradict is not certified. (Thomas, Theocharous & Ghavamzadeh 2015,
High Confidence Policy Improvement, have the words for the rest.)
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from koffline.config import EvaluationSettings
from koffline.data.disk.log import AnyLog
from koffline.fitting import Progress
from koffline.improvement.parts import UNITS_TO_CERTIFY, count_units
from koffline.ope.evaluation import evaluate_one_of_several
from koffline.ope.groups import By, GroupValue
from koffline.ope.results import (
    NOT_ANSWERABLE,
    Estimate,
    Interval,
    Reason,
    Record,
    Verdict,
)
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.workspace import SharedByPolicies
from koffline.policies import Policy

# Kinds of reasons that question the log itself, or the state that both policies see: nothing is
# recommended from such a log.
OF_STRUCTURE = frozenset(
    (
        "actions",
        "ends",
        "labels",
        "order",
        "rewards",
        "starts",
        "state",
        "states",
        "values",
    )
)
# of logged probabilities that do not fit the logged actions
CONTRADICTION = "contradiction"
_ROUNDED_LEVEL = 10_000
_LEAST_LEVEL = 0.1  # of an interval, where level is low and finalists are few
_ASSUMPTIONS = (
    "The lower ends of all {count} finalists hold together with {level:.10g}%. They"
    " cover the sampling of {units}, not what the log lacks or no network can express."
)
_ASSUMPTIONS_OF_ONE = (
    "The lower end holds with {level:.10g}%. It covers the sampling of {units}, not"
    " what the log lacks or no network can express."
)


@dataclass(frozen=True)
class Cost(Record):
    """A second return: its value, and its upper end; None where the log does not
    answer.

    ``robust``: the doubly robust estimate by the same networks, which has moved the
    upper end if it is larger; None if the value is one already.
    """

    value: float
    high: float | None
    robust: float | None = None


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """What the certify part says of a finalist.

    ``uplift``, ``interval``: over the behavior policy, the interval with a lower end
    that holds for all finalists together; None where the log does not answer.
    ``moved``: by how much the doubly robust estimate ``robust`` of the value moved it
    down, ≤ 0; ``robust`` is None if the value is such an estimate. ``cost``: the
    second return, whose upper end is to be at most ``cost_limit``. ``groups``: values of
    groups of start states. ``effective_units``: of the certify part; None in what an
    earlier version wrote. ``probabilities``: what the logged probabilities of actions
    contradict.
    """

    value: float
    value_interval: Interval | None
    uplift: float | None
    interval: Interval | None
    behavior_value: float | None
    verdict: Verdict
    moved: float = 0.0
    scale: float = 1.0
    units: int = 0
    warnings: tuple[str, ...] = ()
    groups: tuple[GroupValue, ...] = ()
    cost: Cost | None = None
    cost_limit: float | None = None
    effective_units: float | None = None
    probabilities: tuple[str, ...] = ()
    robust: float | None = None

    def doubting(self, contradicted: tuple[str, ...]) -> Certificate:
        """With what all rows of the log contradict of its logged probabilities, before
        what these rows do.
        """
        return dataclasses.replace(
            self, probabilities=(*contradicted, *self.probabilities)
        )

    @property
    def keeps_limit(self) -> bool:
        """Whether the cost is certified to be at most its limit; True without one."""
        if self.cost_limit is None:
            return True
        return (
            self.cost is not None
            and self.cost.high is not None
            and self.cost.high <= self.cost_limit
        )

    @property
    def doubt_of_log(self) -> str | None:
        """The first reason that questions the log itself; None if there is none."""
        for reason in self.verdict.reasons:
            if reason.kind in OF_STRUCTURE:
                return str(reason)
        if self.probabilities and self.doubt_of_support is None:
            return f"{CONTRADICTION}: {self.probabilities[0]}"
        return None

    @property
    def doubt_of_support(self) -> str | None:
        """The first reason by which the log lacks what the policy does; None if there
        is none.
        """
        for reason in self.verdict.reasons:
            if reason.kind == "support":
                return reason.text
        return None

    @property
    def few_units(self) -> float | None:
        """The effective units, if they are too few to see rare losses."""
        units = self.effective_units
        if units is None:
            units = float(self.units)
        if 0.0 < units < UNITS_TO_CERTIFY:
            return units
        return None

    @property
    def passes(self) -> bool:
        """Whether the policy is certified to be better than the behavior policy."""
        return self.why_not is None

    @property
    def why_not(self) -> str | None:
        """Which kind of reason speaks against it: support, log, size, noise or
        constraint; None if it is certified.
        """
        if self.doubt_of_log is not None:
            return "log"
        if self.verdict.answer == NOT_ANSWERABLE:
            reason = self.verdict.reasons[0].kind
            if reason in ("size", "interval"):
                return "size"
            return "support"
        if self.probabilities:
            return "support"
        if self.interval is None or self.uplift is None:
            return "size"
        if self.interval.low > 0.0:
            if self.few_units is not None:
                return "size"
            if self.keeps_limit:
                return None
            return "constraint"
        if self.uplift > 0.0:
            return "size"
        return "noise"


def level_of_one(settings: EvaluationSettings, finalists: int) -> float:
    """The level of each two-sided interval, rounded up, so that all lower ends hold
    together with the settings' level (Bonferroni).
    """
    alpha = 1.0 - settings.level
    level = 1.0 - 2.0 * alpha / finalists
    rounded = math.ceil(level * _ROUNDED_LEVEL - 1e-9) / _ROUNDED_LEVEL
    if rounded < 1.0:
        return max(rounded, _LEAST_LEVEL)
    return level


def certify(
    log: AnyLog,
    policy: Policy,
    finalists: int,
    settings: EvaluationSettings,
    shared: SharedByPolicies,
    *,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    by: By | None = None,
) -> Certificate:
    """Certify one of ``finalists`` policies on the certify part.

    settings: as for `koffline.evaluate`; its level is that of all lower ends together.
    shared: of the finalists. Raises KofflineError where the policy cannot be evaluated.
    """
    of_one = settings.model_copy(update={"level": level_of_one(settings, finalists)})
    estimate = evaluate_one_of_several(
        log, policy, of_one, shared, stream=stream, progress=progress, by=by
    )
    certificate = _certificate(estimate, finalists, settings.level)
    units = count_units(log)
    return dataclasses.replace(
        certificate, units=units.number, effective_units=units.effective
    )


def certify_cost(
    log: AnyLog,
    policy: Policy,
    finalists: int,
    settings: EvaluationSettings,
    shared: SharedByPolicies,
) -> Cost:
    """The second return of one of ``finalists`` policies, with an upper end that holds
    for all of them together.

    log: the certify part, with costs in place of rewards. shared: with the costs of
    other finalists. Recommended is what is both
    better and within the limit, so that the two bounds need no correction for each
    other: a wrong recommendation takes an error of at least one of them, and neither
    alone leads to one with more than 1 − level. Raises KofflineError.
    """
    of_one = settings.model_copy(update={"level": level_of_one(settings, finalists)})
    estimate = evaluate_one_of_several(log, policy, of_one, shared)
    if estimate.verdict.answer == NOT_ANSWERABLE or estimate.interval is None:
        return Cost(estimate.value, None)
    robust = estimate.diagnostics.get("doubly_robust_value")
    moved = 0.0
    if robust is not None:
        moved = max(0.0, robust - estimate.value)
    return Cost(estimate.value, estimate.interval.as_measured.high + moved, robust)


def _certificate(estimate: Estimate, finalists: int, level: float) -> Certificate:
    verdict = estimate.verdict
    uplift = None
    interval = None
    behavior_value = None
    moved = 0.0
    robust = estimate.diagnostics.get("doubly_robust_value")
    of_log = estimate.uplift
    if of_log is not None:
        uplift = of_log.value
        behavior_value = of_log.behavior_value
        if robust is not None:
            moved = min(0.0, robust - estimate.value)
        if of_log.interval is not None:
            kind = "rows"
            if estimate.n_episodes:
                kind = "episodes"
            assumptions = _ASSUMPTIONS
            if finalists == 1:
                assumptions = _ASSUMPTIONS_OF_ONE
            interval = dataclasses.replace(
                of_log.interval.as_measured,
                low=of_log.interval.as_measured.low + moved,
                high=of_log.interval.as_measured.high,
                assumptions=assumptions.format(
                    count=finalists, level=100.0 * level, units=kind
                ),
            )
    return Certificate(
        value=estimate.value,
        value_interval=estimate.interval,
        uplift=uplift,
        interval=interval,
        behavior_value=behavior_value,
        verdict=verdict,
        moved=moved,
        robust=robust,
        scale=estimate.diagnostics["reward_scale"],
        probabilities=tuple(
            text.rstrip(".") for text in estimate.diagnostics.get("probabilities", ())
        ),
        warnings=estimate.warnings,
        groups=tuple(estimate.groups),
    )


def certificate_from(content: dict[str, Any]) -> Certificate:
    """A certificate from its JSON."""
    verdict = content["verdict"]
    reasons = tuple(Reason(**reason) for reason in verdict["reasons"])
    cost = None
    if content["cost"] is not None:
        cost = Cost(**content["cost"])
    intervals: dict[str, Interval | None] = {}
    for name in ("value_interval", "interval"):
        intervals[name] = None
        if content[name] is not None:
            intervals[name] = Interval(**content[name])
    return Certificate(
        **{
            **content,
            **intervals,
            "verdict": Verdict(verdict["answer"], reasons, verdict["sentence"]),
            "warnings": tuple(content["warnings"]),
            "probabilities": tuple(content.get("probabilities", ())),
            "groups": tuple(map(_group_from, content["groups"])),
            "cost": cost,
        }
    )


def _group_from(content: dict[str, Any]) -> GroupValue:
    interval = content["interval"]
    if interval is not None:
        interval = Interval(**interval)
    return GroupValue(**{**content, "interval": interval})
