"""The quadratic form of `koffline.ope.bellman_test.forms` in explicit features, for many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.bellman_test.forms import GramForm, Moments, SignDraws, random_signs

_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class FeatureForm:
    """Scores in m features, computed block by block: O(G m) memory is never needed.

    ``scores``, ``shift_scores (G, N)`` sparse of one pattern, ``inputs (N, k)``. That the spread of the null
    grows with an alternative is left out: with thousands of scores those of interest are small against the
    noise.
    """

    scores: sparse.csr_matrix
    shift_scores: sparse.csr_matrix
    inputs: Float[Tensor, "row k"]
    features: FourierFeatures
    rows: int  # n, those of positive weight

    @property
    def statistic(self) -> float:
        """T = ‖Σ_g f_g‖²."""
        return float(np.square(self._totals[0]).sum())

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T* = ‖Σ_g ε_g f_g‖² for B draws; O(G m B) time, one pass over the rows."""
        projected = torch.zeros(draws, self._totals.shape[1], dtype=torch.float64)
        own = torch.zeros(draws, dtype=torch.float64)
        mean = shift_own = 0.0
        for block, shifts in self._blocks():
            signs = torch.as_tensor(random_signs((len(block), draws), generator))
            projected.addmm_(signs.mT, block)  # (B, g) @ (g, m)
            own += signs.mT @ (block * shifts).sum(dim=1)
            mean += float(block.square().sum())
            shift_own += float(shifts.square().sum())
        found, shift = projected.numpy(), self._totals[1]
        statistics, linear = np.square(found).sum(axis=1), found @ shift - own.numpy()
        variance, noise = float(statistics.var()), float(np.square(linear).mean())
        return SignDraws(statistics, linear, Moments(mean, variance, noise, float(shift @ shift) - shift_own))

    def moments(self) -> Moments:
        """Exact for random signs and the kernel of the features, but for the growth of the spread."""
        covariance, fourth, linear, shift_own = self._sums
        shift = self._totals[1]
        variance = 2.0 * max(float(np.square(covariance).sum()) - fourth, 0.0)
        return Moments(float(np.trace(covariance)), variance, linear, float(shift @ shift) - shift_own)

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of Σ_g f_g f_gᵀ: the law of normal multipliers, which has 2 Σ m_gg² more variance."""
        return np.linalg.eigvalsh(self._sums[0]), 0.0

    def condensed(self) -> GramForm:
        """The same form as products of few scores: O(G² m), and nothing is left out."""
        pairs = list(self._blocks())
        scores, shifts = (torch.cat([pair[side] for pair in pairs]).numpy() for side in (0, 1))
        return GramForm(scores @ scores.T, shifts @ scores.T, shifts @ shifts.T)

    @cached_property
    def _totals(self) -> np.ndarray:
        """(2, m): Σ_g f_g and Σ_g s_g."""
        coefficients = np.concatenate(
            [np.asarray(part.sum(axis=0)).reshape(1, -1) for part in (self.scores, self.shift_scores)]
        )
        total = torch.zeros(2, 2 * self.features.frequencies.shape[1], dtype=torch.float64)
        for start in range(0, len(self.inputs), _BLOCK):
            part = torch.as_tensor(coefficients[:, start : start + _BLOCK])
            total += part @ self.features(self.inputs[start : start + _BLOCK])
        return total.numpy() / np.sqrt(self.rows)

    @cached_property
    def _sums(self) -> tuple[np.ndarray, float, float, float]:
        """Σ f_g f_gᵀ (m, m), Σ ‖f_g‖⁴, Σ (f_gᵀ Σ_{h≠g} s_h)² and Σ ‖s_g‖²."""
        size = self._totals.shape[1]
        total, shift = torch.zeros(size, size, dtype=torch.float64), torch.as_tensor(self._totals[1])
        fourth = linear = shift_own = 0.0
        for block, shifts in self._blocks():
            total.addmm_(block.mT, block)
            fourth += float(block.square().sum(dim=1).square().sum())
            linear += float((block @ shift - (block * shifts).sum(dim=1)).square().sum())
            shift_own += float(shifts.square().sum())
        return total.numpy(), fourth, linear, shift_own

    def _blocks(self) -> Iterator[tuple[Float[Tensor, "score feature"], Float[Tensor, "score feature"]]]:
        """Pairs of f_g and s_g in order, some thousand at a time."""
        ends = self.scores.indptr
        edges = np.unique(np.searchsorted(ends, np.arange(0, ends[-1] + _BLOCK, _BLOCK)))
        edges = np.unique(np.append(edges, self.scores.shape[0]))
        for start, stop in pairwise(edges):
            parts = self.scores[start:stop], self.shift_scores[start:stop]
            reached = np.concatenate([part.indices for part in parts])
            if len(reached) == 0:
                continue
            first, last = int(reached.min()), int(reached.max()) + 1
            columns = self.features(self.inputs[first:last]).numpy() / np.sqrt(self.rows)
            made = [torch.as_tensor(np.asarray(part[:, first:last] @ columns)) for part in parts]
            yield made[0], made[1]
