"""Intervals for a policy's value, each labelled certified or calibrated; this file
makes the calibrated ones.

``calibrated_interval`` inverts a wild bootstrap test; the fitted value is a weighted
sum of residuals. ``pivot_interval`` resamples units (episodes, or rows), which needs
only sums over units: θ̂ solves Bᵀ(v − Bθ) = τD(θ − θ0), that is n⁻¹ Σ Ω_i (r_i − z_iᵀθ)
= τD(θ − θ0), with the instruments Ω_i = w_i Bᵀψ_i (N, p) held fixed. A resampled log
weights units by how often they were drawn; its θ* = θ̂ + (n⁻¹ΣwΩzᵀ + τD)⁻¹ n⁻¹Σ(w −
1)Ωδ̂.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from koffline.config import read_section
from koffline.data.hashing import poisson_counts
from koffline.errors import ConfigError
from koffline.ope import thresholds
from koffline.ope.intervals import base
from koffline.ope.intervals.base import (
    RIDGE,
    IntervalResult,
    KernelIntervalSettings,
    ridged_fit,
)
from koffline.ope.intervals.feature_system import FeatureSystem
from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.names import BOOTSTRAP_PIVOT, KERNEL_CALIBRATED, SYSTEM_KINDS
from koffline.ope.results import Interval

_ALARM_DRAWS = 199  # draws, enough for a warning
_FEW = 30.0
_FEW_STARTS = 10
_ASSUMPTIONS = (
    "Asymptotic: a wild bootstrap test of each value over rows and {starts}; Q^π in the"
    " class, residuals without memory (any log of single steps), reward and next state"
    " as the environment draws them. It does not know what the class cannot express."
)
# multiplications in the sums of one bootstrap: some seconds on one core
_MOST_PRODUCTS = 3e10
_MOST_NUMBERS = 5e7  # numbers in the matrices of all draws: 400 MB
_FEW_UNITS = 30
_PIVOT_ASSUMPTIONS = (
    "Asymptotic: {units} resampled, the estimate solved again for each ({matrix};"
    " features and instruments as they are), errors turned around; {starts}. It does"
    " not know what the class cannot express."
)


def make_interval(kind: str, system: FeatureSystem, **options: Any) -> IntervalResult:
    """Make an interval of the given kind for the value of a policy, with its
    assumptions.

    kind: one of ``koffline.ope.names.SYSTEM_KINDS``. options: fields of
    `KernelIntervalSettings` (level, norm_bound, value_bounds, reward_bounds, draws,
    seed). An infeasible class is no error: ``result.interval`` is then None and
    ``result.misspecified`` true. Raises ConfigError.
    """
    if kind not in SYSTEM_KINDS:
        raise ConfigError(
            f"interval is '{kind}'; give one of {', '.join(SYSTEM_KINDS)}"
        )
    settings = read_section(KernelIntervalSettings, options)
    settings = settings.model_copy(
        update={"draws": base.enough_draws(settings.level, settings.draws)}
    )
    if kind == KERNEL_CALIBRATED:
        return calibrated_interval(system, settings)
    if kind == BOOTSTRAP_PIVOT:
        return pivot_interval(system, settings)
    return feature_interval(system, kind, settings)


def calibrated_interval(
    system: FeatureSystem, settings: KernelIntervalSettings, check_class: bool = True
) -> IntervalResult:
    """All values η for which a wild-bootstrap test of "cᵀθ = η" does not reject.

    For each η the residuals are those of the parameters on a path with cᵀθ = η, so the
    interval is not
    symmetric: the statistic (η̂ − η)² / Σ a(η)² is compared with q², a quadratic
    inequality in η. Residuals are scaled for leverage (HC2). check_class: warn if the
    smallest kernel loss in the class exceeds what the wild bootstrap explains, an alarm
    that the class may not contain Q^π.
    """
    profile = base.make_profile(system)
    level = settings.level
    quantile, counted = base.studentised_quantile(profile.influences, settings)
    below, above = base.invert_test(profile.influences, profile.slopes, quantile)
    bounds = settings.values_within(system)
    text = _ASSUMPTIONS.format(
        starts=base.describe_starts(system.fixed_starts, "start states")
    )
    interval = Interval(
        profile.value + below, profile.value + above, level, KERNEL_CALIBRATED, text
    )
    interval = interval.within(bounds)
    threshold = math.inf
    if check_class:
        draws = base.enough_draws(level, min(settings.draws, _ALARM_DRAWS))
        threshold = base.wild_threshold(system, profile, draws, settings.seed, level)
    starts = int((system.start_weights > 0.0).sum())
    sentences: list[str] = []
    if counted < _FEW:
        sentences.append(
            f"the interval rests on {counted:.0f} rows or start states that count; with"
            f" so few the level {level:g} is not to be relied on"
        )
    if not system.fixed_starts and starts < _FEW_STARTS:
        sentences.append(
            f"{starts} start states are too few to tell how start states vary; give"
            " initial_observations"
        )
    if (interval.low, interval.high) == bounds:
        sentences.append(
            "the log says too little: the interval is all that rewards and γ allow"
        )
    if profile.loss > threshold:
        sentences.append(base.describe_misspecified(profile.loss, threshold))
    return IntervalResult(
        KERNEL_CALIBRATED,
        interval,
        value=profile.value,
        threshold=threshold,
        least_loss=profile.loss,
        misspecified=profile.loss > threshold,
        warnings=tuple(sentences),
    )


@torch.no_grad()
def pivot_interval(
    system: FeatureSystem, settings: KernelIntervalSettings
) -> IntervalResult:
    """[v − q_high, v − q_low] from the errors of the fit over resampled episodes (rows
    without episodes).

    The interval is None for a single unit, and if more than a tenth of the resampled
    logs have no solution. (Hao et al. 2021, the distributional correction)
    """
    if system.clusters is None:
        numbers = np.arange(len(system.unit_starts))
    else:
        numbers = system.clusters
    counts = poisson_counts(settings.seed, range(settings.draws), numbers)
    theta = ridged_fit(system, RIDGE)
    weights = _by_unit(system, system.row_weights.numpy())
    counts = counts[counts @ weights > 0.0]  # with few units, a draw may be empty
    value = system.value(theta)
    warnings = []
    interval = None
    drawn = len(np.unique(numbers[weights > 0.0]))
    kind = system.kind
    if 2 <= drawn < _FEW_UNITS:
        warnings.append(
            f"the bootstrap has {drawn} {kind} to draw from; its interval is too narrow"
        )
    values, is_exact = resample_values(system, counts)
    errors = values[np.isfinite(values)] - value
    tail = (1.0 - settings.level) / 2.0
    if drawn < 2:
        warnings.append(
            f"one of the log's {kind} has all weight: a bootstrap has nothing to choose"
            " from"
        )
    elif len(errors) < thresholds.FEWEST_FINITE_DRAWS * settings.draws:
        warnings.append("too many resampled logs have no answer; give more episodes")
    else:
        low, high = np.quantile(errors, (tail, 1.0 - tail))
        matrix = "its matrix held: the first order"
        if is_exact:
            matrix = "its matrix too"
        text = _PIVOT_ASSUMPTIONS.format(
            units=kind,
            matrix=matrix,
            starts=base.describe_starts(
                system.fixed_starts, "start states resampled with them"
            ),
        )
        interval = Interval(
            value - float(high),
            value - float(low),
            settings.level,
            BOOTSTRAP_PIVOT,
            text,
        )
        interval = interval.within(settings.values_within(system))
    return IntervalResult(
        BOOTSTRAP_PIVOT, interval, value=value, warnings=tuple(warnings)
    )


def resample_values(
    system: FeatureSystem, counts: Int[np.ndarray, "draw unit"]
) -> tuple[Float[np.ndarray, " draw"], bool]:
    """cᵀθ of every resampled log, and whether the matrices were resampled too.

    If that would take too much time or memory, the matrix of the whole log is used
    (first-order bootstrap). Start states are resampled with their units unless they are
    given; draws without start states are NaN.
    """
    matrix = system.projected[:, :-1]
    theta = ridged_fit(system, RIDGE)
    omega = (
        torch.cat([psi @ matrix for _, psi in base.instruments(system)])
        * system.row_weights[:, None]
    )
    ridge = torch.diag(base.ridge_sizes(matrix.mT @ matrix, system.free, RIDGE))
    size = theta.numel() ** 2 * len(counts)
    is_exact = (
        len(system.unit_starts) * size <= _MOST_PRODUCTS and size <= _MOST_NUMBERS
    )
    weights = counts @ _by_unit(system, system.row_weights.numpy())  # Σw per draw
    share = torch.as_tensor(counts / weights[:, None])  # weight of each unit's sums
    gap = (omega * system.residuals(theta)[:, None]).numpy()
    pull = share @ torch.as_tensor(_by_unit(system, gap)) - torch.as_tensor(
        gap.sum(axis=0) / len(gap)
    )
    if is_exact:  # n⁻¹ΣwΩzᵀ of every draw, one column of z at a time
        products = (omega * column[:, None] for column in system.difference.T)
        columns = [
            share @ torch.as_tensor(_by_unit(system, product.numpy()))
            for product in products
        ]
        steps = torch.linalg.solve(torch.stack(columns, dim=-1) + ridge, pull)
    else:
        whole = omega.mT @ system.difference / len(gap) + ridge
        steps = torch.linalg.solve(whole, pull.mT).mT
    if system.fixed_starts:
        return ((theta + steps) @ system.start_mean).numpy(), is_exact
    drawn = torch.as_tensor(counts, dtype=torch.float64) * system.start_weights
    means = (drawn @ system.starts) / drawn.sum(dim=1, keepdim=True)
    return (means * (theta + steps)).sum(dim=1).numpy(), is_exact


def _by_unit(system: FeatureSystem, values: np.ndarray) -> np.ndarray:
    """Sums over the rows of each unit, (U, …)."""
    return np.add.reduceat(values, system.unit_starts, axis=0)
