"""Which model estimates behavior probabilities best: koffline's own, or a classifier of
scikit-learn?

Logs of one-step decisions whose true probabilities are known, in four worlds: the
behavior policy is logistic in the state, bends with it, follows rules (a tree with 10 %
exploration), or has ten actions. For each log and model: the log-likelihood that is lost
per row (the mean divergence from the true probabilities), the calibration error, and the
self-normalised importance sampling estimate of a target policy's value, whose exact
value is known up to the states drawn.

    python scripts/bench/behavior_models.py --json docs/results/behavior_models.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from koffline.data.transitions import Discrete, Transitions
from koffline.ope.importance.ratios import estimate_behavior
from koffline.store.files import atomic_file

COLUMNS = 4
CLASSIFIERS: dict[str, Any] = {
    "own": None,
    "LogisticRegression": make_pipeline(
        StandardScaler(), LogisticRegression(max_iter=500)
    ),
    "RandomForest, leaves of 20": RandomForestClassifier(min_samples_leaf=20),
    "HistGradientBoosting": HistGradientBoostingClassifier(),
    "HistGradientBoosting, 30 trees": HistGradientBoostingClassifier(max_iter=30),
}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Chances (N, n) from logits (N, n)."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def logistic(states: np.ndarray) -> np.ndarray:
    """Three actions, logits linear in the state."""
    directions = np.random.default_rng(1).normal(size=(COLUMNS, 3)) * 0.8
    return softmax(states @ directions)


def bent(states: np.ndarray) -> np.ndarray:
    """Three actions, logits that bend with the state."""
    zero = np.zeros(len(states))
    waves = 2.0 * np.sin(2.0 * states[:, 0])
    return softmax(np.stack([zero, waves, states[:, 1] ** 2 - 1.0], axis=1))


def rules(states: np.ndarray) -> np.ndarray:
    """Three actions by thresholds of two columns; 10 % are drawn uniformly."""
    action = np.where(states[:, 0] > 0.3, 2, (states[:, 1] > -0.2).astype(int))
    return 0.9 * np.eye(3)[action] + 0.1 / 3.0


def many(states: np.ndarray) -> np.ndarray:
    """Ten actions, logits linear in the state and in a product."""
    generator = np.random.default_rng(2)
    products = states[:, :1] * states[:, 1:2]
    inputs = np.concatenate([states, products], axis=1)
    return softmax(inputs @ generator.normal(size=(COLUMNS + 1, 10)) * 0.6)


WORLDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "logistic": logistic,
    "bent": bent,
    "rules": rules,
    "ten actions": many,
}


@dataclass(frozen=True)
class Case:
    """A log, the true chances (N, n), the target's (N, n), and the value of the target
    on the log's states.
    """

    log: Transitions
    chances: np.ndarray
    target: np.ndarray
    value: float


def make_case(world: str, rows: int, seed: int) -> Case:
    """One log of a world."""
    generator = np.random.default_rng([seed, 77])
    states = generator.uniform(-2.0, 2.0, size=(rows, COLUMNS))
    chances = WORLDS[world](states)
    n = chances.shape[1]
    actions = (generator.random((rows, 1)) >= chances.cumsum(axis=1)).sum(axis=1)
    means = np.cos(states[:, :1] + np.arange(n)) + 0.5 * states[:, 1:2]
    rewards = means[np.arange(rows), actions] + generator.normal(size=rows)
    target = softmax(2.0 * np.cos(states[:, :1] + np.arange(n)))
    log = Transitions(
        observations=states,
        next_observations=states,
        actions=actions,
        rewards=rewards,
        terminated=np.ones(rows, dtype=bool),
        truncated=np.zeros(rows, dtype=bool),
        action_space=Discrete(n),
        episode_ids=np.arange(rows),
        steps=np.zeros(rows, dtype=int),
    )
    return Case(log, chances, target, float((target * means).sum(axis=1).mean()))


def weighted_mean(case: Case, behavior: np.ndarray) -> float:
    """The self-normalised estimate; behavior: log-probabilities (N,) of what was
    taken.
    """
    rows = np.arange(len(behavior))
    taken = case.target[rows, np.asarray(case.log.actions)]
    weights = taken / np.exp(behavior)
    return float(weights @ case.log.rewards / weights.sum())


def measure(world: str, rows: int, logs: int) -> list[dict[str, Any]]:
    """One line for each model of a world."""
    collected: dict[str, list[tuple[float, ...]]] = {name: [] for name in CLASSIFIERS}
    with_truth = []
    for seed in range(logs):
        case = make_case(world, rows, seed)
        actions = np.asarray(case.log.actions)
        truth = np.log(case.chances[np.arange(rows), actions])
        with_truth.append(weighted_mean(case, truth) - case.value)
        for name, classifier in CLASSIFIERS.items():
            started = time.process_time()
            behavior, facts = estimate_behavior(
                case.log, seed=seed, classifier=classifier
            )
            seconds = time.process_time() - started
            lost = float((truth - behavior).mean())
            calibration = facts["behavior_calibration_error"]
            error = weighted_mean(case, behavior) - case.value
            collected[name].append((lost, calibration, error, seconds))
    lines = [
        {
            "world": world,
            "model": "true probabilities",
            "error": float(np.sqrt(np.mean(np.square(with_truth)))),
        }
    ]
    for name, numbers in collected.items():
        lost, calibrations, errors, seconds = np.transpose(numbers)
        lines.append(
            {
                "world": world,
                "model": name,
                "lost_log_likelihood": float(lost.mean()),
                "calibration_error": float(calibrations.mean()),
                "error": float(np.sqrt(np.mean(np.square(errors)))),
                "seconds": float(seconds.mean()),
            }
        )
    return lines


def main() -> None:
    """Measure all worlds, print and write the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--logs", type=int, default=20)
    options = parser.parse_args()
    lines = []
    for world in WORLDS:
        for line in measure(world, options.rows, options.logs):
            lines.append(line)
            print(json.dumps(line))
    if options.json:
        result = {"rows": options.rows, "logs": options.logs, "lines": lines}
        with atomic_file(options.json, force=True) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
