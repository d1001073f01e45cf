"""Post-hoc correction of a given value function: is the corrected value nearer?

    python -m scripts.bench.post_hoc --out docs/results/post-hoc.json

Of all Q̂ + φᵀθ that a wild bootstrap of the kernel loss does not reject, the one with the
smallest ‖θ‖ (Feng, Ren, Tang & Liu 2020):

    min ‖θ‖²  subject to  ‖v − Bθ‖² ≤ λ,  v = ψᵀδ(Q̂)/n,  B = ψᵀZ/n.

Its θ is a ridge regression whose ridge meets the constraint; θ = 0 where Q̂ is feasible.
Errors of the value at the log's start states, root mean squares over logs divided by the
root mean square of the true values, with random features of the default kernel:

- ``given``: of Q̂, which is the true Q plus an error of a stated kind;
- ``corrected``: λ is the 95 % quantile; ``to the median``: its 50 % quantile;
- ``refit``: Q̂ is forgotten, the kernel loss minimised in the features;
- ``on top``: the kernel loss minimised over corrections, without a constraint;
- ``doubly robust``: Q̂ plus the dual weights of the kernel loss times its residuals.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.fitting import threads
from koffline.ope.intervals import base
from koffline.ope.intervals.feature_system import (
    FeatureSystem,
    default_features,
    make_feature_system,
)
from scripts.bench.bellman_bandwidths import error_shape
from tests.exact_problems import CASES, FiniteCase
from tests.ope.intervals.systems import prepared

PROBLEMS = ("chain_off", "grid_off_limited")
ERRORS = ("none", "constant", "smooth", "local", "one action", "rough", "wrong gamma")
SIZE = 0.2  # of an error, relative to the root mean square value
FEATURES = 50
INSTRUMENTS = 100
DRAWS = 99
_FACTORS = np.logspace(-14.0, 4.0, 181)  # of the largest curvature
_RIDGE = 1e-3  # of the dual weights, relative to the mean curvature


@dataclass(frozen=True, eq=False)
class Correction:
    """θ (p,) of the least norm with a kernel loss of at most the threshold; the norm is
    infinite if there is none.
    """

    theta: Float[Tensor, " parameter"]
    norm: float


def correct(
    matrix: Float[Tensor, "instrument parameter"],
    gap: Float[Tensor, " instrument"],
    threshold: float,
) -> Correction:
    """min ‖θ‖² subject to ‖v − Bθ‖² ≤ λ, by the largest ridge that meets it."""
    if float(gap @ gap) <= threshold:
        return Correction(matrix.new_zeros(matrix.shape[1]), 0.0)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    along = left.mT @ gap
    outside = float((gap - left @ along).square().sum())
    chosen = None
    for factor in _FACTORS[::-1]:
        ridge = factor * float(sizes.max()) ** 2
        remaining = along * ridge / (sizes.square() + ridge)
        chosen = right.mT @ (along * sizes / (sizes.square() + ridge))
        if float(remaining.square().sum()) + outside <= threshold:
            return Correction(chosen, float(chosen.norm()))
    assert chosen is not None  # there are factors
    return Correction(chosen, float("inf"))


def residuals_of(
    case: FiniteCase, system: FeatureSystem, log: Any, table: np.ndarray
) -> Tensor:
    """δ (N,) of a table Q̂ (S, A)."""
    now = case.world.states_of(np.asarray(log.observations, dtype=np.float64))
    following = case.world.states_of(np.asarray(log.next_observations, np.float64))
    later = (case.target * table).sum(axis=1)[following]
    values = torch.as_tensor(table[now, log.actions])
    return system.rewards + system.discounts * torch.as_tensor(later) - values


def repeat(case: FiniteCase, error: str, rows: int, seed: int) -> dict[str, float]:
    """Errors of the value at start states, on one log."""
    generator = np.random.default_rng([seed, 7])
    exact = case(seed, rows)
    problem = prepared(exact, seed=seed)
    features = default_features(problem, FEATURES, seed=seed)
    system = make_feature_system(
        problem, features, gamma=exact.gamma, instruments=INSTRUMENTS, seed=seed
    )
    mdp = case.world.mdp
    q = mdp.action_values(case.target, case.gamma)
    scale = float(np.sqrt(np.mean(np.square(q))))
    if error == "wrong gamma":
        table = mdp.action_values(case.target, 0.95 * case.gamma)
    else:
        shape = error_shape(error, case.world.coordinates, mdp.n_actions, generator)
        table = q + SIZE * scale * shape
    log = exact.transitions
    delta = residuals_of(case, system, log, table)
    matrix = system.projected[:, :-1]
    gap = torch.zeros(matrix.shape[0], dtype=torch.float64)
    for part, psi in base.instruments(system):
        gap += psi.mT @ (system.row_weights[part] * delta[part]) / len(system)
    profile = base.make_profile(system)
    thresholds = {
        "corrected": base.wild_threshold(system, profile, DRAWS, seed, 0.95),
        "to the median": base.wild_threshold(system, profile, DRAWS, seed, 0.5),
    }
    # of the log's own start states, which are rows that begin an episode
    first = np.asarray(log.unit_starts)
    start_states = case.world.states_of(
        np.asarray(log.observations[first], dtype=np.float64)
    )
    share = (system.start_weights / system.start_weights.sum()).numpy()
    truth = float(share @ (case.target * q).sum(axis=1)[start_states])
    value_before = float(share @ (case.target * table).sum(axis=1)[start_states])
    start = system.start_mean
    curvature = matrix.mT @ matrix
    on_top = base.solve_ridged(curvature, matrix.mT @ gap, system.free, base.RIDGE)
    dual = matrix @ base.solve_ridged(curvature, start, system.free, _RIDGE)
    errors = {
        "given": value_before - truth,
        "refit": profile.value - truth,
        "on top": value_before + float(start @ on_top) - truth,
        "doubly robust": value_before + float(dual @ gap) - truth,
    }
    for name, threshold in thresholds.items():
        correction = correct(matrix, gap, threshold)
        errors[name] = value_before + float(start @ correction.theta) - truth
        if name == "corrected":
            is_feasible = float(correction.norm == 0.0)
    relative = {name: number / scale for name, number in errors.items()}
    return {**relative, "is_feasible": is_feasible}


def study(name: str, error: str, rows: int, draws: int) -> dict[str, Any]:
    """Root mean square errors over logs."""
    case = next(case for case in CASES if case.name == name)
    assert isinstance(case, FiniteCase)
    results = [repeat(case, error, rows, seed) for seed in range(draws)]
    summary: dict[str, Any] = {"problem": name, "error": error, "n": rows}
    for key in results[0]:
        numbers = np.array([result[key] for result in results])
        if key == "is_feasible":
            summary[key] = float(numbers.mean())
        else:
            summary[key] = float(np.sqrt(np.mean(np.square(numbers))))
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rows = []
    with threads(1), torch.no_grad():
        for name in PROBLEMS:
            for error in ERRORS:
                rows.append(study(name, error, arguments.rows, arguments.draws))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        command = "python -m scripts.bench.post_hoc --out docs/results/post-hoc.json"
        content = {"command": command, "draws": arguments.draws, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
