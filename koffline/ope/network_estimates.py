"""Estimates by the trained networks: their heads, and closed forms in the features of every network.

A closed form chooses the last layer θ by instruments: minimise ‖v − Bθ‖² + λ‖θ‖² with B the mean of
critics · Zᵀ and v that of critics · r. Its value cᵀθ, c the mean features of start states, is linear in the
rewards: the mean of ω r with ω = criticsᵀ B (BᵀB + λ)⁻¹ c. The same ω minimises ‖Bᵀα − c‖² + λ‖α‖² over
ω = criticsᵀα: the marginalised importance weights that balance Z against c. So one fit is both a value
function (minimax Q-learning) and a density ratio d^π/μ (minimax weight learning).

The spread over rows of one network does not show what its features miss. Each form is therefore solved for
every network, on its own resampled units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import DataError
from koffline.kernels import FourierFeatures
from koffline.ope.fitted import FittedValues, uplift_of
from koffline.ope.last_layer import ridge_solve
from koffline.ope.limits import NOTABLE
from koffline.ope.names import FITTED
from koffline.ope.problem import EvaluationProblem
from koffline.ope.results import Interval, PointEstimate, plain
from koffline.ope.workspace import Workspace

_SMALLEST, _LARGEST = 1e-10, 0.1
_CRITICS, _CRITIC_RIDGE = 300, 0.1  # critics of DualDICE, and their ridge
_BLOCK = 8192
_LARGE_RESIDUAL = 3.0  # bound of the residuals in rms returns; those of a zero value function are below one


def critic_moments(critics: FourierFeatures, problem: EvaluationProblem) -> Float[Tensor, "critic critic"]:
    """Σ w ψψᵀ over the rows of a part of the log."""
    inputs, weights = torch.as_tensor(problem.kernel_inputs).double(), torch.as_tensor(problem.row_weights)
    total = torch.zeros(2 * critics.frequencies.shape[1], 2 * critics.frequencies.shape[1]).double()
    for block, own in zip(inputs.split(_BLOCK), weights.split(_BLOCK), strict=True):
        psi = critics(block)
        total.addmm_(psi.mT, psi * own[:, None])
    return total


@torch.no_grad()
def closed_form(name: str, fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """J of a closed form by name in the features of each network, on its own rows; units of the return.

    Start states as its sample weighs them, and as the log does.

    ``mql``: minimax Q-learning with critics in an RKHS, the kernel loss minimised over Q = φᵀθ, θ drawn to
    zero (Feng et al. 2019, equ:vstat). ``lstdq``: critics are the features themselves (cor:same_as_td).
    ``mwl``: the mean of ω r, ω in the RKHS that balances Z against c: the dual of ``mql``, and like it in all
    but the ridge, which is the networks' own (Uehara, Huang & Jiang 2020, Minimax Weight and Q-Function
    Learning). ``dualdice``: ω = ζ of min_ν max_ζ E ζ(x)(ν(x) − discount ν(x')) − ζ(x)²/2 − E ν(x0), both
    ridged: the inner maximum regresses ν(x) − discount ν(x') on x before it is squared (Nachum et al. 2019),
    which is ``mql`` in units in which the critics' second moment is the identity.
    """
    systems, starts, outputs = fitted.systems, fitted.start_features, fitted.record.network.sizes[-1]
    matrix, vector = systems.kernel_matrix, systems.kernel_vector
    if name == "lstdq":
        curvature, slope = systems.temporal_matrix, systems.temporal_vector
        ridge = usual_ridge(fitted.rows, 1.0)
    else:
        ridge = fitted.settings.ridge if name == "mwl" else usual_ridge(fitted.rows, 1.5)
        if name == "dualdice":
            matrix, vector = _whitened(fitted, matrix, vector)
        curvature, slope = matrix.mT @ matrix, (matrix.mT @ vector.unsqueeze(-1)).squeeze(-1)
    theta = ridge_solve(curvature, slope, ridge, outputs)
    return (starts @ theta.unsqueeze(-1)).squeeze(-1).cpu().numpy() * fitted.problem.reward_scale


def usual_ridge(rows: float, power: float) -> float:
    """Relative ridge by the number n of rows alone: n^−power, between 1e-10 and 0.1.

    power: 1.5 for curvatures BᵀB, 1 for LSTD's matrix, found by measurement.
    """
    return min(max(rows**-power, _SMALLEST), _LARGEST)


def _whitened(fitted: FittedValues, matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """B and v of the first critics, in units in which their ridged second moment is the identity."""
    frequencies = fitted.instruments.frequencies
    count = min(_CRITICS // 2, frequencies.shape[1])
    chosen = torch.cat((torch.arange(count), torch.arange(count) + frequencies.shape[1]))  # cosines, sines
    total = fitted.fold(partial(critic_moments, FourierFeatures(frequencies[:, :count])))
    second = (total / fitted.rows).to(matrix)
    ridged = second + _CRITIC_RIDGE * second.diagonal().mean() * torch.eye(len(second)).to(second)
    root, failed = torch.linalg.cholesky_ex(ridged)
    if bool(failed):
        raise DataError(
            "DualDICE's critics cannot be told apart on these rows; give more rows of like weight"
        )
    both = torch.cat((matrix[:, chosen], vector[:, chosen, None]), dim=-1)
    both = both * (frequencies.shape[1] / count) ** 0.5  # critics of squared length one again
    solved = torch.linalg.solve_triangular(root, both, upper=False)
    return solved[..., :-1], solved[..., -1]


def estimate_by_networks(workspace: Workspace, name: str) -> PointEstimate:
    """A head or a closed form: mean over the networks, interval from the spread of the resampled ones."""
    fitted = workspace.fitted
    values = fitted.replica_values[name] if name in FITTED else closed_form(name, fitted)
    found, interval = fitted.summarise(values), fitted.interval(values)
    diagnostics: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if name in FITTED:
        diagnostics = _diagnostics_of_networks(workspace, name)
        warnings = tuple(_doubts(workspace, diagnostics, interval))
    elif name == "mwl":  # weights of rows are those of mql
        diagnostics, warnings = workspace.row_sums.diagnostics(), workspace.row_sums.warnings()
    return PointEstimate(
        name=name,
        value=found.value,
        standard_error=found.deviation,
        interval=interval,
        uplift=uplift_of(fitted, workspace.behavior_values, values),
        effective_sample_size=diagnostics.get("effective_units"),
        warnings=warnings,
        diagnostics=diagnostics,
    )


def _diagnostics_of_networks(workspace: Workspace, head: str) -> dict[str, Any]:
    """Diagnostics of the trained networks as plain numbers."""
    fitted, heads = workspace.fitted, workspace.fitted.estimate_by_head()
    memory, drift = workspace.memory_shift, workspace.drift_shift
    agreeing = [value for name, value in heads.items() if name in ("kloss", "fqe", head)]
    diagnostics = {
        **workspace.held_pass.diagnostics(workspace.problem.reward_scale),
        "effective_bandwidth": fitted.bandwidth,
        "estimates_by_head": heads,
        "head_disagreement": max(agreeing) - min(agreeing),
        "replica_standard_deviation": fitted.summarise(fitted.replica_values[fitted.head]).deviation,
        "training_steps": fitted.record.steps,
        "memory_shift": None if memory is None else memory.value,
        "memory_p_value": None if memory is None else memory.p_value,
        "drift_shift": None if drift is None else drift.value,
        "drift_p_value": None if drift is None else drift.p_value,
    }
    return {name: plain(value) for name, value in diagnostics.items()}


def _doubts(workspace: Workspace, diagnostics: dict[str, Any], interval: Interval) -> Iterator[str]:
    """Yield warnings about the trained networks."""
    fitted, scale, rms = workspace.fitted, workspace.problem.reward_scale, diagnostics["residual_rms"]
    if diagnostics["head_disagreement"] > max(0.5 * interval.width, NOTABLE * scale):
        heads = ", ".join(f"{name} {value:.4g}" for name, value in diagnostics["estimates_by_head"].items())
        yield f"Estimators that should agree do not ({heads}); train longer or collect more data."
    if not fitted.alive.all():
        yield f"{fitted.describe_diverged()}, and were left out; lower learning_rate."
    if rms is None or rms > _LARGE_RESIDUAL * scale:
        yield (
            f"Bellman residuals (rms {math.inf if rms is None else rms:.3g}) are larger than the logged "
            f"returns themselves (rms {scale:.3g}): the values mean nothing; look at coverage first, since "
            "what the log does not show cannot be learnt, then at outliers, then lower learning_rate."
        )
