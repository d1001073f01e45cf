"""The kernel loss minimised exactly over the last layer, on all rows at once.

A network is linear in its last layer θ, so its residual is r − Zθ with Z = φ(x) − discount · E φ(x'), and the
full-batch V-statistic with an explicit feature map ψ of the kernel, ‖ψᵀ(r − Zθ)‖²/n², is a least-squares
problem in θ. Only the sums ψᵀZ and ψᵀr over rows are needed: one pass in blocks, memory independent of n.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.ope.learning import row_blocks
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP
from koffline.solvers.linear import kernel_inputs, last_layer, last_layer_features, with_last_layer


@dataclass(frozen=True, eq=False)
class LinearSystems(Sums):
    """What one pass over the rows leaves of a stack of R networks with p last-layer parameters.

    ``kernel_matrix (R, m, p)`` is ψᵀWZ and ``kernel_vector (R, m)`` ψᵀWr for m instruments ψ and row weights
    W; ``temporal_matrix (R, p, p)`` is φᵀWZ and ``temporal_vector (R, p)`` φᵀWr. Sums over rows, so those of
    two parts of a log add up; `mean` divides by a number of rows, which no solution depends on.
    """

    kernel_matrix: Float[Tensor, "replica instrument parameter"]
    kernel_vector: Float[Tensor, "replica instrument"]
    temporal_matrix: Float[Tensor, "replica parameter parameter"]
    temporal_vector: Float[Tensor, "replica parameter"]

    def mean(self, rows: int) -> LinearSystems:
        """Divided by a number of rows."""
        return LinearSystems(*(getattr(self, field.name) / rows for field in dataclasses.fields(self)))


def accumulate_systems(
    network: StackedMLP,
    table: Table,
    instruments: Callable[[Tensor], Tensor],
    row_weights: Float[Tensor, "replica row"],
) -> LinearSystems:
    """Sums over blocks of rows. ``instruments`` maps kernel inputs (B, k) to ψ (B, m).

    All in float64: in single precision what a layer gives for a row depends on the rows beside it.
    """
    network, compared = network.with_flat(network.flat.double()), kernel_inputs(table)

    def features(inputs: Tensor, readout: Tensor | None, rows: slice) -> Tensor:
        return last_layer_features(network, inputs[rows].double(), None if readout is None else readout[rows])

    sums: list[Tensor] | None = None
    for rows in row_blocks(network, len(table), table.draws):
        psi = instruments(compared[rows].double())  # (B, m)
        now = features(table.inputs, table.readout, rows)
        later = features(table.next_inputs, table.next_readout, rows)
        discounts, rewards = table.discounts[rows].double(), table.rewards[rows].double()
        difference = now - discounts[:, None] * later  # Z, (R, B, p)
        weights = row_weights[:, rows].double()
        weighted = difference * weights.unsqueeze(-1)  # (R, B, p)
        weighted_rewards = weights * rewards  # (R, B)
        parts = [
            _shared_product(psi, weighted),
            weighted_rewards @ psi,
            now.mT @ weighted,
            (weighted_rewards.unsqueeze(1) @ now).squeeze(1),
        ]
        sums = parts if sums is None else [total.add_(part) for total, part in zip(sums, parts, strict=True)]
    assert sums is not None  # a table has rows
    return LinearSystems(*sums)


def minimise_kernel_loss(network: StackedMLP, systems: LinearSystems, ridge: float) -> StackedMLP:
    """The networks with the last layer that minimises the full-batch kernel loss, ridged toward the old.

    ``ridge`` is relative to the mean curvature. A ridge toward zero would pull the values themselves to zero.
    With the linear kernel (ψ = φ) this is the LSTD solution.
    (Feng et al. 2019, cor:same_as_td)
    """
    theta, matrix = last_layer(network), systems.kernel_matrix
    gap = systems.kernel_vector - (matrix @ theta.unsqueeze(-1)).squeeze(-1)  # ψᵀδ/n at the old layer, (R, m)
    pull = (matrix.mT @ gap.unsqueeze(-1)).squeeze(-1)
    return with_last_layer(network, theta + _ridge_solve(matrix.mT @ matrix, pull, ridge))


def solve_temporal_difference(network: StackedMLP, systems: LinearSystems, ridge: float) -> StackedMLP:
    """The networks with the last layer that is the LSTD-Q solution on the same features, ridged likewise."""
    theta, matrix = last_layer(network), systems.temporal_matrix
    gap = systems.temporal_vector - (matrix @ theta.unsqueeze(-1)).squeeze(-1)
    return with_last_layer(network, theta + _ridge_solve(matrix, gap, ridge))


def _shared_product(psi: Tensor, weighted: Tensor) -> Tensor:
    """ψᵀ Z_r for every replica as one product: (m, B) @ (B, R · p) = (m, R · p), returned as (R, m, p)."""
    replicas, rows, parameters = weighted.shape
    together = psi.mT @ weighted.transpose(0, 1).reshape(rows, replicas * parameters)
    return together.unflatten(1, (replicas, parameters)).transpose(0, 1)


def _ridge_solve(matrix: Tensor, vector: Tensor, ridge: float) -> Tensor:
    """(matrix + ridge · mean |diagonal| · I)⁻¹ vector per replica; dead features make the matrix singular.

    NaN where a replica has diverged (its matrix is no matrix): the others are solved all the same.
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(dim=-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    solution, info = torch.linalg.solve_ex(matrix + (ridge * scale)[:, None, None] * eye, vector)
    return torch.where(info[:, None] == 0, solution, math.nan)
