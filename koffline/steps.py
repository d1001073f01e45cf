"""One step of every replica: gather rows, value them, carry the objective's gradients to the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Batch, BatchSchedule, ReplicaPlan, Table
from koffline.kernels import Gaussian, Kernel
from koffline.objectives import MemoryLoss, Objective, Rows, ValueGradients, gram_product
from koffline.replicas import StackedNetwork, Workspace

_LEAST_EXPONENT = -120.0  # least exponent of two: smaller powers are subnormal and slow


class BatchSource:
    """The mini-batches of every step, and their Gram matrices (or features) where there is a kernel.

    The table's columns lie side by side, so that a mini-batch is one gather (two with drawn continuations).
    """

    def __init__(
        self, table: Table, kernel: Kernel | MemoryLoss | None, plan: ReplicaPlan, schedule: BatchSchedule
    ) -> None:
        self._schedule, self._kernel, self._draws = schedule, kernel, table.draws
        self._kept: tuple[int, Batch, Tensor | None] | None = None
        self._workspace = Workspace()
        self._continuations = table.next_inputs.flatten(0, 1) if table.draws > 1 else None
        parts = {name: column for name, column in table.columns() if name != "kernel_inputs"}
        parts["rewards"], parts["discounts"] = table.rewards[:, None], table.discounts[:, None]
        parts["next_inputs"] = table.next_inputs.flatten(1)
        if self._continuations is not None:
            del parts["next_inputs"]
        self._wide = False
        if isinstance(kernel, Gaussian):  # columns whose product is the kernel's exponent, computed once
            columns = table.compared
            parts["left"], parts["right"] = kernel.exponent_columns(columns)
            corners = torch.stack((columns.amin(dim=0), columns.amax(dim=0)))
            low, high = kernel.exponent_columns(corners)
            # Kernel values of the farthest corners would be subnormal in single precision.
            self._wide = float((low[0] * high[1]).sum()) < _LEAST_EXPONENT
        elif kernel is not None:
            parts["kernel_inputs"] = table.compared
        self._widths = {name: part.shape[1] for name, part in parts.items()}
        self._columns = torch.cat(list(parts.values()), dim=1).contiguous()
        groups = len(plan.groups)
        self._group_of = self._gram_of = None
        if groups < len(plan):
            self._group_of = torch.tensor(plan.group_of, device=table.inputs.device)
            # One gram serves its replicas as a view when groups follow each other in equal sizes.
            in_order = tuple(group for group in range(groups) for _ in range(len(plan) // groups))
            self._gram_of = None if in_order == plan.group_of else self._group_of

    def batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """Rows of every replica (R, B, …) and Gram matrices (G, B, B), until another step is asked for."""
        if self._kept is None or self._kept[0] != step:
            self._kept = step, *self._gather(step)
        return self._kept[1], self._kept[2]

    def _gather(self, step: int) -> tuple[Batch, Tensor | None]:
        rows = self._schedule.rows(step)
        packed = self._columns.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # (G, B, C)
        following = None
        if self._continuations is not None:
            chosen = rows * self._draws + self._schedule.draws(step, self._draws)
            following = self._continuations.index_select(0, chosen.flatten()).unflatten(0, rows.shape)
        gram = None if self._kernel is None else self._gram(self._split(packed))
        if self._group_of is not None:
            packed = packed.index_select(0, self._group_of)
            following = None if following is None else following.index_select(0, self._group_of)
        part = self._split(packed)
        batch = Batch(
            inputs=part["inputs"],
            next_inputs=part["next_inputs"] if following is None else following,
            rewards=part["rewards"].squeeze(-1),
            discounts=part["discounts"].squeeze(-1),
            readout=part.get("readout"),
            next_readout=part.get("next_readout"),
        )
        return batch, gram

    def _split(self, packed: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._widths, packed.split(list(self._widths.values()), dim=-1), strict=True))

    def _gram(self, part: dict[str, Tensor]) -> Tensor:
        if isinstance(self._kernel, Gaussian):
            left, right = part["left"], part["right"]
            groups, rows = left.shape[:2]
            buffer = self._workspace.take("gram", (groups, rows, rows), left)
            exponent = torch.bmm(left, right.mT, out=buffer)
            gram = (exponent.clamp_(min=_LEAST_EXPONENT) if self._wide else exponent).exp2_()
            gram.diagonal(dim1=-2, dim2=-1).fill_(1.0)  # exact in spite of the rounded exponent
        else:
            assert self._kernel is not None
            gram = self._kernel.gram(part["kernel_inputs"])
        return gram if self._gram_of is None else gram.index_select(0, self._gram_of)


class Step:
    """Loss and parameter gradient of an objective at each step; this one has no state."""

    def __init__(self, objective: Objective, source: BatchSource) -> None:
        self._objective, self._source = objective, source
        self._next_bounds: tuple[float, float] | None = getattr(objective, "next_bounds", None)

    def compute(
        self, step: int, network: StackedNetwork, target: StackedNetwork | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and its gradient in ``network.flat`` (R, P) on the mini-batches of `step`.

        target: None where the next values come from the network itself. rates: the learning rates (R, 1).
        The gradient may lie in a buffer that the next call overwrites.
        """
        batch, gram = self._source.batch(step)
        if self._objective.next_from == "network":
            gradients = partial(self._objective.compute_gradients, discount=batch.discounts, gram=gram)
            return full_gradient(network, batch, gradients)
        # A semi-gradient: the next rows' values are held still.
        next_value = read_values((target or network).forward(batch.next_inputs), batch.next_readout)
        if self._next_bounds is not None:
            next_value = next_value.clamp(*self._next_bounds)
        outputs, pullback = network.forward_with_pullback(batch.inputs)
        residual = residual_of(batch, read_values(outputs, batch.readout), next_value)
        found = self._objective.compute_gradients(residual, batch.discounts, gram)
        return found.loss, pullback(spread_gradient(found.value, batch.readout))


