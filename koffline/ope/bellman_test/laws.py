"""The law of the statistic where the Bellman equation holds, three ways; the power of an alternative."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.ope.bellman_test.forms import Moments, QuadraticForm, SignDraws
from koffline.ope.bellman_test.settings import SPECTRAL, WILD, BellmanSettings

_NEGLIGIBLE = 1e-10  # of the largest weight: such terms act as their mean
_TERMS, _MOST_TERMS = 256, 40_000
_TOLERANCE = 1e-9
_SMALLEST = 1e-6
_ROUNDING = 1.0 - 1e-12
_LARGEST_SHIFT = 2.0**40
_NO_SPREAD = 1e-16  # of the squared mean: T* varies by rounding alone

DETECTABLE_POWER = 0.8


@dataclass(frozen=True, eq=False)
class NullLaw:
    """What T looks like under H0, and with an alternative of c units added. Rejection: beyond ``critical``.

    With ``draws``: random signs for the residuals. With ``spectrum`` (λ, constant): Σ λ_i χ²_i + constant, λ
    the eigenvalues of the products of scores. With neither: the Gamma distribution with T*'s two moments.
    """

    critical: float
    moments: Moments
    draws: SignDraws | None = None
    spectrum: tuple[np.ndarray, float] | None = None

    def p_value(self, statistic: float) -> float:
        """How often a T at least as large occurs under H0.

        Of draws (1 + #{T* ≥ T})/(B + 1), never zero; else an upper tail, 1 where T* does not vary.
        """
        if self.draws is not None:
            as_large = self.draws.statistics >= statistic * _ROUNDING
            return (1.0 + float(as_large.sum())) / (len(as_large) + 1.0)
        if self.spectrum is None or not _varies(self.moments.mean, self.moments.variance):
            return _gamma_tail(self.moments.mean, self.moments.variance, statistic)
        eigenvalues, constant = self.spectrum
        return weighted_chi_square_tail(eigenvalues, statistic - constant)

    def power(self, shift: float) -> float:
        """How often H0 is rejected with c = shift, tested against the null made anew.

        Of draws the share that the alternative lifts above its critical value; else a Gamma distribution with
        the alternative's two moments.
        """
        mean, variance, linear, quadratic, growth_2, growth_4 = self.moments
        if not _varies(mean, variance):
            return 0.0
        spread = math.sqrt(1.0 + (shift**2 * growth_2 + shift**4 * growth_4) / variance)
        renewed = mean + (self.critical - mean) * spread  # less what the alternative adds to the null's mean
        if self.draws is not None:
            lifted = self.draws.statistics + 2.0 * shift * self.draws.linear + shift**2 * quadratic
            return float(np.mean(lifted > renewed))
        return _gamma_tail(mean + shift**2 * quadratic, variance + 4.0 * shift**2 * linear, renewed)


def make_law(form: QuadraticForm, settings: BellmanSettings, generator: np.random.Generator) -> NullLaw:
    """The law that ``settings.method`` names."""
    if settings.method == WILD:
        draws = form.draw(settings.draws, generator)
        allowed = math.floor(settings.level * (settings.draws + 1) + 1e-9)  # fewer draws are as large
        return NullLaw(float(np.sort(draws.statistics)[-allowed]), draws.moments, draws)
    moments = form.moments()
    if settings.method == SPECTRAL:
        eigenvalues, constant = form.eigenvalues()
        critical = _spectral_critical(eigenvalues, settings.level) + constant
        return NullLaw(critical, moments, spectrum=(eigenvalues, constant))
    critical = moments.mean
    if _varies(moments.mean, moments.variance):
        critical = float(_gamma(moments.mean, moments.variance).isf(settings.level))
    return NullLaw(critical, moments)


def detectable_shift(law: NullLaw, start: float) -> float | None:
    """The smallest c found with power of 80 %, by doubling and halving from ``start``; None where none is."""
    low, high = 0.0, start
    while law.power(high) < DETECTABLE_POWER:
        low, high = high, 2.0 * high
        if high > _LARGEST_SHIFT * start:
            return None
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if law.power(middle) < DETECTABLE_POWER else (low, middle)
    return high


def _spectral_critical(eigenvalues: np.ndarray, level: float) -> float:
    """The 1 − level quantile of Σ λ_i χ²_i."""
    from scipy import optimize

    def excess(threshold: float) -> float:
        return weighted_chi_square_tail(eigenvalues, threshold) - level

    mean = float(eigenvalues.sum())
    deviation = math.sqrt(2.0 * float(np.square(eigenvalues).sum()))
    if deviation == 0.0:
        return mean
    low, high = mean - 10.0 * deviation, mean + deviation
    while excess(high) > 0.0:
        low, high = high, high + 2.0 * deviation
    return float(optimize.brentq(excess, low, high, rtol=1e-4))


def _varies(mean: float, variance: float) -> bool:
    return mean > 0.0 and variance > _NO_SPREAD * mean**2


def _gamma(mean: float, variance: float):  # type: ignore[no-untyped-def]
    """The Gamma distribution with two moments."""
    from scipy import stats

    return stats.gamma(mean**2 / variance, scale=variance / mean)


def _gamma_tail(mean: float, variance: float, threshold: float) -> float:
    """P(X ≥ threshold) for a Gamma variable with two moments, which may have no spread."""
    if not _varies(mean, variance):
        return float(mean >= threshold * _ROUNDING)
    return float(_gamma(mean, variance).sf(threshold))


def weighted_chi_square_tail(weights: Float[np.ndarray, " term"], threshold: float) -> float:
    """P(Σ λ_i χ²_i > q), any signs of λ, by inversion of the characteristic function.

    Trapezoid rule of Davies (Applied Statistics 1980, AS 155) for Imhof's integral: the error of the grid is
    a tail beyond q ± 2π/step, kept below 1e-9, and the sum is cut: what is below 1e-6 is not to be trusted
    and becomes 1e-6 (for a single chi-square errors reach 1e-4).
    """
    weights = np.asarray(weights, dtype=np.float64)
    largest = float(np.abs(weights).max(initial=0.0))
    if largest == 0.0:
        return float(threshold < 0.0)
    small = np.abs(weights) < _NEGLIGIBLE * largest
    scaled, point = weights[~small] / largest, (threshold - float(weights[small].sum())) / largest
    deviation = math.sqrt(2.0 * float(np.square(scaled).sum()))
    step = math.pi / (abs(point - float(scaled.sum())) + 8.0 * deviation + 25.0)
    total = 0.0
    for first in range(0, _MOST_TERMS, _TERMS):
        numbers = np.arange(first, first + _TERMS) + 0.5
        turns = 2.0 * scaled[None] * (numbers * step)[:, None]  # characteristic function Π (1 − 2iλu)^(−1/2)
        angle = 0.5 * np.arctan(turns).sum(axis=1) - numbers * step * point
        size = np.exp(-0.25 * np.log1p(turns**2).sum(axis=1))
        total += float((np.sin(angle) * size / numbers).sum())
        if float(size[-1]) < _TOLERANCE * (first + _TERMS):  # the terms that follow alternate and fall
            break
    return min(max(0.5 + total / math.pi, _SMALLEST), 1.0)
