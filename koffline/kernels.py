"""Positive-definite kernels: Gram matrices, diagonals, random Fourier features and the
median bandwidth.

Rows may carry leading axes: ``gram`` maps (…, N, d) and (…, M, d) to (…, N, M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from koffline.errors import ConfigError, DataError

Rows = Float[Tensor, "*batch n d"]
OtherRows = Float[Tensor, "*batch m d"]
Gram = Float[Tensor, "*batch n m"]
_SMALLEST_BANDWIDTH = 1e-6
_LOG2_E = 1.0 / math.log(2.0)


@runtime_checkable
class Kernel(Protocol):
    """A symmetric positive-definite function of two rows."""

    def gram(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Gram matrix (…, N, M) of all pairs; `y` defaults to `x`."""
        ...

    def diagonal(self, x: Tensor) -> Tensor:
        """Diagonal k(x_i, x_i), (…, N)."""
        ...


@dataclass(frozen=True)
class _Scaled:
    bandwidth: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0.0):
            raise ConfigError(f"bandwidth is {self.bandwidth}; give a positive number")

    def diagonal(self, x: Rows) -> Float[Tensor, "*batch n"]:
        """Diagonal of ones."""
        return torch.ones_like(x[..., 0])

    def exponent_columns(
        self, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Columns (…, N, d + 2) and (…, M, d + 2) whose product is −log2(e) ‖x − y‖² /
        bandwidth².

        Rows are centred first, because the product subtracts large squares if data are
        far from zero.
        """
        if y is None:
            y = x
        centre = x.mean(dim=-2, keepdim=True)
        scale = math.sqrt(_LOG2_E) / self.bandwidth
        rows = (x - centre) * scale
        other_rows = (y - centre) * scale
        squares = -rows.square().sum(dim=-1, keepdim=True)
        other_squares = -other_rows.square().sum(dim=-1, keepdim=True)
        left = torch.cat((squares, torch.ones_like(squares), 2.0 * rows), dim=-1)
        right = torch.cat(
            (torch.ones_like(other_squares), other_squares, other_rows), dim=-1
        )
        return left, right

    def _exponent(self, x: Tensor, y: Tensor | None) -> Tensor:
        left, right = self.exponent_columns(x, y)
        # rounding may leave +1e-7 at equal rows
        exponent = (left @ right.mT).clamp_(max=0.0)
        if y is None or y is x:
            exponent.diagonal(dim1=-2, dim2=-1).zero_()
        return exponent


@dataclass(frozen=True)
class Gaussian(_Scaled):
    """k(x, y) = exp(−‖x − y‖² / bandwidth²).

    (Feng et al. 2019, sec:exp_eval)
    """

    def gram(self, x: Rows, y: OtherRows | None = None) -> Gram:
        """Gram matrix of all pairs: one product of augmented columns, then exp2, much
        faster than exp.
        """
        return self._exponent(x, y).exp2_()

    def draw_frequencies(
        self, dimension: int, count: int, generator: Generator
    ) -> Tensor:
        """Draw frequencies (d, count) from N(0, 2 / bandwidth²) by ``generator``, for
        rows of d = ``dimension`` columns.
        """
        normal = torch.randn(dimension, count, generator=generator, dtype=torch.float64)
        return normal * (math.sqrt(2.0) / self.bandwidth)


@dataclass(frozen=True)
class Laplacian(_Scaled):
    """k(x, y) = exp(−‖x − y‖₁ / bandwidth), with the sum of absolute differences."""

    def gram(self, x: Rows, y: OtherRows | None = None) -> Gram:
        """Gram matrix of all pairs."""
        if y is None:
            y = x
        return torch.cdist(x, y, p=1.0).mul(-1.0 / self.bandwidth).exp_()

    def draw_frequencies(
        self, dimension: int, count: int, generator: Generator
    ) -> Tensor:
        """Draw frequencies (d, count), Cauchy with scale 1 / bandwidth, by
        ``generator``, for rows of d = ``dimension`` columns.
        """
        uniform = torch.rand(dimension, count, generator=generator, dtype=torch.float64)
        return (math.pi * (uniform - 0.5)).tan() / self.bandwidth


@dataclass(frozen=True)
class InverseMultiquadric(_Scaled):
    """k(x, y) = (1 + ‖x − y‖² / bandwidth²)^(−1/2); its tails are heavier than the
    Gaussian's.
    """

    def gram(self, x: Rows, y: OtherRows | None = None) -> Gram:
        """Gram matrix of all pairs."""
        return torch.rsqrt(1.0 - self._exponent(x, y) / _LOG2_E)


@dataclass(frozen=True)
class Linear:
    """k(x, y) = xᵀy: minimising the kernel loss gives the TD solution.

    (Feng et al. 2019, cor:same_as_td)
    """

    def gram(self, x: Rows, y: OtherRows | None = None) -> Gram:
        """Gram matrix of all pairs."""
        if y is None:
            y = x
        return x @ y.mT

    def diagonal(self, x: Rows) -> Float[Tensor, "*batch n"]:
        """Diagonal of squared lengths."""
        return x.square().sum(dim=-1)


@dataclass(frozen=True, eq=False)
class FourierFeatures:
    """An explicit feature map whose inner products approximate a Gaussian kernel:
    ψ(x)ᵀψ(y) ≈ k(x, y).

    Pairs of cosine and sine, so that ψ(x)ᵀψ(x) = 1 exactly. The error decreases as
    count^(−1/2).
    """

    frequencies: Tensor  # (d, count / 2)

    def __call__(self, x: Rows) -> Float[Tensor, "*batch n m"]:
        """Features ψ(x)."""
        phases = x @ self.frequencies.to(x)
        return torch.cat((phases.cos(), phases.sin()), dim=-1) / math.sqrt(
            self.frequencies.shape[1]
        )


def random_fourier_features(
    kernel: Gaussian | Laplacian, dimension: int, count: int, generator: Generator
) -> FourierFeatures:
    """Feature map of `kernel` with `count` columns for rows of `dimension` columns,
    drawn in float64 by `generator`.

    Raises ConfigError unless `count` is even and positive.
    """
    if count < 2 or count % 2:
        raise ConfigError(
            f"count is {count}; give an even number of random features, at least 2"
        )
    return FourierFeatures(kernel.draw_frequencies(dimension, count // 2, generator))


def median_bandwidth(
    x: Float[Tensor, "n d"], max_rows: int = 3000, generator: Generator | None = None
) -> float:
    """Median of the off-diagonal Euclidean distances between the rows of `x` (N, d), at
    least 1e-6.

    With more than `max_rows` rows a subset is used: drawn by `generator`, or evenly
    spaced without one. Raises DataError for fewer than two rows.
    (Feng et al. 2019, sec:exp_detail)
    """
    rows = torch.as_tensor(x).detach()
    if rows.ndim != 2 or len(rows) < 2:
        raise DataError(
            f"median_bandwidth received shape {tuple(rows.shape)}; give at least two"
            " rows (N, d)"
        )
    count = len(rows)
    if count > max_rows:
        evenly = torch.arange(max_rows) * count // max_rows
        if generator is None:
            kept = evenly
        else:
            kept = torch.randperm(count, generator=generator)[:max_rows]
        rows = rows[kept.to(rows.device)]
    distances = torch.pdist(rows.to("cpu", torch.float64)).numpy()
    # Not torch's median, which copies them with their indices: three times the memory.
    return max(float(np.median(distances, overwrite_input=True)), _SMALLEST_BANDWIDTH)


# By their names in configurations. A kernel of your own goes here, too: KERNELS["mine"]
# = Mine(), a `Kernel` with values up to 1 whose rows arrive divided by the bandwidth.
KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(1.0),
    "laplacian": Laplacian(1.0),
    "inverse_multiquadric": InverseMultiquadric(1.0),
    "linear": Linear(),
}
