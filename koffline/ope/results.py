"""Results of estimators and evaluations: values, intervals and their evidence, with
JSON output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from koffline.config import ANY_GAMMA
from koffline.data.disk.log import AnyLog
from koffline.errors import ConfigError, escaped_json, percent, printable
from koffline.json_types import JsonObject
from koffline.shown_results import views
from koffline.store.run_record import versions

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from koffline.ope.value_functions import ValueFunction


# Evidence beside an estimate, by name: numbers, texts, flags, intervals, None, and
# lists or mappings of these. `plain` makes JSON of it.
Diagnostics: TypeAlias = dict[str, Any]
# A row of a result's frame, by column; None where something is missing.
Cells: TypeAlias = dict[str, str | float | int | bool | list[float] | None]


class Record:
    """Base of dataclasses with JSON output.

    ``repr=False`` omits a field; metadata ``key`` renames it.
    """

    def as_dict(self) -> JsonObject:
        """The record as plain JSON types, in the order of its fields."""
        assert dataclasses.is_dataclass(self)
        shown = [field for field in dataclasses.fields(self) if field.repr]
        return {
            field.metadata.get("key", field.name): plain(getattr(self, field.name))
            for field in shown
        }

    def to_dict(self) -> JsonObject:
        """The record as plain JSON types, as the commands print it with ``--json``."""
        return self.as_dict()

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


def plain(value: object) -> Any:
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


def without_seconds(content: object) -> Any:
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


# numbers in the frames of results, also where all of them are missing
_NUMBERS = (
    "value",
    "low",
    "high",
    "level",
    "uplift",
    "uplift_low",
    "uplift_high",
    "behavior_value",
    "effective_sample_size",
)


def as_frame(rows: Sequence[Cells], library: str) -> Any:
    """Rows with the same keys as a frame of polars or pandas; missing is null.

    Raises ConfigError for another library, or if pandas is not installed.
    """
    import polars as pl

    if library not in ("polars", "pandas"):
        raise ConfigError(
            f"frames of {library!r} are not known; ask for 'polars' or 'pandas'"
        )
    columns = list(rows[0])
    kinds: dict[str, Any] = {name: pl.Float64 for name in _NUMBERS if name in columns}
    for name in columns:
        if name not in kinds and all(row[name] is None for row in rows):
            kinds[name] = pl.String
    frame = pl.DataFrame(rows, schema_overrides=kinds, infer_schema_length=None)
    if library == "polars":
        return frame
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            "pandas is not installed; `pip install pandas`, or take to_frame() of"
            " polars"
        ) from None
    columns_of: dict[str, np.ndarray | list[object]] = {}
    for column in frame:
        if column.dtype == pl.Float64:
            columns_of[column.name] = column.to_numpy()  # NaN where it is missing
        else:
            columns_of[column.name] = column.to_list()
    return pandas.DataFrame(columns_of)


def interval_cells(interval: Interval | None) -> Cells:
    """The columns of a frame that hold an interval."""
    if interval is None:
        return {"low": None, "high": None, "level": None, "kind": None}
    return {
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
        "kind": interval.kind,
    }


def uplift_cells(uplift: Uplift | None) -> Cells:
    """The columns of a frame that hold the uplift over the behavior policy."""
    if uplift is None:
        return {"uplift": None, "uplift_low": None, "uplift_high": None}
    interval = interval_cells(uplift.interval)
    return {
        "uplift": uplift.value,
        "uplift_low": interval["low"],
        "uplift_high": interval["high"],
    }


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
    episodes, which are resampled or left out in turn for both.
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
    diagnostics: Diagnostics = field(default_factory=dict)


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


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LogResult(Record):
    """Base of results computed from a log; these fields, which identify the log, come
    last in the JSON.

    ``str(result)`` begins with the answer in a sentence, ``repr(result)`` is one line,
    and in a notebook a result shows what the top of its report shows.
    """

    gamma: float
    n_transitions: int
    n_episodes: int
    source: str | None
    notes: tuple[str, ...] = ()
    settings: JsonObject = field(default_factory=dict)
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    data_sha256: str
    seconds: float

    @property
    def is_one_step(self) -> bool:
        """Whether every row of the log ends its episode, so that γ makes no difference.

        Results without diagnostics hold no counts of ends: there it is whether every
        row is an episode and γ is `ANY_GAMMA`, which stands for one that nobody chose.
        Where equal episodes were merged, fewer rows than the log's are counted as
        terminated; then no row may be truncated.
        """
        diagnostics = getattr(self, "diagnostics", None)
        if diagnostics is None:
            is_unchosen = self.gamma == ANY_GAMMA
            return is_unchosen and self.n_episodes == self.n_transitions
        ended = diagnostics.get("n_terminated")  # equal episodes count once
        if not ended:
            return False
        if ended == self.n_transitions:
            return True
        has_cuts = bool(diagnostics.get("n_truncated"))
        return self.n_episodes == self.n_transitions and not has_cuts

    @property
    def discounting(self) -> str:
        """How rewards are discounted, in words."""
        if self.is_one_step:
            return "every episode is one step"
        return f"γ = {self.gamma:.10g}"

    def as_dict(self) -> JsonObject:
        """Plain JSON types."""
        content = super().as_dict()
        for about in dataclasses.fields(LogResult):
            content[about.name] = content.pop(about.name)  # moves it to the end
        return content

    def frame_rows(self) -> list[Cells]:
        """The rows of `to_frame`, at least one."""
        raise NotImplementedError

    def to_frame(self, library: str = "polars") -> Any:
        """The result as a frame of polars, or with ``"pandas"`` of pandas.

        A missing number is null. Raises ConfigError if pandas is not installed.
        """
        return as_frame(self.frame_rows(), library)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the figure at the top of the report, and return its axes.

        ax: matplotlib's axes to draw on; by default those of a new figure of pyplot,
        which a notebook shows.
        """
        return views().plot(self, ax)

    def report(self, path: str | Path, force: bool = False) -> Path:
        """Write the report, as the commands do with ``--out``, and return the path of
        its page.

        path: a folder for JSON, page and figures; or a file ending in .html for the
        page alone, which needs no other file. force: replace an earlier report there.
        Raises DataError if something is in the way.
        """
        return views().write(self, path, force)

    def _repr_html_(self) -> str:
        return views().html(self)


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


