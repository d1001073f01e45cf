"""T = ‖Σ_g f_g‖²: the statistic as a quadratic form of G scores, from a Gram matrix or from features.

f_g is score g in the kernel's space, divided by √n. Random signs ε turn T into T* = ‖Σ_g ε_g f_g‖²; an
alternative adds c·f_h, its shift of the residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from koffline.kernels import FourierFeatures, Kernel

_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class SignDraws:
    """B draws: T* (B,), and what an alternative c adds to them: 2c·linear (B,) + c²·quadratic."""

    statistics: np.ndarray
    linear: np.ndarray
    quadratic: float


@dataclass(frozen=True, eq=False)
class Moments:
    """Of T* under random signs: mean Σ m_gg, variance 2 Σ_{g≠h} m_gh², with m_gh = f_gᵀf_h.

    With an alternative c: c²·``quadratic`` more mean and 4c²·``linear`` more variance.
    """

    mean: float
    variance: float
    linear: float
    quadratic: float


@runtime_checkable
class QuadraticForm(Protocol):
    """What the laws of `koffline.ope.bellman_test.laws` need."""

    @property
    def statistic(self) -> float:
        """T."""
        ...

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T* for B draws of random signs."""
        ...

    def moments(self) -> Moments:
        """Of T*."""
        ...

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """λ and a constant: T* is about Σ λ_i χ²_i + constant."""
        ...


@dataclass(frozen=True, eq=False)
class GramForm:
    """``products (G, G)``: m_gh; ``shift (G,)``: f_gᵀf_h of the alternative; ``quadratic``: ‖f_h‖²."""

    products: np.ndarray
    shift: np.ndarray
    quadratic: float

    @property
    def statistic(self) -> float:
        """T = Σ_gh m_gh."""
        return max(float(self.products.sum()), 0.0)

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T* = εᵀMε for B draws."""
        signs = random_signs((draws, len(self.products)), generator)
        statistics = np.einsum("bg,bg->b", signs @ self.products, signs)
        return SignDraws(statistics, signs @ self.shift, self.quadratic)

    def moments(self) -> Moments:
        """Exact for random signs."""
        diagonal = np.diagonal(self.products)
        off = float(np.square(self.products).sum() - np.square(diagonal).sum())
        return Moments(
            float(diagonal.sum()), 2.0 * max(off, 0.0), float(self.shift @ self.shift), self.quadratic
        )

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of M without its diagonal: with the constant Σ m_gg the first three moments are those of T*."""
        centred = self.products.copy()
        np.fill_diagonal(centred, 0.0)
        return np.linalg.eigvalsh(centred), float(np.trace(self.products))


