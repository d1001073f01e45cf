"""How far from the best candidate in hindsight are rules that choose bandwidth, ridge and features?

    python scripts/bench/selection.py --seeds 5 --networks
    python scripts/bench/selection.py --seeds 5 --networks --temperature 0.1

The paper's three evaluation problems: 5000 tuples from uniform states, a softmax policy, truth by Monte
Carlo. Every candidate of the default grid is fitted on all rows by the closed form; the oracle is the one
with the smallest mean squared error. Printed: its error in native units, the error of each rule's choice
divided by it, the same for the median candidate, for the best LSTD solution on the same features (chosen
with the truth, over the same ridges) and for networks by variable projection at their defaults. The
temperature of the softmax decides how hard a problem is: the benchmark's own policies are nearly greedy on
the pole (0.003), softer on Puddle World (0.3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

import koffline
from koffline.batches import Table
from koffline.builders.uniform import learn_grid_policy
from koffline.envs.boxes import WORLDS, BoxWorld, make_world
from koffline.experiments.problem import GAMMA, StateValues, Tuples, draw_tuples, monte_carlo_values
from koffline.kernels import Gaussian, InverseMultiquadric, median_bandwidth
from koffline.solvers import CandidateGrid, LinearValue, solve, solve_lstd
from koffline.solvers.linear import LinearResidual, accumulate_forms
from koffline.solvers.quadratic import RidgePath
from koffline.solvers.selection import (
    default_grid,
    held_out_loss,
    lstd_tournament,
    make_folds,
    predict_held_out,
)


def candidate_values(table: Table, grid: CandidateGrid) -> Tensor:
    """Values (C, N) at the log's states of every candidate fitted on all rows, exact kernels."""
    values = []
    for features in grid.feature_maps:
        residual = LinearResidual(table, features)
        now = torch.cat([residual.now(rows) for rows in residual.blocks()])
        for bandwidth in grid.bandwidths:
            path = RidgePath(accumulate_forms(residual, Gaussian(bandwidth)).loss(), residual.free)
            values += [now @ path.solve(ridge).weights for ridge in grid.ridges]
    return torch.stack(values)


def measure(world: BoxWorld, log: Tuples, truth: StateValues, seed: int, networks: bool) -> dict[str, Any]:
    """Errors of the oracle, the rules' choices and the references on one log."""
    scale = world.reward_scale
    table = log.table(world, scale).to("cpu", torch.float64)

    def error(values: Tensor) -> float:
        """Mean squared error in native units, without the noise of the truth."""
        return float(np.mean((values.numpy() * scale - truth.values) ** 2)) - truth.noise

    assert table.kernel_inputs is not None
    grid = default_grid(table.kernel_inputs)
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    held_out = predict_held_out(table, grid, make_folds(len(table), 5, generator), generator)
    seconds = time.perf_counter() - started
    median = median_bandwidth(table.kernel_inputs)
    scores = {
        "tournament": lstd_tournament(held_out),
        "held-out imq": held_out_loss(held_out, InverseMultiquadric(0.1 * median), generator),
        "held-out gauss": held_out_loss(held_out, Gaussian(0.2 * median), generator),
    }
    errors = [error(values) for values in candidate_values(table, grid)]
    best = int(np.argmin(errors))
    found = {rule: errors[int(score.argmin())] for rule, score in scores.items()}
    found["median"] = statistics.median(errors)
    fits: list[LinearValue] = [
        solve_lstd(table, features, ridge=ridge) for features in grid.feature_maps for ridge in grid.ridges
    ]
    found["lstd oracle"] = min(error(fit.values(table.inputs)) for fit in fits)
    if networks:
        found["networks"] = error(solve(table, "variable-projection", seed=seed).values(table.inputs)[0])
    chosen = {rule: str(grid.candidates[int(score.argmin())]) for rule, score in scores.items()}
    return {
        "seed": seed,
        "oracle": errors[best],
        "oracle_candidate": str(grid.candidates[best]),
        "ratio": {name: value / errors[best] for name, value in found.items()},
        "chosen": chosen,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worlds", nargs="*", help=f"of {', '.join(WORLDS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--truth-repeats", type=int, default=100)
    parser.add_argument("--temperature", type=float, help="of the softmax (default: the benchmark's own)")
    parser.add_argument("--networks", action="store_true", help="also variable projection (20 s a log)")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in arguments.worlds or WORLDS:
        world, policy = make_world(name), learn_grid_policy(name, GAMMA, arguments.temperature)
        for seed in range(arguments.seeds):
            generator = np.random.default_rng(seed)
            log = draw_tuples(world, policy, arguments.rows, generator)
            truth = monte_carlo_values(world, policy, log.states, GAMMA, generator, arguments.truth_repeats)
            rows.append({"world": name, **measure(world, log, truth, seed, arguments.networks)})
            if len(rows) == 1:
                print(f"{'world':<14}{'seed':>8}{'oracle':>9}", *(f"{key:>15}" for key in rows[0]["ratio"]))
            line = (f"{ratio:>15.2f}" for ratio in rows[-1]["ratio"].values())
            print(f"{name:<14}{seed:>8}{rows[-1]['oracle']:>9.3f}", *line, flush=True)
    for title, summary in (("geometric mean", statistics.geometric_mean), ("worst", max)):
        parts = (summary([row["ratio"][key] for row in rows]) for key in rows[0]["ratio"])
        print(f"{title:<31}", *(f"{part:>15.2f}" for part in parts))
    print(f"scoring {arguments.rows} rows: {statistics.median(row['seconds'] for row in rows):.1f} s")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"command": " ".join(sys.argv), "koffline": koffline.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
