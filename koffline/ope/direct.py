"""Estimators that fit a value function: trained networks by head, and their mean as a function of (s, a)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.fitting import Progress, threads
from koffline.kernels import Gaussian
from koffline.ope.ensemble import draw_ensemble
from koffline.ope.estimate import Evidence, plain
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.learning import start_values
from koffline.ope.limits import NOTABLE
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.provenance import Provenance
from koffline.ope.results import Interval, PointEstimate
from koffline.ope.value_functions import ValueFunction
from koffline.ope.workspace import Workspace
from koffline.policies import Policy
from koffline.replicas import StackedMLP

_GRAM_ROWS = 1000
_LARGE_RESIDUAL = 3.0  # times the rms return; a value function that is zero everywhere stays below one
_ASSUMPTIONS = (
    "Standard deviation over networks retrained on resampled {units}, Student t: it covers the choice of "
    "{units}, start states and training noise, not what the log or the network cannot express."
)


def estimate_by_networks(workspace: Workspace, head: str) -> PointEstimate:
    """Mean over the replicas of the whole log; interval from the spread of the resampled ones."""
    fitted = workspace.fitted
    interval = replica_interval(fitted, head)
    values, alive, full = head_values(fitted, head)
    diagnostics = _diagnostics(workspace)
    return PointEstimate(
        name=head,
        value=float(values[:full][alive[:full]].mean()),
        standard_error=float(values[full:][alive[full:]].std(ddof=1)),
        interval=interval,
        warnings=tuple(_warnings(workspace, diagnostics, interval)),
        diagnostics=diagnostics,
    )


def _diagnostics(workspace: Workspace) -> dict[str, Any]:
    """Numbers about the trained networks, all finite or None."""
    fitted, residuals, problem = workspace.fitted, workspace.residuals, workspace.problem
    heads = fitted.estimate_by_head()
    values, kept, full = head_values(fitted, fitted.head)
    found: dict[str, Any] = {
        "held_out_kernel_loss": residuals.held_out_kernel_loss,
        "held_out_kernel_ratio": residuals.held_out_ratio,
        "effective_bandwidth": fitted.bandwidth,
        "mean_off_diagonal_kernel": _mean_off_diagonal(
            problem.kernel_inputs[problem.row_weights > 0.0], fitted.bandwidth
        ),
        "estimates_by_head": heads,
        "head_disagreement": max(heads.values()) - min(heads.values()),
        "replica_standard_deviation": float(values[full:][kept[full:]].std(ddof=1)),
        "residual_rms": residuals.rms,
        "residual_mean": residuals.mean,
        "training_steps": fitted.record.steps,
    }
    return {name: plain(value) for name, value in found.items()}


def _warnings(workspace: Workspace, diagnostics: dict[str, Any], interval: Interval) -> list[str]:
    """Reasons to distrust the trained networks."""
    fitted, scale, found = workspace.fitted, workspace.problem.reward_scale, []
    if diagnostics["head_disagreement"] > max(0.5 * interval.width, NOTABLE * scale):
        heads = ", ".join(f"{name} {value:.4g}" for name, value in diagnostics["estimates_by_head"].items())
        found.append(f"Estimators that should agree do not ({heads}); train longer or collect more data.")
    off_diagonal = diagnostics["mean_off_diagonal_kernel"]
    if off_diagonal is not None and off_diagonal < 1.0 / len(workspace.transitions):
        found.append("The kernel sees every row as alone; raise the bandwidth.")
    if not fitted.alive.all():
        found.append(f"{fitted.describe_diverged()}, and were left out; lower learning_rate.")
    rms = diagnostics["residual_rms"]
    if rms is None or rms > _LARGE_RESIDUAL * scale:
        found.append(
            f"Bellman residuals (rms {math.inf if rms is None else rms:.3g}) are larger than the logged "
            f"returns themselves (rms {scale:.3g}): nothing was learnt; lower learning_rate."
        )
    return found


def _mean_off_diagonal(kernel_inputs: np.ndarray, bandwidth: float) -> float:
    """Mean kernel value of two different rows, over an even sample."""
    rows = np.unique(np.linspace(0, len(kernel_inputs) - 1, min(len(kernel_inputs), _GRAM_ROWS)).astype(int))
    count = len(rows)
    if count < 2:
        return math.nan
    gram = Gaussian(bandwidth).gram(torch.as_tensor(kernel_inputs[rows]))
    return float((gram.sum() - gram.diagonal().sum()) / (count * (count - 1)))


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


HEADS = ("kloss", "fqe", "lstd")


@dataclass(frozen=True, eq=False)
class NetworkValues:
    """Mean of Q(s, a) over a stack of networks, within the bounds of any discounted return of its log."""

    network: StackedMLP
    problem: EvaluationProblem  # only its units: the rows are left out

    @torch.no_grad()
    def __call__(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(M,) in units of the return."""
        flat = self.network.flat
        inputs = torch.as_tensor(self.problem.standardise(observations, actions))
        outputs = self.network.forward(inputs.to(flat)).mean(dim=0).cpu().double().numpy()  # (M, n)
        if self.problem.n_actions is None:
            values = outputs[:, 0]
        else:
            values = np.take_along_axis(outputs, np.asarray(actions)[:, None], axis=1)[:, 0]
        return np.clip(values, *self.problem.value_bounds) * self.problem.reward_scale


def fitted_value_function(
    fitted: FittedValues, transitions: Transitions, head: str | None = None
) -> ValueFunction:
    """The mean network of a head (the chosen one when None), fitted to ``transitions``."""
    name = head or fitted.head
    kept = np.flatnonzero(fitted.alive[: fitted.ensemble.full]).tolist()
    if not kept:
        raise KofflineError(f"{fitted.describe_diverged()}; lower learning_rate or look for outliers")
    network = fitted.heads[name].select(kept)
    return ValueFunction(
        name=name,
        function=NetworkValues(network, fitted.problem.without_rows()),
        action_space=transitions.action_space,
        observation_shape=transitions.observation_shape,
        trained_on=Provenance.of(transitions),
    )


def fit_value_function(
    transitions: Transitions,
    policy: Policy,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> ValueFunction:
    """Q^π by the estimator of the settings, kloss or fqe, from the whole log; no replicas are resampled."""
    with torch.no_grad(), threads(settings.threads):
        generator = np.random.default_rng(settings.seed)
        problem = prepare_problem(transitions, policy, settings.gamma, settings.action_draws, generator)
        ensemble = draw_ensemble(problem, settings.full_replicas, 0, settings.seed)
        fitted = fit_value_functions(problem, ensemble, settings, progress)
        return fitted_value_function(fitted, transitions)