@dataclass(frozen=True, eq=False)
class FeatureForm:
    """Scores in m features, computed block by block: O(G m) memory is never needed.

    ``scores (G, N)`` sparse, ``inputs (N, k)``; ``shift (N,)``: the alternative's weight · residual.
    """

    scores: sparse.csr_matrix
    inputs: Float[Tensor, "row k"]
    features: FourierFeatures
    shift_coefficients: np.ndarray
    rows: int  # n, those of positive weight

    @cached_property
    def _totals(self) -> np.ndarray:
        """(2, m): Σ_g f_g and f_h."""
        coefficients = np.stack([np.asarray(self.scores.sum(axis=0)).ravel(), self.shift_coefficients])
        total = torch.zeros(2, 2 * self.features.frequencies.shape[1], dtype=torch.float64)
        for start in range(0, len(self.inputs), _BLOCK):
            part = torch.as_tensor(coefficients[:, start : start + _BLOCK])
            total += part @ self.features(self.inputs[start : start + _BLOCK])
        return total.numpy() / np.sqrt(self.rows)

    @property
    def statistic(self) -> float:
        """T = ‖Σ_g f_g‖²."""
        return float(np.square(self._totals[0]).sum())

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T* = ‖Σ_g ε_g f_g‖² for B draws; O(G m B) time, one pass over the rows."""
        projected = torch.zeros(draws, self._totals.shape[1], dtype=torch.float64)
        for block in self._blocks():
            signs = torch.as_tensor(random_signs((len(block), draws), generator))
            projected.addmm_(signs.mT, block)  # (B, g) @ (g, m)
        found, shift = projected.numpy(), self._totals[1]
        return SignDraws(np.square(found).sum(axis=1), found @ shift, float(shift @ shift))

    def moments(self) -> Moments:
        """Exact for random signs and the kernel of the features."""
        covariance, fourth = self._covariance
        shift = self._totals[1]
        variance = 2.0 * max(float(np.square(covariance).sum()) - fourth, 0.0)
        linear, quadratic = float(shift @ covariance @ shift), float(shift @ shift)
        return Moments(float(np.trace(covariance)), variance, linear, quadratic)

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of Σ_g f_g f_gᵀ: the law of normal multipliers, which has 2 Σ m_gg² more variance."""
        return np.linalg.eigvalsh(self._covariance[0]), 0.0

    def condensed(self) -> GramForm:
        """The same form as products of few scores: O(G² m), exact for random signs in every law."""
        scores = torch.cat(list(self._blocks())).numpy()
        shift = self._totals[1]
        return GramForm(scores @ scores.T, scores @ shift, float(shift @ shift))

    @cached_property
    def _covariance(self) -> tuple[np.ndarray, float]:
        """Σ_g f_g f_gᵀ (m, m) and Σ_g ‖f_g‖⁴."""
        size = self._totals.shape[1]
        total, fourth = torch.zeros(size, size, dtype=torch.float64), 0.0
        for block in self._blocks():
            total.addmm_(block.mT, block)
            fourth += float(block.square().sum(dim=1).square().sum())
        return total.numpy(), fourth

    def _blocks(self) -> Iterator[Float[Tensor, "score feature"]]:
        """f_g in order, some thousand at a time."""
        ends = self.scores.indptr
        edges = np.unique(np.searchsorted(ends, np.arange(0, ends[-1] + _BLOCK, _BLOCK)))
        edges = np.unique(np.append(edges, self.scores.shape[0]))
        for start, stop in pairwise(edges):
            part = self.scores[start:stop]
            if part.nnz == 0:
                continue
            first, last = int(part.indices.min()), int(part.indices.max()) + 1
            columns = self.features(self.inputs[first:last]).numpy()
            yield torch.as_tensor(np.asarray(part[:, first:last] @ columns)) / np.sqrt(self.rows)


@dataclass(frozen=True, eq=False)
class SumForm:
    """T = Σ_k T_k of separate value functions on separate rows, whose residuals are never multiplied.

    What cross-fitting leaves cancels across folds: a fold's noise enters its own residuals and, through the
    models fitted to it, the others' with the opposite sign.
    """

    parts: tuple[GramForm | FeatureForm, ...]

    @property
    def statistic(self) -> float:
        """Σ T_k."""
        return sum(part.statistic for part in self.parts)

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """Independent signs for every part."""
        drawn = [part.draw(draws, generator) for part in self.parts]
        return SignDraws(
            np.sum([one.statistics for one in drawn], axis=0),
            np.sum([one.linear for one in drawn], axis=0),
            sum(one.quadratic for one in drawn),
        )

    def moments(self) -> Moments:
        """All of them add up."""
        found = [part.moments() for part in self.parts]
        return Moments(
            sum(one.mean for one in found),
            sum(one.variance for one in found),
            sum(one.linear for one in found),
            sum(one.quadratic for one in found),
        )

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of all parts together."""
        values, constants = zip(*(part.eigenvalues() for part in self.parts), strict=True)
        return np.concatenate(values), float(sum(constants))


def gram_form(
    scores: sparse.csr_matrix, inputs: Float[Tensor, "row k"], kernel: Kernel, shift: np.ndarray, rows: int
) -> GramForm:
    """The form with the exact Gram matrix of ``inputs``; O(N²)."""
    gram = kernel.gram(inputs).numpy()
    against = np.asarray(scores @ gram)  # (G, N)
    products = np.asarray(scores @ against.T) / rows  # (G, G), symmetric
    return GramForm(products, against @ shift / rows, float(shift @ gram @ shift) / rows)


def random_signs(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Rademacher draws ±1.0, from the bits of random bytes."""
    count = shape[0] * shape[1]
    bits = np.unpackbits(np.frombuffer(generator.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    return (2.0 * bits - 1.0).reshape(shape)
