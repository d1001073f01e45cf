"""Would cross-fitting recommend more on small logs? One-step logs, no networks.

    python -m scripts.bench.improve.cross_fitting    # 45 processor seconds

Four offers for visitors of four features, shown with known chances; linear models of
rewards by ridge regression, their greedy and softmax policies, each mixed with the
present policy at four shares; doubly robust estimates. Three parts, as `koffline.improve`
has them, with 60, 20 and 20 or 40, 20 and 40 % of the rows: two finalists, each lower
end with 97.5 %. Five folds: on the four others a policy is learnt (75 %) and chosen
(25 %), and valued on the fold; what is certified is the mixture of the five policies,
by the mean over all rows, with 97.5 %, as one of two finalists is. Writes
docs/results/improve_cross_fitting.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import special

RESULTS = (
    Path(__file__).resolve().parents[3]
    / "docs"
    / "results"
    / "improve_cross_fitting.json"
)
DRAWS = 400
SIZES = (1000, 2000)
EFFECTS = (0.0, 0.04, 0.08, 0.15)  # 0: every offer is worth the same
FOLDS = 5
_CHANCES = np.array([0.4, 0.3, 0.2, 0.1])  # of the present policy
_TEMPERATURES = (0.0, 0.03, 0.1)
_SHARES = (0.25, 0.5, 0.75, 1.0)
_RIDGE = 5.0
_TRUTH_ROWS = 3000
_ROUNDING = 1e-12  # of uplifts that are 0


@dataclass(frozen=True, eq=False)
class Rows:
    """Contexts (N, 4), offers (N,) and rewards (N,)."""

    contexts: Float[np.ndarray, "row 4"]
    offers: Int[np.ndarray, " row"]
    rewards: Float[np.ndarray, " row"]

    def part(self, rows: Int[np.ndarray, " part"]) -> Rows:
        """Some of the rows."""
        return Rows(self.contexts[rows], self.offers[rows], self.rewards[rows])


@dataclass(frozen=True, eq=False)
class LinearPolicy:
    """The softmax (temperature 0: greedy) of linear values, mixed with the present
    policy.
    """

    weights: Float[np.ndarray, "offer feature"]
    temperature: float
    share: float

    def values(self, contexts: np.ndarray) -> Float[np.ndarray, "row offer"]:
        """Modelled mean rewards."""
        return _features(contexts) @ self.weights.T

    def chances(self, contexts: np.ndarray) -> Float[np.ndarray, "row offer"]:
        """Probabilities of the offers."""
        values = self.values(contexts)
        if self.temperature == 0.0:
            learnt = np.eye(len(_CHANCES))[values.argmax(axis=1)]
        else:
            learnt = special.softmax(values / self.temperature, axis=1)
        return (1.0 - self.share) * _CHANCES + self.share * learnt

    def uplifts(self, rows: Rows) -> Float[np.ndarray, " row"]:
        """Doubly robust uplift of every row, over its reward."""
        chances = self.chances(rows.contexts)
        values = self.values(rows.contexts)
        numbers = np.arange(len(rows.offers))
        ratios = chances[numbers, rows.offers] / _CHANCES[rows.offers]
        residuals = rows.rewards - values[numbers, rows.offers]
        return (chances * values).sum(axis=1) + ratios * residuals - rows.rewards


def _features(contexts: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(contexts)), contexts])


def fit(rows: Rows) -> Float[np.ndarray, "offer feature"]:
    """Ridge regression of the rewards of each offer."""
    weights = []
    mean = rows.rewards.mean()
    for offer in range(len(_CHANCES)):
        chosen = rows.offers == offer
        features = _features(rows.contexts[chosen])
        gram = features.T @ features + _RIDGE * np.eye(features.shape[1])
        solved = np.linalg.solve(gram, features.T @ (rows.rewards[chosen] - mean))
        solved[0] += mean
        weights.append(solved)
    return np.array(weights)


def lower_end(uplifts: Float[np.ndarray, " row"], level: float) -> float:
    """One-sided lower end of a mean by Student t."""
    error = uplifts.std(ddof=1) / math.sqrt(len(uplifts))
    return float(uplifts.mean() - special.stdtrit(len(uplifts) - 1, level) * error)


def choose(train: Rows, chosen_on: Rows, count: int) -> list[LinearPolicy]:
    """The policies of the largest lower ends, learnt on one part, chosen on another."""
    weights = fit(train)
    policies = [
        LinearPolicy(weights, temperature, share)
        for temperature in _TEMPERATURES
        for share in _SHARES
    ]
    policies.sort(key=lambda policy: -lower_end(policy.uplifts(chosen_on), 0.95))
    return policies[:count]


def in_three(
    rows: Rows, order: np.ndarray, train: float, certify: float
) -> list[LinearPolicy]:
    """The certified policy, or none. train, certify: shares of the rows."""
    first = round(train * len(order))
    second = round((1.0 - certify) * len(order))
    finalists = choose(rows.part(order[:first]), rows.part(order[first:second]), 2)
    ends = [
        lower_end(policy.uplifts(rows.part(order[second:])), 0.975)
        for policy in finalists
    ]
    best = int(np.argmax(ends))
    if ends[best] > 0.0:
        return [finalists[best]]
    return []


def crossed(rows: Rows, order: np.ndarray) -> list[LinearPolicy]:
    """The policies of the certified mixture, or none."""
    folds = np.array_split(order, FOLDS)
    policies = []
    uplifts = []
    for number, fold in enumerate(folds):
        outside = np.concatenate(folds[:number] + folds[number + 1 :])
        first = round(0.75 * len(outside))
        (policy,) = choose(rows.part(outside[:first]), rows.part(outside[first:]), 1)
        policies.append(policy)
        uplifts.append(policy.uplifts(rows.part(fold)))
    if lower_end(np.concatenate(uplifts), 0.975) > 0.0:
        return policies
    return []


WAYS: dict[str, Callable[[Rows, np.ndarray], list[LinearPolicy]]] = {
    "60, 20 and 20 %": lambda rows, order: in_three(rows, order, 0.6, 0.2),
    "40, 20 and 40 %": lambda rows, order: in_three(rows, order, 0.4, 0.4),
    "five folds": crossed,
}


def measure(effect: float, size: int, draws: int) -> list[dict[str, Any]]:
    """For each way the shares of logs with a recommendation and with a false one, and
    the mean true uplift.
    """
    uplifts: dict[str, list[float | None]] = {name: [] for name in WAYS}
    for draw in range(draws):
        generator = np.random.default_rng([draw, size])
        slopes = generator.normal(size=(4, len(_CHANCES)))

        def means(contexts: np.ndarray, slopes: np.ndarray = slopes) -> np.ndarray:
            return np.clip(0.3 + effect * np.tanh(contexts @ slopes), 0.02, 0.98)

        contexts = generator.normal(size=(size, 4))
        offers = generator.choice(len(_CHANCES), size=size, p=_CHANCES)
        chances = means(contexts)[np.arange(size), offers]
        rewards = (generator.random(size) < chances).astype(float)
        rows = Rows(contexts, offers, rewards)
        order = generator.permutation(size)
        visitors = generator.normal(size=(_TRUTH_ROWS, 4))
        truth = means(visitors)
        for name, way in WAYS.items():
            policies = way(rows, order)
            if not policies:
                uplifts[name].append(None)
                continue
            taken = np.mean([policy.chances(visitors) for policy in policies], axis=0)
            uplifts[name].append(float(((taken - _CHANCES) * truth).sum(1).mean()))
    records = []
    for name, of_way in uplifts.items():
        recommended = [uplift for uplift in of_way if uplift is not None]
        wrong = sum(uplift <= _ROUNDING for uplift in recommended)
        records.append(
            {
                "effect": effect,
                "rows": size,
                "way": name,
                "logs": draws,
                "recommended": round(len(recommended) / draws, 4),
                "false": round(wrong / draws, 4),
                "uplift": round(sum(recommended) / draws, 5),
            }
        )
    return records


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    rows = []
    for effect in EFFECTS:
        for size in SIZES:
            rows += measure(effect, size, options.draws)
    content = {
        "command": "python -m scripts.bench.improve.cross_fitting",
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
