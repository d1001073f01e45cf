"""What stands beside an estimate from sums: from the sums themselves, and from the sample where they are
silent.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from koffline.ope.blocks import row_blocks
from koffline.ope.closed_form.fitting import FOLDS
from koffline.ope.closed_form.moments import leading_features
from koffline.ope.closed_form.weights import WeightDiagnostics
from koffline.ope.diagnostics import (
    coverage_warnings,
    few_episodes_warnings,
    head_warnings,
    horizon_warnings,
    mean_off_diagonal,
)
from koffline.ope.estimate import Evidence
from koffline.ope.learning import make_table, start_values
from koffline.ope.limits import Limits
from koffline.ope.problem import EvaluationProblem
from koffline.ope.residuals import compute_residuals
from koffline.ope.streaming.facts import LogFacts
from koffline.ope.streaming.frame import Frame
from koffline.ope.streaming.moments import StreamingMoments
from koffline.ope.streaming.sampling import Request, Sampled
from koffline.ope.streaming.solving import ClosedForm, Reader, TowardPath, folded_sums
from koffline.replicas import StackedMLP

_SAMPLE_ROWS = 20_000
_SLIMMER = 8  # blocks here than elsewhere: the sums are still in memory


def log_diagnostics(request: Request, facts: LogFacts, sampled: Sampled) -> dict[str, Any]:
    """Numbers about the log and the policy; coverage and overlap are of the sample."""
    returns = facts.returns
    return {
        "coverage": sampled.coverage.fraction,
        "n_terminated": facts.terminated,
        "n_truncated": facts.truncated,
        "n_initial_states": len(request.log) if not request.log.has_episodes else request.log.n_episodes,
        "reward_scale": sampled.problem.reward_scale,
        "behavior_return": returns.mean if returns.count else None,
        "behavior_return_se": returns.standard_error,
        **sampled.overlap,
        "sample_rows": sampled.rows,
    }


def log_warnings(request: Request, limits: Limits, diagnostics: dict[str, Any]) -> list[str]:
    """Reasons to distrust any estimate from this log."""
    log = request.log
    found = coverage_warnings(diagnostics["coverage"])
    if log.has_episodes:
        found += few_episodes_warnings(log.n_episodes)
        found += horizon_warnings(limits)
    return [*found, *(f"Reader: {note}" for note in log.metadata.notes)]


def head_diagnostics(
    reader: Reader,
    sums: StreamingMoments,
    sampled: Sampled,
    layers: dict[str, torch.Tensor],
    head: str,
    ridge: float,
) -> dict[str, Any]:
    """Numbers about the networks by head; the held-out loss is of fits to the other folds of groups."""
    heads = {name: float(reader.value(sums, theta).mean()) for name, theta in layers.items()}
    heads = {name: value for name, value in heads.items() if math.isfinite(value)}
    loss, ratio = _held_out_loss(reader, sums, layers["fqe"], ridge)
    rms, mean = residual_size(reader, sums, layers[head])
    found: dict[str, Any] = {
        "held_out_kernel_loss": loss,
        "held_out_kernel_ratio": ratio,
        "effective_bandwidth": sampled.bandwidth,
        "mean_off_diagonal_kernel": mean_off_diagonal(
            sampled.problem.kernel_inputs[sampled.problem.row_weights > 0.0], sampled.bandwidth
        ),
        "estimates_by_head": heads,
        "head_disagreement": max(heads.values()) - min(heads.values()),
        "residual_rms": rms,
        "residual_mean": mean,
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found.items()
    }


def network_warnings(sampled: Sampled, diagnostics: dict[str, Any], width: float, rows: int) -> list[str]:
    """Reasons to distrust the trained networks."""
    diverged = None
    if sampled.diverged and sampled.record is not None:
        diverged = f"{sampled.diverged} of {len(sampled.record.diverged_at)} networks diverged"
    return head_warnings(diagnostics, width, rows, diverged)


def residual_size(reader: Reader, sums: StreamingMoments, theta: torch.Tensor) -> tuple[float, float]:
    """Root mean square (rows weighted by w²) and mean of the Bellman residual of the mean network's fits."""
    scale, outputs = reader.frame.units.reward_scale, reader.frame.outputs
    squares, means = [], []
    for replica in range(sums.replicas):
        moments = sums.moments(replica)
        mixing = torch.cat([-theta[replica], theta.new_ones(1)])
        squares.append(float(mixing @ moments.squares @ mixing) / moments.weight_squares)
        # the constants' rows of φᵀW[Z, r] add up to ΣW[Z, r]
        means.append(float(moments.temporal[-outputs:].sum(dim=0) @ mixing) / moments.weight)
    return scale * math.sqrt(max(0.0, float(np.mean(squares)))), scale * float(np.mean(means))


def _held_out_loss(
    reader: Reader, sums: StreamingMoments, trained: torch.Tensor, ridge: float
) -> tuple[float, float]:
    """U-statistic of the kernel loss and V-statistic over its expectation, on folds left out; means."""
    losses, ratios = [], []
    for replica in range(sums.replicas):
        folded = folded_sums(reader, sums, replica, FOLDS)
        scale = reader.frame.units.reward_scale
        score = own = pairs = 0.0
        for part, rest in zip(folded.parts, folded.without_each(), strict=True):
            theta = TowardPath(rest, trained[replica] * scale).solve_value(ridge)
            mixing = torch.cat([-theta, theta.new_ones(1)])
            score += float((part.projected @ mixing).square().sum())
            own += float(mixing @ part.squares @ mixing)
            pairs += part.weight**2 - part.weight_squares
        losses.append((score - own) / pairs if pairs > 0.0 else math.nan)
        ratios.append(score / own if own > 0.0 else math.nan)
    return float(np.mean(losses)), float(np.mean(ratios))


