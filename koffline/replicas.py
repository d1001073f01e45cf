"""Stacked networks and their optimiser: R replicas with a leading axis, trained by the same tensor products.

Parameters of replica r are row r of one flat (R, P) tensor, so that an optimiser step, a target copy or an
average is one operation for all. A replica's numbers do not depend on how many others are in the stack.

    network = StackedMLP.initialise((4, 64, 64, 2), seeds=range(10))
    network.forward(observations)                 # (N, 4) -> (10, N, 2)
    network.features(observations)                # last hidden layer, (10, N, 64)

``StackedNetwork`` is what the training loop asks for; ``StackedMLP`` implements it with a hand-written
backward pass, ``stacked_module.StackedModule`` for copies of any torch module by ``vmap`` and autograd.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.errors import ConfigError, DataError
from koffline.stacked_products import Workspace, affine, outer_sum, tanh_

Pullback = Callable[[Tensor], Tensor]
Self = TypeVar("Self", bound="StackedNetwork")
_ACTIVATIONS = ("relu", "tanh", "silu")
_LARGEST_BUFFER = 1 << 24  # numbers


@runtime_checkable
class StackedNetwork(Protocol):
    """R networks of one shape."""

    flat: Tensor  # (R, P)

    def with_flat(self: Self, flat: Tensor) -> Self:
        """The same networks with other parameters; `flat` is not copied."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (R, N, n) for rows (N, d) shared by all replicas or (R, N, d) of their own."""
        ...

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from a gradient in them (R, N, n) to the gradient in `flat` (R, P)."""
        ...


class StackedMLP:
    """R multilayer perceptrons: outputs = offset + scale · net(x).

    sizes: (inputs, hidden…, outputs). activation: "relu", "tanh" or "silu" between layers.
    scale, offset: fixed, one number or one per replica.
    Raises ConfigError for sizes, activations or parameters that do not fit.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        flat: Float[Tensor, "replica parameter"],
        activation: str = "relu",
        scale: float | Tensor = 1.0,
        offset: float | Tensor = 0.0,
    ) -> None:
        if len(sizes) < 2 or min(sizes) < 1:
            raise ConfigError(
                f"sizes is {tuple(sizes)}; give inputs, hidden layers and outputs, all positive"
            )
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"activation is '{activation}'; use one of {', '.join(_ACTIVATIONS)}")
        self.sizes = tuple(int(size) for size in sizes)
        if flat.ndim != 2 or flat.shape[1] != self.parameter_count:
            raise ConfigError(
                f"flat has shape {tuple(flat.shape)}; sizes {self.sizes} need (R, {self.parameter_count})"
            )
        self._flat = flat
        self._views = self.layers(flat)
        self.activation = activation
        self.scale = _per_replica(scale, flat, "scale")
        self.offset = _per_replica(offset, flat, "offset")
        self._workspace = Workspace()
        self._gradient_buffer: tuple[Tensor, list[tuple[Tensor, Tensor]]] | None = None

    @classmethod
    def initialise(
        cls,
        sizes: Sequence[int],
        seeds: Sequence[int],
        activation: str = "relu",
        scale: float | Tensor = 1.0,
        offset: float | Tensor = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> StackedMLP:
        """One replica per seed; weights and biases uniform in ±1/√fan_in, drawn in float64 on the CPU."""
        rows = [_initial_parameters(sizes, seed) for seed in seeds]
        if not rows:
            raise ConfigError("seeds is empty; give one seed per replica")
        return cls(sizes, torch.stack(rows).to(device, dtype), activation, scale, offset)

    @property
    def flat(self) -> Tensor:
        """Parameters, (R, P); written in place by training, replaced by `with_flat`."""
        return self._flat

    @property
    def replicas(self) -> int:
        """R."""
        return self.flat.shape[0]

    @property
    def parameter_count(self) -> int:
        """P."""
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(self.sizes))

    def with_flat(self, flat: Float[Tensor, "replica parameter"]) -> StackedMLP:
        """The same networks with other parameters; `flat` is not copied."""
        return StackedMLP(self.sizes, flat, self.activation, self.scale, self.offset)

    def select(self, replicas: Sequence[int] | Tensor) -> StackedMLP:
        """The stack of the chosen replicas, copied."""
        index = torch.as_tensor(replicas, device=self.flat.device)
        scale, offset = (
            part[index] if isinstance(part, Tensor) else part for part in (self.scale, self.offset)
        )
        return StackedMLP(self.sizes, self.flat[index], self.activation, scale, offset)

    def layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of parameters, or of a gradient: weights (R, in, out), biases (R, 1, out) per layer."""
        views, start = [], 0
        for fan_in, fan_out in itertools.pairwise(self.sizes):
            middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
            weight = flat[:, start:middle].unflatten(1, (fan_in, fan_out))
            views.append((weight, flat[:, middle:end].unsqueeze(1)))
            start = end
        return views

    def forward(self, x: Float[Tensor, "*replica row input"]) -> Float[Tensor, "replica row output"]:
        """Outputs (R, N, n) for rows (N, d) shared by all replicas or (R, N, d) of their own."""
        *hidden_layers, (top, top_bias) = self._views
        hidden = self._stacked(x)
        for index, (weight, bias) in enumerate(hidden_layers):
            hidden = self._activate(affine(hidden, weight, bias, self._buffer(index, hidden, weight)))
        return self._scaled(affine(hidden, top, top_bias))

    def features(self, x: Float[Tensor, "*replica row input"]) -> Float[Tensor, "replica row hidden"]:
        """Last hidden layer, (R, N, H): what the last layer is linear in."""
        hidden = self._stacked(x)
        for weight, bias in self._views[:-1]:
            hidden = self._activate(affine(hidden, weight, bias))
        return hidden

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from a gradient in them (R, N, n) to the gradient in `flat` (R, P).

        Call the map once and before the next forward pass: both write into the same buffers.
        """
        layers = self._views
        inputs: list[Tensor] = [self._stacked(x)]  # of each layer
        before: list[Tensor | None] = []  # hidden layers before the activation, where its slope needs them
        for index, (weight, bias) in enumerate(layers[:-1]):
            linear = affine(inputs[-1], weight, bias, self._buffer(index, inputs[-1], weight))
            before.append(linear if self.activation == "silu" else None)
            inputs.append(self._activate(linear))
        outputs = self._scaled(affine(inputs[-1], *layers[-1]))

        def pullback(gradient: Tensor) -> Tensor:
            scaled = gradient if self._plain_scale() else gradient * self.scale
            if len(layers) == 2 and self.activation == "relu" and self.sizes[-1] == 1:
                return self._pull_single_output(scaled, inputs)
            return self._pull(scaled, inputs, before)

        return outputs, pullback

    def _pull(self, gradient: Tensor, inputs: list[Tensor], before: list[Tensor | None]) -> Tensor:
        """Layer by layer from the outputs down."""
        result, slots = self._gradient()
        for index in reversed(range(len(slots))):
            weight_slot, bias_slot = slots[index]
            weight_slot.copy_(outer_sum(inputs[index], gradient))
            torch.sum(gradient, dim=1, keepdim=True, out=bias_slot)
            if index:
                weight = self._views[index][0]
                buffer = self._buffer(("gradient", index), gradient, weight.mT)
                product = torch.mul if weight.shape[-1] == 1 else torch.bmm
                gradient = product(gradient, weight.mT, out=buffer)
                gradient = self._chain(gradient, before[index - 1], inputs[index])
        return result

    def _pull_single_output(self, gradient: Tensor, inputs: list[Tensor]) -> Tensor:
        """One ReLU layer, one output: the gradient of the hidden layer, (R, N, H), is never formed.

        It is g m w with m the 0/1 mask of active units, so its product with the inputs is T w where
        T = (x g)ᵀ m; and as the hidden layer is m (x W), the last layer's gradient gᵀ m (x W) is Σ_d W T.
        """
        result, (_, (top_slot, top_bias_slot)) = self._gradient()
        rows = gradient.squeeze(2).unsqueeze(1)  # (R, 1, N)
        torch.sum(rows, dim=2, keepdim=True, out=top_bias_slot)
        fan_in, hidden, top = self.sizes[0], self.sizes[1], self._views[1][0]
        weighted = self._workspace.take("weighted", (len(rows), fan_in + 1, rows.shape[2]), rows)
        torch.mul(inputs[0].mT, rows, out=weighted[:, :fan_in])
        weighted[:, fan_in:] = rows  # the bias is one more input, always one
        both = (fan_in + 1) * hidden  # weights and biases of the first layer follow each other
        slot = result[:, :both].unflatten(1, (fan_in + 1, hidden))
        product = torch.bmm(weighted, inputs[1].sign_())  # (R, d + 1, N) @ (R, N, H)
        torch.mul(product, top.mT, out=slot)
        product.mul_(self.flat[:, :both].unflatten(1, (fan_in + 1, hidden)))
        torch.sum(product, dim=1, keepdim=True, out=top_slot.mT)
        return result

    def _gradient(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The buffer of the parameter gradient, and its views."""
        if self._gradient_buffer is None:
            result = torch.empty_like(self.flat)
            self._gradient_buffer = result, self.layers(result)
        return self._gradient_buffer

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; see `from_state_dict`."""
        return {
            "sizes": list(self.sizes),
            "activation": self.activation,
            "scale": self.scale,
            "offset": self.offset,
            "flat": self.flat,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> StackedMLP:
        """The stack that `state_dict` described."""
        return cls(state["sizes"], state["flat"], state["activation"], state["scale"], state["offset"])

    def _stacked(self, x: Tensor) -> Tensor:
        if x.ndim not in (2, 3) or x.shape[-1] != self.sizes[0]:
            raise DataError(
                f"network inputs have shape {tuple(x.shape)}; "
                f"give (N, {self.sizes[0]}) or (R, N, {self.sizes[0]})"
            )
        if x.ndim == 3 and x.shape[0] not in (1, self.replicas):
            raise DataError(f"network inputs have {x.shape[0]} replicas; give one or {self.replicas}")
        return x.expand(self.replicas, *x.shape[-2:])

    def _buffer(self, name: object, x: Tensor, weight: Tensor) -> Tensor | None:
        """Where x W goes, (R, N, out); None where gradients are recorded or it is too large to keep."""
        shape = (*x.shape[:2], weight.shape[2])
        if torch.is_grad_enabled() or math.prod(shape) > _LARGEST_BUFFER:
            return None
        return self._workspace.take(name, shape, self.flat)

    def _plain_scale(self) -> bool:
        return not isinstance(self.scale, Tensor) and self.scale == 1.0

    def _scaled(self, outputs: Tensor) -> Tensor:
        if not self._plain_scale():
            outputs = outputs.mul_(self.scale)
        plain = not isinstance(self.offset, Tensor) and self.offset == 0.0
        return outputs if plain else outputs.add_(self.offset)

    def _activate(self, linear: Tensor) -> Tensor:
        """Overwrites `linear` where its slope can be told from what comes out."""
        if self.activation == "relu":
            return linear.relu_()
        return tanh_(linear) if self.activation == "tanh" else nn.functional.silu(linear)

    def _chain(self, gradient: Tensor, before: Tensor | None, after: Tensor) -> Tensor:
        """Gradient before the activation from the gradient after it; overwrites `gradient`."""
        aten = torch.ops.aten
        if self.activation == "relu":
            return aten.threshold_backward.grad_input(gradient, after, 0.0, grad_input=gradient)
        if self.activation == "tanh":
            return aten.tanh_backward.grad_input(gradient, after, grad_input=gradient)
        return aten.silu_backward.grad_input(gradient, before, grad_input=gradient)


def _initial_parameters(sizes: Sequence[int], seed: int) -> Tensor:
    """(P,) float64, the layer's weights and biases uniform in ±1/√fan_in."""
    generator = torch.Generator().manual_seed(int(seed))
    parts = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        uniform = torch.rand((fan_in + 1) * fan_out, generator=generator, dtype=torch.float64)
        parts.append((2.0 * uniform - 1.0) / math.sqrt(fan_in))
    return torch.cat(parts)


def _per_replica(number: float | Tensor, flat: Tensor, name: str) -> float | Tensor:
    """A float as it is; a tensor (R,) as (R, 1, 1)."""
    if not isinstance(number, Tensor):
        return float(number)
    if number.numel() != flat.shape[0]:
        raise ConfigError(
            f"{name} has {number.numel()} numbers; give one, or one per replica ({flat.shape[0]})"
        )
    return number.to(flat).reshape(-1, 1, 1)
