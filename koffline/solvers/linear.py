"""The Bellman residual of a value function that is linear in given features, δ = r − Zθ, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.errors import DataError
from koffline.kernels import Kernel
from koffline.replicas import StackedMLP
from koffline.solvers.features import FeatureMap
from koffline.solvers.quadratic import ResidualForms

KernelMap = Callable[[Tensor], Tensor]  # ψ with ψ(x)ᵀψ(y) = k(x, y): (N, k) -> (N, m)
_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 25  # in one array: 256 MB in float64


@dataclass(frozen=True, eq=False)
class LinearResidual:
    """Rows of a table seen through a feature map φ: p parameters, in the order of `combine_features`.

    constant: one more feature that is always one (one for each output of a table with readouts).
    weights (N,): of the rows, None where all are one.
    Raises DataError when the map does not give (N, F) finite numbers.
    """

    table: Table
    features: FeatureMap
    constant: bool = True
    weights: Float[Tensor, " row"] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def outputs(self) -> int | None:
        """Length of a readout, where there are any."""
        return None if self.table.readout is None else self.table.readout.shape[1]

    @cached_property
    def parameters(self) -> int:
        """p."""
        return self.now(slice(0, 1)).shape[1]

    @property
    def free(self) -> Tensor:
        """Which parameters a ridge leaves alone, (p,) bool: those of the constant."""
        constants = (self.outputs or 1) if self.constant else 0
        return free_parameters(self.parameters, constants).to(self.table.inputs.device)

    @cached_property
    def kernel_inputs(self) -> Tensor:
        """What the kernel compares, (N, k) float64."""
        return kernel_inputs(self.table).double()

    def now(self, rows: slice) -> Float[Tensor, "row parameter"]:
        """φ with V(x) = φᵀθ for a block of rows; float64."""
        readout = self.table.readout
        return self._features(self.table.inputs[rows], None if readout is None else readout[rows])

    def augmented(self, rows: slice) -> Float[Tensor, "row column"]:
        """[Z, r] for a block of rows, (B, p + 1), with Z = φ(x) − discount · E φ(x'); float64."""
        table = self.table
        readout = None if table.next_readout is None else table.next_readout[rows]
        later = self._features(table.next_inputs[rows], readout)
        difference = self.now(rows) - table.discounts[rows].double()[:, None] * later
        return torch.cat((difference, table.rewards[rows].double()[:, None]), dim=1)

    def blocks(self) -> Iterator[slice]:
        """Slices that cover the rows, narrow enough for a block of features and its drawn next rows."""
        width = self.parameters * self.table.draws
        size = max(1, min(_MOST_ROWS, _MOST_NUMBERS // (4 * width)))
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def stored(self) -> Tensor | None:
        """[Z, r] of all rows (N, p + 1) where that fits into 256 MB; None: compute it block by block."""
        if len(self) * (self.parameters + 1) > _MOST_NUMBERS:
            return None
        return torch.cat([self.augmented(rows) for rows in self.blocks()])

    @property
    def weight_sums(self) -> tuple[float, float]:
        """Σ w and Σ w²."""
        if self.weights is None:
            return float(len(self)), float(len(self))
        return float(self.weights.sum()), float(self.weights.square().sum())

    def weighted(self, columns: Tensor, rows: slice) -> Tensor:
        """Columns of a block of rows (B, …) times the rows' weights."""
        return columns if self.weights is None else columns * self.weights[rows, None]

    def zeros(self, rows: int | None = None) -> Tensor:
        """A sum (rows or p + 1, p + 1) over no rows."""
        size = self.parameters + 1
        return self.kernel_inputs.new_zeros(size if rows is None else rows, size)

    def temporal(self) -> Float[Tensor, "parameter column"]:
        """φᵀW[Z, r], (p, p + 1)."""
        total = self.zeros(self.parameters)
        for rows in self.blocks():
            total += self.weighted(self.now(rows), rows).mT @ self.augmented(rows)
        return total

    def project(self, kernel: KernelMap) -> Float[Tensor, "instrument column"]:
        """ψᵀW[Z, r] (m, p + 1): what disjoint sets of rows give adds up."""
        parts = (
            kernel(self.kernel_inputs[rows]).mT @ self.weighted(self.augmented(rows), rows)
            for rows in self.blocks()
        )
        return reduce(torch.add, parts)

    def own(self, diagonal: KernelMap | None = None) -> tuple[Tensor, Tensor]:
        """Σ w_i² k_ii a_i a_iᵀ and Σ w_i k_ii a_i a_iᵀ, (p + 1, p + 1) each; None: k(x, x) = 1."""
        own, square = self.zeros(), self.zeros()
        for rows in self.blocks():
            columns = self.augmented(rows)
            scale = 1.0 if diagonal is None else diagonal(self.kernel_inputs[rows]).unsqueeze(1)
            weight = 1.0 if self.weights is None else self.weights[rows, None]
            square += columns.mT @ (columns * (weight * scale))
            if self.weights is not None:
                own += columns.mT @ (columns * (weight * weight * scale))
        return (square if self.weights is None else own), square

    def _features(self, inputs: Tensor, readout: Tensor | None) -> Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1]).double()
        features = self.features(flat)
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        if isinstance(shape, str) or len(shape) != 2 or shape[0] != len(flat) or shape[1] == 0:
            raise DataError(f"the feature map gave {shape} for {len(flat)} rows; give a tensor (N, F), F > 0")
        if not bool(torch.isfinite(features).all()):
            raise DataError("the feature map gave NaN or infinite numbers; check its scale")
        return combine_features(features.double(), len(flat) // max(1, len(inputs)), readout, self.constant)


@torch.no_grad()
def accumulate_forms(
    residual: LinearResidual, kernel: Kernel | KernelMap, block_size: int = 1024
) -> ResidualForms:
    """The forms of all rows: with a kernel in O(n² p) time, with a map ψ of m columns in O(n m p).

    Memory is bounded by blocks of `block_size` rows and what `LinearResidual.stored` allows.
    """
    if isinstance(kernel, Kernel):
        total, diagonal = _exact_total(residual, kernel, block_size), kernel.diagonal
    else:
        projected = residual.project(kernel)
        total, diagonal = projected.mT @ projected, lambda x: kernel(x).square().sum(dim=-1)
    own, square = residual.own(diagonal)
    count, (_, squares) = float(len(residual)), residual.weight_sums  # the mean weight is one
    return ResidualForms(total, own, square, count, squares)


def _exact_total(residual: LinearResidual, kernel: Kernel, block_size: int) -> Tensor:
    """AᵀWKWA, blocks of K above the diagonal only."""
    stored = residual.stored()

    def block(start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + block_size)
        columns = residual.augmented(rows) if stored is None else stored[rows]
        return residual.kernel_inputs[rows], residual.weighted(columns, rows)

    half = residual.zeros()
    for start in range(0, len(residual), block_size):
        x, columns = block(start)
        product = 0.5 * (kernel.gram(x) @ columns)  # (b, b) @ (b, p + 1)
        for other in range(start + block_size, len(residual), block_size):
            y, later = block(other)
            product.addmm_(kernel.gram(x, y), later)
        half += columns.mT @ product
    return half + half.mT


def normalised_weights(weights: Tensor | None, rows: int) -> Tensor | None:
    """Weights in float64, their mean one; None where all are equal. Raises DataError."""
    if weights is None:
        return None
    if weights.shape != (rows,) or not bool((torch.isfinite(weights) & (weights >= 0.0)).all()):
        raise DataError(
            f"row_weights has shape {tuple(weights.shape)}; give {rows} finite numbers that are not negative"
        )
    if not bool(weights.any()):
        raise DataError("row_weights are all zero; give at least one row a positive weight")
    relative = weights.double() / weights.max()
    return None if bool((relative == 1.0).all()) else relative / relative.mean()


def kernel_inputs(table: Table) -> Float[Tensor, "row column"]:
    """What the kernel compares."""
    return table.inputs if table.kernel_inputs is None else table.kernel_inputs


def as_double(array: Any, device: torch.device | str = "cpu") -> Tensor:
    """A float64 tensor of an array or tensor; arrays are copied (those of a log are read-only)."""
    if isinstance(array, Tensor):
        return array.to(device, torch.float64)
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(device)


def free_parameters(parameters: int, constants: int) -> Tensor:
    """(p,) bool: true for the last `constants`."""
    return torch.arange(parameters) >= parameters - constants


def combine_features(
    features: Float[Tensor, "*replica drawn feature"],
    draws: int,
    readout: Float[Tensor, "row output"] | None,
    constant: bool,
) -> Float[Tensor, "*replica row parameter"]:
    """φ (…, N, p) with Σ readout · outputs = φᵀθ, from features (…, N · draws, F) averaged over draws.

    θ is the last layer row by row: a weight of every output for the first feature, for the second, …, and
    with `constant` the outputs' constants last; p = (F + 1) · outputs.
    """
    mean = features if draws == 1 else features.unflatten(-2, (-1, draws)).mean(dim=-2)
    if constant:
        mean = torch.cat([mean, torch.ones_like(mean[..., :1])], dim=-1)
    if readout is None:
        return mean
    return (mean.unsqueeze(-1) * readout.to(mean).unsqueeze(-2)).flatten(-2)


def last_layer_features(
    network: StackedMLP, inputs: Float[Tensor, "row *draw input"], readout: Float[Tensor, "row output"] | None
) -> Float[Tensor, "replica row parameter"]:
    """φ with Σ readout · net(inputs) = φᵀθ for a network's last layer θ, averaged over draws; float64."""
    hidden = network.features(inputs.reshape(-1, inputs.shape[-1])).double()
    return combine_features(hidden, hidden.shape[1] // max(1, len(inputs)), readout, constant=True)


def last_layer(network: StackedMLP) -> Float[Tensor, "replica parameter"]:
    """θ (R, (H + 1) · n) in the order of `last_layer_features`; float64."""
    weight, bias = network.layers(network.flat)[-1]
    return torch.cat([weight, bias], dim=1).double().flatten(1)


def with_last_layer(network: StackedMLP, theta: Float[Tensor, "replica parameter"]) -> StackedMLP:
    """The same networks in float64, the last layer replaced by θ."""
    flat = network.flat.double().clone()
    flat[:, -theta.shape[1] :] = theta  # weight rows, then the bias row: the layout of the flat parameters
    return network.with_flat(flat)
