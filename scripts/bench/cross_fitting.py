"""How often does the Bellman test notice the estimation error of LSTD-Q, by the rows it
is tested on?

    python -m scripts.bench.cross_fitting --repetitions 300 --out docs/results/cross-fitting.json

LSTD-Q with 20 random Fourier features on independent tuples of a seven-state chain
(`chain_tuples` in tests/exact_problems.py). "training": tested on the rows it was
fitted to. "pooled": two folds, all residuals in one statistic, which multiplies
residuals of different models. "cross_fit": the same folds as koffline tests them, each
model on its own rows. "one_fold": only the first model. "exact": the true Q, on all
rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import koffline
from koffline.ope.bellman_test.forms import count_features, draw_signs
from koffline.ope.cross_fit import CrossFitted, cross_fit
from koffline.ope.intervals.feature_system import default_features, make_feature_system
from koffline.ope.log.problem import prepare_problem
from tests.exact_problems import CASES, ExactProblem, FiniteCase

LEVEL = 0.05
FEATURES = 20
RIDGE = 1e-6
KINDS = ("training", "pooled", "one_fold", "cross_fit", "exact")


def fit_lstdq(log: koffline.Transitions, policy: Any, gamma: float) -> Any:
    """Q as a function of observations and actions."""
    problem = prepare_problem(log, policy, gamma, 1, np.random.default_rng(0))
    features = default_features(problem, FEATURES)
    system = make_feature_system(problem, features, gamma=gamma, instruments=100)
    matrix = system.now.mT @ system.difference
    ridge = (
        RIDGE
        * matrix.diagonal().abs().mean()
        * torch.eye(len(matrix), dtype=torch.float64)
    )
    weights = torch.linalg.solve(
        matrix + ridge, system.now.mT @ system.rewards
    ).reshape(-1, problem.n_actions)

    def q(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        columns = features(torch.as_tensor(problem.standardise(observations)))
        values = torch.cat([columns, torch.ones(len(columns), 1)], dim=1) @ weights
        return values.numpy()[np.arange(len(actions)), actions]

    return q


def p_values(problem: ExactProblem, exact: Any, seed: int) -> dict[str, float]:
    """One log, five tests."""
    log = problem.transitions
    policy = problem.policy
    gamma = problem.gamma
    model = cross_fit(log, lambda part: fit_lstdq(part, policy, gamma), 2, seed)
    first = log.select(np.flatnonzero(model.folds == 0))
    tested: dict[str, tuple[Any, koffline.Transitions]] = {
        "training": (fit_lstdq(log, policy, gamma), log),
        "one_fold": (model.parts[0], first),
        "cross_fit": (model, log),
        "exact": (exact, log),
    }
    assert isinstance(model, CrossFitted)
    tests = {
        kind: koffline.bellman_test(q, rows, policy, gamma, seed=seed, draws=199)
        for kind, (q, rows) in tested.items()
    }
    case = dataclasses.replace(tests["cross_fit"].rows, folds=(np.arange(len(log)),))
    drawn = draw_signs(case, count_features(case), np.random.default_rng(seed + 1))
    return {"pooled": drawn.p_value(drawn.statistic)} | {
        kind: test.p_value for kind, test in tests.items()
    }


def main() -> None:
    """Count rejections and write them with binomial intervals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[400])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    case = next(case for case in CASES if case.name == "chain_tuples")
    assert isinstance(case, FiniteCase)
    values = case.world.mdp.action_values(case.target, case.gamma)
    points = np.linspace(-1.0, 1.0, 7)

    def exact(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return values[np.argmin(np.abs(observations - points), axis=1), actions]

    table = []
    for n in arguments.rows:
        rejected = dict.fromkeys(KINDS, 0)
        for seed in range(arguments.repetitions):
            for kind, p_value in p_values(case(seed, n), exact, seed).items():
                rejected[kind] += p_value <= LEVEL
        for kind, count in rejected.items():
            interval = stats.binomtest(count, arguments.repetitions).proportion_ci(
                0.95, "exact"
            )
            row = {
                "n": n,
                "tested_on": kind,
                "rejected": count,
                "repetitions": arguments.repetitions,
            }
            table.append(
                {**row, "low": round(interval.low, 4), "high": round(interval.high, 4)}
            )
            print(table[-1], flush=True)
    if arguments.out is not None:
        command = (
            f"python -m scripts.bench.cross_fitting --repetitions {arguments.repetitions}"
            f" --out {arguments.out}"
        )
        record = {
            "command": command,
            "level": LEVEL,
            "problem": "chain_tuples",
            "rejections": table,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
