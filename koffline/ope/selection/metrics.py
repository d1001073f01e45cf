"""How good is a choice among policies when their true values are known? Pure functions of two columns.

``estimates (K,)`` and ``truths (K,)`` are values of the same K policies in the same order; larger is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError, DataError

Values = Float[np.ndarray, " policy"]


@dataclass(frozen=True)
class TypeErrors:
    """Accepting a policy when its interval lies above ``threshold``: how often that decision is wrong.

    ``false_accepts`` (type I): share of the policies that are truly not above, yet accepted.
    ``false_rejects`` (type II): share of those truly above, yet not accepted. None without such policies.
    """

    threshold: float
    false_accepts: float | None
    false_rejects: float | None


@dataclass(frozen=True)
class SelectionMetrics:
    """One ranking judged by the truth; None where a number is not defined (all estimates equal, say).

    ``regret_at_k`` begins at k = 1, in units of the return; ``relative_regret_at_1`` is its share of the
    range of true values: 0 best, 1 worst choice. ``coverage``: share of intervals that hold the truth.
    """

    regret_at_k: tuple[float, ...]
    relative_regret_at_1: float | None
    spearman: float | None
    kendall: float | None
    mean_absolute_error: float
    mean_relative_error: float | None
    coverage: float | None = None
    type_errors: TypeErrors | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "regret_at_k": list(self.regret_at_k)}


def score_selection(
    estimates: Sequence[float] | Values,
    truths: Sequence[float] | Values,
    intervals: Sequence[tuple[float, float]] | None = None,
    threshold: float | None = None,
    most: int = 5,
) -> SelectionMetrics:
    """All metrics of one ranking. most: the largest k of regret@k. Raises DataError, ConfigError."""
    values, true = _checked(estimates, truths)
    held = errors = None
    if intervals is not None:
        bounds = np.asarray(intervals, dtype=np.float64).reshape(len(values), 2)
        held = float(np.mean((bounds[:, 0] <= true) & (true <= bounds[:, 1])))
        if threshold is not None:
            errors = type_errors(bounds[:, 0] > threshold, true, threshold)
    return SelectionMetrics(
        regret_at_k=tuple(regret_at_k(values, true, k + 1) for k in range(min(most, len(values)))),
        relative_regret_at_1=relative_regret_at_k(values, true, 1),
        spearman=spearman(values, true),
        kendall=kendall(values, true),
        mean_absolute_error=float(np.mean(np.abs(values - true))),
        mean_relative_error=mean_relative_error(values, true),
        coverage=held,
        type_errors=errors,
    )


def regret_at_k(estimates: Values, truths: Values, k: int) -> float:
    """max truth − max truth among the k policies of largest estimate; ties go to the earlier policy.

    (Fu et al. 2021, Benchmarks for deep off-policy evaluation)
    """
    values, true = _checked(estimates, truths)
    if not 1 <= k <= len(values):
        raise ConfigError(f"k is {k} for {len(values)} policies; give 1 … {len(values)}")
    chosen = np.argsort(-values, kind="stable")[:k]
    return float(true.max() - true[chosen].max())


def relative_regret_at_k(estimates: Values, truths: Values, k: int) -> float | None:
    """regret@k / (best truth − worst truth), in [0, 1]; None when all policies are worth the same."""
    reach = float(np.ptp(np.asarray(truths, dtype=np.float64)))
    return regret_at_k(estimates, truths, k) / reach if reach > 0.0 else None


def spearman(estimates: Values, truths: Values) -> float | None:
    """Correlation of the ranks (mean ranks for ties); None when one column is constant or K < 2."""
    from scipy import stats

    values, true = _checked(estimates, truths)
    if _constant(values) or _constant(true):
        return None
    return _number(stats.spearmanr(values, true)[0])


def kendall(estimates: Values, truths: Values) -> float | None:
    """Kendall's τ_b: (concordant − discordant pairs) over pairs without ties; None as in `spearman`."""
    from scipy import stats

    values, true = _checked(estimates, truths)
    if _constant(values) or _constant(true):
        return None
    return _number(stats.kendalltau(values, true)[0])


def mean_relative_error(estimates: Values, truths: Values) -> float | None:
    """Mean of |estimate − truth| / |truth|; None when a truth is zero."""
    values, true = _checked(estimates, truths)
    return None if np.any(true == 0.0) else float(np.mean(np.abs(values - true) / np.abs(true)))


def type_errors(accepted: np.ndarray, truths: Values, threshold: float) -> TypeErrors:
    """Errors of the decision ``accepted (K,)`` bool: "this policy is worth more than ``threshold``"."""
    taken, above = np.asarray(accepted, dtype=bool), np.asarray(truths) > threshold
    return TypeErrors(
        threshold=float(threshold),
        false_accepts=_share(taken[~above]),
        false_rejects=_share(~taken[above]),
    )


def _checked(estimates: Sequence[float] | Values, truths: Sequence[float] | Values) -> tuple[Values, Values]:
    """Both as float64 (K,); DataError when they cannot be compared."""
    values, true = np.asarray(estimates, dtype=np.float64), np.asarray(truths, dtype=np.float64)
    if values.ndim != 1 or values.shape != true.shape or len(values) == 0:
        raise DataError(
            f"estimates have shape {values.shape}, truths {true.shape}; give one of each per policy"
        )
    if not (np.isfinite(values).all() and np.isfinite(true).all()):
        raise DataError("estimates or truths hold NaN or infinite numbers; leave those policies out")
    return values, true


def _constant(column: Values) -> bool:
    return len(column) < 2 or bool(np.all(column == column[0]))


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _share(flags: np.ndarray) -> float | None:
    return float(flags.mean()) if len(flags) else None
