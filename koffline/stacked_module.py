"""Copies of any torch module as a stack of replicas: the general path beside ``StackedMLP``."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from koffline.errors import ConfigError
from koffline.replicas import Pullback


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
        return self.apply(self.flat, x)

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from a gradient in them (R, N, n) to the gradient in `flat` (R, P)."""
        outputs, vjp = torch.func.vjp(lambda flat: self.apply(flat, x), self.flat)  # type: ignore[misc]
        return outputs, lambda gradient: vjp(gradient)[0]

    def apply(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs (R, N, n) with parameters `flat` (R, P); works inside torch.func transforms."""

        def call(row: Tensor, buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
            parts = row.split([shape.numel() for shape in self._shapes.values()])
            named = {
                name: part.view(shape)
                for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
            }
            return torch.func.functional_call(self._skeleton, (named, buffers), (inputs,))

        return torch.func.vmap(call, in_dims=(0, 0, 0 if x.ndim == 3 else None))(flat, self._buffers, x)