def weight_diagnostics(form: ClosedForm, sums: StreamingMoments, sampled: Sampled) -> dict[str, Any]:
    """Of ω: mass and imbalance from the sums, evenness from the sample; of the first replica."""
    reader, frame = form.reader, form.reader.frame
    path, system = form.path(sums, 0), reader.system(sums, 0)
    moments = reader.moments(sums, 0)
    alpha = path.solve(form.ridges[0]).alpha
    projected = _critic_sums(form, moments, frame)
    balance = alpha @ projected[:, :-1] / moments.weight  # n⁻¹ Σ w ω Z
    start = system.start_mean
    omega = _weights_of_sample(form, sampled, alpha)
    used = omega * sampled.problem.row_weights[: len(omega)]
    share = float(used.sum() ** 2 / max(np.square(used).sum() * len(used), np.finfo(float).tiny))
    size = float(np.abs(used).sum()) or 1.0
    found = WeightDiagnostics(
        effective_rows=share * float(sums.rows.sum()),
        effective_units=share * float(sums.rows.sum()),
        mass=float(balance[-frame.outputs :].sum()),
        imbalance=float((balance - start).norm() / start.norm().clamp_min(1e-300)),
        negative_share=float(np.abs(used[used < 0.0]).sum()) / size,
        largest_share=float(np.abs(used).max()) / size,
    )
    described = found.as_dict()
    described.pop("effective_units")
    return {
        **described,
        "ridges": list(form.ridges),
        "warnings": found.warnings(int(sums.rows.sum())),
        "parameters": frame.parameters,
    }


def _critic_sums(form: ClosedForm, moments: Any, frame: Frame) -> torch.Tensor:
    """Σ w critic [Z, r] for the critics that α belongs to."""
    if form.name == "lstdq":
        return torch.as_tensor(moments.temporal)
    if form.name != "dualdice":
        return torch.as_tensor(moments.projected)
    from koffline.ope.closed_form.moments import leading_instruments

    instruments, critics = len(moments.projected), frame.critics
    chosen = moments.projected[leading_instruments(instruments, critics)]
    return torch.as_tensor(chosen * (instruments / critics) ** 0.5)


def _weights_of_sample(form: ClosedForm, sampled: Sampled, alpha: torch.Tensor) -> np.ndarray:
    """ω of (at most 20,000) rows of the sample."""
    problem, frame = sampled.problem, form.reader.frame
    rows = slice(0, _SAMPLE_ROWS)
    if form.name == "lstdq":
        from koffline.solvers.linear import combine_features

        features = frame.features(torch.from_numpy(problem.inputs[rows]), torch.float64)[:1]
        readout = None if problem.readout is None else torch.from_numpy(problem.readout[rows])
        return np.asarray((combine_features(features, 1, readout, constant=True)[0] @ alpha).numpy())
    kernel_inputs = torch.from_numpy(problem.kernel_inputs[rows])
    critics = frame.instruments
    if form.name == "dualdice":
        critics = leading_features(critics, frame.critics)
    return np.asarray((critics(kernel_inputs) @ alpha).numpy())


def make_evidence(sampled: Sampled, network: StackedMLP, replica_values: np.ndarray) -> Evidence | None:
    """Arrays for the plots, from the sample; ``network``: those of the head, in double precision."""
    record, problem = sampled.record, sampled.problem
    if record is None:
        return None
    steps = np.array(record.probe_steps)
    losses = record.losses.T.cpu().numpy()
    at = np.minimum(np.searchsorted(np.array(record.loss_steps), steps), losses.shape[1] - 1)
    table = make_table(problem, "cpu")
    size = min(_SAMPLE_ROWS, len(table))
    parts = [
        compute_residuals(network, table, rows) for rows in row_blocks(network, size, _SLIMMER * table.draws)
    ]
    residuals = torch.cat(parts, dim=1).mean(dim=0).numpy()
    relevant = sampled.coverage.weights > 0.0
    return Evidence(
        steps=steps,
        objective=losses[:, at],
        values=torch.stack(record.probes).T.cpu().numpy(),
        residuals=residuals[problem.row_weights[:size] > 0.0] * problem.reward_scale,
        initial_values=_initial_values(network, problem),
        action_support=sampled.coverage.ratios[relevant],
        support_weights=sampled.coverage.weights[relevant],
        support_label="distance to the nearest logged row / the sample's own spacing",
        replica_values=replica_values,
        replica_roles=("full",) * len(replica_values),
    )


def _initial_values(network: StackedMLP, problem: EvaluationProblem) -> np.ndarray:
    """(E,) mean over the networks."""
    parts = []
    for rows in row_blocks(network, len(problem.start_inputs), _SLIMMER * problem.start_inputs.shape[1]):
        probabilities = problem.start_probabilities
        some = dataclasses.replace(
            problem,
            start_inputs=problem.start_inputs[rows],
            start_probabilities=None if probabilities is None else probabilities[rows],
        )
        parts.append(start_values(network, some).numpy().mean(axis=0))
    return np.concatenate(parts)
