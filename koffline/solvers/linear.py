"""The Bellman residual of a value function that is linear in given features: δ = r − Zθ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.errors import DataError
from koffline.solvers.features import FeatureMap

_MOST_ROWS = 4096
_MOST_NUMBERS = 1 << 25  # in one array: 256 MB in float64


@dataclass(frozen=True, eq=False)
class LinearResidual:
    """Rows of a table seen through a feature map φ: p parameters, in the order of `combine_features`.

    constant: one more feature that is always one (one for each output of a table with readouts).
    Raises DataError when the map does not give (N, F) finite numbers.
    """

    table: Table
    features: FeatureMap
    constant: bool = True

    def __post_init__(self) -> None:
        self.now(slice(0, 1))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def outputs(self) -> int:
        """Length of a readout; 1 without."""
        return 1 if self.table.readout is None else self.table.readout.shape[1]

    @property
    def parameters(self) -> int:
        """p."""
        return self.now(slice(0, 1)).shape[1]

    @property
    def free(self) -> Tensor:
        """Which parameters a ridge leaves alone, (p,) bool: those of the constant."""
        free = free_parameters(self.parameters, self.outputs if self.constant else 0)
        return free.to(self.table.inputs.device)

    @property
    def kernel_inputs(self) -> Tensor:
        """What the kernel compares, (N, k)."""
        return self.table.inputs if self.table.kernel_inputs is None else self.table.kernel_inputs

    def now(self, rows: slice) -> Float[Tensor, "row parameter"]:
        """φ with V(x) = φᵀθ for a block of rows; float64."""
        return self._features(self.table.inputs[rows], _part(self.table.readout, rows))

    def later(self, rows: slice) -> Float[Tensor, "row parameter"]:
        """The same of the next rows, averaged over draws."""
        return self._features(self.table.next_inputs[rows], _part(self.table.next_readout, rows))

    def augmented(self, rows: slice) -> Float[Tensor, "row column"]:
        """[Z, r] for a block of rows, (B, p + 1), with Z = φ(x) − discount · E φ(x'); float64."""
        difference = self.now(rows) - self.table.discounts[rows].double()[:, None] * self.later(rows)
        return torch.cat((difference, self.table.rewards[rows].double()[:, None]), dim=1)

    def blocks(self, most_rows: int = _MOST_ROWS) -> Iterator[slice]:
        """Slices that cover the rows, narrow enough for a block of features and its drawn next rows."""
        width = self.parameters * self.table.draws
        size = max(1, min(most_rows, _MOST_NUMBERS // (4 * width)))
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def stored(self) -> Tensor | None:
        """[Z, r] of all rows (N, p + 1) where that fits into 256 MB; None: compute it block by block."""
        if len(self) * (self.parameters + 1) > _MOST_NUMBERS:
            return None
        return torch.cat([self.augmented(rows) for rows in self.blocks()])

    def _features(self, inputs: Tensor, readout: Tensor | None) -> Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1]).double()
        features = self.features(flat)
        shape = tuple(features.shape) if isinstance(features, Tensor) else None
        if shape is None or len(shape) != 2 or shape[0] != len(flat) or shape[1] == 0:
            given = type(features).__name__ if shape is None else shape
            raise DataError(f"the feature map gave {given} for {len(flat)} rows; give a tensor (N, F), F > 0")
        if not bool(torch.isfinite(features).all()):
            raise DataError("the feature map gave NaN or infinite numbers; check its scale")
        draws = len(flat) // max(1, len(inputs))
        return combine_features(features.double(), draws, readout, self.constant)


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


def as_double(array: Any, device: torch.device | str = "cpu") -> Tensor:
    """A float64 tensor of an array or tensor; arrays are copied (those of a log are read-only)."""
    if isinstance(array, Tensor):
        return array.to(device, torch.float64)
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(device)


def free_parameters(parameters: int, constants: int) -> Tensor:
    """(p,) bool: true for the last `constants`."""
    return torch.arange(parameters) >= parameters - constants


def _part(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]
