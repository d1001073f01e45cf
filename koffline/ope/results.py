"""Results of estimators and evaluations: values, intervals and their evidence, with
JSON output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.disk.log import AnyLog
from koffline.errors import escaped_json, percent
from koffline.store.run_record import versions

if TYPE_CHECKING:
    from koffline.ope.value_functions import ValueFunction


class Record:
    """Base of dataclasses with JSON output.

    ``repr=False`` omits a field; metadata ``key`` renames it.
    """

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, in the order of its fields."""
        assert dataclasses.is_dataclass(self)
        shown = [field for field in dataclasses.fields(self) if field.repr]
        return {
            field.metadata.get("key", field.name): plain(getattr(self, field.name))
            for field in shown
        }

    def to_json(self, timing: bool = True) -> str:
        """The record as JSON, keys in reading order. timing: include seconds, which
        differ in every run.
        """
        if timing:
            kept = self.as_dict()
        else:
            kept = without_seconds(self.as_dict())
        return escaped_json(
            json.dumps(kept, indent=2, allow_nan=False, ensure_ascii=False)
        )


def plain(value: Any) -> Any:
    """Records, numpy scalars, arrays and nested containers as JSON types."""
    if isinstance(value, Record):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return value


def without_seconds(content: Any) -> Any:
    """Copy of ``content`` without the entries named ``seconds``, at any depth."""
    if isinstance(content, Mapping):
        return {
            key: without_seconds(part)
            for key, part in content.items()
            if key != "seconds"
        }
    if isinstance(content, (list, tuple)):
        return [without_seconds(part) for part in content]
    return content


SUPPORTED = "supported"
WITH_CARE = "with care"
NOT_ANSWERABLE = "not answerable from this log"


