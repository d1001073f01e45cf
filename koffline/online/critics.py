"""Windows of d steps on sampled paths, V at both ends of each, and four critics in closed form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.online.config import OnlineConfig
from koffline.online.networks import AgentStack, InputMoments
from koffline.online.paths import Paths

Rows = slice | Tensor
_SMALLEST_BANDWIDTH = 1e-6


@dataclass(frozen=True, eq=False)
class Minibatch:
    """B paths of K runs with W windows on each; a window that would start past its path's end is not valid.

    inputs (K, B, T + 1, d) standardised; actions; rewards (K, B, T) scaled. starts, ends (K, B, W): steps;
    valid (K, B, W). weights (K, B, W, T): γ^(t − start) within the window, else 0. discounts (K, B, W):
    γ^length of what follows, 0 after a terminal step. rows (K, R): the steps b · T + t that some window
    covers, filler where a run has fewer; covered (K, R): 1 for a step, 0 for filler, which repeats step 0.
    """

    inputs: Tensor
    actions: Tensor
    rewards: Tensor
    starts: Tensor
    ends: Tensor
    valid: Tensor
    weights: Tensor
    discounts: Tensor
    rows: Tensor
    covered: Tensor


class WindowCutter:
    """Cuts windows of min(d, what is left of the path) steps; a time limit is no terminal state."""

    def __init__(self, configs: Sequence[OnlineConfig], dtype: torch.dtype) -> None:
        self._dtype, self._count, self._length = dtype, configs[0].windows_per_path, configs[0].path_length
        gamma, self._window_length, scale = (
            np.array([getattr(config, name) for config in configs])[:, None, None]
            for name in ("gamma", "window_length", "reward_scale")
        )
        self._powers = gamma[:, 0] ** np.arange(self._length + 1)  # (K, T + 1)
        self._reward_scale = self._tensor(scale)

    def sample(
        self, paths: Paths, generators: Sequence[np.random.Generator], moments: InputMoments
    ) -> Minibatch:
        """Windows drawn uniformly within each path, each run's from its own generator; or all."""
        lengths = paths.lengths
        if not self._count:
            every = np.broadcast_to(np.arange(self._length), (*lengths.shape, self._length))
            return self.cut(paths, every, moments)
        uniform = np.stack([generator.random((lengths.shape[1], self._count)) for generator in generators])
        return self.cut(paths, (uniform * lengths[..., None]).astype(np.int64), moments)

    def cut(
        self, paths: Paths, starts: Int[np.ndarray, "run path window"], moments: InputMoments
    ) -> Minibatch:
        """Windows from the given starts on sampled paths (K, B, …)."""
        lengths = paths.lengths[..., None]  # (K, B, 1)
        size = np.clip(np.minimum(self._window_length, lengths - starts), 0, None)
        ends = starts + size
        offsets = np.arange(self._length) - starts[..., None]  # (K, B, W, T)
        inside = (offsets >= 0) & (offsets < size[..., None])
        run = np.arange(len(starts))[:, None, None]
        weights = np.where(inside, self._powers[run[..., None], np.clip(offsets, 0, None)], 0.0)
        valid, is_final = size > 0, (ends == lengths) & paths.terminated[..., None]
        discounts = np.where(is_final, 0.0, self._powers[run, size]) * valid
        rows, covered = _pack_steps(weights)
        mean, inverse = (self._tensor(part)[:, None, None] for part in (moments.mean, 1.0 / moments.std))
        actions = torch.from_numpy(paths.actions)
        return Minibatch(
            inputs=(self._tensor(paths.observations) - mean) * inverse,
            actions=actions if actions.dtype == torch.int64 else actions.to(self._dtype),
            rewards=self._tensor(paths.rewards) * self._reward_scale,
            starts=torch.from_numpy(np.array(starts)),
            ends=torch.from_numpy(ends),
            valid=self._tensor(valid),
            weights=self._tensor(weights),
            discounts=self._tensor(discounts),
            rows=torch.from_numpy(rows),
            covered=self._tensor(covered),
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._dtype)


def _pack_steps(weights: Float[np.ndarray, "run path window step"]) -> tuple[np.ndarray, np.ndarray]:
    """Steps outside every window need no policy: with one window of ten a path, nearly half of all."""
    inside = (weights != 0.0).any(axis=2).reshape(len(weights), -1)
    run, step = np.nonzero(inside)
    counts = np.bincount(run, minlength=len(inside))
    place = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((len(inside), int(counts.max(initial=1))), dtype=np.int64)
    index[run, place] = step
    return index, np.arange(index.shape[1]) < counts[:, None]


class ValueEnds:
    """V at both ends of every window, (K, M), and the way back: gradients in them to gradients in V's row.

    slow: the runs whose V(end) is the slow copy's. V is evaluated at the ends alone where windows are few,
    else at all T + 1 steps of a path.
    """

    def __init__(self, online: AgentStack, target: AgentStack, slow: Rows | None, batch: Minibatch) -> None:
        runs, paths, length, width = batch.inputs.shape
        count = batch.starts.shape[2]
        if 2 * count < length:
            inputs = rows_at(batch.inputs, torch.cat((batch.starts, batch.ends), dim=2).unsqueeze(3))
            starts = torch.arange(count).expand(runs, paths, count)
            ends, length = starts + count, 2 * count
        else:
            inputs = batch.inputs
            starts, ends = (part.clamp(max=length - 1) for part in (batch.starts, batch.ends))
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


