"""What a sweep found: per setting the interquartile mean over seeds with a bootstrap interval, ranked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError
from koffline.spread import Spread, spread_of
from koffline.train.config import TrainConfig
from koffline.train.sweep_plan import Setting, SweepPlan
from koffline.train.sweep_run import RunResult

_FALLS = ("td_error", "continuous_action_diff", "compare_continuous_action_diff")


@dataclass(frozen=True)
class Metric:
    """A column of the runs' metrics, and whether more is better."""

    name: str
    maximize: bool


@dataclass(frozen=True)
class SettingSummary:
    """A setting's scores. values: one per finished seed, infinitely bad where it diverged; seconds: mean."""

    setting: Setting
    values: tuple[float, ...]
    spread: Spread
    diverged: int
    missing: int
    seconds: float


@dataclass(frozen=True)
class AxisSummary:
    """All scores with one value of an axis, seeds drawn again within each setting."""

    axis: str
    value: str
    settings: int
    spread: Spread


@dataclass(frozen=True)
class FailedRun:
    """A run without a result."""

    name: str
    reason: str


@dataclass(frozen=True)
class SweepSummary:
    """A sweep's outcome, the best setting first; those that lack seeds come last."""

    metric: Metric
    settings: tuple[SettingSummary, ...]
    axes: tuple[AxisSummary, ...]
    failures: tuple[FailedRun, ...]
    warnings: tuple[str, ...]
    runs: int
    seeds: tuple[int, ...]

    @property
    def best(self) -> SettingSummary | None:
        """The first setting, where it has all seeds and a finite score."""
        first = self.settings[0]
        return None if first.missing or not math.isfinite(first.spread.iqm) else first

    @property
    def rivals(self) -> int:
        """Settings whose interval overlaps the best one's."""
        best = self.best
        if best is None:
            return 0
        return sum(_overlap(best.spread, other.spread) for other in self.settings[1:])


def choose_metric(config: TrainConfig, name: str | None = None, maximize: bool | None = None) -> Metric:
    """The metric of that name: an evaluator's, an evaluator's type, or a loss.

    Without a name the return in an environment, else the only evaluator. Errors, losses and distances are
    better when small, unless ``maximize`` says otherwise. Raises ConfigError.
    """
    types = {key: settings.type for key, settings in config.evaluators.items()}
    if name is None:
        played = [key for key, kind in types.items() if kind == "environment"]
        candidates = played or list(types)
        if len(candidates) != 1:
            known = f"one of {', '.join(candidates)}" if candidates else "a loss, as in --metric loss"
            raise ConfigError(f"the config does not say which metric counts; name it with --metric: {known}")
        name = candidates[0]
    if name not in types:
        of_type = [key for key, kind in types.items() if kind == name]
        near = difflib.get_close_matches(name, types, n=1, cutoff=0.75)
        if near and not of_type:
            raise ConfigError(f"--metric {name} is no evaluator of the config; did you mean '{near[0]}'?")
        name = of_type[0] if len(of_type) == 1 else name
    falls = types.get(name, name) in _FALLS or name.endswith("loss") or name.startswith("time_")
    return Metric(name, not falls if maximize is None else maximize)


def summarise(
    plan: SweepPlan, results: Mapping[str, RunResult], metric: Metric, failures: Sequence[FailedRun] = ()
) -> SweepSummary:
    """Rank the settings by the results that are there (by name of the run). Raises ConfigError."""
    _check_metric(results, metric)
    worst = -math.inf if metric.maximize else math.inf
    parts = []
    for setting in plan.settings:
        runs = [results[run.name] for run in plan.runs if run.setting is setting and run.name in results]
        found = [score for run in runs if (score := _score(run, metric, worst)) is not None]
        seconds = float(np.mean([run.seconds for run in runs])) if runs else math.nan
        parts.append(
            SettingSummary(
                setting,
                tuple(found),
                spread_of([np.asarray(found)]),
                diverged=sum(math.isinf(value) for value in found),
                missing=len(plan.seeds) - len(found),
                seconds=seconds,
            )
        )
    warnings = dict.fromkeys(text for run in results.values() for text in run.warnings)
    return SweepSummary(
        metric,
        tuple(sorted(parts, key=lambda part: _rank(part, metric))),
        tuple(_by_axis(plan, parts)),
        tuple(failures),
        tuple(warnings),
        len(plan.runs),
        plan.seeds,
    )


def _score(run: RunResult, metric: Metric, worst: float) -> float | None:
    """NaN and divergence are the worst there is; None where the run does not have that metric."""
    if run.diverged is not None:
        return worst
    value = run.metrics.get(metric.name)
    return worst if value is not None and not math.isfinite(value) else value


def _check_metric(results: Mapping[str, RunResult], metric: Metric) -> None:
    trained = [run for run in results.values() if run.diverged is None]
    if not trained or any(metric.name in run.metrics for run in trained):
        return
    known = sorted({name for run in trained for name in run.metrics if not name.startswith("time_")})
    raise ConfigError(
        f"no run has a metric '{metric.name}'; known are {', '.join(known)}: the runs are kept, name one of "
        "these with --metric"
    )


def _rank(part: SettingSummary, metric: Metric) -> tuple[bool, bool, float, int, float]:
    """Complete ones first, then by the interquartile mean; the infinitely bad by what did not diverge."""
    sign = -1.0 if metric.maximize else 1.0
    finite = [value for value in part.values if math.isfinite(value)]
    mean = sign * math.fsum(finite) / len(finite) if finite else math.inf
    iqm = sign * part.spread.iqm if part.values else math.inf
    return (part.missing > 0, not part.values, iqm, part.diverged, mean)


def _by_axis(plan: SweepPlan, parts: Sequence[SettingSummary]) -> list[AxisSummary]:
    """One line per value of each axis, where the grid has several axes."""
    several = sum(len(axis.values) > 1 for axis in plan.axes) > 1
    found = []
    for place in range(len(plan.axes) if several else 0):
        groups: dict[tuple[str, str], list[Float[np.ndarray, " score"]]] = {}
        for part in parts:
            groups.setdefault(part.setting.values[place], []).append(np.asarray(part.values))
        if len(groups) > 1:
            found += [
                AxisSummary(name, value, len(scores), spread_of(scores))
                for (name, value), scores in groups.items()
            ]
    return found


def _overlap(first: Spread, second: Spread) -> bool:
    if any(math.isnan(part.low) for part in (first, second)):
        return True
    return first.low <= second.high and second.low <= first.high
