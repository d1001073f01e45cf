"""Objectives with a second function beside the value: GTD2's weights w and SBEED's test function f.

Both estimate the Bellman error by regression instead of a second sample. Each record gives the gradients for
the value and, as directions of descent too, for the second function; each has a step that moves that
function beside the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import ReplicaPlan
from koffline.errors import ConfigError
from koffline.kernels import Kernel
from koffline.objectives import MemoryLoss, NextFrom, Objective, Rows, ValueGradients
from koffline.replicas import StackedMLP, StackedNetwork, affine, outer_sum
from koffline.steps import (
    BatchSource,
    MemoryStep,
    StackedAdam,
    Step,
    full_gradient,
    read_values,
    spread_gradient,
)


@dataclass(frozen=True)
class GradientTD2:
    """Nonlinear GTD2: w regresses the residual on the gradient φ = ∇V(s), V follows against g = φᵀw.

    w ← w + β (δ − g) φ;  θ ← θ + α {(φ − discount·φ') g − h},  h = (δ − g) ∇²V(s) w.
    auxiliary_rate: β as a multiple of the value's learning rate.
    (Maei et al. 2009, "Convergent temporal-difference learning with arbitrary smooth function approximation")
    """

    auxiliary_rate: float = 1.0
    kernel: Kernel | None = field(default=None, init=False)
    next_from: NextFrom = field(default="network", init=False)

    def compute_gradients(self, residual: Rows, discount: Rows, correction: Rows) -> ValueGradients:
        """−g/n through the value, discount·g/n through the next one; the loss is `projected_error`.

        The Hessian term h reaches the parameters through g, in which the gradient is (δ − g)/n.
        """
        slope = correction / residual.shape[-1]
        return ValueGradients(projected_error(residual, correction), -slope, slope * discount)

    def compute_auxiliary_gradient(self, residual: Rows, correction: Rows) -> Rows:
        """Gradient of mean (δ − g)²/2 in g, (R, N): what w descends."""
        return (correction - residual) / residual.shape[-1]


@dataclass(frozen=True)
class SaddlePoint:
    """SBEED for evaluation: min over V, max over f of mean 2δf − f², f a small network.

    ascent_steps: gradient steps of f on a mini-batch before V's step on it.
    auxiliary_rate: learning rate of f as a multiple of the value's.
    (Feng et al. 2019, equ:sbeed)
    """

    hidden: tuple[int, ...] = (10,)
    ascent_steps: int = 10
    auxiliary_rate: float = 1.0
    kernel: Kernel | None = field(default=None, init=False)
    next_from: NextFrom = field(default="network", init=False)

    def compute_gradients(self, residual: Rows, discount: Rows, test: Rows) -> ValueGradients:
        """−2f/n through the value, 2 discount·f/n through the next one."""
        slope = test * (2.0 / residual.shape[-1])
        return ValueGradients(projected_error(residual, test), -slope, slope * discount)

    def compute_auxiliary_gradient(self, residual: Rows, test: Rows) -> Rows:
        """Gradient of −mean(2δf − f²) in f, (R, N)."""
        return (test - residual) * (2.0 / residual.shape[-1])


DualObjective = GradientTD2 | SaddlePoint | MemoryLoss


def projected_error(residual: Rows, estimate: Rows) -> Float[Tensor, " replica"]:
    """mean 2δf − f², (R,): at its maximum over a family of f the Bellman error projected on it, squared.

    (Feng et al. 2019, equ:sbeed)
    """
    return (estimate * (2.0 * residual - estimate)).mean(dim=-1)


def make_step(
    objective: Objective | DualObjective,
    source: BatchSource,
    network: StackedNetwork,
    plan: ReplicaPlan,
) -> Step:
    """The step of any objective.

    Raises ConfigError for a dual objective whose network is no StackedMLP.
    """
    if isinstance(objective, MemoryLoss):
        return MemoryStep(objective, source, network)
    if not isinstance(objective, GradientTD2 | SaddlePoint):
        return Step(objective, source)
    if not isinstance(network, StackedMLP):
        raise ConfigError(f"{type(objective).__name__} needs a StackedMLP as value network; give one")
    flat = network.flat
    if isinstance(objective, GradientTD2):
        weights = torch.zeros_like(flat)
        return GradientTD2Step(objective, source, weights)
    seeds = [seed + 1_000_003 for seed in plan.batch_seeds]  # other initial weights than the value's
    sizes = (network.sizes[0], *objective.hidden, network.sizes[-1])
    test = StackedMLP.initialise(sizes, seeds, dtype=flat.dtype, device=flat.device)
    return SaddlePointStep(objective, source, test)


class DualStep(Step):
    """Base of steps with a second function, whose parameters `second` have their own Adam."""

    def __init__(self, objective: Any, source: BatchSource, second: Tensor) -> None:
        self._dual, self._source, self.second, self._adam = objective, source, second, StackedAdam(second)


class GradientTD2Step(DualStep):
    """Step of GTD2: w, (R, P), is `second` and is updated at the same old parameters as the value."""

    def compute(self, step: int, network: Any, target: Any, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Update w; return the loss and the value's gradient."""
        batch, _ = self._source.batch(step)
        outputs, tangents, pull_own = forward_with_tangent(network, batch.inputs, self.second)
        next_outputs, pull_next = network.forward_with_pullback(batch.next_inputs)
        value, correction = (read_values(part, batch.readout) for part in (outputs, tangents))
        next_value = read_values(next_outputs, batch.next_readout)
        residual = batch.rewards + batch.discounts * next_value - value
        parts = self._dual.compute_gradients(residual, batch.discounts, correction)
        regression = self._dual.compute_auxiliary_gradient(residual, correction)
        own, hessian, auxiliary = (
            spread_gradient(part, batch.readout) for part in (parts.value, -regression, regression)
        )
        gradient = pull_next(spread_gradient(parts.next_value, batch.next_readout)) + pull_own(own, hessian)
        self._adam.update(self.second, pull_own(auxiliary, None), rates * self._dual.auxiliary_rate)
        return parts.loss, gradient


class SaddlePointStep(DualStep):
    """Step of SBEED: the test functions f, with parameters `second`, ascend before the value's gradient."""

    def __init__(self, objective: Any, source: BatchSource, test: StackedMLP) -> None:
        super().__init__(objective, source, test.flat)
        self._test = test

    def compute(self, step: int, network: Any, target: Any, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Update f; return the loss and the value's gradient."""
        batch, _ = self._source.batch(step)
        value = read_values(network.forward(batch.inputs), batch.readout).clone()
        next_value = read_values(network.forward(batch.next_inputs), batch.next_readout)
        residual = batch.rewards + batch.discounts * next_value - value
        scaled = rates * self._dual.auxiliary_rate
        for _ in range(self._dual.ascent_steps):
            outputs, pullback = self._test.forward_with_pullback(batch.inputs)
            slope = self._dual.compute_auxiliary_gradient(residual, read_values(outputs, batch.readout))
            self._adam.update(self.second, pullback(spread_gradient(slope, batch.readout)), scaled)
        test = read_values(self._test.forward(batch.inputs), batch.readout)
        gradients = partial(self._dual.compute_gradients, discount=batch.discounts, test=test)
        return full_gradient(network, batch, gradients)


def forward_with_tangent(
    network: StackedMLP, x: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor | None], Tensor]]:
    """Outputs o (R, N, n), ȯ (R, N, n) along `direction` (R, P), and (∂o, ∂ȯ or None) ↦ gradient (R, P).

    The gradient of ȯ is a product of the Hessian with the direction. Dual numbers by hand: a step of GTD2
    takes three times as long by torch.func.jvp.
    """
    layers, ways = network.layers(network.flat), network.layers(direction)
    inputs = [x.expand(network.replicas, *x.shape[-2:])]  # h of each layer
    tangents: list[Tensor | None] = [None]  # ḣ
    slopes: list[Tensor] = []  # σ'(z) of each hidden layer
    bends: list[Tensor | None] = []  # σ''(z)·ż, None where it is zero
    for (weight, bias), (weight_way, bias_way) in zip(layers, ways, strict=True):
        linear = affine(inputs[-1], weight, bias)  # z = h W + b
        moved = affine(inputs[-1], weight_way, bias_way)  # ż = h Ẇ + ḃ + ḣ W
        if tangents[-1] is not None:
            moved = moved + affine(tangents[-1], weight, torch.zeros_like(bias))
        if len(inputs) == len(layers):
            break
        if network.activation == "relu":
            inputs.append(linear.relu())
            slopes.append((linear > 0).to(linear.dtype))
            bends.append(None)
        else:
            inputs.append(linear.tanh())
            slopes.append(1.0 - inputs[-1].square())
            bends.append(-2.0 * inputs[-1] * slopes[-1] * moved)
        tangents.append(moved.mul_(slopes[-1]))

    def pull(below: Tensor, beside: Tensor | None) -> Tensor:
        """Gradients in z and ż, layer by layer from the outputs down."""
        result = torch.empty_like(network.flat)
        for index, (weight_slot, bias_slot) in reversed(list(enumerate(network.layers(result)))):
            weight_slot.copy_(outer_sum(inputs[index], below))
            tangent = tangents[index]
            if beside is not None and tangent is not None:
                weight_slot.add_(outer_sum(tangent, beside))
            torch.sum(below, dim=1, keepdim=True, out=bias_slot)
            if index:
                slope, bend = slopes[index - 1], bends[index - 1]
                below = _times(below, layers[index][0])
                if beside is not None:
                    below.add_(_times(beside, ways[index][0]))
                    beside = _times(beside, layers[index][0])
                below.mul_(slope)
                if beside is not None:
                    if bend is not None:
                        below.addcmul_(bend, beside)
                    beside.mul_(slope)
        return result

    return linear, moved, pull


def _times(gradient: Tensor, weight: Tensor) -> Tensor:
    """Product g Wᵀ, (R, N, in); for a single output an elementwise product, which is faster."""
    return gradient * weight.mT if weight.shape[-1] == 1 else torch.bmm(gradient, weight.mT)
