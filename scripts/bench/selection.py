"""How far from the best candidate in hindsight is the choice of bandwidth, ridge and features by tournament?

    python scripts/bench/selection.py --seeds 5
    python scripts/bench/selection.py --seeds 5 --temperature 0.1

The paper's three evaluation problems: 5000 tuples from uniform states, a softmax policy, truth by Monte
Carlo. Every candidate of the default grid is fitted on all rows by the closed form; the oracle is the one
with the smallest mean squared error. Printed: its error in native units, and the errors of the choice and of
the median candidate divided by it. The temperature of the softmax decides how hard a problem is: the
benchmark's own policies are nearly greedy on the pole (0.003), softer on Puddle World (0.3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

import koffline
from koffline.builders.uniform import learn_grid_policy
from koffline.data.transitions import Discrete, Transitions
from koffline.envs.boxes import WORLDS, BoxWorld, make_world
from koffline.experiments.problem import GAMMA, StateValues, Tuples, draw_tuples, monte_carlo_values
from koffline.kernels import Gaussian
from koffline.solvers import (
    Candidates,
    SolverSettings,
    UnitBox,
    held_out,
    make_folds,
    ridge_path,
    tournament,
)
from koffline.solvers.linear import StateRows


def rows_of(world: BoxWorld, log: Tuples) -> StateRows:
    """The log in units of the world's box, rewards scaled as for networks."""
    nothing = np.zeros(len(log.rewards), dtype=bool)
    transitions = Transitions(
        observations=log.states,
        actions=nothing.astype(np.int64),
        rewards=log.rewards / world.reward_scale,
        next_observations=log.next_states,
        terminated=log.terminated,
        truncated=nothing,
        action_space=Discrete(world.n_actions),
    )
    return StateRows.of(transitions, GAMMA, UnitBox(tuple(world.low), tuple(world.high)))


def candidate_values(rows: StateRows, grid: Candidates) -> Tensor:
    """Values (C, N) at the log's states of every candidate fitted on all rows, exact kernels."""
    values = []
    for features in grid.features:
        now = torch.cat([part for _, part, _ in rows.blocks(features)])
        for bandwidth in grid.bandwidths:
            path = ridge_path(rows.kernel_form(features, Gaussian(bandwidth)) / float(len(rows)) ** 2)
            values += [now @ path.solve(ridge).weights for ridge in grid.ridges]
    return torch.stack(values)


def measure(world: BoxWorld, rows: StateRows, truth: StateValues, seed: int) -> dict[str, Any]:
    """Errors of the oracle, the choice and the median candidate on one log."""
    grid = Candidates.of(rows, SolverSettings())
    generator = torch.Generator().manual_seed(seed)
    scores = tournament(*held_out(rows, grid, make_folds(len(rows), 5, generator), generator), rows)
    values = candidate_values(rows, grid).numpy() * world.reward_scale
    errors = np.mean((values - truth.values) ** 2, axis=1) - truth.noise
    best = float(errors.min())
    ratio = {
        "tournament": float(errors[int(scores.argmin())]) / best,
        "median": float(np.median(errors)) / best,
    }
    return {"seed": seed, "oracle": best, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worlds", nargs="*", help=f"of {', '.join(WORLDS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--truth-repeats", type=int, default=100)
    parser.add_argument("--temperature", type=float, help="of the softmax (default: the benchmark's own)")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name in arguments.worlds or WORLDS:
        world, policy = make_world(name), learn_grid_policy(name, GAMMA, arguments.temperature)
        for seed in range(arguments.seeds):
            generator = np.random.default_rng(seed)
            log = draw_tuples(world, policy, arguments.rows, generator)
            truth = monte_carlo_values(world, policy, log.states, GAMMA, generator, arguments.truth_repeats)
            found.append({"world": name, **measure(world, rows_of(world, log), truth, seed)})
            ratio = found[-1]["ratio"]
            shares = ", ".join(f"{rule} {times:.2f} times that" for rule, times in ratio.items())
            print(f"{name:<14} seed {seed}: oracle {found[-1]['oracle']:.3f}, {shares}", flush=True)
    mean = statistics.geometric_mean(row["ratio"]["tournament"] for row in found)
    print(f"geometric mean of the tournament: {mean:.2f} times the oracle's error")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"command": " ".join(sys.argv), "koffline": koffline.__version__, "rows": found}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
