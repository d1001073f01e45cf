"""One test from several bandwidths: M = max_h (T_h − E T*_h) / σ(T*_h).

Every bandwidth sees errors of its own size: small ones those of single places, large
ones those of all values. The same random signs are drawn for every kernel, so that the
draws of M have the law of the maximum under H0, whatever the dependence of the T_h: one
level holds for all bandwidths together. (after Schrab et al. 2023, MMD Aggregated
Two-Sample Test, which compares p-values instead of studentised statistics)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from koffline.kernels import Gaussian
from koffline.ope.bellman_test.case import BellmanCase
from koffline.ope.bellman_test.forms import (
    SignDraws,
    critical_value,
    draw_signs,
    share_of_draws,
    smallest_shift,
)


@dataclass(frozen=True)
class BandwidthDraws:
    """The draws of every bandwidth, by the same signs, and the law of their maximum.

    Bandwidths whose kernel is numerically the identity are left out: random signs never
    change their T. At least one must remain, else nothing is rejected.
    """

    of_bandwidths: tuple[SignDraws, ...]

    @cached_property
    def _varying(self) -> tuple[SignDraws, ...]:
        return tuple(drawn for drawn in self.of_bandwidths if drawn.has_spread)

    @property
    def statistic(self) -> float:
        """M; −∞ if no kernel compares different rows."""
        scaled = [
            (drawn.statistic - drawn.mean) / drawn.deviation for drawn in self._varying
        ]
        return max(scaled, default=-np.inf)

    @cached_property
    def statistics(self) -> Float[np.ndarray, " draw"]:
        """Draws of M under H0, (B,)."""
        scaled = [
            (drawn.statistics - drawn.mean) / drawn.deviation for drawn in self._varying
        ]
        if not scaled:
            return np.full(len(self.of_bandwidths[0].statistics), -np.inf)
        return np.max(scaled, axis=0)

    @property
    def p_value(self) -> float:
        """Probability of so large an M under H0: (1 + #{M* ≥ M})/(B + 1)."""
        return share_of_draws(self.statistics, self.statistic)

    def power(self, shift: float, level: float) -> float:
        """Probability that H0 is rejected with c = ``shift``, as `SignDraws.power`."""
        if not self._varying:
            return 0.0
        critical = critical_value(self.statistics, level)
        lifted = [drawn.studentised(shift) for drawn in self._varying]
        return float(np.mean(np.max(lifted, axis=0) > critical))

    def detectable_shift(self, start: float, level: float) -> float | None:
        """Smallest c with a power of 80 %, searched from ``start``; None if none is
        found.
        """
        return smallest_shift(lambda shift: self.power(shift, level), start)


def draw_bandwidths(
    case: BellmanCase, multiples: Sequence[float], features: int, seed: int
) -> BandwidthDraws:
    """T_h and its draws for bandwidths that are ``multiples`` of the median distance.

    features: number of random features, or 0. seed: of the signs, which are equal for
    all bandwidths.
    """
    median = case.kernel.bandwidth / case.settings.bandwidth
    of_bandwidths = []
    for multiple in multiples:
        kernel = Gaussian(multiple * median)
        of_bandwidth = dataclasses.replace(case, kernel=kernel)
        generator = np.random.default_rng(seed)
        of_bandwidths.append(draw_signs(of_bandwidth, features, generator))
    return BandwidthDraws(tuple(of_bandwidths))
