"""A network as a value function linear in its last layer: features, weights, and putting weights back."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.replicas import StackedMLP
from koffline.solvers.linear import combine_features


def last_layer_features(
    network: StackedMLP, inputs: Float[Tensor, "row *draw input"], readout: Float[Tensor, "row output"] | None
) -> Float[Tensor, "replica row parameter"]:
    """φ with Σ readout · net(inputs) = φᵀθ for the last layer θ, averaged over draws; float64."""
    rows, width = inputs.shape[0], inputs.shape[-1]
    hidden = network.features(inputs.reshape(-1, width)).double()
    return combine_features(hidden, hidden.shape[1] // max(1, rows), readout, constant=True)


def last_layer(network: StackedMLP) -> Float[Tensor, "replica parameter"]:
    """θ (R, (H + 1) · n) in the order of ``last_layer_features``; float64."""
    weight, bias = network.layers(network.flat)[-1]
    return torch.cat([weight, bias], dim=1).double().flatten(1)


def with_last_layer(network: StackedMLP, theta: Float[Tensor, "replica parameter"]) -> StackedMLP:
    """The same networks in float64, the last layer replaced by θ."""
    flat = network.flat.double().clone()
    outputs = network.sizes[-1]
    flat[:, -theta.shape[1] :] = theta  # weight rows, then the bias row: the layout of the flat parameters
    assert theta.shape[1] == (network.sizes[-2] + 1) * outputs
    return network.with_flat(flat)
