"""Why the kernel loss misses the value of the balanced pole: its loss at the truth and
at what it learns.

    python -m scripts.bench.pole_level [--world gymnasium_pole] [--rows 8000]

Two seeds of the kernel loss and of FVI learn from the 5,000 tuples of `koffline
reproduce figure-bench`. Printed are their errors, the mean value by fifths of the true
one, and the kernel loss (U-statistic, several bandwidths) of 2,000 of these tuples and
of fresh ones, also that of the true values.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from koffline.builders.uniform import draw_tuples, learn_grid_policy
from koffline.envs.boxes import Tuples, make_world
from koffline.experiments.benchmark import (
    GAMMA,
    as_table,
    monte_carlo_values,
    to_unit_square,
)
from koffline.experiments.figure_methods import OBJECTIVES
from koffline.fitting import FitSettings, fit, threads
from koffline.kernel_loss import u_statistic
from koffline.kernels import Gaussian
from koffline.replicas import ReplicaPlan, StackedMLP

BANDWIDTHS = (0.5, 0.25, 0.1)
METHODS = {"kloss": 1e-3, "fvi": 3e-3}  # and their best learning rates
_ROWS = 5000
_OLD = 2000
_BATCH = 150
_EPOCHS = 1500
_REPEATS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="cart_pole")
    parser.add_argument("--rows", type=int, default=8000, help="fresh tuples")
    arguments = parser.parse_args()
    world = make_world(arguments.world)
    policy = learn_grid_policy(arguments.world)
    generator = np.random.default_rng(0)
    log, fresh = (
        draw_tuples(world, policy, rows, generator) for rows in (_ROWS, arguments.rows)
    )

    def truth(states: np.ndarray) -> np.ndarray:
        return monte_carlo_values(
            world, policy, states, GAMMA, generator, _REPEATS
        ).values

    def losses(tuples: Tuples, value: np.ndarray, following: np.ndarray) -> str:
        rows = slice(0, arguments.rows if tuples is fresh else _OLD)
        residual = (tuples.rewards + GAMMA * ~tuples.terminated * following - value)[
            rows
        ]
        states = torch.from_numpy(to_unit_square(world, tuples.states[rows]))
        losses_of = [
            float(
                u_statistic(
                    torch.from_numpy(residual)[None], Gaussian(bandwidth).gram(states)
                )
            )
            for bandwidth in BANDWIDTHS
        ]
        return " ".join(f"{loss:9.1e}" for loss in losses_of)

    true = [(truth(part.states), truth(part.next_states)) for part in (log, fresh)]
    print(
        "kernel loss at bandwidths",
        BANDWIDTHS,
        "of tuples learned from, then of fresh ones",
    )
    print(
        "truth    ",
        *(
            losses(part, *values)
            for part, values in zip((log, fresh), true, strict=True)
        ),
    )
    table = as_table(log, world, world.reward_scale)
    values = true[0][0]
    fifth = np.digitize(values, np.quantile(values, [0.2, 0.4, 0.6, 0.8]))
    print(
        "truth     by fifths",
        *(f"{values[fifth == part].mean():.2f}" for part in range(5)),
    )
    per_epoch = _ROWS // _BATCH
    settings = FitSettings(_EPOCHS * per_epoch, _BATCH, record_every=per_epoch)
    for method, rate in METHODS.items():
        plan = ReplicaPlan.grid(range(2), (rate,))
        network = fit(
            table,
            StackedMLP.initialise((2, 80, 1), plan.batch_seeds),
            OBJECTIVES[method],
            plan,
            settings,
        ).network
        with torch.no_grad():
            learnt = [
                [
                    network.forward(
                        torch.from_numpy(to_unit_square(world, states)).float()
                    )[..., 0]
                    .double()
                    .numpy()
                    * world.reward_scale
                    for states in (part.states, part.next_states)
                ]
                for part in (log, fresh)
            ]
        for seed in range(2):
            estimate = learnt[0][0][seed]
            error = estimate - values
            print(
                f"{method} {seed}: MSE / Var V {np.mean(error**2) / values.var():.2f},"
                f" without its mean {error.var() / values.var():.2f}; by fifths",
                *(f"{estimate[fifth == part].mean():.2f}" for part in range(5)),
            )
            pairs = zip((log, fresh), learnt, strict=True)
            print(
                "         ",
                *(losses(part, now[seed], then[seed]) for part, (now, then) in pairs),
            )


if __name__ == "__main__":
    with threads(1):
        main()
