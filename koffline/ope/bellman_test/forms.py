"""T = ‖Σ_g f_g‖²: the statistic as a quadratic form of G scores, its law under H0, its power.

f_g is score g in the kernel's space, divided by √n. Random signs ε turn T into T* = ‖Σ_g ε_g f_g‖². An
alternative of c units adds c·s_g to score g, and whoever then tests makes the null anew from shifted
residuals: its mean grows by Σ_g (2c f_gᵀs_g + c² s_gᵀs_g), its variance by products of different scores. So
only what an alternative adds to products of different scores counts for the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures

_BLOCK = 8192
_ROUNDING = 1.0 - 1e-12
_LARGEST_SHIFT = 2.0**40
_NO_SPREAD = 1e-16  # relative to the squared mean: below it T* varies by rounding alone
_DETECTABLE_POWER = 0.8


class Moments(NamedTuple):
    """Moments of T* under random signs: mean Σ m_gg and variance 2 Σ_{g≠h} m_gh², with m_gh = f_gᵀf_h.

    With an alternative c: T exceeds the mean of the null made anew by c²·``quadratic`` on average; the
    variance of that null is ``variance`` + c²·growth_2 + c⁴·growth_4.
    """

    mean: float
    variance: float
    quadratic: float
    growth_2: float = 0.0
    growth_4: float = 0.0


class SignDraws(NamedTuple):
    """T, and B draws: T* (B,), and what an alternative c adds to T − mean: 2c·linear (B,) + c²·quadratic."""

    statistic: float
    statistics: np.ndarray
    linear: np.ndarray
    moments: Moments


@dataclass(frozen=True, eq=False)
class GramForm:
    """The form by ``products (G, G)``: f_gᵀf_h; ``crossed``: s_gᵀf_h; ``shifted``: s_gᵀs_h."""

    products: np.ndarray
    crossed: np.ndarray
    shifted: np.ndarray

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T = Σ_gh m_gh and T* = εᵀMε for B draws; the moments are exact."""
        signs = random_signs((draws, len(self.products)), generator)
        statistics = np.einsum("bg,bg->b", signs @ self.products, signs)
        linear = self.crossed.sum(axis=0) - np.diagonal(self.crossed)  # Σ_{h≠g} s_hᵀf_g, (G,)
        statistic = max(float(self.products.sum()), 0.0)
        return SignDraws(statistic, statistics, signs @ linear, self.moments())

    def moments(self) -> Moments:
        """Exact moments under random signs."""
        return Moments(
            mean=float(np.trace(self.products)),
            variance=2.0 * _off_diagonal_squares(self.products),
            quadratic=float(self.shifted.sum() - np.trace(self.shifted)),
            growth_2=4.0 * _off_diagonal_squares(self.crossed),
            growth_4=2.0 * _off_diagonal_squares(self.shifted),
        )


def gram_form(
    scores: Float[np.ndarray, " score"],
    shifts: Float[np.ndarray, " score"],
    gram: Float[np.ndarray, "score score"],
    rows: int,
) -> GramForm:
    """The form with a Gram matrix: O(G²). rows: n."""
    against, shift_against = scores[:, None] * gram, shifts[:, None] * gram
    return GramForm(against * scores / rows, shift_against * scores / rows, shift_against * shifts / rows)


