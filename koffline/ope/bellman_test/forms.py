"""T = ‖Σ_g f_g‖²: the statistic as a quadratic form of G scores, here from products of scores.

f_g is score g in the kernel's space, divided by √n. Random signs ε turn T into T* = ‖Σ_g ε_g f_g‖². An
alternative of c units adds c·s_g to score g, and whoever then tests makes the null anew from shifted
residuals: its mean grows by Σ_g (2c f_gᵀs_g + c² s_gᵀs_g), its variance by products of different scores. So
only what an alternative adds to products of different scores counts for the power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from koffline.kernels import Kernel


@dataclass(frozen=True, eq=False)
class Moments:
    """Of T* under random signs: mean Σ m_gg and variance 2 Σ_{g≠h} m_gh², with m_gh = f_gᵀf_h.

    With an alternative c: T exceeds the mean of the null made anew by c²·``quadratic`` on average, with a
    variance of 4c²·``linear`` more; the variance of that null is ``variance`` + c²·growth[0] + c⁴·growth[1].
    """

    mean: float
    variance: float
    linear: float
    quadratic: float
    growth: tuple[float, float] = (0.0, 0.0)

    def spread(self, shift: float) -> float:
        """Standard deviation of the null made anew, in those of the first one."""
        if self.variance <= 0.0:
            return 1.0
        added = shift**2 * self.growth[0] + shift**4 * self.growth[1]
        return float(np.sqrt(1.0 + added / self.variance))


@dataclass(frozen=True, eq=False)
class SignDraws:
    """B draws: T* (B,), and what an alternative c adds to T − mean: 2c·linear (B,) + c²·quadratic.

    ``moments``: as far as the form knows them without more work.
    """

    statistics: np.ndarray
    linear: np.ndarray
    moments: Moments


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
    """``products (G, G)``: f_gᵀf_h; ``crossed (G, G)``: s_gᵀf_h; ``shifted (G, G)``: s_gᵀs_h."""

    products: np.ndarray
    crossed: np.ndarray
    shifted: np.ndarray

    @property
    def statistic(self) -> float:
        """T = Σ_gh m_gh."""
        return max(float(self.products.sum()), 0.0)

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T* = εᵀMε for B draws."""
        signs = random_signs((draws, len(self.products)), generator)
        statistics = np.einsum("bg,bg->b", signs @ self.products, signs)
        return SignDraws(statistics, signs @ self._linear, self.moments())

    def moments(self) -> Moments:
        """Exact for random signs."""
        return Moments(
            mean=float(np.trace(self.products)),
            variance=2.0 * _off_diagonal_squares(self.products),
            linear=float(self._linear @ self._linear),
            quadratic=float(self.shifted.sum() - np.trace(self.shifted)),
            growth=(4.0 * _off_diagonal_squares(self.crossed), 2.0 * _off_diagonal_squares(self.shifted)),
        )

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of M without its diagonal: with the constant Σ m_gg the first three moments are those of T*."""
        centred = self.products.copy()
        np.fill_diagonal(centred, 0.0)
        return np.linalg.eigvalsh(centred), float(np.trace(self.products))

    @property
    def _linear(self) -> np.ndarray:
        """Σ_{h≠g} s_hᵀf_g, (G,)."""
        return self.crossed.sum(axis=0) - np.diagonal(self.crossed)


@dataclass(frozen=True, eq=False)
class SumForm:
    """T = Σ_k T_k of separate value functions on separate rows, whose residuals are never multiplied.

    What cross-fitting leaves cancels across folds: a fold's noise enters its own residuals and, through the
    models fitted to it, the others' with the opposite sign.
    """

    parts: tuple[QuadraticForm, ...]

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
            _sum_of([one.moments for one in drawn]),
        )

    def moments(self) -> Moments:
        """All of them add up."""
        return _sum_of([part.moments() for part in self.parts])

    def eigenvalues(self) -> tuple[np.ndarray, float]:
        """Of all parts together."""
        values, constants = zip(*(part.eigenvalues() for part in self.parts), strict=True)
        return np.concatenate(values), float(sum(constants))


def gram_form(
    scores: sparse.csr_matrix,
    shift_scores: sparse.csr_matrix,
    inputs: Float[Tensor, "row k"],
    kernel: Kernel,
    rows: int,
) -> GramForm:
    """The form with the exact Gram matrix of ``inputs``; scores (G, N), O(N²). rows: n."""
    gram = kernel.gram(inputs).numpy()
    against, shift_against = np.asarray(scores @ gram), np.asarray(shift_scores @ gram)  # (G, N)
    return GramForm(
        np.asarray(scores @ against.T).T / rows,
        np.asarray(scores @ shift_against.T).T / rows,
        np.asarray(shift_scores @ shift_against.T).T / rows,
    )


def random_signs(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Rademacher draws ±1.0, from the bits of random bytes."""
    count = shape[0] * shape[1]
    bits = np.unpackbits(np.frombuffer(generator.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    return (2.0 * bits - 1.0).reshape(shape)


def _off_diagonal_squares(matrix: np.ndarray) -> float:
    """Σ_{g≠h} m_gh²."""
    return max(float(np.square(matrix).sum() - np.square(np.diagonal(matrix)).sum()), 0.0)


def _sum_of(found: list[Moments]) -> Moments:
    """Moments of a sum of independent parts."""
    return Moments(
        mean=sum(one.mean for one in found),
        variance=sum(one.variance for one in found),
        linear=sum(one.linear for one in found),
        quadratic=sum(one.quadratic for one in found),
        growth=(sum(one.growth[0] for one in found), sum(one.growth[1] for one in found)),
    )
