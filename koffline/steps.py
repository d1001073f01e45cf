"""One step of every replica: gather rows, value them, carry the objective's gradients to the parameters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from koffline.batches import Batch, BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.kernels import Gaussian, Kernel
from koffline.objectives import Objective
from koffline.replicas import StackedNetwork


class StepComputer:
    """Computes losses and parameter gradients of a step; changes nothing."""

    def __init__(
        self,
        table: Table,
        objective: Objective,
        plan: ReplicaPlan,
        schedule: BatchSchedule,
        draws: Literal["one", "all"] = "one",
    ) -> None:
        if objective.kernel is not None and table.kernel_inputs is None:
            raise ConfigError("the objective needs a kernel, the table has no kernel_inputs; give them")
        self._objective, self._schedule = objective, schedule
        self._packed = _PackedTable(table, objective, draws)
        groups = len(plan.groups)
        group_of = torch.tensor(plan.group_of, device=table.inputs.device)
        self._group_of = None if groups == len(plan) else group_of
        # Grams are shared as a view when groups follow each other in equal sizes, else repeated.
        even = len(plan) % groups == 0
        in_order = even and torch.equal(
            group_of.cpu(), torch.arange(groups).repeat_interleave(len(plan) // groups)
        )
        self._repeat_gram = None if in_order else group_of

    def compute(
        self, step: int, network: StackedNetwork, target: StackedNetwork | None
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and its gradient in ``network.flat`` (R, P) on the mini-batches of `step`."""
        rows = self._schedule.rows(step)
        picks = self._schedule.draws(step, self._packed.draws) if self._packed.picks else None
        batch, gram = self._packed.gather(rows, picks, self._group_of)
        if gram is not None and self._repeat_gram is not None:
            gram = gram[self._repeat_gram]
        if self._objective.next_from == "network":
            return self._full_gradient(network, batch, gram)
        return self._semi_gradient(network, network if target is None else target, batch, gram)

    def _full_gradient(
        self, network: StackedNetwork, batch: Batch, gram: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows and next rows go through the network together; gradients reach both."""
        rows = batch.rewards.shape[1]
        outputs, pullback = network.forward_with_pullback(torch.cat((batch.inputs, batch.next_inputs), dim=1))
        value = _read(outputs[:, :rows], batch.readout, 1)
        next_value = _read(outputs[:, rows:], batch.next_readout, batch.draws)
        residual = batch.rewards + batch.discounts * next_value - value
        gradients = self._objective.compute_gradients(residual, batch.discounts, gram)
        assert gradients.next_value is not None
        in_outputs = torch.cat(
            (
                _spread(gradients.value, batch.readout, 1),
                _spread(gradients.next_value, batch.next_readout, batch.draws),
            ),
            dim=1,
        )
        return gradients.loss, pullback(in_outputs)

    def _semi_gradient(
        self, network: StackedNetwork, following: StackedNetwork, batch: Batch, gram: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The next rows' values are held still; gradients reach the rows' own values."""
        next_value = _read(following.forward(batch.next_inputs), batch.next_readout, batch.draws)
        outputs, pullback = network.forward_with_pullback(batch.inputs)
        residual = batch.rewards + batch.discounts * next_value - _read(outputs, batch.readout, 1)
        gradients = self._objective.compute_gradients(residual, batch.discounts, gram)
        return gradients.loss, pullback(_spread(gradients.value, batch.readout, 1))


class _PackedTable:
    """The table's columns side by side, so that a mini-batch is one gather (two with drawn continuations)."""

    def __init__(self, table: Table, objective: Objective, draws: Literal["one", "all"]) -> None:
        self.draws = table.draws
        self.picks = draws == "one" and table.draws > 1
        self._kernel = objective.kernel
        self._separate = table.next_inputs.reshape(-1, table.inputs.shape[1]) if self.picks else None
        parts: dict[str, Tensor] = {"inputs": table.inputs}
        if not self.picks:
            parts["next_inputs"] = table.next_inputs.flatten(1)
        parts["rewards"], parts["discounts"] = table.rewards[:, None], table.discounts[:, None]
        if table.readout is not None and table.next_readout is not None:
            parts["readout"], parts["next_readout"] = table.readout, table.next_readout
        if self._kernel is not None:
            parts.update(_kernel_columns(table, self._kernel))
        self._slices: dict[str, slice] = {}
        start = 0
        for name, part in parts.items():
            self._slices[name] = slice(start, start + part.shape[1])
            start += part.shape[1]
        self._columns = torch.cat(list(parts.values()), dim=1).contiguous()

    def gather(
        self, rows: Tensor, picks: Tensor | None, group_of: Tensor | None
    ) -> tuple[Batch, Tensor | None]:
        """The batch of every replica (R, B, …) and the Gram matrix of every group (G, B, B)."""
        packed = self._columns[rows]  # (G, B, C)
        gram = self._gram(packed)
        following = None
        if self._separate is not None and picks is not None:
            following = self._separate[rows * self.draws + picks]
        if group_of is not None:
            packed = packed.index_select(0, group_of)
            following = None if following is None else following.index_select(0, group_of)
        part = {name: packed[..., where] for name, where in self._slices.items()}
        inputs = part["inputs"]
        if following is None:
            following = part["next_inputs"].reshape(len(packed), -1, inputs.shape[-1])
        batch = Batch(
            inputs=inputs,
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
        if isinstance(self._kernel, Gaussian):
            left, right = packed[..., self._slices["left"]], packed[..., self._slices["right"]]
            return torch.bmm(left, right.mT).exp_()
        return self._kernel.gram(packed[..., self._slices["kernel_inputs"]])


def _kernel_columns(table: Table, kernel: Kernel) -> dict[str, Tensor]:
    """Columns the kernel needs: for the Gaussian those whose product is its exponent, computed once."""
    assert table.kernel_inputs is not None
    if isinstance(kernel, Gaussian):
        left, right = kernel.exponent_columns(table.kernel_inputs)
        return {"left": left, "right": right}
    return {"kernel_inputs": table.kernel_inputs}


def _read(outputs: Tensor, readout: Tensor | None, draws: int) -> Tensor:
    """Values (R, B) from outputs (R, B·m, n): the readout of each row, averaged over its m continuations."""
    if draws > 1:
        outputs = outputs.unflatten(1, (-1, draws)).mean(dim=2)
    return outputs.squeeze(-1) if readout is None else (outputs * readout).sum(dim=-1)


def _spread(gradient: Tensor, readout: Tensor | None, draws: int) -> Tensor:
    """The transpose of `_read`: gradients in values (R, B) as gradients in outputs (R, B·m, n)."""
    spread = gradient.unsqueeze(-1) if readout is None else gradient.unsqueeze(-1) * readout
    return spread.repeat_interleave(draws, dim=1) / draws if draws > 1 else spread
