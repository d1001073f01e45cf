"""Estimators that fit a value function: trained networks by head."""

from __future__ import annotations

import math

import numpy as np
import torch

from koffline.ope.diagnostics import fitted_diagnostics, fitted_warnings
from koffline.ope.estimate import Evidence
from koffline.ope.fitted import FittedValues
from koffline.ope.interval import Interval
from koffline.ope.learning import start_values
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.workspace import Workspace

_ASSUMPTIONS = (
    "Standard deviation over networks retrained on resampled {units}, Student t: it covers the choice of "
    "{units}, start states and training noise, not what the log or the network cannot express."
)


def estimate_by_networks(workspace: Workspace, head: str) -> PointEstimate:
    """Mean over the replicas of the whole log; interval from the spread of the resampled ones."""
    interval = replica_interval(workspace.fitted, head)
    values, alive, full = head_values(workspace.fitted, head)
    diagnostics = fitted_diagnostics(workspace)
    return PointEstimate(
        name=head,
        value=float(values[:full][alive[:full]].mean()),
        standard_error=float(values[full:][alive[full:]].std(ddof=1)),
        interval=interval,
        warnings=tuple(
            fitted_warnings(
                workspace, {**diagnostics, "reward_scale": workspace.problem.reward_scale}, interval
            )
        ),
        diagnostics=diagnostics,
    )


def replica_interval(fitted: FittedValues, head: str) -> Interval:
    """Student-t interval around the mean of the full replicas, with the spread of the resampled ones.

    Resampling U units shows (U − 1)/U of the variance of a mean, with at most U − 1 degrees of freedom.
    """
    from scipy import stats

    values, alive, count = head_values(fitted, head)
    full, resampled = values[:count][alive[:count]], values[count:][alive[count:]]
    value, spread = float(full.mean()), float(resampled.std(ddof=1))
    level = fitted.settings.level
    parts = max(2.0, fitted.units)
    quantile = float(stats.t.ppf(0.5 + level / 2.0, df=min(len(resampled), parts) - 1))
    half_width = quantile * spread * math.sqrt((1.0 + 1.0 / len(full)) * parts / (parts - 1.0))
    units = "episodes" if len(fitted.problem.episode_starts) < fitted.problem.n_rows else "rows"
    assumptions = _ASSUMPTIONS.format(units=units)
    return Interval(value - half_width, value + half_width, level, "bootstrap", assumptions)


def head_values(fitted: FittedValues, head: str) -> tuple[np.ndarray, np.ndarray, int]:
    """J per replica (R,) by a head, which of them count (R,), and how many saw the whole log."""
    values = fitted.replica_values[head]
    return values, fitted.alive & np.isfinite(values), fitted.ensemble.full


def make_evidence(workspace: Workspace) -> Evidence:
    """Arrays for the plots."""
    fitted, coverage = workspace.fitted, workspace.coverage
    record, full = fitted.record, fitted.ensemble.full
    steps = np.array(record.probe_steps)
    losses = record.losses.T.numpy()
    at = np.minimum(np.searchsorted(np.array(record.loss_steps), steps), losses.shape[1] - 1)
    starts = start_values(fitted.chosen, fitted.problem)[:full].cpu().numpy()[fitted.alive[:full]]
    starts, relevant = starts[:, fitted.problem.start_weights > 0.0], coverage.weights > 0.0
    return Evidence(
        steps=steps,
        objective=losses[:, at],
        values=torch.stack(record.probes).T.numpy(),
        residuals=workspace.residuals.sample,
        initial_values=starts.mean(axis=0),
        action_support=coverage.ratios[relevant],
        support_weights=coverage.weights[relevant],
        support_label="distance to the nearest logged row / the log's own spacing",
        replica_values=fitted.replica_values[fitted.head],
        replica_roles=fitted.ensemble.roles,
    )
