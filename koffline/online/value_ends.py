"""A mini-batch of windows, V at both their ends, and the way back to the gradient in V's parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.online.critics import CriticGradients
from koffline.online.networks import AgentStack
from koffline.online.windows import Windows

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Minibatch:
    """Sampled paths as tensors: inputs (K, B, T + 1, d) standardised, rewards scaled, windows cut.

    rows, covered (K, R): the steps the policy is asked about, see PackedSteps.
    """

    inputs: Tensor
    actions: Tensor
    rewards: Tensor
    windows: Windows
    weights: Tensor
    discounts: Tensor
    valid: Tensor
    rows: Tensor
    covered: Tensor


class ValueEnds:
    """V at both ends of every window, (K, M), and the way back: gradients in them to gradients in V's row.

    slow: the runs whose V(end) is the slow copy's. V is evaluated at the ends alone where windows are few,
    else at all T + 1 steps of a path.
    """

    def __init__(self, online: AgentStack, target: AgentStack, slow: Rows | None, batch: Minibatch) -> None:
        runs, paths, length, width = batch.inputs.shape
        starts, ends = (
            torch.from_numpy(np.array(part)) for part in (batch.windows.starts, batch.windows.ends)
        )
        count = starts.shape[2]
        if 2 * count < length:
            points = torch.cat((starts, ends), dim=2)
            inputs = rows_at(batch.inputs, points.unsqueeze(3))
            starts = torch.arange(count).expand(runs, paths, count)
            ends, length = starts + count, 2 * count
        else:
            inputs, starts = batch.inputs, starts.clamp(max=length - 1)
            ends = ends.clamp(max=length - 1)
        offset = (torch.arange(paths) * length)[None, :, None]
        self._starts, self._ends = (starts + offset).flatten(1), (ends + offset).flatten(1)
        inputs = inputs.reshape(runs, paths * length, width)
        outputs, self._pull_value = online.value.forward_with_pullback(inputs)
        values = outputs.squeeze(2)
        self.start, self.end = values.gather(1, self._starts), values.gather(1, self._ends)
        if slow is not None:
            flat = target.flat[slow][:, online.shape.parts[2]]
            held = target.value.with_flat(flat).forward(inputs[slow]).squeeze(2)
            self.end[slow] = held.gather(1, self._ends[slow])
        self.discount, self.valid = batch.discounts.flatten(1), batch.valid.flatten(1)
        self._shape = values.shape

    def pull(self, gradients: CriticGradients) -> Tensor:
        """The gradient in V's parameters, (K, ·)."""
        inside = gradients.start.new_zeros(self._shape)
        inside.scatter_add_(1, self._starts, gradients.start)
        inside.scatter_add_(1, self._ends, gradients.end)
        return self._pull_value(inside.unsqueeze(2))


def rows_at(steps: Tensor, index: Tensor) -> Tensor:
    """Rows of (R, B, T, c) at steps (R, B, W, 1): (R, B, W, c)."""
    return steps.gather(2, index.expand(*index.shape[:3], steps.shape[3]))
