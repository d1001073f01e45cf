"""Values that are linear in features: feature maps, and the last layers of networks.

A feature map is any callable from rows (N, d) to features (N, F), both float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError
from koffline.kernels import FourierFeatures, Gaussian, random_fourier_features
from koffline.replicas import StackedMLP

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
