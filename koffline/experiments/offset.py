"""Value networks with an output offset of their own: V(s) = net(s) + b / (1 − γ).

A gradient step then moves the mean of V as fast as its shape, along the direction in which a residual changes
by only (1 − γ).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from koffline.experiments.problem import GAMMA
from koffline.replicas import StackedMLP
from koffline.stacked_module import StackedModule


class _OffsetNetwork(nn.Module):
    """The layers of a StackedMLP's replica and the offset."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weight for weight, _ in layers])
        self.biases = nn.ParameterList([bias for _, bias in layers])
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) -> (N, 1)."""
        *below, (top, bias) = list(zip(self.weights, self.biases, strict=True))
        for weight, shift in below:
            x = torch.relu(x @ weight + shift)
        return x @ top + bias + self.offset / (1.0 - GAMMA)


def offset_networks(hidden: Sequence[int], seeds: Sequence[int]) -> StackedModule:
    """One network per seed, with the same first weights as StackedMLP's and an offset of zero."""
    start = StackedMLP.initialise((2, *hidden, 1), seeds)
    layers = start.layers(start.flat)
    modules = [
        _OffsetNetwork([(weight[r].clone(), bias[r].squeeze(0).clone()) for weight, bias in layers])
        for r in range(start.replicas)
    ]
    return StackedModule(modules)
