"""Steps of the objectives that train a second function: the value's gradient, and that function's updates.

A training run calls, in this order, ``update_before`` (SBEED: f ascends), ``compute`` (the value's loss and
gradient, nothing changes) and ``update_after`` (GTD2: w moves, from the same old parameters as the value).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from koffline.batches import Batch, ReplicaPlan
from koffline.dual_objectives import DualObjective, GradientTD2, SaddlePoint
from koffline.errors import ConfigError
from koffline.replicas import StackedMLP, StackedNetwork
from koffline.stacked_adam import StackedAdam
from koffline.stacked_tangents import forward_with_tangent
from koffline.steps import BatchSource, full_gradient, read_values, spread_gradient


@runtime_checkable
class DualStep(Protocol):
    """See the module's docstring. rates: learning rates of the value, (R, 1)."""

    def update_before(self, step: int, network: StackedNetwork, rates: Tensor) -> None:
        """Updates that precede the value's gradient."""
        ...

    def compute(self, step: int, network: StackedNetwork) -> tuple[Tensor, Tensor]:
        """Loss (R,) and gradient in ``network.flat`` (R, P)."""
        ...

    def update_after(self, rates: Tensor) -> None:
        """Updates that follow from what `compute` saw."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


def dual_step(
    objective: DualObjective,
    source: BatchSource,
    network: StackedNetwork,
    plan: ReplicaPlan,
    betas: tuple[float, float],
    epsilon: float,
) -> DualStep:
    """The steps of a dual objective; the second function is optimised by an Adam of its own."""
    if isinstance(objective, GradientTD2):
        return _GradientTD2Step(objective, source, network, betas, epsilon)
    return _SaddlePointStep(objective, source, network, plan, betas, epsilon)


class _GradientTD2Step:
    def __init__(
        self,
        objective: GradientTD2,
        source: BatchSource,
        network: StackedNetwork,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        self._objective, self._source = objective, source
        self._weights = torch.zeros_like(network.flat)  # w, (R, P)
        self._adam = StackedAdam(self._weights, betas, epsilon)
        self._pending = torch.zeros_like(self._weights)

    def update_before(self, step: int, network: StackedNetwork, rates: Tensor) -> None:
        pass

    def compute(self, step: int, network: StackedNetwork) -> tuple[Tensor, Tensor]:
        batch, _ = self._source.batch(step)
        outputs, tangents, pull_own = forward_with_tangent(network, batch.inputs, self._weights)
        next_outputs, pull_next = network.forward_with_pullback(batch.next_inputs)
        value, correction = (read_values(part, batch.readout, 1) for part in (outputs, tangents))
        next_value = read_values(next_outputs, batch.next_readout, batch.draws)
        residual = batch.rewards + batch.discounts * next_value - value
        parts = self._objective.compute_gradients(residual, batch.discounts, correction)
        bend = self._objective.compute_correction_gradient(residual, correction)
        regression = self._objective.compute_auxiliary_gradient(residual, correction)
        own, hessian, auxiliary = (
            spread_gradient(part, batch.readout, 1) for part in (parts.value, bend, regression)
        )
        assert parts.next_value is not None
        gradient = pull_next(spread_gradient(parts.next_value, batch.next_readout, batch.draws))
        gradient = gradient + pull_own(own, hessian)
        self._pending = pull_own(auxiliary, None)
        return parts.loss, gradient

    def update_after(self, rates: Tensor) -> None:
        self._adam.update(self._weights, self._pending, rates * self._objective.auxiliary_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._weights, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights.copy_(state["weights"])
        self._adam.load_state_dict(state["adam"])


class _SaddlePointStep:
    def __init__(
        self,
        objective: SaddlePoint,
        source: BatchSource,
        network: StackedNetwork,
        plan: ReplicaPlan,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        sizes = getattr(network, "sizes", None)
        if sizes is None:
            raise ConfigError("SBEED needs a StackedMLP as value network; give one")
        self._objective, self._source = objective, source
        seeds = [seed + 1_000_003 for seed in plan.batch_seeds]  # not the value's own first weights
        flat = network.flat
        self._test = StackedMLP.initialise(
            (sizes[0], *objective.hidden, sizes[-1]), seeds, dtype=flat.dtype, device=flat.device
        )
        self._adam = StackedAdam(self._test.flat, betas, epsilon)

    def update_before(self, step: int, network: StackedNetwork, rates: Tensor) -> None:
        batch, _ = self._source.batch(step)
        value = read_values(network.forward(batch.inputs), batch.readout, 1).clone()
        residual = self._residual(batch, value, network.forward(batch.next_inputs))
        scaled = rates * self._objective.auxiliary_rate
        for _ in range(self._objective.ascent_steps):
            outputs, pullback = self._test.forward_with_pullback(batch.inputs)
            test = read_values(outputs, batch.readout, 1)
            gradient = self._objective.compute_auxiliary_gradient(residual, test)
            self._adam.update(self._test.flat, pullback(spread_gradient(gradient, batch.readout, 1)), scaled)

    def compute(self, step: int, network: StackedNetwork) -> tuple[Tensor, Tensor]:
        batch, _ = self._source.batch(step)
        test = read_values(self._test.forward(batch.inputs), batch.readout, 1)
        gradients = partial(self._objective.compute_gradients, discount=batch.discounts, test=test)
        return full_gradient(network, batch, gradients)

    def update_after(self, rates: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"test": self._test.flat, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._test.flat.copy_(state["test"])
        self._adam.load_state_dict(state["adam"])

    def _residual(self, batch: Batch, value: Tensor, next_outputs: Tensor) -> Tensor:
        next_value = read_values(next_outputs, batch.next_readout, batch.draws)
        return batch.rewards + batch.discounts * next_value - value
