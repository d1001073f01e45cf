"""How should folds' estimates become one lower end? One-step logs, no networks.

    python -m scripts.bench.improve.pooled_ends    # processor minutes: 2

The logs and the ridge policies of `scripts.bench.improve.cross_fitting`; the best of
twelve in each of five folds. Doubly robust uplifts of all rows, by the regression that
was learnt outside the fold, become a lower end of the mixture of the folds' policies by
``folds``: intervals of Student t of the folds, pooled (`koffline.improvement.pooling`);
``rows``: Student t over all rows; ``bootstrap-t``: 200 resamples of all rows, with the
quantile of studentised means, which respects skewness. False is an end above the
mixture's true uplift: at most 5 % are promised. ``recommended`` is an end above 0.
Ends have 97.5 %, as in `koffline.improvement.folds`.
``skewed``: chances of offers of 0.91, 0.03, 0.03 and 0.03, so that few rows carry the
weight. Writes docs/results/improve_pooled_ends.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from jaxtyping import Float
from scipy import special

from koffline.improvement.pooling import pooled_interval
from koffline.ope.results import Interval
from scripts.bench.improve import cross_fitting
from scripts.bench.improve.cross_fitting import LinearPolicy, Rows, choose

RESULTS = (
    Path(__file__).resolve().parents[3]
    / "docs"
    / "results"
    / "improve_pooled_ends.json"
)
DRAWS = 300
SIZES = (200, 400, 1000)
EFFECTS = (0.0, 0.15)
CHANCES = {
    "usual": np.array([0.4, 0.3, 0.2, 0.1]),
    "skewed": np.array([0.91, 0.03, 0.03, 0.03]),
}
WAYS = ("folds", "rows", "bootstrap-t")
LEVEL = 0.975  # of an end, for a promise of 95 %
_RESAMPLES = 200


@dataclass(frozen=True)
class Ends:
    """Lower ends and true uplifts, one of each log."""

    low: Float[np.ndarray, " log"]
    truth: Float[np.ndarray, " log"]


def end_of_folds(
    uplifts: list[Float[np.ndarray, " row"]], level: float = LEVEL
) -> float:
    """The lower end from intervals of Student t of the folds."""
    total = sum(map(len, uplifts))
    means = []
    intervals: list[Interval | None] = []
    for of_fold in uplifts:
        error = of_fold.std(ddof=1) / np.sqrt(len(of_fold))
        half = special.stdtrit(len(of_fold) - 1, level) * error
        mean = float(of_fold.mean())
        means.append(mean)
        intervals.append(
            Interval(mean - half, mean + half, 2.0 * level - 1.0, "episodes-t")
        )
    shares = [len(of_fold) / total for of_fold in uplifts]
    pooled = pooled_interval(means, intervals, shares)
    assert pooled is not None
    return pooled.low


def end_by_bootstrap(
    uplifts: Float[np.ndarray, " row"],
    generator: np.random.Generator,
    level: float = LEVEL,
) -> float:
    """The lower end by studentised resampled means (Efron & Tibshirani 1993, 12.5)."""
    size = len(uplifts)
    drawn = uplifts[generator.integers(size, size=(_RESAMPLES, size))]
    errors = drawn.std(axis=1, ddof=1) / np.sqrt(size)
    moves = drawn.mean(axis=1) - uplifts.mean()
    ratios = np.divide(moves, errors, out=np.zeros(_RESAMPLES), where=errors > 0.0)
    error = uplifts.std(ddof=1) / np.sqrt(size)
    return float(uplifts.mean() - np.quantile(ratios, level) * error)


def ends_of_log(
    effect: float,
    rows: int,
    folds: int,
    generator: np.random.Generator,
    level: float = LEVEL,
) -> tuple[dict[str, float], float]:
    """Lower ends by every way, and the mixture's true uplift."""
    chances = cross_fitting._CHANCES
    slopes = generator.normal(size=(4, len(chances)))

    def means(contexts: np.ndarray) -> np.ndarray:
        return np.clip(0.3 + effect * np.tanh(contexts @ slopes), 0.02, 0.98)

    contexts = generator.normal(size=(rows, 4))
    shown = generator.choice(len(chances), size=rows, p=chances)
    is_paid = generator.random(rows) < means(contexts)[np.arange(rows), shown]
    log = Rows(contexts, shown, is_paid.astype(float))
    parts = np.array_split(generator.permutation(rows), folds)
    policies: list[LinearPolicy] = []
    uplifts = []
    for number, part in enumerate(parts):
        outside = np.concatenate(parts[:number] + parts[number + 1 :])
        first = round(0.75 * len(outside))
        (policy,) = choose(log.part(outside[:first]), log.part(outside[first:]), 1)
        policies.append(policy)
        uplifts.append(policy.uplifts(log.part(part)))
    visitors = generator.normal(size=(2000, 4))
    taken = np.mean([policy.chances(visitors) for policy in policies], axis=0)
    truth = float(((taken - chances) * means(visitors)).sum(axis=1).mean())
    together = np.concatenate(uplifts)
    ends = {
        "folds": end_of_folds(uplifts, level),
        "rows": cross_fitting.lower_end(together, level),
        "bootstrap-t": end_by_bootstrap(together, generator, level),
    }
    return ends, truth


def simulated_ends(
    effect: float, rows: int, draws: int, folds: int = 5, way: str = "folds"
) -> Ends:
    """Lower ends by one way on many logs."""
    low = []
    truth = []
    for draw in range(draws):
        generator = np.random.default_rng([draw, rows])
        ends, of_mixture = ends_of_log(effect, rows, folds, generator)
        low.append(ends[way])
        truth.append(of_mixture)
    return Ends(np.array(low), np.array(truth))


def measure(
    law: str, effect: float, rows: int, draws: int, level: float = LEVEL
) -> list[dict[str, Any]]:
    """For each way the shares of false lower ends and of recommendations."""
    false = dict.fromkeys(WAYS, 0)
    recommended = dict.fromkeys(WAYS, 0)
    with mock.patch.object(cross_fitting, "_CHANCES", CHANCES[law]):
        for draw in range(draws):
            generator = np.random.default_rng([draw, rows])
            ends, truth = ends_of_log(
                effect, rows, cross_fitting.FOLDS, generator, level
            )
            for way, end in ends.items():
                false[way] += end > truth
                recommended[way] += end > 0.0
    return [
        {
            "law": law,
            "effect": effect,
            "rows": rows,
            "way": way,
            "logs": draws,
            "false": round(float(false[way]) / draws, 4),
            "recommended": round(float(recommended[way]) / draws, 4),
        }
        for way in WAYS
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--level", type=float, default=LEVEL, help="of an end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for law in CHANCES:
        for effect in EFFECTS:
            for size in SIZES:
                rows += measure(law, effect, size, options.draws, options.level)
    content = {"command": "python -m scripts.bench.improve.pooled_ends", "rows": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
