"""Windows of d steps on sampled paths: their ends, weights and discounts, and V at both ends of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.data.paths import Paths
from koffline.online.critics import CriticGradients
from koffline.online.networks import AgentStack

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class WindowRules:
    """Per-run numbers (K,): γ, d and the oddities of the original; the paths' length T is common."""

    gamma: np.ndarray
    window_length: np.ndarray
    legacy_timeouts: np.ndarray
    legacy_discount: np.ndarray
    path_length: int

    @property
    def powers(self) -> Float[np.ndarray, "run power"]:
        """γ^0 … γ^T."""
        return self.gamma[:, None] ** np.arange(self.path_length + 1)


@dataclass(frozen=True, eq=False)
class Windows:
    """W windows on each of B paths of K runs; a window that would start past its path's end is not valid.

    starts, ends (K, B, W): steps; valid (K, B, W). weights (K, B, W, T): γ^(t − start) within the window,
    else 0. discounts (K, B, W): γ^length of what follows, 0 after a terminal step.
    """

    starts: Int[np.ndarray, "run path window"]
    ends: Int[np.ndarray, "run path window"]
    valid: np.ndarray
    weights: Float[np.ndarray, "run path window step"]
    discounts: Float[np.ndarray, "run path window"]


@dataclass(frozen=True, eq=False)
class PackedSteps:
    """The steps that some window covers, (K, R) numbers b · T + t; filler where a run has fewer.

    covered (K, R): 1 for a step, 0 for filler, which repeats step 0.
    """

    index: Int[np.ndarray, "run row"]
    covered: Float[np.ndarray, "run row"]


def pack_steps(windows: Windows) -> PackedSteps:
    """Steps outside every window need no policy: with one window of ten a path, nearly half of all."""
    inside = (windows.weights != 0.0).any(axis=2).reshape(len(windows.starts), -1)
    run, step = np.nonzero(inside)
    counts = np.bincount(run, minlength=len(inside))
    place = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((len(inside), int(counts.max(initial=1))), dtype=np.int64)
    index[run, place] = step
    return PackedSteps(index, (np.arange(index.shape[1]) < counts[:, None]).astype(float))


def draw_starts(
    generators: Sequence[np.random.Generator], lengths: Int[np.ndarray, "run path"], windows: int
) -> Int[np.ndarray, "run path window"]:
    """Uniform starts within each path, each run's from its own generator."""
    uniform = np.stack([generator.random((lengths.shape[1], windows)) for generator in generators])
    return (uniform * lengths[..., None]).astype(np.int64)


def all_starts(lengths: Int[np.ndarray, "run path"], path_length: int) -> Int[np.ndarray, "run path window"]:
    """Every step of every path, also those past its end."""
    return np.broadcast_to(np.arange(path_length), (*lengths.shape, path_length))


def cut_windows(paths: Paths, starts: Int[np.ndarray, "run path window"], rules: WindowRules) -> Windows:
    """Windows of min(d, what is left of the path) steps from the given starts.

    legacy_timeouts: a time limit ends the value as a terminal state does. legacy_discount: what follows a
    window that ends with its path is discounted by one γ too few. Both as in the code the paper modified.
    """
    lengths = paths.lengths[..., None]  # (K, B, 1)
    size = np.clip(np.minimum(rules.window_length[:, None, None], lengths - starts), 0, None)
    ends = starts + size
    at_end = ends == lengths
    offsets = np.arange(rules.path_length) - starts[..., None]  # (K, B, W, T)
    inside = (offsets >= 0) & (offsets < size[..., None])
    powers, run = rules.powers, np.arange(len(starts))[:, None, None]
    weights = np.where(inside, powers[run[..., None], np.clip(offsets, 0, None)], 0.0)
    final = paths.terminated | (paths.truncated & rules.legacy_timeouts[:, None])
    exponent = np.clip(size - (at_end & rules.legacy_discount[:, None, None]), 0, None)
    discounts = np.where(at_end & final[..., None], 0.0, powers[run, exponent])
    valid = size > 0
    return Windows(starts, ends, valid, weights, discounts * valid)


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
