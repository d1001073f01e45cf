"""The law of the statistic where the Bellman equation holds, three ways; the power of an alternative."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from koffline.ope.bellman_test.forms import Moments, QuadraticForm, SignDraws
from koffline.ope.bellman_test.settings import SPECTRAL, WILD, BellmanSettings

_NEGLIGIBLE = 1e-10  # of the largest weight: such terms act as their mean
_TERMS = 256
_MOST_TERMS = 40_000
_TOLERANCE = 1e-9
_SMALLEST = 1e-6

DETECTABLE_POWER = 0.8
_LARGEST_SHIFT = 2.0**40
_NO_SPREAD = 1e-16  # of the squared mean: T* varies by rounding alone


@runtime_checkable
class NullLaw(Protocol):
    """What T looks like under H0, and with an alternative of c units added."""

    @property
    def critical(self) -> float:
        """Rejection is for a larger T."""
        ...

    def p_value(self, statistic: float) -> float:
        """How often a T at least as large occurs under H0."""
        ...

    def power(self, shift: float) -> float:
        """How often H0 is rejected with c = shift."""
        ...


@dataclass(frozen=True, eq=False)
class WildLaw:
    """Random signs for the residuals; p = (1 + #{T* ≥ T})/(B + 1) is never zero."""

    draws: SignDraws
    critical: float  # p ≤ level: T beyond it

    def p_value(self, statistic: float) -> float:
        """Counts draws at least as large, rounding aside."""
        as_large = self.draws.statistics >= statistic * (1.0 - 1e-12)
        return (1.0 + float(as_large.sum())) / (len(as_large) + 1.0)

    def power(self, shift: float) -> float:
        """Share of the draws that the alternative lifts above the critical value of the null made anew."""
        moments = self.draws.moments
        if _gamma_parameters(moments.mean, moments.variance) is None:
            return 0.0
        lifted = self.draws.statistics + 2.0 * shift * self.draws.linear + shift**2 * moments.quadratic
        return float(np.mean(lifted > _renewed(moments, shift, self.critical)))


@dataclass(frozen=True, eq=False)
class GammaLaw:
    """The Gamma distribution with the mean and variance of T*."""

    moments: Moments
    critical: float

    def p_value(self, statistic: float) -> float:
        """Upper tail; 1 where T* does not vary."""
        return _gamma_tail(self.moments.mean, self.moments.variance, statistic)

    def power(self, shift: float) -> float:
        """With the alternative's mean and variance, again as a Gamma distribution."""
        return _gamma_power(self.moments, shift, self.critical)


@dataclass(frozen=True, eq=False)
class SpectralLaw:
    """Σ λ_i χ²_i + constant with the eigenvalues of the products of scores."""

    eigenvalues: np.ndarray
    constant: float
    moments: Moments
    critical: float

    def p_value(self, statistic: float) -> float:
        """Upper tail, by inversion of the characteristic function; 1 where T* does not vary."""
        if _gamma_parameters(self.moments.mean, self.moments.variance) is None:
            return float(self.moments.mean >= statistic * (1.0 - 1e-12))
        return weighted_chi_square_tail(self.eigenvalues, statistic - self.constant)

    def power(self, shift: float) -> float:
        """The critical value is exact, the law above it a Gamma distribution with the right two moments."""
        return _gamma_power(self.moments, shift, self.critical)


def make_law(form: QuadraticForm, settings: BellmanSettings, generator: np.random.Generator) -> NullLaw:
    """The law that ``settings.method`` names."""
    if settings.method == WILD:
        draws = form.draw(settings.draws, generator)
        allowed = math.floor(
            settings.level * (settings.draws + 1) + 1e-9
        )  # fewer draws than this are as large
        return WildLaw(draws, float(np.sort(draws.statistics)[::-1][allowed - 1]))
    moments = form.moments()
    if settings.method == SPECTRAL:
        eigenvalues, constant = form.eigenvalues()
        critical = _spectral_critical(eigenvalues, settings.level) + constant
        return SpectralLaw(eigenvalues, constant, moments, critical)
    return GammaLaw(moments, _gamma_critical(moments, settings.level))


def detectable_shift(law: NullLaw, start: float) -> float | None:
    """The smallest c found with power of 80 %, by doubling and halving from ``start``; None where none is."""
    low, high = 0.0, start
    while law.power(high) < DETECTABLE_POWER:
        low, high = high, 2.0 * high
        if high > _LARGEST_SHIFT * start:
            return None
    for _ in range(30):
        middle = 0.5 * (low + high)
        if law.power(middle) < DETECTABLE_POWER:
            low = middle
        else:
            high = middle
    return high


def _spectral_critical(eigenvalues: np.ndarray, level: float) -> float:
    """The 1 − level quantile of Σ λ_i χ²_i."""
    from scipy import optimize

    mean = float(eigenvalues.sum())
    deviation = math.sqrt(2.0 * float(np.square(eigenvalues).sum()))
    if deviation == 0.0:
        return mean
    low, high = mean - 10.0 * deviation, mean + deviation
    while weighted_chi_square_tail(eigenvalues, high) > level:
        low, high = high, high + 2.0 * deviation
    return float(
        optimize.brentq(lambda q: weighted_chi_square_tail(eigenvalues, q) - level, low, high, rtol=1e-4)
    )


def _gamma_parameters(mean: float, variance: float) -> tuple[float, float] | None:
    """Shape and scale; None where there is no spread."""
    if not (mean > 0.0 and variance > _NO_SPREAD * mean**2):
        return None
    return mean**2 / variance, variance / mean


def _gamma_tail(mean: float, variance: float, threshold: float) -> float:
    """P(X ≥ threshold) for a Gamma variable with two moments, which may have no spread."""
    from scipy import stats

    found = _gamma_parameters(mean, variance)
    if found is None:
        return float(mean >= threshold * (1.0 - 1e-12))
    return float(stats.gamma.sf(threshold, found[0], scale=found[1]))


def _gamma_critical(moments: Moments, level: float) -> float:
    from scipy import stats

    found = _gamma_parameters(moments.mean, moments.variance)
    return moments.mean if found is None else float(stats.gamma.isf(level, found[0], scale=found[1]))


def _gamma_power(moments: Moments, shift: float, critical: float) -> float:
    """P(T + alternative > critical) with two moments; none without any spread."""
    if _gamma_parameters(moments.mean, moments.variance) is None:
        return 0.0
    mean = moments.mean + shift**2 * moments.quadratic
    variance = moments.variance + 4.0 * shift**2 * moments.linear
    return _gamma_tail(mean, variance, _renewed(moments, shift, critical))


def _renewed(moments: Moments, shift: float, critical: float) -> float:
    """The critical value with an alternative, less what that adds to the mean of the null."""
    return moments.mean + (critical - moments.mean) * moments.spread(shift)


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
    reach = abs(point - float(scaled.sum())) + 8.0 * deviation + 25.0
    step = 2.0 * math.pi / (2.0 * reach)
    total, first = 0.0, 0
    while first < _MOST_TERMS:
        at = (np.arange(first, first + _TERMS) + 0.5) * step
        turns = 2.0 * scaled[None] * at[:, None]  # characteristic function Π (1 − 2iλu)^(−1/2)
        angle = 0.5 * np.arctan(turns).sum(axis=1) - at * point
        size = np.exp(-0.25 * np.log1p(turns**2).sum(axis=1))
        terms = np.sin(angle) * size / (np.arange(first, first + _TERMS) + 0.5)
        total += float(terms.sum())
        first += _TERMS
        if float(size[-1]) < _TOLERANCE * first:  # the terms that follow alternate and fall
            break
    return min(max(0.5 + total / math.pi, _SMALLEST), 1.0)
