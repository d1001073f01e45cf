"""The kernel loss with a memory: a streaming K-loss without double samples and without a stored data set.

‖E ψδ‖² has the gradient 2 (E ψδ)ᵀ E ψ∇δ, a product of two expectations that one mini-batch cannot estimate
without the bias of its diagonal. Here the first factor is a moving average m of earlier mini-batches, so that
it is independent of the rows that give the second. Parameters move while m is gathered: each step adds what
the move changed on its own rows, ψ(δ(θ) − δ(θ before)), which leaves no bias at any length of the memory.
(Feng et al. 2019, thm:eigen; the correction as in Cutkosky & Orabona 2019, STORM)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError
from koffline.kernel_loss import check_diag_weight
from koffline.kernels import FourierFeatures, Gaussian, Laplacian, random_fourier_features
from koffline.objectives import NextFrom, Rows, ValueGradients, gram_product
from koffline.replicas import StackedNetwork
from koffline.steps import BatchSource, Step, full_gradient, read_values, residual_of


@dataclass(frozen=True)
class RandomFeatures:
    """Random features ψ with ψ(x)ᵀψ(y) ≈ k(x, y), used in place of a kernel: `gram` returns the features."""

    base: Gaussian | Laplacian
    count: int
    seed: int

    def gram(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """Features ψ(x)."""
        return self._map(x.shape[-1])(x)

    def _map(self, dimension: int) -> FourierFeatures:
        if dimension not in self._maps:
            generator = torch.Generator().manual_seed(self.seed)
            self._maps[dimension] = random_fourier_features(self.base, dimension, self.count, generator)
        return self._maps[dimension]

    @cached_property
    def _maps(self) -> dict[int, FourierFeatures]:
        return {}


@dataclass(frozen=True)
class MemoryLoss:
    """The loss (1 − w) ‖E ψδ‖² + w E δ², in whose first term one factor E ψδ is remembered.

    memory: β, the share of m that a step keeps, so that m averages about 1/(1 − β) mini-batches. diag_weight:
    w; the loss without a memory has 1/n for n rows. features: number of random features, even. is_corrected:
    whether m follows the parameters. (Feng et al. 2019, thm:eigen)
    """

    base: Gaussian | Laplacian
    memory: float = 0.97
    diag_weight: float = 0.003
    features: int = 500
    is_corrected: bool = True
    seed: int = 0
    next_from: NextFrom = field(default="network", init=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory < 1.0:
            raise ConfigError(f"memory is {self.memory}; give a number in [0, 1)")
        check_diag_weight(self.diag_weight)

    @cached_property
    def kernel(self) -> RandomFeatures:
        """Feature map of the rows of a mini-batch."""
        return RandomFeatures(self.base, self.features, self.seed)

    def compute_gradients(
        self, residual: Rows, discount: Rows, remembered: Tensor, psi: Tensor
    ) -> ValueGradients:
        """Loss (1 − w) mᵀψᵀδ/n + w mean δ² and its gradients, unbiased if m is independent of the rows."""
        rows, weight = residual.shape[-1], self.diag_weight
        slope = (1.0 - weight) * gram_product(remembered, psi.mT) + weight * residual
        slope = slope * (2.0 / rows)
        return ValueGradients((slope * residual).sum(dim=-1) / 2.0, -slope, slope * discount)


class Memory:
    """Moving average m (R, f) of mini-batches' mean ψδ. share: kept per step, a number or (R, 1)."""

    def __init__(self, share: float | Tensor, sums: Tensor) -> None:
        self._share, self._sums, self.count = share, sums, 0

    def take(self, now: Float[Tensor, "run feature"], before: Tensor | None) -> Tensor:
        """Return the estimate of E ψδ from earlier mini-batches, then add this mini-batch to m.

        now: this mini-batch's mean ψδ. before: the same at the previous step's parameters; None without
        correction.
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
        if self._memory.count and self._loss.is_corrected:
            rows = batch.rewards.shape[1]
            both = network.with_flat(self._before).forward(
                torch.cat((batch.inputs, batch.next_inputs), dim=1)
            )
            value = read_values(both[:, :rows], batch.readout)
            old = residual_of(batch, value, read_values(both[:, rows:], batch.next_readout))

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

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {**self._memory.state_dict(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._memory.load_state_dict(state)
        self._before.copy_(state["before"])