@dataclass(frozen=True, eq=False)
class CriticGradients:
    """loss (R,), and its gradients (R, M) in V(start) and in V(end); zero where no gradient flows."""

    loss: Tensor
    start: Tensor
    end: Tensor


@dataclass(frozen=True, eq=False)
class Gram:
    """Kernel matrices (R, M, M), the median distances (R,) and the mean off-diagonal values (R,)."""

    matrix: Tensor
    median: Tensor
    off_diagonal: Tensor


def squared_error_gradients(
    residual: Float[Tensor, "run window"],
    discount: Float[Tensor, "run window"],
    valid: Float[Tensor, "run window"],
    through_end: Float[Tensor, "run 1"],
) -> CriticGradients:
    """Mean squared residual over valid windows; through both ends (1: RG) or the start alone (0: TD(0), FVI).

    (Feng et al. 2019, equ:rg)
    """
    count = valid.sum(dim=1, keepdim=True)
    kept = residual * valid
    slope = kept * (2.0 / count)
    loss = (kept * kept).sum(dim=1) / count.squeeze(1)
    return CriticGradients(loss, -slope, slope * discount * through_end)


def kernel_gradients(
    residual: Float[Tensor, "run window"],
    discount: Float[Tensor, "run window"],
    valid: Float[Tensor, "run window"],
    gram: Float[Tensor, "run window window"],
    diag_weight: Float[Tensor, "run 1"],
) -> CriticGradients:
    """(1 − w) U + w mean δ² over m valid windows; w = ``diag_weight``, NaN for 1/m. No target network.

    (Feng et al. 2019, sec:batch_lv)
    """
    count = valid.sum(dim=1, keepdim=True)
    weight = torch.where(diag_weight.isnan(), 1.0 / count, diag_weight)
    kept = residual * valid
    off = (1.0 - weight) / (count * (count - 1.0))
    product = torch.bmm(kept.unsqueeze(1), gram).squeeze(1)  # (R, 1, M) @ (R, M, M); the diagonal is one
    weighted = product * off + (weight / count - off) * kept
    weighted = weighted * valid
    loss = (weighted * kept).sum(dim=1)
    return CriticGradients(loss, -2.0 * weighted, 2.0 * weighted * discount)


def gaussian_gram(
    inputs: Float[Tensor, "run window column"],
    valid: Float[Tensor, "run window"],
    bandwidth_scale: Float[Tensor, "run 1"],
) -> Gram:
    """exp(−‖x − y‖² / h²), h = bandwidth_scale · the median distance of a run's valid windows.

    (Feng et al. 2019, sec:exp_detail)
    """
    squares = _squared_distances(inputs)
    median = _median_distance(squares, valid)
    scale = -1.0 / (bandwidth_scale.squeeze(1) * median).square()
    matrix = (squares * scale[:, None, None]).exp_()
    count = valid.sum(dim=1)
    total = torch.bmm(torch.bmm(valid.unsqueeze(1), matrix), valid.unsqueeze(2)).reshape(-1)
    return Gram(matrix, median, (total - count) / (count * (count - 1.0)))


def _squared_distances(inputs: Tensor) -> Tensor:
    """(R, M, M), zero on the diagonal."""
    centred = inputs - inputs.mean(dim=1, keepdim=True)
    norms = centred.square().sum(dim=2)
    squares = torch.baddbmm(norms.unsqueeze(1) + norms.unsqueeze(2), centred, centred.mT, alpha=-2.0).clamp_(
        min=0.0
    )
    # What is left of equal rows is rounding; it must not become the bandwidth.
    rounding = 8.0 * torch.finfo(squares.dtype).eps * (norms.unsqueeze(1) + norms.unsqueeze(2))
    squares.masked_fill_(squares < rounding, 0.0)
    squares.diagonal(dim1=1, dim2=2).zero_()
    return squares


def _median_distance(squares: Tensor, valid: Tensor) -> Tensor:
    """Median distance of each run's pairs of valid windows, (R,); numpy selects many times faster."""
    pairs = squares.flatten(1).numpy()[:, _upper(squares.shape[1])]  # (R, M(M−1)/2)
    if bool((valid > 0.0).all()):
        middle = [(pairs.shape[1] - 1) // 2, pairs.shape[1] // 2]
        found = np.sqrt(np.partition(pairs, middle, axis=1)[:, middle]).mean(axis=1)
    else:
        kept = valid.numpy() > 0.0
        both = (kept[:, :, None] & kept[:, None, :]).reshape(len(kept), -1)[:, _upper(squares.shape[1])]
        found = np.array([np.median(np.sqrt(row[keep])) for row, keep in zip(pairs, both, strict=True)])
    return torch.from_numpy(np.maximum(found, _SMALLEST_BANDWIDTH).astype(pairs.dtype))


@functools.cache
def _upper(rows: int) -> np.ndarray:
    """Where the entries above the diagonal lie in a flattened matrix."""
    return np.flatnonzero(np.triu(np.ones((rows, rows), dtype=bool), 1))