@dataclass(frozen=True)
class Interval(Record):
    """An interval for a value, in units of the discounted return; ``level``: nominal
    coverage in (0, 1).

    ``kind``: the method (``"bootstrap"``, ``"kernel-certified"`` …). A calibrated
    interval has its level on average over many logs; a certified one holds for any
    number of rows under the stated ``assumptions``.
    ``is_guess``: some of its bounds were read off the log, and it fails if they are
    wrong. ``norm_bound``: ρ, the largest norm of a value function in its class; None
    without a class. ``uncut``: the ends before `within` moved them to a bound; None if
    it moved none.
    """

    low: float
    high: float
    level: float
    kind: str
    assumptions: str = ""
    norm_bound: float | None = None
    is_guess: bool = False
    uncut: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    @property
    def width(self) -> float:
        """Width high − low."""
        return self.high - self.low

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies inside, ends included."""
        return self.low <= value <= self.high

    def within(self, bounds: tuple[float, float]) -> Interval:
        """The part inside ``bounds``, which every value obeys; the nearest bound if
        nothing is inside.
        """
        least, most = bounds
        low = min(max(self.low, least), most)
        high = max(min(self.high, most), least)
        if (low, high) == (self.low, self.high):
            return self
        return dataclasses.replace(
            self, low=low, high=high, uncut=self.uncut or (self.low, self.high)
        )

    @property
    def as_measured(self) -> Interval:
        """The interval before it was cut at bounds; estimates that are not cut are
        compared with this one.
        """
        if self.uncut is None:
            return self
        low, high = self.uncut
        return dataclasses.replace(self, low=low, high=high, uncut=None)


@dataclass(frozen=True)
class Uplift(Record):
    """How much more a policy is worth than the behavior policy, both by the same
    resampled episodes.
    """

    value: float
    interval: Interval | None
    behavior_value: float
    behavior_interval: Interval | None


@dataclass(frozen=True, eq=False)
class PointEstimate(Record):
    """An estimate in units of the discounted return, with what is needed to judge it.

    ``standard_error``: asymptotic, over independent units (episodes, or rows without
    episodes); None if unknown. ``effective_sample_size``: (Σw)²/Σw² over these units.
    ``warnings``: readable sentences; a NaN always has one. ``why_no_interval``: a
    clause if the log allows no interval.
    """

    name: str
    value: float
    standard_error: float | None = None
    interval: Interval | None = None
    uplift: Uplift | None = None
    effective_sample_size: float | None = None
    warnings: tuple[str, ...] = ()
    why_no_interval: str | None = field(default=None, repr=False)
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reason(Record):
    """Why a log does not fully answer: ``kind``, what is missing (support, size, state
    …), and a clause.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Verdict(Record):
    """``answer``: "supported", "with care" or "not answerable from this log";
    ``reasons``: why not "supported". ``sentence``: the answer in a sentence with the
    estimate.
    """

    answer: str
    reasons: tuple[Reason, ...] = ()
    sentence: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the question cannot be answered from this log."""
        return self.answer == NOT_ANSWERABLE

    def because(self, *kinds: str) -> tuple[str, ...]:
        """The reasons of the given kinds, as texts."""
        return tuple(str(reason) for reason in self.reasons if reason.kind in kinds)

    def __str__(self) -> str:
        if not self.reasons:
            return self.answer
        return f"{self.answer} ({'; '.join(map(str, self.reasons))})"


@dataclass(frozen=True, eq=False)
class Evidence:
    """Arrays for the plots of the report.

    Shapes: ``residuals (N',)`` over a sample of the rows, in units of the reward;
    ``action_support (M,)`` with weights: distances of the policy's state-actions to the
    log, relative to the log's own spacing; ``initial_values (E,)``; ``replica_values
    (R,)`` with ``replica_roles``, ``"full"`` or ``"resampled"``.
    """

    residuals: np.ndarray
    initial_values: np.ndarray
    action_support: np.ndarray
    support_weights: np.ndarray
    replica_values: np.ndarray
    replica_roles: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class LogResult(Record):
    """Base of results computed from a log; these fields, which identify the log, come
    last in the JSON.
    """

    gamma: float
    n_transitions: int
    n_episodes: int
    source: str | None
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    data_sha256: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        content = super().as_dict()
        for about in dataclasses.fields(LogResult):
            content[about.name] = content.pop(about.name)  # moves it to the end
        return content


def describe_log(log: AnyLog, seed: int, started: float) -> dict[str, Any]:
    """Fields of a `LogResult` for this log, except gamma and settings. started: by
    `time.perf_counter`.
    """
    return {
        "n_transitions": len(log),
        "n_episodes": log.n_episodes,
        "source": log.metadata.source,
        "notes": log.metadata.notes,
        "seed": seed,
        "versions": versions(),
        "data_sha256": log.sha256,
        "seconds": round(time.perf_counter() - started, 3),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate(LogResult):
    """What a policy is worth: the expected discounted return J = E_{s0, a~π} Q(s0, a)
    from start states.

    ``interval``: for ``value``, None if the log does not support one; ``truth``: a
    value to compare with;
    ``verdict``: whether the log answers the question; ``warnings``: to be read before
    acting on the estimate;
    ``notes``: what else was done. ``behavior_value``: of the behavior policy, by the
    same estimator;
    ``uplift``: how much more this policy is worth. ``groups``: a
    `koffline.ope.groups.GroupValue` for each group of start states that ``by`` defines.
    ``evidence``, ``value_function``: only from kloss, fqe, lstd.
    """

    verdict: Verdict
    value: float
    interval: Interval | None
    truth: float | None = None
    behavior_value: float | None = None
    uplift: Uplift | None = None
    by: str | None = None
    groups: tuple[Any, ...] = ()
    estimator: str
    policy: str
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    evidence: Evidence | None = field(default=None, repr=False)
    value_function: ValueFunction | None = field(default=None, repr=False)

    def __str__(self) -> str:
        about = (
            f"{self.estimator}, γ = {self.gamma:.10g}, {self.n_transitions} transitions"
        )
        interval = self.interval
        if interval is None:
            return f"{self.value:.4g}  (no interval, {about})"
        ends = f"[{interval.low:.4g}, {interval.high:.4g}]"
        kind = f"{percent(interval.level)} {interval.kind}"
        return f"{self.value:.4g}  {ends} ({kind}, {about})"


@dataclass(frozen=True, eq=False)
class EstimateRow(Record):
    """One estimator's estimate, or the reason for none.

    Shared work counts for the first estimator.
    """

    name: str
    family: str
    estimate: PointEstimate | None
    reason: str | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        entry: dict[str, Any] = {"estimator": self.name, "family": self.family}
        if self.estimate is None:
            return {**entry, "value": None, "reason": self.reason}
        entry |= self.estimate.as_dict()
        entry["seconds"] = round(self.seconds, 3)
        del entry["name"]  # "estimator" above
        return entry

    def __str__(self) -> str:
        if self.estimate is None:
            return f"–  {self.reason}"
        value = f"{self.estimate.value:.4g}"
        interval = self.estimate.interval
        if interval is None:
            return value
        return f"{value}  [{interval.low:.4g}, {interval.high:.4g}] {interval.kind}"


@dataclass(frozen=True, eq=False)
class BoundRow(Record):
    """An interval that belongs to no single estimator, or the reason why there is
    none.
    """

    kind: str
    interval: Interval | None
    reason: str | None


@dataclass(frozen=True, eq=False, kw_only=True)
class EstimateTable(LogResult):
    """Estimates of a policy's value by several estimators (``table["fqe"]``), and
    bounds of no single one.

    ``verdict``: on the first row: that of ``auto``, if it is there. ``warnings``: on
    all. ``truth``: given.
    """

    verdict: Verdict
    truth: float | None = None
    rows: tuple[EstimateRow, ...] = field(metadata={"key": "estimates"})
    bounds: tuple[BoundRow, ...]
    level: float
    policy: str
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> EstimateRow:
        return {row.name: row for row in self.rows}[name]

    def __iter__(self) -> Iterator[EstimateRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        about = (
            f"{self.policy}: γ = {self.gamma:.10g}, {self.n_transitions} transitions;"
            f" {self.verdict}"
        )
        return "\n".join([about, *(f"  {row.name:<10} {row}" for row in self.rows)])
