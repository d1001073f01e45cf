"""Linear value functions: feature maps, the rows of a log seen through one, and parameters with a ridge.

A feature map is any callable from rows (N, d) to features (N, F), both float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from koffline.batches import Table
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import discount
from koffline.kernels import FourierFeatures, Gaussian, Kernel, random_fourier_features
from koffline.replicas import StackedMLP

FeatureMap = Callable[[Tensor], Tensor]
BLOCK = 4096
_KERNEL_BLOCK = 1024


@dataclass(frozen=True)
class RandomFourierFeatures:
    """`count` (even) random Fourier features: values are smooth over distances of about `width`.

    The same seed gives the same features for rows of the same dimension.
    """

    width: float
    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        Gaussian(self.width)
        if self.count < 2 or self.count % 2:
            raise ConfigError(f"count is {self.count}; give an even number of random features, at least 2")

    def __call__(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Features of squared length one."""
        return _fourier(self, x.shape[-1])(x)


@lru_cache(maxsize=32)
def _fourier(features: RandomFourierFeatures, dimension: int) -> FourierFeatures:
    generator = torch.Generator().manual_seed(features.seed)
    return random_fourier_features(Gaussian(features.width), dimension, features.count, generator)


@dataclass(frozen=True)
class UnitBox:
    """Rows in units of a box: the corner `low` (d,) becomes 0 and `high` (d,) becomes 1."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.low, self.high, strict=False))
        if len(self.low) != len(self.high) or not all(-math.inf < a < b < math.inf for a, b in pairs):
            raise ConfigError(
                f"box has low {self.low}, high {self.high}; give equal lengths and finite low < high"
            )

    def __call__(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """Scaled rows; those outside the box stay outside."""
        if x.shape[-1] != len(self.low):
            raise DataError(f"the box has {len(self.low)} axes, received rows of {x.shape[-1]} columns")
        low = x.new_tensor(self.low)
        return (x - low) / (x.new_tensor(self.high) - low)

    @classmethod
    def around(cls, log: Transitions) -> UnitBox:
        """From the smallest to the largest observation; a constant column keeps the unit 1."""
        both = torch.cat([as_double(part).flatten(1) for part in (log.observations, log.next_observations)])
        low, high = both.aminmax(dim=0)
        high = torch.where(high > low, high, low + 1.0)
        return cls(tuple(low.tolist()), tuple(high.tolist()))


@dataclass(frozen=True, eq=False)
class StateRows:
    """N rows of a log: states in units of a box, weights of mean one."""

    states: Float[Tensor, "row column"]
    following: Float[Tensor, "row column"]
    rewards: Float[Tensor, " row"]
    discounts: Float[Tensor, " row"]
    weights: Float[Tensor, " row"]

    @classmethod
    def of(cls, log: Transitions, gamma: float, box: UnitBox) -> StateRows:
        """All rows of a log."""
        weights = torch.ones(len(log), dtype=torch.float64)
        if log.weights is not None:
            weights = as_double(log.weights)
            weights = weights / weights.max()  # so that no sum overflows
            weights = weights / weights.mean()
        states, following = (
            box(as_double(part).flatten(1)) for part in (log.observations, log.next_observations)
        )
        discounts = discount(gamma, as_double(log.terminated))
        return cls(states, following, as_double(log.rewards), discounts, weights)

    def __len__(self) -> int:
        return len(self.rewards)

    def select(self, rows: Int[Tensor, " chosen"]) -> StateRows:
        """Some of them, weights as they are."""
        return StateRows(*(column[rows] for column in vars(self).values()))

    def blocks(self, features: FeatureMap) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Row numbers, φ (B, p) and [Z, r] (B, p + 1) with Z = φ(s) − discount · φ(s')."""
        for start in range(0, len(self), BLOCK):
            rows = slice(start, start + BLOCK)
            now = with_constant(features, self.states[rows])
            difference = now - self.discounts[rows, None] * with_constant(features, self.following[rows])
            yield rows, now, torch.cat((difference, self.rewards[rows, None]), dim=1)

    def project(
        self, features: FeatureMap, instruments: FourierFeatures
    ) -> Float[Tensor, "instrument column"]:
        """ψᵀW[Z, r] (m, p + 1)."""
        parts = (
            instruments(self.states[rows]).mT @ (columns * self.weights[rows, None])
            for rows, _, columns in self.blocks(features)
        )
        return reduce(torch.add, parts)

    def kernel_form(
        self, features: FeatureMap, kernel: Kernel | FourierFeatures
    ) -> Float[Tensor, "column column"]:
        """[Z, r]ᵀWKW[Z, r] (p + 1, p + 1): O(n² p), or O(n m p) where the kernel has m features."""
        if not isinstance(kernel, Kernel):
            projected = self.project(features, kernel)
            return projected.mT @ projected
        weighted = torch.cat(
            [columns * self.weights[rows, None] for rows, _, columns in self.blocks(features)]
        )
        half = weighted.new_zeros(weighted.shape[1], weighted.shape[1])
        blocks = list(zip(self.states.split(_KERNEL_BLOCK), weighted.split(_KERNEL_BLOCK), strict=True))
        for number, (x, columns) in enumerate(blocks):  # the upper triangle of K
            product = 0.5 * (kernel.gram(x) @ columns)  # (b, b) @ (b, p + 1)
            for y, later in blocks[number + 1 :]:
                product.addmm_(kernel.gram(x, y), later)
            half += columns.mT @ product
        return half + half.mT


