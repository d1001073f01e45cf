"""A reward for the unknown: how far kernel regressions of the runs' own states still disagree.

An ensemble of ridge regressions on random features ψ of a Gaussian kernel, each with its own noise, spreads
at s by √(ψ(s)ᵀ (I + Σ ψψᵀ)⁻¹ ψ(s)), the sum over the states seen so far: from 1 where the kernel sees none
of them to 0. It is the spread of infinitely many replicas in closed form. (Rasmussen & Williams 2006, ch. 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures, Gaussian
from koffline.online.critics import wide
from koffline.online.paths import Minibatch

_FEATURES = 128
_BANDWIDTH = 0.5  # times the root mean squared distance of standardised states
_EVERY = 20  # iterations between two inversions


class Exploration:
    """Bonuses of K runs for the states that their steps reach; ``scales``: of each run, in scaled reward.

    States are standardised as they were when seen.
    """

    def __init__(self, scales: Sequence[float], dimension: int, dtype: torch.dtype) -> None:
        bandwidth = _BANDWIDTH * (2.0 * dimension) ** 0.5
        generator = torch.Generator().manual_seed(0)
        frequencies = Gaussian(bandwidth).draw_frequencies(dimension, _FEATURES // 2, generator)
        self._features = FourierFeatures(frequencies.to(dtype))
        self._scales = torch.tensor(scales, dtype=dtype).unsqueeze(1)
        self._seen = torch.eye(_FEATURES, dtype=dtype).repeat(len(scales), 1, 1)
        self._inverse, self._iterations = self._seen.clone(), 0

    def update(self, states: Float[Tensor, "run state d"]) -> None:
        """Take in standardised states."""
        psi = self._features(states)
        self._seen += psi.mT @ psi
        if self._iterations % _EVERY == 0:
            self._inverse = torch.linalg.inv(self._seen)
        self._iterations += 1

    def add(self, batch: Minibatch) -> Minibatch:
        """The mini-batch with rewards that hold the bonuses."""
        reached = batch.rows + batch.rows // batch.rewards.shape[2] + 1  # rows of inputs, T + 1 a path
        states = batch.inputs.flatten(1, 2)
        psi = self._features(states.gather(1, wide(reached, states)))
        spread = ((psi @ self._inverse) * psi).sum(dim=2).clamp(min=0.0).sqrt()
        bonus = self._scales * spread * batch.covered
        rewards = batch.rewards.flatten(1).scatter_add(1, batch.rows, bonus)
        return replace(batch, rewards=rewards.view_as(batch.rewards))

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {"seen": self._seen.clone(), "inverse": self._inverse.clone(), "iterations": self._iterations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._seen, self._inverse, self._iterations = (
            state[name] for name in ("seen", "inverse", "iterations")
        )
