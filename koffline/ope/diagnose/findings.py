"""What a diagnosis says in sentences."""

from __future__ import annotations

import math

import numpy as np

from koffline.ope.bellman_test.result import BellmanTest
from koffline.ope.bellman_test.witness import Region
from koffline.ope.coverage import Coverage
from koffline.ope.diagnose.profiles import Profile

Z_NOTE = (
    "z is not mean residual / ±: it belongs to the kernel-weighted mean at the place, in which near rows "
    "count more; the mean residual is the average over the rows within one bandwidth (of that action, where "
    "actions are discrete)."
)
_LOW_COVERAGE = 0.8
_LOW_POWER = 0.5


def collect_findings(
    test: BellmanTest,
    kernel_ratio: float,
    coverage: Coverage,
    regions: tuple[Region, ...],
    by_value: Profile,
    by_step: Profile | None,
) -> tuple[str, ...]:
    """The conclusion, the kernel loss in words, and where the error is, where there is evidence of one."""
    found = [f"Bellman test: {test.conclusion}."]
    if math.isfinite(kernel_ratio):
        found.append(
            f"The kernel loss on these rows is {kernel_ratio:.3g} times what noise alone would leave "
            "(1: nothing left to explain)."
        )
    significant = [region for region in regions if region.is_significant]
    if significant:
        found.append(_describe_region(significant[0], len(significant), test.window))
    if test.rejects:
        found += [
            sentence
            for sentence in (_describe_profile(by_value, test.level), _describe_profile(by_step, test.level))
            if sentence
        ]
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
    if not test.rejects and not test.power >= _LOW_POWER:
        power = f"power {test.power:.2f}" if math.isfinite(test.power) else "power unknown"
        found.append(
            f"The test could hardly have found {test.alternative_name} ({power}); collect more rows before "
            "trusting that it was not rejected."
        )
    return tuple(dict.fromkeys(found))


def describe_place(center: np.ndarray, digits: int = 3, most: int = 6) -> str:
    """A state in few characters."""
    parts = [f"{number:.{digits}g}" for number in center[:most]]
    return f"({', '.join(parts)}{', …' if len(center) > most else ''})"


def describe_action(action: object) -> str:
    """An action in few characters; nothing for V(s)."""
    if action is None:
        return ""
    if isinstance(action, np.ndarray):
        return f"action {describe_place(action)}"
    return f"action {action}"


def _describe_region(region: Region, count: int, window: int) -> str:
    low = region.mean_residual < 0.0
    where = f"state {describe_place(region.center)}"
    action = describe_action(region.action)
    others = f" ({count} such places are listed)" if count > 1 else ""
    target = "reward plus discounted next value"
    if window > 1:
        target = f"the discounted rewards over {window} steps plus the value after them"
    return (
        f"The error is clearest near {where}{', ' + action if action else ''}: there the value is "
        f"{'above' if low else 'below'} {target} by {abs(region.mean_residual):.3g} "
        f"± {region.standard_error:.2g} on average over {region.size} rows{others}."
    )


def _describe_profile(profile: Profile | None, level: float) -> str | None:
    """The bin with the largest mean among those that are clear after counting all bins."""
    if profile is None or len(profile.mean) < 2:
        return None
    from scipy import stats

    limit = float(stats.norm.isf(level / (2.0 * len(profile.mean))))
    is_clear = np.abs(profile.z_scores) > limit
    if not is_clear.any():
        return None
    worst = int(np.argmax(np.where(is_clear, np.abs(profile.mean), -1.0)))
    error = profile.standard_error[worst]
    spread = f" ± {error:.2g}" if error > 0.0 else " in every row"
    return (
        f"By {profile.label}, of the bins beyond chance the mean residual of one step is largest around "
        f"{profile.label} {profile.center[worst]:.3g}: {profile.mean[worst]:+.3g}{spread}."
    )