def with_constant(
    features: FeatureMap, states: Float[Tensor, "row column"]
) -> Float[Tensor, "row parameter"]:
    """φ (N, F + 1), the constant last; DataError where the map does not give (N, F) finite numbers."""
    found = features(states)
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(states) or found.shape[1] == 0:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(f"the feature map gave {shape} for {len(states)} rows; give a tensor (N, F), F > 0")
    if not bool(torch.isfinite(found).all()):
        raise DataError("the feature map gave NaN or infinite numbers; check its scale")
    return torch.cat((found.double(), torch.ones(len(found), 1, dtype=torch.float64)), dim=1)


def as_double(array: Any) -> Tensor:
    """In float64; arrays are copied (those of a log are read-only)."""
    return (
        array.double() if isinstance(array, Tensor) else torch.from_numpy(np.array(array, dtype=np.float64))
    )


def kernel_inputs(table: Table) -> Float[Tensor, "row column"]:
    """What the kernel compares."""
    return table.inputs if table.kernel_inputs is None else table.kernel_inputs


def free_parameters(parameters: int, constants: int) -> Bool[Tensor, " parameter"]:
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
        mean = torch.cat([mean, mean.new_ones(*mean.shape[:-1], 1)], dim=-1)
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


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """A minimiser. degrees_of_freedom: Σ e/(e + λ) over eigenvalues e of the curvature, free ones count one.

    condition: largest over smallest curvature of what was minimised, infinite where the data leave a
    direction open. weights are NaN where there is no minimum.
    """

    weights: Float[Tensor, " parameter"]
    degrees_of_freedom: float
    condition: float


class RidgePath:
    """Minimisers of θᵀCθ − 2 sᵀθ + λ‖θ‖² over the parameters that are not free, for any relative λ.

    λ = ridge · (mean curvature). One eigendecomposition of C serves all ridges; free parameters are
    eliminated first. With ridge 0, directions that the data leave open stay at zero.
    """

    def __init__(
        self,
        curvature: Float[Tensor, "parameter parameter"],
        slope: Float[Tensor, " parameter"],
        free: Bool[Tensor, " parameter"],
    ) -> None:
        bound, self._free = ~free, free
        self._finite = bool(torch.isfinite(curvature).all()) and bool(torch.isfinite(slope).all())
        if not self._finite:
            curvature = torch.zeros_like(curvature)  # a decomposition that fails must not stop other fits
        self._cross, self._free_slope = curvature[free][:, bound], slope[free]
        self._inverse = torch.linalg.pinv(curvature[free][:, free], hermitian=True)
        outer = curvature[bound][:, bound] - self._cross.mT @ self._inverse @ self._cross
        self._values, self._vectors = torch.linalg.eigh(0.5 * (outer + outer.mT))
        diagonal = curvature.diagonal()
        size = torch.maximum(self._values.abs().amax(), diagonal[bound].abs().amax())
        self._tiny = float(torch.finfo(curvature.dtype).eps * curvature.shape[-1] * size)
        pull = slope[bound] - self._cross.mT @ self._inverse @ self._free_slope
        self._pull, self._scale = self._vectors.mT @ pull, mean_curvature(diagonal, free)

    def solve(self, ridge: float) -> RidgeSolution:
        """The minimiser for one ridge."""
        check_ridge(ridge)
        values = torch.where(self._values.abs() <= self._tiny, 0.0, self._values)
        total = values + ridge * self._scale
        is_open = total <= self._tiny
        safe = torch.where(is_open, 1.0, total)
        outer = self._vectors @ torch.where(is_open, 0.0, self._pull / safe)
        weights = outer.new_full((len(self._free),), math.nan)
        if self._finite and not bool((total < -self._tiny).any()):
            weights[~self._free] = outer
            weights[self._free] = self._inverse @ (self._free_slope - self._cross @ outer)
        freedom = float(torch.where(is_open, 0.0, values / safe).sum()) + int(self._free.sum())
        least = float(total.amin())
        condition = math.inf if least <= self._tiny else float(total.amax()) / least
        return RidgeSolution(weights, freedom, condition)


def mean_curvature(diagonal: Float[Tensor, " parameter"], free: Bool[Tensor, " parameter"]) -> Tensor:
    """Mean absolute entry over the parameters that are not free: the unit of a relative ridge."""
    return diagonal[~free].abs().mean()


def check_ridge(ridge: float) -> None:
    """Raise ConfigError for a negative or infinite ridge."""
    if not (math.isfinite(ridge) and ridge >= 0.0):
        raise ConfigError(f"ridge is {ridge}; give a number that is not negative")
