"""What a diagnosis says in sentences, and the mean Bellman residual along one number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from koffline.ope.bellman_test.front import BellmanTest
from koffline.ope.bellman_test.witness import Region
from koffline.ope.coverage import Coverage

Z_NOTE = (
    "z is not mean residual / ±: it belongs to the kernel-weighted mean at the place, in which near rows "
    "count more; the mean residual is the average over the rows within one bandwidth (of that action, where "
    "actions are discrete)."
)
_LOW_COVERAGE = 0.8
_LOW_POWER = 0.5
_BINS = 12
_FEWEST = 8  # rows in a bin, where there are enough
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Profile:
    """Rows in bins of nearly equal weight, in the order of ``label``.

    (B,) each: ``center``: weighted mean of the number; ``mean`` ± ``standard_error`` of the residual;
    ``low``, ``high``: its 10 % and 90 % quantiles; ``rows``: how many.
    """

    label: str
    center: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray

    @property
    def z_scores(self) -> np.ndarray:
        """(B,) mean in standard errors; without spread infinite for enough rows of a mean, else 0."""
        certain = (self.mean != 0.0) & (self.rows >= _FEWEST)
        otherwise = np.where(certain, np.copysign(np.inf, self.mean), 0.0)
        return np.divide(self.mean, self.standard_error, out=otherwise, where=self.standard_error > 0.0)


def make_profile(
    label: str,
    numbers: Float[np.ndarray, " row"],
    residuals: Float[np.ndarray, " row"],
    weights: Float[np.ndarray, " row"],
    bins: int = _BINS,
) -> Profile:
    """Bins by quantiles of ``numbers``; equal numbers share a bin. Rows of weight zero are no evidence."""
    kept = np.flatnonzero(weights > 0.0)
    order = kept[np.argsort(numbers[kept], kind="stable")]
    numbers, residuals, weights = numbers[order], residuals[order], weights[order]
    bins = max(1, min(bins, len(order) // _FEWEST))
    reached = np.cumsum(weights) / weights.sum()
    cuts = np.searchsorted(reached, np.arange(1, bins) / bins + 1e-9, side="right")
    firsts = np.searchsorted(numbers, numbers[np.minimum(cuts, len(order) - 1)], side="left")
    edges = np.unique(np.concatenate([[0], firsts, [len(order)]]))
    parts = [slice(int(start), int(stop)) for start, stop in pairwise(edges)]
    columns = zip(*(_summary(numbers[part], residuals[part], weights[part]) for part in parts), strict=True)
    center, mean, error, low, high = map(np.array, columns)
    return Profile(label, center, mean, error, low, high, np.diff(edges))


def _summary(numbers: np.ndarray, residuals: np.ndarray, weights: np.ndarray) -> tuple[float, ...]:
    """Of one bin: centre, mean, standard error and two quantiles."""
    share, count = weights / weights.sum(), len(numbers)
    mean = float(share @ residuals)
    error = math.sqrt(float(np.square(share) @ np.square(residuals - mean)))
    if np.ptp(residuals) <= _ROUNDING * abs(mean):  # equal residuals have no spread
        error = 0.0
    if count > 1:
        error *= math.sqrt(count / (count - 1))
    low, high = np.quantile(residuals, [0.1, 0.9])
    return float(share @ numbers), mean, error, float(low), float(high)


def collect_findings(
    test: BellmanTest,
    coverage: Coverage,
    regions: tuple[Region, ...],
    by_value: Profile,
    by_step: Profile | None,
) -> tuple[str, ...]:
    """The conclusion, the kernel loss in words, and where the error is, where there is evidence of one."""
    found = [f"Bellman test: {test.conclusion}."]
    if math.isfinite(test.kernel_ratio):
        found.append(
            f"The kernel loss on these rows is {test.kernel_ratio:.3g} times what noise alone would leave "
            "(1: nothing left to explain)."
        )
    significant = [region for region in regions if region.is_significant]
    if significant:
        found.append(_describe_region(significant[0], len(significant), test.window))
    if test.rejects:
        said = [describe_profile(profile, test.level) for profile in (by_value, by_step)]
        found += [sentence for sentence in said if sentence]
    found.append(f"{coverage.fraction:.0%} of the policy's actions lie near logged ones (95 % on-policy).")
    return tuple(found)


def collect_warnings(test: BellmanTest, coverage: Coverage, notes: tuple[str, ...]) -> tuple[str, ...]:
    """Each sentence once: what the values are, how fresh the rows, how much the test can see."""
    found = [*notes, *test.warnings]
    if coverage.fraction < _LOW_COVERAGE:
        found.append(
            f"Only {coverage.fraction:.0%} of the policy's actions lie near logged ones: errors elsewhere "
            "cannot be seen in this log, whatever the test says."
        )
    if not test.rejects and test.power < _LOW_POWER:
        found.append(
            f"The test could hardly have found {test.alternative_name} (power {test.power:.2f}); collect "
            "more rows before trusting that it was not rejected."
        )
    return tuple(dict.fromkeys(found))


def describe_place(center: np.ndarray, most: int = 6) -> str:
    """A state in few characters."""
    parts = [f"{number:.3g}" for number in center[:most]]
    return f"({', '.join(parts)}{', …' if len(center) > most else ''})"


def describe_action(action: object) -> str:
    """An action in few characters; nothing for V(s)."""
    if action is None:
        return ""
    return f"action {describe_place(action) if isinstance(action, np.ndarray) else action}"


def describe_profile(profile: Profile | None, level: float) -> str | None:
    """The bin with the largest mean among those that are clear after counting all bins."""
    if profile is None or len(profile.mean) < 2:
        return None
    from scipy import stats

    is_clear = np.abs(profile.z_scores) > float(stats.norm.isf(level / (2.0 * len(profile.mean))))
    if not is_clear.any():
        return None
    worst = int(np.argmax(np.where(is_clear, np.abs(profile.mean), -1.0)))
    error = profile.standard_error[worst]
    spread = f" ± {error:.2g}" if error > 0.0 else " in every row"
    return (
        f"By {profile.label}, of the bins beyond chance the mean residual of one step is largest around "
        f"{profile.label} {profile.center[worst]:.3g}: {profile.mean[worst]:+.3g}{spread}."
    )


def _describe_region(region: Region, count: int, window: int) -> str:
    where = ", ".join(
        filter(None, (f"state {describe_place(region.center)}", describe_action(region.action)))
    )
    side = "above" if region.mean_residual < 0.0 else "below"
    target = "reward plus discounted next value"
    if window > 1:
        target = f"the discounted rewards over {window} steps plus the value after them"
    others = f" ({count} such places are listed)" if count > 1 else ""
    return (
        f"The error is clearest near {where}: there the value is {side} {target} by "
        f"{abs(region.mean_residual):.3g} ± {region.standard_error:.2g} on average over {region.size} "
        f"rows{others}."
    )
