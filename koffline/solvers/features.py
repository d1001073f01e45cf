"""Feature maps: what a linear value function is linear in.

A feature map is any callable from rows (N, d) to features (N, F), both float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernels import FourierFeatures, Gaussian, StationaryKernel, random_fourier_features

FeatureMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RandomFourierFeatures:
    """`count` (even) random Fourier features: values are smooth over distances of about `width`.

    kernel: another stationary kernel in place of the Gaussian of that width. The same seed gives the same
    features for rows of the same dimension.
    """

    width: float
    count: int
    seed: int = 0
    kernel: StationaryKernel | None = None

    def __post_init__(self) -> None:
        Gaussian(self.width)
        if self.count < 2 or self.count % 2:
            raise ConfigError(f"count is {self.count}; give an even number of random features, at least 2")

    def __call__(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Features of squared length one."""
        return _fourier(self, x.shape[-1])(x)


@lru_cache(maxsize=32)
def _fourier(features: RandomFourierFeatures, dimension: int) -> FourierFeatures:
    kernel = features.kernel or Gaussian(features.width)
    count, seed = features.count, features.seed
    return random_fourier_features(kernel, dimension, count, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class TileCoding:
    """`tilings` grids over a box, displaced against each other; each row lies in one tile of every grid.

    low, high: corners of the box, (d,); rows outside count as on its border. tiles: per axis, (d,).
    offsets: displacement of every tiling in tiles, (tilings, d) in [0, 1); by default the tilings are spread
    evenly, axis j by odd multiples 2j + 1 of 1/tilings, which avoids a pattern along the diagonal.
    Displaced grids have one more tile per axis: F = tilings · Π (tiles + 1).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    tiles: tuple[int, ...]
    tilings: int = 1
    offsets: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        axes = len(self.low)
        if not axes or len(self.high) != axes or len(self.tiles) != axes:
            raise ConfigError(
                f"tile coding has low {self.low}, high {self.high}, tiles {self.tiles}; give equal lengths"
            )
        if not all(a < b < math.inf and a > -math.inf for a, b in zip(self.low, self.high, strict=True)):
            raise ConfigError(f"tile coding has low {self.low}, high {self.high}; give finite low < high")
        if min(self.tiles) < 1 or self.tilings < 1:
            raise ConfigError(f"tile coding has tiles {self.tiles}, tilings {self.tilings}; give at least 1")
        shifts = self.shifts
        if len(shifts) != self.tilings or any(
            len(shift) != axes or not all(0.0 <= part < 1.0 for part in shift) for shift in shifts
        ):
            raise ConfigError(
                f"offsets is {self.offsets}; give {self.tilings} tuples of {axes} numbers in [0, 1)"
            )

    @property
    def shifts(self) -> tuple[tuple[float, ...], ...]:
        """Displacement of every tiling in tiles."""
        if self.offsets is not None:
            return self.offsets
        return tuple(
            tuple((number * (2 * axis + 1) / self.tilings) % 1.0 for axis in range(len(self.low)))
            for number in range(self.tilings)
        )

    @property
    def count(self) -> int:
        """F."""
        return self.tilings * math.prod(tiles + 1 for tiles in self.tiles)

    def __call__(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Zeros and `tilings` ones per row."""
        if x.shape[-1] != len(self.low):
            raise DataError(f"tile coding has {len(self.low)} axes, received rows of {x.shape[-1]} columns")
        low, tiles = x.new_tensor(self.low), x.new_tensor(self.tiles)
        place = (x - low) / (x.new_tensor(self.high) - low) * tiles
        place = place.clamp(min=torch.zeros_like(tiles), max=tiles * (1.0 - 1e-12))
        index = (place.unsqueeze(1) + x.new_tensor(self.shifts)).floor().long()  # (N, tilings, d)
        sizes = [count + 1 for count in self.tiles]
        strides = list(itertools.accumulate([*sizes[:0:-1]], lambda a, b: a * b, initial=1))[::-1]
        cell = (index * torch.tensor(strides, device=x.device)).sum(dim=-1)
        cell = cell + torch.arange(self.tilings, device=x.device) * math.prod(sizes)
        return x.new_zeros(len(x), self.count).scatter_(1, cell, 1.0)


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
