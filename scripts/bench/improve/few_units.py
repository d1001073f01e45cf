"""How often are lower ends false where few units certify? Skewed laws, no networks.

    python -m scripts.bench.improve.few_units    # 30 processor seconds

A unit's uplift is drawn from a law of mean 0: the new policy is worth as much as the
present one, so that every lower end above 0 is false. ``every tenth``: nine units in
ten gain 1, the tenth loses 9. Lower ends are made as those of one of two finalists
are, each to hold with 97.5 %: by Student t over units, as the doubly robust estimate of
one-step logs has it, and by 20 resampled estimates, as the networks have it (here
without their own noise, which only widens). Writes docs/results/improve_few_units.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from scipy import special

from koffline.improvement.settings import make_improve_settings

RESULTS = (
    Path(__file__).resolve().parents[3] / "docs" / "results" / "improve_few_units.json"
)
SIZES = (8, 12, 15, 20, 25, 30, 40, 60, 100, 200)
LEVEL = 0.95  # two-sided, of one of two finalists
DRAWS = 10_000
_DRAWS_AT_ONCE = 500
Uplifts: TypeAlias = Float[np.ndarray, "draw unit"]
Law: TypeAlias = Callable[[np.random.Generator, tuple[int, int]], Uplifts]


def losses(every: int) -> Law:
    """Gains of 1, and in one of ``every`` units a loss that takes all of them."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Uplifts:
        is_lost = generator.random(shape) < 1.0 / every
        return np.where(is_lost, 1.0 - every, 1.0)

    return draw


def _normal(generator: np.random.Generator, shape: tuple[int, int]) -> Uplifts:
    return generator.normal(size=shape)


def _exponential(generator: np.random.Generator, shape: tuple[int, int]) -> Uplifts:
    return 1.0 - generator.exponential(size=shape)


def _lognormal(generator: np.random.Generator, shape: tuple[int, int]) -> Uplifts:
    return math.exp(0.5) - generator.lognormal(size=shape)


LAWS: dict[str, Law] = {
    "normal": _normal,
    "losses of exponential size": _exponential,
    "losses of lognormal size": _lognormal,
    "a loss in every third unit": losses(3),
    "a loss in every fifth": losses(5),
    "a loss in every seventh": losses(7),
    "a loss in every tenth": losses(10),
    "a loss in every twentieth": losses(20),
    "a loss in every fiftieth": losses(50),
}


def ends_by_student(uplifts: Uplifts) -> Float[np.ndarray, " draw"]:
    """Lower ends (D,) by Student t over units
    (`koffline.ope.importance.episode_intervals.student_interval`).
    """
    units = uplifts.shape[1]
    errors = uplifts.std(axis=1, ddof=1) / math.sqrt(units)
    quantile = special.stdtrit(units - 1, 0.5 + LEVEL / 2.0)
    return uplifts.mean(axis=1) - quantile * errors


def ends_by_resampling(
    uplifts: Uplifts, generator: np.random.Generator
) -> Float[np.ndarray, " draw"]:
    """Lower ends (D,) from the spread of resampled means
    (`koffline.ope.networks.fitted_values.FittedValues.interval`).
    """
    defaults = make_improve_settings(None)
    draws, units = uplifts.shape
    resampled = defaults.resampled_replicas
    counts = generator.poisson(size=(draws, resampled, units))
    totals = np.maximum(counts.sum(axis=2), 1)
    means = np.einsum("dru,du->dr", counts, uplifts) / totals
    freedom = min(resampled, units) - 1
    quantile = special.stdtrit(freedom, 0.5 + LEVEL / 2.0)
    widening = math.sqrt((1.0 + 1.0 / defaults.full_replicas) * units / (units - 1.0))
    return uplifts.mean(axis=1) - quantile * widening * means.std(axis=1, ddof=1)


def measure(law: Law, units: int, draws: int) -> dict[str, float]:
    """Shares of false lower ends, by both ways, in logs of ``units`` units."""
    generator = np.random.default_rng(units)
    false_by_student: list[Bool[np.ndarray, " draw"]] = []
    false_by_resampling: list[Bool[np.ndarray, " draw"]] = []
    for _ in range(0, draws, _DRAWS_AT_ONCE):
        uplifts = law(generator, (_DRAWS_AT_ONCE, units))
        false_by_student.append(ends_by_student(uplifts) > 0.0)
        false_by_resampling.append(ends_by_resampling(uplifts, generator) > 0.0)
    return {
        "student": round(float(np.mean(false_by_student)), 4),
        "resampled": round(float(np.mean(false_by_resampling)), 4),
    }


def rows(draws: int = DRAWS) -> list[dict[str, Any]]:
    """A row for each law and number of units."""
    return [
        {"law": name, "units": units, **measure(law, units, draws)}
        for name, law in LAWS.items()
        for units in SIZES
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    content = {
        "command": "python -m scripts.bench.improve.few_units",
        "draws": options.draws,
        "rows": rows(options.draws),
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
