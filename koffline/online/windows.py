"""Windows of d steps on sampled paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.online.config import OnlineConfig
from koffline.online.networks import InputMoments
from koffline.online.paths import Paths

Rows = slice | Tensor


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

    def of(self, runs: Rows) -> Minibatch:
        """Those runs' windows."""
        return Minibatch(**{name: part[runs] for name, part in vars(self).items()})


class WindowCutter:
    """Cuts windows of min(d, what is left of the path) steps; a time limit is no terminal state."""

    def __init__(self, configs: Sequence[OnlineConfig], dtype: torch.dtype) -> None:
        common = configs[0]
        self._dtype, self._length = dtype, common.path_length
        self._count = 0 if common.streaming else common.windows_per_path
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
