"""Products with a leading replica axis, in the forms that are fast, and buffers for their results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NARROW = 16  # outputs below which a batched product is computed as its transpose


class Workspace:
    """Buffers that are used again in every step.

    A fresh tensor of some megabytes is fresh memory, and touching it first costs more than the arithmetic.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def take(self, name: object, shape: Sequence[int], like: Tensor) -> Tensor:
        """The buffer of that name, made anew when the shape changes; holds whatever was left there."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tuple(shape):
            buffer = self._buffers[name] = torch.empty(*shape, dtype=like.dtype, device=like.device)
        return buffer


def affine(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    """x W + b, (R, N, out); with few outputs as its transpose, since narrow batched products are slow."""
    if out is None and weight.shape[-1] < _NARROW:
        # One output is no transpose but a row: a stride of one in both axes takes a slow path.
        rows = weight.mT if weight.shape[-1] > 1 else weight.squeeze(2).unsqueeze(1)
        return torch.baddbmm(bias.mT, rows, x.mT).mT  # (R, out, in) @ (R, in, N)
    return torch.baddbmm(bias, x, weight, out=out)


def outer_sum(x: Tensor, gradient: Tensor) -> Tensor:
    """xᵀ g, (R, in, out), likewise."""
    if gradient.shape[-1] < _NARROW:
        rows = gradient.mT if gradient.shape[-1] > 1 else gradient.squeeze(2).unsqueeze(1)
        return torch.bmm(rows, x).mT
    return torch.bmm(x.mT, gradient)


def tanh_(x: Tensor) -> Tensor:
    """x.tanh_(); on the CPU and without gradients by numpy, whose vectorised one is ten times faster."""
    plain = x.device.type == "cpu" and not torch.is_grad_enabled() and type(x) is Tensor
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x
