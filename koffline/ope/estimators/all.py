"""``estimate_all``: every estimator on one log, in one table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.disk.log import LazyTransitions
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.fitting import Progress
from koffline.ope.diagnostics import common_diagnostics, common_warnings
from koffline.ope.estimators.run import bounds_of, run_estimator, sensitivity_to_norm
from koffline.ope.estimators.table import EstimateRow, EstimateTable
from koffline.ope.evaluation import merge_settings, open_workspace
from koffline.ope.interval import Interval
from koffline.ope.limits import NOTABLE
from koffline.ope.names import DEFAULT, ESTIMATORS, KERNEL_CERTIFIED, check_estimator, kinds_for
from koffline.ope.point_estimate import PointEstimate, Unavailable
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.workspace import Workspace


def estimate_all(
    transitions: Transitions | LazyTransitions,
    policy: Any,
    gamma: float | None = None,
    *,
    names: str | Sequence[str] | None = None,
    bounds: bool = True,
    level: float | None = None,
    seed: int | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EstimateTable:
    """What each estimator says the policy is worth, with its interval, and bounds beside them.

    names: one or more of ``koffline.ope.names.ESTIMATORS``; None: all. bounds: intervals of the
    kernel kind too. All else as in `koffline.evaluate`; estimators share what they can, so all of them cost
    little more than ``kloss`` alone. One that does not apply to this log (no episodes, no probabilities …)
    is a row with its reason. Raises KofflineError for what concerns them all.
    """
    settings = merge_settings(
        transitions, settings, {"gamma": gamma, "level": level, "seed": seed, **options}
    )
    if isinstance(names, str):
        names = (names,)
    wanted = list(names or ESTIMATORS)
    for name in wanted:
        check_estimator(name)
    if settings.interval != DEFAULT:
        wanted = [name for name in wanted if settings.interval in kinds_for(name)]
    with open_workspace(transitions, policy, settings, initial_observations, stream, progress) as workspace:
        rows = tuple(_row(name, ESTIMATORS[name], workspace) for name in wanted)
        found = {row.name: row.estimate for row in rows if row.estimate is not None}
        if not found:
            raise KofflineError(f"no estimator applies to this log; {rows[0].name}: {rows[0].reason}")
        bound_rows = bounds_of(workspace, found) if bounds else ()
        sensitivity = sensitivity_to_norm(workspace, KERNEL_CERTIFIED) if bounds else None
        diagnostics = common_diagnostics(workspace)
        warnings = [*common_warnings(workspace, diagnostics), *_disagreement(rows, workspace)]
    return EstimateTable(
        rows=rows,
        bounds=bound_rows,
        level=settings.level,
        diagnostics=diagnostics,
        settings=settings.model_dump(exclude={"gamma", "estimator", "seed", "level"}),
        warnings=tuple(warnings),
        sensitivity=sensitivity,
        **workspace.describe(),
    )


def _row(name: str, family: str, workspace: Workspace) -> EstimateRow:
    """An estimator that fails on this log is a row with its reason."""
    started = time.perf_counter()
    try:
        found: PointEstimate | Unavailable = run_estimator(workspace, name)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        found = Unavailable(name, str(error))
    seconds = time.perf_counter() - started
    if isinstance(found, Unavailable):
        return EstimateRow(name, family, None, found.reason, seconds)
    return EstimateRow(name, family, found, None, seconds)


def _disagreement(rows: Sequence[EstimateRow], workspace: Workspace) -> list[str]:
    """A sentence on the two families whose intervals lie farthest apart, where they do not meet."""
    least = NOTABLE * workspace.problem.reward_scale
    worst, found = least, []
    for one in rows:
        for other in rows:
            low, high = (row.estimate.interval if row.estimate else None for row in (one, other))
            if one.family == other.family or low is None or high is None:
                continue
            gap = high.low - low.high
            if gap > worst:
                worst = gap
                found = [
                    f"Families disagree: {one.name} ({one.family}) says {_span(low)}, {other.name} "
                    f"({other.family}) {_span(high)}; their assumptions cannot all hold on this log: look at "
                    "coverage, effective sample sizes and `koffline diagnose` before trusting either."
                ]
    return found


def _span(interval: Interval) -> str:
    return f"[{interval.low:.4g}, {interval.high:.4g}]"
