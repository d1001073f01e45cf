"""Stacked networks and their optimiser: R replicas with a leading axis, trained by the same tensor products.

Parameters of replica r are row r of one flat (R, P) tensor, so that an optimiser step, a target copy or an
average is one operation for all. A replica's numbers do not depend on how many others are in the stack.

    network = StackedMLP.initialise((4, 64, 64, 2), seeds=range(10))
    network.forward(observations)                 # (N, 4) -> (10, N, 2)
    network.features(observations)                # last hidden layer, (10, N, 64)

``StackedNetwork`` is what the training loop asks for; ``StackedMLP`` implements it with a hand-written
backward pass, ``StackedModule`` for copies of any torch module by ``vmap`` and autograd.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from koffline.errors import ConfigError, DataError

Pullback = Callable[[Tensor], Tensor]
Self = TypeVar("Self", bound="StackedNetwork")
_ACTIVATIONS = ("relu", "tanh", "silu")


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
        self.flat = flat
        self.activation = activation
        self.scale = _per_replica(scale, flat, "scale")
        self.offset = _per_replica(offset, flat, "offset")

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

    def layers(self, flat: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Views of the parameters, or of a gradient: weights (R, in, out), biases (R, 1, out) per layer."""
        flat = self.flat if flat is None else flat
        views, start = [], 0
        for fan_in, fan_out in itertools.pairwise(self.sizes):
            middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
            weight = flat[:, start:middle].unflatten(1, (fan_in, fan_out))
            views.append((weight, flat[:, middle:end].unsqueeze(1)))
            start = end
        return views

    def forward(self, x: Float[Tensor, "*replica row input"]) -> Float[Tensor, "replica row output"]:
        """Outputs (R, N, n) for rows (N, d) shared by all replicas or (R, N, d) of their own."""
        weight, bias = self.layers()[-1]
        return self._scaled(torch.baddbmm(bias, self.features(x), weight))

    def features(self, x: Float[Tensor, "*replica row input"]) -> Float[Tensor, "replica row hidden"]:
        """Last hidden layer, (R, N, H): what the last layer is linear in."""
        hidden = self._stacked(x)
        for weight, bias in self.layers()[:-1]:
            hidden = self._activate(torch.baddbmm(bias, hidden, weight))
        return hidden

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from a gradient in them (R, N, n) to the gradient in `flat` (R, P)."""
        layers = self.layers()
        inputs: list[Tensor] = [self._stacked(x)]  # of each layer
        before: list[Tensor] = []  # hidden layers before the activation, kept where its slope needs them
        for weight, bias in layers[:-1]:
            linear = torch.baddbmm(bias, inputs[-1], weight)
            before.append(linear)
            inputs.append(self._activate(linear))
        outputs = self._scaled(torch.baddbmm(layers[-1][1], inputs[-1], layers[-1][0]))

        def pullback(gradient: Tensor) -> Tensor:
            result = torch.empty_like(self.flat)
            slots = self.layers(result)
            gradient = gradient * self.scale
            for index in reversed(range(len(layers))):
                weight_slot, bias_slot = slots[index]
                torch.bmm(inputs[index].mT, gradient, out=weight_slot)
                torch.sum(gradient, dim=1, keepdim=True, out=bias_slot)
                if index:
                    gradient = torch.bmm(gradient, layers[index][0].mT)
                    gradient = self._chain(gradient, before[index - 1], inputs[index])
            return result

        return outputs, pullback

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

    def _scaled(self, outputs: Tensor) -> Tensor:
        return outputs.mul_(self.scale).add_(self.offset)

    def _activate(self, linear: Tensor) -> Tensor:
        if self.activation == "relu":
            return linear.relu()
        return linear.tanh() if self.activation == "tanh" else nn.functional.silu(linear)

    def _chain(self, gradient: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Gradient before the activation from the gradient after it."""
        if self.activation == "relu":
            return torch.ops.aten.threshold_backward(gradient, after, 0.0)
        if self.activation == "tanh":
            return torch.ops.aten.tanh_backward(gradient, after)
        return torch.ops.aten.silu_backward(gradient, before)


class StackedModule:
    """R copies of any torch module that maps (N, d) to (N, n), by ``vmap`` and autograd: the general path.

    modules: equal in structure, one per replica; buffers are kept as they are. Slower than StackedMLP.
    """

    def __init__(self, modules: Sequence[nn.Module], flat: Tensor | None = None) -> None:
        if not modules:
            raise ConfigError("modules is empty; give one module per replica")
        self._modules = tuple(modules)
        parameters, buffers = torch.func.stack_module_state(list(modules))
        self._shapes = {name: parameter.shape[1:] for name, parameter in parameters.items()}
        self._buffers = {name: buffer.detach() for name, buffer in buffers.items()}
        self._skeleton = copy.deepcopy(modules[0])
        joined = torch.cat([part.detach().flatten(1) for part in parameters.values()], dim=1)
        self.flat = joined if flat is None else flat

    @property
    def replicas(self) -> int:
        """R."""
        return self.flat.shape[0]

    def with_flat(self, flat: Tensor) -> StackedModule:
        """The same networks with other parameters; `flat` is not copied."""
        return StackedModule(self._modules, flat)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (R, N, n) for rows (N, d) shared by all replicas or (R, N, d) of their own."""
        return self._apply(self.flat, x)

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from a gradient in them (R, N, n) to the gradient in `flat` (R, P)."""
        outputs, vjp = torch.func.vjp(lambda flat: self._apply(flat, x), self.flat)
        return outputs, lambda gradient: vjp(gradient)[0]

    def _apply(self, flat: Tensor, x: Tensor) -> Tensor:
        def call(row: Tensor, buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
            parts = row.split([shape.numel() for shape in self._shapes.values()])
            named = {
                name: part.view(shape)
                for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
            }
            return torch.func.functional_call(self._skeleton, (named, buffers), (inputs,))

        return torch.func.vmap(call, in_dims=(0, 0, 0 if x.ndim == 3 else None))(flat, self._buffers, x)


class StackedAdam:
    """Adam on flat (R, P) parameters, a handful of operations for all replicas, a learning rate for each."""

    def __init__(
        self, flat: Tensor, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8
    ) -> None:
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0 and epsilon > 0.0):
            raise ConfigError(
                f"Adam received betas {betas}, epsilon {epsilon}; give [0, 1) and a positive one"
            )
        self._betas, self._epsilon = betas, epsilon
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._scratch = torch.empty_like(flat)
        self._steps = 0

    def update(self, flat: Tensor, gradient: Tensor, rates: Float[Tensor, "replica 1"]) -> None:
        """Move `flat` in place against `gradient`; bias corrections are folded into the step's scalars."""
        self._steps += 1
        first, second = self._betas
        root = math.sqrt(1.0 - second**self._steps)
        self._mean.lerp_(gradient, 1.0 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        torch.sqrt(self._square, out=self._scratch).add_(self._epsilon * root)
        torch.div(self._mean, self._scratch, out=self._scratch)
        flat.addcmul_(self._scratch, rates, value=-root / (1.0 - first**self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count."""
        return {"mean": self._mean, "square": self._square, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps = int(state["steps"])


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
