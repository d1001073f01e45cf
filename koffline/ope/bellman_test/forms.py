"""T = ‖Σ_g f_g‖²: the statistic as a quadratic form of G scores, its law under H0, its
power.

f_g is score g in the kernel's space, divided by √n. Random signs ε turn T into T* =
‖Σ_g ε_g f_g‖². An alternative of c units adds c·s_g to score g. A tester then computes
the null distribution from the shifted
residuals: its mean grows by Σ_g (2c f_gᵀs_g + c² s_gᵀs_g), its variance by products of
different scores. So only what an alternative adds to products of different scores
counts for the power.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.data.columns import blocks
from koffline.errors import ConfigError
from koffline.kernels import FourierFeatures, random_fourier_features
from koffline.ope.bellman_test.case import BellmanCase
from koffline.untrusted.limits import check_fits

_FEATURES = 1000
_EXACT_ROWS = 3000  # the Gram matrix of as many rows takes 72 MB and a second
_MOST_EXACT_ROWS = 20_000
_BLOCK = 8192
_ROUNDING = 1e-12
_LARGEST_SHIFT = 2.0**40
_NO_SPREAD = 1e-16  # relative to the squared mean: below it T* varies by rounding alone
_DETECTABLE_POWER = 0.8


class SignDraws(NamedTuple):
    """T, B draws of its law under H0 by random signs of the residuals, and the effect
    of an alternative.

    ``statistics (B,)``: T*, with mean ``mean`` = Σ m_gg and variance ``variance`` = 2
    Σ_{g≠h} m_gh², m_gh = f_gᵀf_h. An alternative c adds 2c·``linear`` (B,) +
    c²·``quadratic`` to T − mean; the null distribution from the shifted residuals has
    the variance variance + c²·``growth_2`` + c⁴·``growth_4``. A test rejects if p ≤
    level.
    """

    statistic: float
    statistics: np.ndarray
    linear: np.ndarray
    mean: float
    variance: float
    quadratic: float
    growth_2: float = 0.0
    growth_4: float = 0.0

    @property
    def has_spread(self) -> bool:
        """Whether random signs change T by more than rounding."""
        return self.mean > 0.0 and self.variance > _NO_SPREAD * self.mean**2

    @property
    def deviation(self) -> float:
        """Standard deviation of T* under random signs."""
        return math.sqrt(self.variance)

    def p_value(self, statistic: float) -> float:
        """Probability of a T at least as large under H0: (1 + #{T* ≥ T})/(B + 1), never
        zero.
        """
        return share_of_draws(self.statistics, statistic)

    def critical(self, level: float) -> float:
        """Critical value: a larger T is rejected."""
        return critical_value(self.statistics, level)

    def power(self, shift: float, level: float) -> float:
        """Probability that H0 is rejected with c = shift, tested against the null of
        the shifted residuals.

        It is the share of draws that the alternative lifts above their critical value.
        """
        if not self.has_spread:
            return 0.0
        # the shift of the mean is left out
        renewed = self.mean + (self.critical(level) - self.mean) * self._spread(shift)
        return float(np.mean(self._lifted(shift) > renewed))

    def studentised(self, shift: float) -> Float[np.ndarray, " draw"]:
        """(T* − mean)/σ of every draw with the alternative c = shift, with the mean and
        deviation of the null of the shifted residuals.
        """
        deviation = self.deviation * self._spread(shift)
        return (self._lifted(shift) - self.mean) / deviation

    def detectable_shift(self, start: float, level: float) -> float | None:
        """Smallest c with a power of 80 %, searched from ``start``; None if none is
        found.
        """
        return smallest_shift(lambda shift: self.power(shift, level), start)

    def _spread(self, shift: float) -> float:
        """σ of the null of the shifted residuals, divided by σ."""
        growth = shift**2 * self.growth_2 + shift**4 * self.growth_4
        return math.sqrt(1.0 + growth / self.variance)

    def _lifted(self, shift: float) -> Float[np.ndarray, " draw"]:
        """T* with the alternative c = shift, beside what it adds to the mean."""
        return self.statistics + 2.0 * shift * self.linear + shift**2 * self.quadratic


def share_of_draws(statistics: Float[np.ndarray, " draw"], statistic: float) -> float:
    """p-value (1 + #{T* ≥ T})/(B + 1); draws that only rounding keeps below T count."""
    as_large = statistics >= statistic - _ROUNDING * abs(statistic)
    return (1.0 + float(as_large.sum())) / (len(as_large) + 1.0)


def critical_value(statistics: Float[np.ndarray, " draw"], level: float) -> float:
    """Critical value: a larger statistic is rejected."""
    # rejected if fewer draws reach T
    allowed = math.floor(level * (len(statistics) + 1) + 1e-9)
    return float(np.sort(statistics)[-allowed])


def smallest_shift(power: Callable[[float], float], start: float) -> float | None:
    """Smallest c whose power(c) is 80 %, searched from ``start``; None if none is
    found.
    """
    low = 0.0
    high = start
    while power(high) < _DETECTABLE_POWER:
        low = high
        high = 2.0 * high
        if high > _LARGEST_SHIFT * start:
            return None
    for _ in range(30):
        middle = 0.5 * (low + high)
        if power(middle) < _DETECTABLE_POWER:
            low = middle
        else:
            high = middle
    return high


def draw_signs(
    case: BellmanCase, features: int, generator: np.random.Generator
) -> SignDraws:
    """T = Σ_k T_k and its draws, summed over folds k with their own value functions and
    rows.

    Products across folds would be biased under cross-fitting: a fold's noise enters its
    own residuals and, through the models fitted to it, those of other folds with the
    opposite sign.
    """
    draws = case.settings.draws
    mapping = None
    if features:
        seeded = torch.Generator().manual_seed(case.settings.seed)
        mapping = random_fourier_features(
            case.kernel, case.inputs.shape[1], features, seeded
        )
    of_folds = []
    for fold in case.folds:
        rows = fold[case.weights[fold] > 0.0]
        inputs = case.inputs[torch.as_tensor(rows)]
        scores = case.weights[rows] * case.residuals[rows]
        # One unit of the alternative, an error of one everywhere, adds discount − 1 to
        # a residual.
        shifts = case.weights[rows] * (case.problem.discounts[rows] - 1.0)
        is_exact = 0 < len(rows) <= min(features, _EXACT_ROWS)
        if mapping is not None and not is_exact:
            of_fold = draw_by_features(
                scores, shifts, inputs, mapping, case.n, draws, generator
            )
        else:
            if mapping is None:
                gram = case.kernel.gram(inputs).numpy()
            else:
                psi = mapping(inputs)
                gram = (psi @ psi.mT).numpy()
            of_fold = draw_by_products(
                products=scores[:, None] * gram * scores / case.n,
                crossed=shifts[:, None] * gram * scores / case.n,
                shifted=shifts[:, None] * gram * shifts / case.n,
                draws=draws,
                generator=generator,
            )
        of_folds.append(of_fold)
    totals: dict[str, Any] = {
        name: sum(getattr(of_fold, name) for of_fold in of_folds)
        for name in SignDraws._fields
    }
    return SignDraws(**totals)


def count_features(case: BellmanCase) -> int:
    """Number of random features; 0 for the exact kernel.

    Raises ConfigError if it has too many rows.
    """
    count = case.settings.features
    rows = len(case.transitions)
    if count is None:
        if rows <= _EXACT_ROWS:
            return 0
        return _FEATURES
    if count == 0 and rows > _MOST_EXACT_ROWS:
        raise ConfigError(
            f"features=0 asks for the Gram matrix of {rows} rows, more than"
            f" {_MOST_EXACT_ROWS}; leave features out or give some thousand"
        )
    return count


def draw_by_products(
    products: Float[np.ndarray, "score score"],
    crossed: Float[np.ndarray, "score score"],
    shifted: Float[np.ndarray, "score score"],
    draws: int,
    generator: np.random.Generator,
) -> SignDraws:
    """T = Σ_gh m_gh and T* = εᵀMε for B draws, from M = f_gᵀf_h, s_gᵀf_h and s_gᵀs_h;
    moments are exact.
    """
    check_fits(
        16.0 * draws * len(products),
        f"draws is {draws}, and {len(products)} rows are tested by the exact kernel",
        "lower draws, or give features",
    )
    signs = random_signs((draws, len(products)), generator)
    linear = crossed.sum(axis=0) - np.diagonal(crossed)  # Σ_{h≠g} s_hᵀf_g, (G,)
    return SignDraws(
        statistic=max(float(products.sum()), 0.0),
        statistics=np.einsum("bg,bg->b", signs @ products, signs),
        linear=signs @ linear,
        mean=float(np.trace(products)),
        variance=2.0 * _off_diagonal_squares(products),
        quadratic=float(shifted.sum() - np.trace(shifted)),
        growth_2=4.0 * _off_diagonal_squares(crossed),
        growth_4=2.0 * _off_diagonal_squares(shifted),
    )


def draw_by_features(
    scores: Float[np.ndarray, " score"],
    shifts: Float[np.ndarray, " score"],
    inputs: Float[Tensor, "score k"],
    features: FourierFeatures,
    rows: int,
    draws: int,
    generator: np.random.Generator,
) -> SignDraws:
    """T = ‖Σ_g f_g‖² and T* = ‖Σ_g ε_g f_g‖² for B draws, in blocks: O(G m B) time,
    never O(G m) memory.

    f_g is ``scores[g]`` times the m features of ``inputs[g]``, which have length one,
    and s_g is ``shifts[g]`` times them; rows: n. The growth of the null's variance is
    neglected: with thousands of scores, relevant alternatives are small.
    """
    count = features.frequencies.shape[1] * 2
    check_fits(
        8.0 * draws * (count + min(len(inputs), _BLOCK)),
        f"draws is {draws}, features {count}",
        "lower draws",
    )
    # Scores with the signs of every draw, with their own, and shifts, each as a row.
    totals = torch.zeros(draws + 2, count, dtype=torch.float64)
    diagonal = np.zeros(draws)  # Σ_g s_g ε_g f_g / n, no part of the cross term
    for part in blocks(len(inputs), _BLOCK):
        signs = random_signs((len(scores[part]), draws), generator)
        signed = signs * scores[part, None]
        columns = np.column_stack([signed, scores[part], shifts[part]])
        # (B + 2, g) @ (g, m)
        totals.addmm_(torch.as_tensor(columns).mT, features(inputs[part]))
        diagonal += shifts[part] @ signed / rows
    sums = totals.numpy() / np.sqrt(rows)
    drawn = sums[:-2]
    observed = sums[-2]
    shift = sums[-1]
    statistics = np.square(drawn).sum(axis=1)
    return SignDraws(
        statistic=float(observed @ observed),
        statistics=statistics,
        linear=drawn @ shift - diagonal,
        mean=float(scores @ scores) / rows,
        variance=float(statistics.var()),
        quadratic=float(shift @ shift) - float(shifts @ shifts) / rows,
    )


def random_signs(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Rademacher draws ±1.0, from the bits of random bytes."""
    count = shape[0] * shape[1]
    bits = np.unpackbits(
        np.frombuffer(generator.bytes((count + 7) // 8), dtype=np.uint8), count=count
    )
    return (2.0 * bits - 1.0).reshape(shape)


def _off_diagonal_squares(matrix: np.ndarray) -> float:
    """Σ_{g≠h} m_gh²."""
    return max(
        float(np.square(matrix).sum() - np.square(np.diagonal(matrix)).sum()), 0.0
    )
