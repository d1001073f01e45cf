"""The law of the statistic where the Bellman equation holds, three ways; the power of an alternative."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from koffline.ope.bellman_test.forms import Moments, QuadraticForm, SignDraws
from koffline.ope.bellman_test.settings import SPECTRAL, WILD, BellmanSettings
from koffline.ope.bellman_test.weighted_chi_square import weighted_chi_square_tail

DETECTABLE_POWER = 0.8
_LARGEST_SHIFT = 2.0**40


class NullLaw(Protocol):
    """What T looks like under H0, and with an alternative of c units added."""

    def p_value(self, statistic: float) -> float:
        """How often a T at least as large occurs under H0."""
        ...

    def power(self, shift: float, level: float) -> float:
        """How often H0 is rejected with c = shift."""
        ...


@dataclass(frozen=True, eq=False)
class WildLaw:
    """Random signs for the residuals; p = (1 + #{T* ≥ T})/(B + 1) is never zero."""

    draws: SignDraws

    def p_value(self, statistic: float) -> float:
        """Counts draws at least as large, rounding aside."""
        as_large = self.draws.statistics >= statistic * (1.0 - 1e-12)
        return (1.0 + float(as_large.sum())) / (len(as_large) + 1.0)

    def power(self, shift: float, level: float) -> float:
        """Share of the draws that the alternative lifts above the critical value."""
        ordered = np.sort(self.draws.statistics)[::-1]
        allowed = math.floor(
            level * (len(ordered) + 1) + 1e-9
        )  # p ≤ level: fewer draws than this are as large
        lifted = self.draws.statistics + 2.0 * shift * self.draws.linear + shift**2 * self.draws.quadratic
        return float(np.mean(lifted > ordered[allowed - 1]))


@dataclass(frozen=True, eq=False)
class GammaLaw:
    """The Gamma distribution with the mean and variance of T*."""

    moments: Moments

    def p_value(self, statistic: float) -> float:
        """Upper tail; 1 where T* does not vary."""
        from scipy import stats

        shape_scale = _gamma_parameters(self.moments.mean, self.moments.variance)
        if shape_scale is None:
            return 1.0
        return float(stats.gamma.sf(statistic, shape_scale[0], scale=shape_scale[1]))

    def power(self, shift: float, level: float) -> float:
        """With the alternative's mean and variance, again as a Gamma distribution."""
        from scipy import stats

        null = _gamma_parameters(self.moments.mean, self.moments.variance)
        if null is None:
            return 0.0
        return _gamma_power(self.moments, shift, float(stats.gamma.isf(level, null[0], scale=null[1])))


@dataclass(frozen=True, eq=False)
class SpectralLaw:
    """Σ λ_i χ²_i + constant with the eigenvalues of the products of scores."""

    eigenvalues: np.ndarray
    constant: float
    moments: Moments

    def p_value(self, statistic: float) -> float:
        """Upper tail, by inversion of the characteristic function."""
        return weighted_chi_square_tail(self.eigenvalues, statistic - self.constant)

    def power(self, shift: float, level: float) -> float:
        """The critical value is exact, the law above it a Gamma distribution with the right two moments."""
        return _gamma_power(self.moments, shift, self._critical(level))

    def _critical(self, level: float) -> float:
        from scipy import optimize

        mean = float(self.eigenvalues.sum())
        deviation = math.sqrt(2.0 * float(np.square(self.eigenvalues).sum()))
        if deviation == 0.0:
            return math.inf
        low, high = mean - 10.0 * deviation, mean + deviation
        while weighted_chi_square_tail(self.eigenvalues, high) > level:
            high += 2.0 * deviation
        found = optimize.brentq(
            lambda q: weighted_chi_square_tail(self.eigenvalues, q) - level, low, high, rtol=1e-4
        )
        return float(found) + self.constant


def make_law(form: QuadraticForm, settings: BellmanSettings, generator: np.random.Generator) -> NullLaw:
    """The law that ``settings.method`` names."""
    if settings.method == WILD:
        return WildLaw(form.draw(settings.draws, generator))
    if settings.method == SPECTRAL:
        return SpectralLaw(*form.eigenvalues(), form.moments())
    return GammaLaw(form.moments())


def detectable_shift(law: NullLaw, level: float, start: float) -> float | None:
    """The smallest c found with power of 80 %, by doubling and halving from ``start``; None where none is."""
    low, high = 0.0, start
    while law.power(high, level) < DETECTABLE_POWER:
        low, high = high, 2.0 * high
        if high > _LARGEST_SHIFT * start:
            return None
    for _ in range(30):
        middle = 0.5 * (low + high)
        if law.power(middle, level) < DETECTABLE_POWER:
            low = middle
        else:
            high = middle
    return high


def _gamma_parameters(mean: float, variance: float) -> tuple[float, float] | None:
    """Shape and scale; None where there is no spread."""
    if not (mean > 0.0 and variance > 1e-24 * mean**2):
        return None
    return mean**2 / variance, variance / mean


def _gamma_power(moments: Moments, shift: float, critical: float) -> float:
    """P(T + alternative > critical) with two moments."""
    from scipy import stats

    mean = moments.mean + shift**2 * moments.quadratic
    lifted = _gamma_parameters(mean, moments.variance + 4.0 * shift**2 * moments.linear)
    return 0.0 if lifted is None else float(stats.gamma.sf(critical, lifted[0], scale=lifted[1]))
