"""Directional derivatives of stacked networks: what an objective with second derivatives needs.

``forward_with_tangent(network, x, direction)`` gives the outputs o, their derivative ȯ along a direction in
the parameters, and the map from gradients in both to the gradient in the parameters, in which the gradient of
ȯ is a product of the Hessian with the direction.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koffline.replicas import StackedMLP, StackedNetwork
from koffline.stacked_module import StackedModule
from koffline.stacked_products import affine, outer_sum

TangentPullback = Callable[[Tensor, Tensor | None], Tensor]


def forward_with_tangent(
    network: StackedNetwork, x: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, TangentPullback]:
    """Outputs o (R, N, n), ȯ (R, N, n) along `direction` (R, P), and (∂o, ∂ȯ or None) ↦ gradient (R, P)."""
    if isinstance(network, StackedMLP):
        return _MLPTangent(network, x, direction).result()
    if isinstance(network, StackedModule):
        return _module_tangent(network, x, direction)
    raise NotImplementedError(f"{type(network).__name__} has no directional derivative")


class _MLPTangent:
    """The forward pass of a multilayer perceptron in dual numbers, kept for its pullback."""

    def __init__(self, network: StackedMLP, x: Tensor, direction: Tensor) -> None:
        self._network = network
        self._layers, self._directions = network.layers(network.flat), network.layers(direction)
        rows = x.expand(network.replicas, *x.shape[-2:])
        self._inputs: list[Tensor] = [rows]  # of each layer
        self._tangents: list[Tensor | None] = [None]  # of the inputs of each layer
        self._slopes: list[Tensor] = []  # σ'(z) of each hidden layer
        self._bends: list[Tensor | None] = []  # σ''(z)·ż
        for index in range(len(self._layers) - 1):
            linear, tangent = self._linear(index)
            hidden, slope, bend = _activate(network.activation, linear)
            self._inputs.append(hidden)
            self._slopes.append(slope)
            self._bends.append(None if bend is None else bend * tangent)
            self._tangents.append(tangent.mul_(slope))

    def result(self) -> tuple[Tensor, Tensor, TangentPullback]:
        outputs, tangents = self._linear(len(self._layers) - 1)
        scale, offset = self._network.scale, self._network.offset
        return outputs * scale + offset, tangents * scale, self._pull

    def _linear(self, index: int) -> tuple[Tensor, Tensor]:
        """z = h W + b and ż = h Ẇ + ḃ + ḣ W."""
        (weight, bias), (weight_way, bias_way) = self._layers[index], self._directions[index]
        inputs, tangents = self._inputs[index], self._tangents[index]
        moved = affine(inputs, weight_way, bias_way)
        if tangents is not None:
            moved = moved + affine(tangents, weight, torch.zeros_like(bias))
        return affine(inputs, weight, bias), moved

    def _pull(self, gradient: Tensor, tangent_gradient: Tensor | None) -> Tensor:
        result = torch.empty_like(self._network.flat)
        slots = self._network.layers(result)
        scale = self._network.scale
        below: Tensor = gradient * scale  # gradient in z, later in h
        beside = None if tangent_gradient is None else tangent_gradient * scale  # gradient in ż, later in ḣ
        for index in reversed(range(len(slots))):
            weight_slot, bias_slot = slots[index]
            weight_slot.copy_(outer_sum(self._inputs[index], below))
            tangents = self._tangents[index]
            if beside is not None and tangents is not None:
                weight_slot.add_(outer_sum(tangents, beside))
            torch.sum(below, dim=1, keepdim=True, out=bias_slot)
            if index:
                below, beside = self._chain(index, below, beside)
        return result

    def _chain(self, index: int, below: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """From the gradients in a layer's z and ż to those in the z and ż of the layer under it."""
        weight, way = self._layers[index][0], self._directions[index][0]
        slope, bend = self._slopes[index - 1], self._bends[index - 1]
        hidden = _times(below, weight)
        if beside is None:
            return hidden.mul_(slope), None
        hidden = hidden.add_(_times(beside, way)).mul_(slope)
        tangent = _times(beside, weight)
        if bend is not None:
            hidden.addcmul_(bend, tangent)
        return hidden, tangent.mul_(slope)


def _times(gradient: Tensor, weight: Tensor) -> Tensor:
    """g Wᵀ, (R, N, in); one output is a product of columns, not of matrices."""
    return gradient * weight.mT if weight.shape[-1] == 1 else torch.bmm(gradient, weight.mT)


def _activate(name: str, linear: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """σ(z), σ'(z) and σ''(z); None where σ'' is zero."""
    if name == "relu":
        return linear.relu(), (linear > 0).to(linear.dtype), None
    if name == "tanh":
        hidden = linear.tanh()
        slope = 1.0 - hidden.square()
        return hidden, slope, -2.0 * hidden * slope
    gate = linear.sigmoid()
    flat = gate * (1.0 - gate)
    return linear * gate, gate + linear * flat, flat * (2.0 + linear * (1.0 - 2.0 * gate))


def _module_tangent(
    network: StackedModule, x: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, TangentPullback]:
    """The same for any module, by forward over reverse differentiation."""

    def both(flat: Tensor) -> Any:
        return torch.func.jvp(lambda inner: network.apply(inner, x), (flat,), (direction,))

    with warnings.catch_warnings():  # the first forward derivative of a process loads scripted code
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        (outputs, tangents), vjp = torch.func.vjp(both, network.flat)  # type: ignore[misc]

    def pull(gradient: Tensor, tangent_gradient: Tensor | None) -> Tensor:
        extra = torch.zeros_like(tangents) if tangent_gradient is None else tangent_gradient
        return vjp((gradient, extra))[0]

    return outputs, tangents, pull