# before the number of an estimator where the log does not answer
NO_ANSWER_IN = "the estimator's number, on which nothing should rest"


def answer_in_words(verdict: Verdict) -> str:
    """The verdict's sentence; of a verdict without one, the verdict itself."""
    return verdict.sentence or f"{verdict}."


def with_ends(value: float, interval: Interval | None) -> str:
    """A number, and the ends of its interval in brackets if there is one."""
    if interval is None:
        return f"{value:.4g}"
    return f"{value:.4g} [{interval.low:.4g}, {interval.high:.4g}]"


def warning_lines(warnings: Iterable[str], verdict: Verdict) -> list[str]:
    """A line for each warning that the verdict's sentence does not hold already."""
    return [
        f"warning: {warning}"
        for warning in warnings
        if warning.removeprefix("No interval: ") not in verdict.sentence
    ]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
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
    diagnostics: Diagnostics = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    evidence: Evidence | None = field(default=None, repr=False)
    value_function: ValueFunction | None = field(default=None, repr=False)

    def __str__(self) -> str:
        lines = [answer_in_words(self.verdict), self._number_line()]
        if self.uplift is not None:
            uplift = with_ends(self.uplift.value, self.uplift.interval)
            behavior = with_ends(
                self.uplift.behavior_value, self.uplift.behavior_interval
            )
            lines.append(
                f"uplift {uplift} over the policy that wrote the log {behavior}"
            )
        lines += map(str, self.groups)
        lines += warning_lines(self.warnings, self.verdict)
        return "\n".join(lines)

    def _number_line(self) -> str:
        """The value with its interval; without an answer, what the number is not."""
        about = (
            f"{self.estimator}, {self.discounting}, {self.n_transitions} transitions"
        )
        interval = self.interval
        if interval is not None:
            about = f"{percent(interval.level)} {interval.kind}, {about}"
        elif not self.verdict.is_open:
            about = f"no interval, {about}"
        value = with_ends(self.value, interval)
        label = "value"
        if self.verdict.is_open:
            label = f"{NO_ANSWER_IN}:"
        return f"{self.verdict.answer}; {label} {value} ({about})"

    def __repr__(self) -> str:
        if self.verdict.is_open:
            answer = self.verdict.answer
        else:
            answer = f"{with_ends(self.value, self.interval)}, {self.verdict.answer}"
        return printable(f"Estimate({answer}; {self.policy} by {self.estimator})")

    def frame_rows(self) -> list[Cells]:
        """One row; the values by group are ``estimate.groups.to_frame()``."""
        return [
            {
                "policy": self.policy,
                "estimator": self.estimator,
                "value": self.value,
                **interval_cells(self.interval),
                "behavior_value": self.behavior_value,
                **uplift_cells(self.uplift),
                "verdict": self.verdict.answer,
            }
        ]


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

    def as_dict(self) -> JsonObject:
        """Plain JSON types."""
        entry: JsonObject = {"estimator": self.name, "family": self.family}
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


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
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
    diagnostics: Diagnostics = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> EstimateRow:
        return {row.name: row for row in self.rows}[name]

    def __iter__(self) -> Iterator[EstimateRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        about = (
            f"{self.verdict.answer}; {self.policy}, {self.discounting},"
            f" {self.n_transitions} transitions"
        )
        if self.verdict.is_open:
            about = f"{about}; none of these numbers is an answer"
        lines = [answer_in_words(self.verdict), about]
        lines += (f"  {row.name:<10} {row}" for row in self.rows)
        lines += warning_lines(self.warnings, self.verdict)
        return "\n".join(lines)

    def __repr__(self) -> str:
        answered = [row.name for row in self.rows if row.estimate is not None]
        return printable(
            f"EstimateTable({self.verdict.answer}; {self.policy} by"
            f" {', '.join(answered)})"
        )

    def frame_rows(self) -> list[Cells]:
        """A row for each estimator, then one for each bound, whose estimator is
        missing.
        """
        rows: list[Cells] = []
        for row in self.rows:
            value = None
            interval = None
            uplift = None
            size = None
            if row.estimate is not None:
                value = row.estimate.value
                interval = row.estimate.interval
                uplift = row.estimate.uplift
                size = row.estimate.effective_sample_size
            rows.append(
                {
                    "estimator": row.name,
                    "family": row.family,
                    "value": value,
                    **interval_cells(interval),
                    **uplift_cells(uplift),
                    "effective_sample_size": size,
                    "reason": row.reason,
                }
            )
        for bound in self.bounds:
            cells: Cells = dict.fromkeys(rows[0])
            cells |= interval_cells(bound.interval)
            cells |= {"kind": bound.kind, "reason": bound.reason}
            rows.append(cells)
        return rows