class Memory:
    """Moving average m (R, f) of mini-batches' mean ψδ. share: kept per step, a number or (R, 1)."""

    def __init__(self, share: float | Tensor, sums: Tensor) -> None:
        self._share, self._sums, self.count = share, sums, 0

    def take(self, now: Float[Tensor, "run feature"], before: Tensor | None) -> Tensor:
        """Return the estimate of E ψδ from earlier mini-batches, then add this mini-batch to m.

        now: this mini-batch's mean ψδ. before: the same at the previous step's parameters; None at first.
        """
        if not self.count:
            remembered = now
        else:
            remembered = self._sums if before is None else self._sums + now - before
        keep = torch.as_tensor(self._share, dtype=now.dtype).clamp(max=self.count / (self.count + 1.0))
        self._sums = torch.lerp(now, remembered, keep.to(now.device))
        self.count += 1
        return remembered

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {"memory": self._sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._sums, self.count = state["memory"], int(state["count"])


class MemoryStep(Step):
    """Step that holds the memory and the previous step's parameters."""

    def __init__(self, objective: MemoryLoss, source: BatchSource, network: StackedNetwork) -> None:
        self._loss, self._source = objective, source
        self._before = network.flat.clone()
        self._memory = Memory(objective.memory, network.flat.new_zeros(len(network.flat), objective.features))

    def compute(self, step: int, network: Any, target: Any, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Update the memory; return loss and gradient."""
        batch, psi = self._source.batch(step)
        assert psi is not None
        old = None
        if self._memory.count:
            old = _residual_from(network.with_flat(self._before).forward(_both(batch)), batch)

        def gradients(residual: Rows) -> ValueGradients:
            now, before = (
                None if each is None else gram_product(each, psi) / each.shape[-1] for each in (residual, old)
            )
            assert now is not None
            remembered = self._memory.take(now, before)
            return self._loss.compute_gradients(residual, batch.discounts, remembered, psi)

        found = full_gradient(network, batch, gradients)
        self._before.copy_(network.flat)
        return found


class StackedAdam:
    """Adam on flat (R, P) parameters, a handful of operations for all replicas, a learning rate for each.

    epsilon: one number, or one for each replica, (R, 1).
    """

    def __init__(
        self, flat: Tensor, betas: tuple[float, float] = (0.9, 0.999), epsilon: float | Tensor = 1e-8
    ) -> None:
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


def full_gradient(
    network: StackedNetwork, batch: Batch, compute_gradients: Callable[[Tensor], ValueGradients]
) -> tuple[Tensor, Tensor]:
    """Loss and gradient through the values of both rows and next rows, in one pass of the network."""
    outputs, pullback = network.forward_with_pullback(_both(batch))
    found = compute_gradients(_residual_from(outputs, batch))
    assert found.next_value is not None
    own = spread_gradient(found.value, batch.readout)
    following = spread_gradient(found.next_value, batch.next_readout)
    return found.loss, pullback(torch.cat((own, following), dim=1))


def _both(batch: Batch) -> Tensor:
    """Inputs of rows and next rows, (R, 2 B, d)."""
    return torch.cat((batch.inputs, batch.next_inputs), dim=1)


def _residual_from(outputs: Tensor, batch: Batch) -> Tensor:
    """Residuals (R, B) from the outputs for rows and next rows, (R, 2 B, n)."""
    rows = batch.rewards.shape[1]
    value = read_values(outputs[:, :rows], batch.readout)
    return residual_of(batch, value, read_values(outputs[:, rows:], batch.next_readout))


def residual_of(batch: Batch, value: Tensor, next_value: Tensor) -> Tensor:
    """Residuals δ, (R, B)."""
    return torch.addcmul(batch.rewards, batch.discounts, next_value).sub_(value)


def read_values(outputs: Tensor, readout: Tensor | None) -> Tensor:
    """Values (R, B) from outputs (R, B, n)."""
    if readout is None:
        return outputs.squeeze(-1)
    return (outputs.mT * readout.mT).sum(dim=1)  # over the outer axis: summing a short inner one is slow


def spread_gradient(gradient: Tensor, readout: Tensor | None) -> Tensor:
    """The transpose of `read_values`: gradients in values (R, B) as gradients in outputs (R, B, n)."""
    return gradient.unsqueeze(-1) if readout is None else gradient.unsqueeze(-1) * readout
