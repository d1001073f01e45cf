"""One step of every replica: gather rows, value them, carry the objective's gradients to the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from koffline.batches import Batch, BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.kernels import Gaussian, Kernel
from koffline.objectives import Objective, ValueGradients
from koffline.replicas import StackedNetwork
from koffline.stacked_products import Workspace

_LEAST_EXPONENT = -120.0  # of two: powers below 2**-126 are slow to compute and to multiply


class BatchSource:
    """The mini-batches of every step, and their Gram matrices where there is a kernel."""

    def __init__(
        self,
        table: Table,
        kernel: Kernel | None,
        plan: ReplicaPlan,
        schedule: BatchSchedule,
        draws: Literal["one", "all"] = "one",
    ) -> None:
        self._schedule, self._packed = schedule, _PackedTable(table, kernel, plan, draws)
        self._kept: tuple[int, Batch, Tensor | None] | None = None

    def batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """Rows of every replica (R, B, …) and Gram matrices (G, B, B), until another step is asked for."""
        if self._kept is None or self._kept[0] != step:
            rows = self._schedule.rows(step)
            picks = self._schedule.draws(step, self._packed.draws) if self._packed.picks else None
            self._kept = step, *self._packed.gather(rows, picks)
        return self._kept[1], self._kept[2]


class StepComputer:
    """Computes losses and parameter gradients of a step; changes nothing."""

    def __init__(self, source: BatchSource, objective: Objective) -> None:
        self._source, self._objective = source, objective
        self._next_bounds: tuple[float, float] | None = getattr(objective, "next_bounds", None)

    def compute(
        self, step: int, network: StackedNetwork, target: StackedNetwork | None
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and its gradient in ``network.flat`` (R, P) on the mini-batches of `step`.

        The gradient may lie in a buffer that the next call overwrites.
        """
        batch, gram = self._source.batch(step)
        if self._objective.next_from == "network":
            gradients = partial(self._objective.compute_gradients, discount=batch.discounts, gram=gram)
            return full_gradient(network, batch, gradients)
        return self._semi_gradient(network, target or network, batch, gram)

    def _semi_gradient(
        self, network: StackedNetwork, following: StackedNetwork, batch: Batch, gram: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The next rows' values are held still; gradients reach the rows' own values."""
        next_value = read_values(following.forward(batch.next_inputs), batch.next_readout, batch.draws)
        if self._next_bounds is not None:
            next_value = next_value.clamp(*self._next_bounds)
        outputs, pullback = network.forward_with_pullback(batch.inputs)
        value = read_values(outputs, batch.readout, 1)
        residual = torch.addcmul(batch.rewards, batch.discounts, next_value).sub_(value)
        gradients = self._objective.compute_gradients(residual, batch.discounts, gram)
        return gradients.loss, pullback(spread_gradient(gradients.value, batch.readout, 1))


def full_gradient(
    network: StackedNetwork, batch: Batch, compute_gradients: Callable[[Tensor], ValueGradients]
) -> tuple[Tensor, Tensor]:
    """Rows and next rows go through the network together; gradients of residuals (R, B) reach both."""
    rows = batch.rewards.shape[1]
    inputs = torch.cat((batch.inputs, batch.next_inputs), dim=1)
    outputs, pullback = network.forward_with_pullback(inputs)
    value = read_values(outputs[:, :rows], batch.readout, 1)
    next_value = read_values(outputs[:, rows:], batch.next_readout, batch.draws)
    residual = torch.addcmul(batch.rewards, batch.discounts, next_value).sub_(value)
    gradients = compute_gradients(residual)
    assert gradients.next_value is not None
    own = spread_gradient(gradients.value, batch.readout, 1)
    following = spread_gradient(gradients.next_value, batch.next_readout, batch.draws)
    return gradients.loss, pullback(torch.cat((own, following), dim=1))


class _PackedTable:
    """The table's columns side by side, so that a mini-batch is one gather (two with drawn continuations)."""

    def __init__(
        self, table: Table, kernel: Kernel | None, plan: ReplicaPlan, draws: Literal["one", "all"]
    ) -> None:
        self.draws = table.draws
        self.picks = draws == "one" and table.draws > 1
        self._kernel, self._workspace = kernel, Workspace()
        self._separate = table.next_inputs.flatten(0, 1) if self.picks else None
        parts: dict[str, Tensor] = {"inputs": table.inputs}
        if not self.picks:
            parts["next_inputs"] = table.next_inputs.flatten(1)
        parts["rewards"], parts["discounts"] = table.rewards[:, None], table.discounts[:, None]
        if table.readout is not None and table.next_readout is not None:
            parts["readout"], parts["next_readout"] = table.readout, table.next_readout
        parts.update(_kernel_columns(table, kernel))
        self._names, self._widths = list(parts), [part.shape[1] for part in parts.values()]
        self._columns = torch.cat(list(parts.values()), dim=1).contiguous()
        self._wide = isinstance(kernel, Gaussian) and _spans_tiny_kernel_values(table, kernel)
        groups, device = len(plan.groups), table.inputs.device
        self._group_of = None
        self._repeat_gram = False
        if groups < len(plan):
            self._group_of = torch.tensor(plan.group_of, device=device)
            # One gram serves its replicas as a view when groups follow each other in equal sizes.
            each = torch.tensor([len(plan) // groups] * groups)
            in_order = tuple(torch.arange(groups).repeat_interleave(each).tolist())
            self._repeat_gram = in_order != plan.group_of

    def gather(self, rows: Tensor, picks: Tensor | None) -> tuple[Batch, Tensor | None]:
        """The batch of every replica (R, B, …) and the Gram matrix of every group (G, B, B)."""
        packed = self._columns.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # (G, B, C)
        gram = self._gram(packed)
        following = None
        if self._separate is not None and picks is not None:
            chosen = (rows * self.draws + picks).flatten()
            following = self._separate.index_select(0, chosen).unflatten(0, rows.shape)
        if self._group_of is not None:
            packed = packed.index_select(0, self._group_of)
            following = None if following is None else following.index_select(0, self._group_of)
        part = dict(zip(self._names, packed.split(self._widths, dim=-1), strict=True))
        if following is None:
            following = part["next_inputs"]
            if self.draws > 1:
                following = following.unflatten(-1, (self.draws, -1)).flatten(1, 2)
        batch = Batch(
            inputs=part["inputs"],
            next_inputs=following,
            rewards=part["rewards"].squeeze(-1),
            discounts=part["discounts"].squeeze(-1),
            readout=part.get("readout"),
            next_readout=part.get("next_readout"),
        )
        return batch, gram

    def _gram(self, packed: Tensor) -> Tensor | None:
        if self._kernel is None:
            return None
        columns = packed.split(self._widths, dim=-1)
        if isinstance(self._kernel, Gaussian):
            groups, rows = packed.shape[:2]
            buffer = self._workspace.take("gram", (groups, rows, rows), packed)
            exponent = torch.bmm(columns[-2], columns[-1].mT, out=buffer)
            gram = (exponent.clamp_(min=_LEAST_EXPONENT) if self._wide else exponent).exp2_()
            gram.diagonal(dim1=-2, dim2=-1).fill_(1.0)  # exactly, whatever the rounding of the exponent
        else:
            gram = self._kernel.gram(columns[-1])
        if self._group_of is None or not self._repeat_gram:
            return gram
        return gram.index_select(0, self._group_of)


def _kernel_columns(table: Table, kernel: Kernel | None) -> dict[str, Tensor]:
    """Columns the kernel needs: for the Gaussian those whose product is its exponent, computed once."""
    if kernel is None:
        return {}
    if table.kernel_inputs is None:
        raise ConfigError("the objective has a kernel, the table no kernel_inputs; give them")
    if isinstance(kernel, Gaussian):
        left, right = kernel.exponent_columns(table.kernel_inputs)
        return {"left": left, "right": right}
    return {"kernel_inputs": table.kernel_inputs}


def _spans_tiny_kernel_values(table: Table, kernel: Gaussian) -> bool:
    """Whether opposite corners of the data have kernel values that single precision cannot hold normally."""
    assert table.kernel_inputs is not None
    corners = torch.stack((table.kernel_inputs.amin(dim=0), table.kernel_inputs.amax(dim=0)))
    left, right = kernel.exponent_columns(corners)
    return float((left[0] * right[1]).sum()) < _LEAST_EXPONENT


def read_values(outputs: Tensor, readout: Tensor | None, draws: int) -> Tensor:
    """Values (R, B) from outputs (R, B·m, n): the readout of each row, averaged over its m continuations."""
    if draws > 1:
        outputs = outputs.unflatten(1, (-1, draws)).mean(dim=2)
    if readout is None:
        return outputs.squeeze(-1)
    return (outputs.mT * readout.mT).sum(dim=1)  # over the outer axis: summing a short inner one is slow


def spread_gradient(gradient: Tensor, readout: Tensor | None, draws: int) -> Tensor:
    """The transpose of `read_values`: gradients in values (R, B) as gradients in outputs (R, B·m, n)."""
    spread = gradient.unsqueeze(-1) if readout is None else gradient.unsqueeze(-1) * readout
    return spread.repeat_interleave(draws, dim=1) / draws if draws > 1 else spread
