"""Feature maps: what a linear value function is linear in.

A feature map is any callable from rows (N, d) to features (N, F), both float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernels import FourierFeatures, Gaussian, random_fourier_features

FeatureMap = Callable[[Tensor], Tensor]


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
