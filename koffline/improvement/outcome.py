"""The result of `koffline.improve`: the recommended policy, or why to keep the present
one, and everything that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from koffline.errors import counted, percent, printable
from koffline.improvement.differences import Differences
from koffline.improvement.parts import CERTIFY
from koffline.ope.results import (
    NOT_ANSWERABLE,
    Interval,
    LogResult,
    Reason,
    Record,
    Verdict,
    interval_cells,
    warning_lines,
    with_ends,
)
from koffline.policies import Mixture, Policy

MARKER = "improvement.json"


@dataclass(frozen=True)
class KeepReason(Record):
    """Why to keep the present policy.

    ``kind``: "support" (the log does not hold what the candidates would do), "size" (it
    holds too few episodes for what they seem to gain), "noise" (none seems better),
    "constraint" (none that is better keeps it), "budget" (it did not reach all
    candidates, of which the others are not better), or "log" (its rows are not what
    they say they are). ``remedy``: what log would answer.
    """

    kind: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}; {self.remedy}"

    def as_verdict(self) -> Verdict:
        """The verdict where no finalist was certified on."""
        return Verdict(
            answer=NOT_ANSWERABLE,
            reasons=(Reason(self.kind, self.text),),
            sentence=f"This log does not show a better policy: {self.text}.",
        )


@dataclass(frozen=True, eq=False)
class CandidatePolicy(Record):
    """A policy that was tried: ``share`` of a trained one, the rest of the clone.

    ``stage``: "choose", or "certify" for a finalist; ``value``, ``uplift`` and
    ``interval`` (of the uplift) are of that part of the log. ``certified``: whether the
    lower end is above 0 and nothing speaks against it. ``note``: why not, or empty.
    ``chosen_by``: the lower end of the uplift on the part to choose on. ``fold``: which
    of a log's folds it was learnt and valued for, from 1; None without folds, and of the
    mixture of the folds' policies.
    """

    name: str
    share: float
    stage: str
    value: float
    uplift: float | None
    interval: Interval | None
    certified: bool = False
    note: str = ""
    chosen_by: float | None = None
    policy: Policy | None = field(default=None, repr=False)
    fold: int | None = None

    def __str__(self) -> str:
        text = f"{self.name}  {self.stage}"
        if self.fold is not None:
            text = f"{self.name}  {self.stage} (fold {self.fold})"
        if self.uplift is not None:
            text = f"{text}  uplift {with_ends(self.uplift, self.interval)}"
        if self.certified:
            return f"{text}  certified"
        if self.note:
            return f"{text}  {self.note}"
        return text


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Improvement(LogResult):
    """From a log to a better policy with a certificate, or the advice to keep the
    present one.

    ``recommended``: whether a policy is certified to be better; ``policy``, ``name``:
    that policy, a mixture of a trained one and the clone; None to keep the present one.
    ``uplift``, ``interval``: over the behavior policy, of the recommended policy, or
    else of the most promising finalist; the lower end holds for all finalists together
    with ``level``. ``reason``: why to keep. ``candidates``: all that was tried,
    finalists first. ``dropped``: candidates that could not be trained or valued, each
    with the keys ``name`` and ``reason``. ``parts``: rows and units of each part of the
    log. ``kind_of_unit``: "episode", "cluster", or "row". ``groups``: values of the
    policy by ``by``. ``constraint``: the second return, with its upper end.
    ``differences``: where the policy acts differently from the present one. ``folds``:
    in how many folds the log was searched; 1: in three parts. Of folds, ``parts`` are
    those of the first one, with all rows to certify on.
    """

    recommended: bool
    name: str | None
    value: float | None
    behavior_value: float | None
    uplift: float | None
    interval: Interval | None
    verdict: Verdict
    reason: KeepReason | None
    level: float
    candidates: tuple[CandidatePolicy, ...]
    dropped: tuple[dict[str, str], ...] = ()
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    kind_of_unit: str = "unit"
    by: str | None = None
    groups: tuple[Any, ...] = ()
    constraint: dict[str, Any] | None = None
    differences: Differences | None = None
    folds: int = 1
    warnings: tuple[str, ...] = ()
    policy: Policy | None = field(default=None, repr=False)
    mixture: Mixture | None = field(default=None, repr=False)

    @property
    def finalists(self) -> tuple[CandidatePolicy, ...]:
        """The candidates that the certify part was asked about."""
        return tuple(item for item in self.candidates if item.stage == CERTIFY)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in a sentence, and what it rests on."""
        sure = percent(self.level)
        certify = self.parts.get(CERTIFY, {})
        units = certify.get("units", 0)
        rows = certify.get("rows", 0)
        size = counted(units, self.kind_of_unit)
        if rows != units:
            size = f"{size} ({counted(rows, 'row')})"
        rests = f"on {size} of the log that took no part in learning or choosing."
        if self.folds > 1:
            rests = (
                f"on all {size}: the log was cut in {self.folds} folds, each tested a"
                f" policy that was learnt and chosen without it, and {self.folds_are}."
            )
        if self.recommended:
            assert self.interval is not None
            answer = (
                f"Use {self.name}: it is worth {self.uplift:.4g} more than the policy"
                f" that wrote the log, at least {self.interval.low:.4g} more with"
                f" {sure} certainty{self._of_interval}."
            )
            return (answer, f"Certified {rests}")
        answer = f"Keep the present policy. {_capital(str(self.reason))}."
        if not self.finalists:
            return (answer,)  # the part to certify on was not looked at
        return (answer, f"Tested {rests}")

    @property
    def _of_interval(self) -> str:
        """Which interval has the lower end; empty if its level is the end's own."""
        if self.interval is None or self.interval.level >= self.level:
            return ""
        return f" (the lower end of an interval of {percent(self.interval.level)})"

    @property
    def not_tried(self) -> tuple[str, ...]:
        """A line for each reason for which candidates were dropped."""
        names: dict[str, list[str]] = {}
        for entry in self.dropped:
            names.setdefault(entry["reason"], []).append(entry["name"])
        return tuple(
            f"not tried: {', '.join(of_reason)}: {reason}"
            for reason, of_reason in names.items()
        )

    @property
    def folds_are(self) -> str:
        """What becomes of the folds' policies; empty without folds."""
        if self.folds == 1:
            return ""
        whose = "what was tested"
        if self.recommended:
            whose = str(self.name)
        return f"{whose} draws one of these {self.folds} policies in every row"

    def __str__(self) -> str:
        lines = [" ".join(self.sentences)]
        if self.value is not None:
            about = f"value {self.value:.4g}"
            if self.uplift is not None:
                about = f"{about}, uplift {with_ends(self.uplift, self.interval)}"
            if self.behavior_value is not None:
                about = f"{about} over {self.behavior_value:.4g}"
            lines.append(
                f"{self.verdict.answer}; {about} ({self.discounting},"
                f" {self.n_transitions} transitions)"
            )
        lines += [f"  {candidate}" for candidate in self.finalists]
        lines += self.not_tried
        lines += warning_lines(self.warnings, self.verdict)
        return "\n".join(lines)

    def __repr__(self) -> str:
        if self.recommended:
            answer = f"{self.name}, uplift {with_ends(self.uplift or 0, self.interval)}"
        else:
            assert self.reason is not None
            answer = f"keep: {self.reason.kind}"
        tried = (
            f"{len(self.finalists)} of {len(self.candidates)} candidates certified on"
        )
        if self.folds > 1:
            tried = f"{len(self.candidates)} candidates in {self.folds} folds"
        return printable(f"Improvement({answer}; {tried})")

    def frame_rows(self) -> list[dict[str, Any]]:
        """A row for each candidate, finalists first."""
        rows: list[dict[str, Any]] = []
        for candidate in self.candidates:
            rows.append(
                {
                    "policy": candidate.name,
                    "share": candidate.share,
                    "stage": candidate.stage,
                    "value": candidate.value,
                    "uplift": candidate.uplift,
                    **interval_cells(candidate.interval),
                    "certified": candidate.certified,
                    "note": candidate.note or None,
                    "chosen_by": candidate.chosen_by,
                    "fold": candidate.fold,
                }
            )
        return rows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