@dataclass(frozen=True, eq=False)
class FeatureForm:
    """Scores in m features, computed block by block: O(G m) memory is never needed.

    f_g is ``scores[g]`` times the features of ``inputs[g]``, which have length one, s_g ``shifts[g]`` times
    them; ``rows``: n. The growth of the null's spread is left out: among thousands of scores alternatives of
    interest are small.
    """

    scores: Float[np.ndarray, " score"]
    shifts: Float[np.ndarray, " score"]
    inputs: Float[Tensor, "score k"]
    features: FourierFeatures
    rows: int

    def draw(self, draws: int, generator: np.random.Generator) -> SignDraws:
        """T = ‖Σ_g f_g‖² and T* = ‖Σ_g ε_g f_g‖² for B draws; O(G m B) time, one pass over the rows."""
        # Scores with the signs of every draw, with their own, and shifts, each as a row.
        totals = torch.zeros(draws + 2, 2 * self.features.frequencies.shape[1], dtype=torch.float64)
        own = np.zeros(draws)
        for start in range(0, len(self.inputs), _BLOCK):
            part = slice(start, start + _BLOCK)
            scores, shifts = self.scores[part], self.shifts[part]
            signed = random_signs((len(scores), draws), generator) * scores[:, None]
            rows = torch.as_tensor(np.column_stack([signed, scores, shifts])).mT
            totals.addmm_(rows, self.features(self.inputs[part]))  # (B + 2, g) @ (g, m)
            own += shifts @ signed / self.rows
        *drawn, whole, shift = totals.numpy() / np.sqrt(self.rows)
        statistics = np.square(drawn).sum(axis=1)
        mean, shift_own = (float(each @ each) / self.rows for each in (self.scores, self.shifts))
        moments = Moments(mean, float(statistics.var()), float(shift @ shift) - shift_own)
        return SignDraws(float(whole @ whole), statistics, np.asarray(drawn) @ shift - own, moments)


def draw_signs(
    parts: Sequence[GramForm | FeatureForm], draws: int, generator: np.random.Generator
) -> SignDraws:
    """T = Σ_k T_k and its draws, of separate value functions on separate rows.

    Products across folds would be biased under cross-fitting: a fold's noise enters its own residuals and,
    through the models fitted to it, the others' with the opposite sign.
    """
    drawn = [part.draw(draws, generator) for part in parts]
    return SignDraws(
        sum(one.statistic for one in drawn),
        np.sum([one.statistics for one in drawn], axis=0),
        np.sum([one.linear for one in drawn], axis=0),
        Moments(*map(sum, zip(*(one.moments for one in drawn), strict=True))),
    )


def random_signs(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Rademacher draws ±1.0, from the bits of random bytes."""
    count = shape[0] * shape[1]
    bits = np.unpackbits(np.frombuffer(generator.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    return (2.0 * bits - 1.0).reshape(shape)


def _off_diagonal_squares(matrix: np.ndarray) -> float:
    """Σ_{g≠h} m_gh²."""
    return max(float(np.square(matrix).sum() - np.square(np.diagonal(matrix)).sum()), 0.0)


@dataclass(frozen=True, eq=False)
class NullLaw:
    """Distribution of T under H0, by random signs of the residuals, and under an alternative of c units.

    Rejection: p ≤ ``level``.
    """

    draws: SignDraws
    level: float

    def p_value(self, statistic: float) -> float:
        """Probability of a T at least as large under H0: (1 + #{T* ≥ T})/(B + 1), never zero."""
        as_large = self.draws.statistics >= statistic * _ROUNDING
        return (1.0 + float(as_large.sum())) / (len(as_large) + 1.0)

    @cached_property
    def critical(self) -> float:
        """Critical value: T above it is rejected."""
        drawn = self.draws.statistics
        allowed = math.floor(self.level * (len(drawn) + 1) + 1e-9)  # rejected if fewer draws reach T
        return float(np.sort(drawn)[-allowed])

    def power(self, shift: float) -> float:
        """Probability that H0 is rejected with c = shift, tested against the null of the shifted residuals.

        The share of draws that the alternative lifts above their critical value.
        """
        mean, variance, quadratic, growth_2, growth_4 = self.draws.moments
        if not (mean > 0.0 and variance > _NO_SPREAD * mean**2):
            return 0.0
        spread = math.sqrt(1.0 + (shift**2 * growth_2 + shift**4 * growth_4) / variance)
        renewed = mean + (self.critical - mean) * spread  # without the change of the mean
        lifted = self.draws.statistics + 2.0 * shift * self.draws.linear + shift**2 * quadratic
        return float(np.mean(lifted > renewed))

    def detectable_shift(self, start: float) -> float | None:
        """Smallest c with a power of 80 %, searched from ``start``; None if none is found."""
        low, high = 0.0, start
        while self.power(high) < _DETECTABLE_POWER:
            low, high = high, 2.0 * high
            if high > _LARGEST_SHIFT * start:
                return None
        for _ in range(30):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.power(middle) < _DETECTABLE_POWER else (low, middle)
        return high
