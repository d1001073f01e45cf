"""Evaluation problems of the size users bring, with true values by Monte Carlo.

``DEVELOPMENT`` is for developing estimators; ``HELD_OUT`` is for judging them: never
tune on it. Each entry is called as ``problem = DEVELOPMENT["cartpole"](seed=0,
n_rows=20_000)``. Truths belong to the problem, not to the seed; they are kept in
$KOFFLINE_BENCH_CACHE (else a folder of the temporary directory).
"""

from __future__ import annotations

import numpy as np

from scripts.bench import controllers as c
from scripts.bench.classic import Acrobot, CartPole, MountainCar, Pendulum
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp
from scripts.bench.held_out_worlds import (
    Inventory,
    Navigation,
    PuddleWorld,
    Queues,
    Repriced,
    Treatment,
)
from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from scripts.bench.specs import Problem, Spec
from scripts.bench.worlds import Chain, NoisyGrid

__all__ = ["DEVELOPMENT", "HELD_OUT", "Problem", "Spec"]

_BALANCE = c.LinearSoftmax((0.5, 1.0, 15.0, 4.0))
_GRID_TARGET = c.Mixed(0.1, c.GoDiagonal(8.0))
_TORQUE = {"low": (-2.0,), "high": (2.0,)}

DEVELOPMENT: dict[str, Spec] = {
    spec.name: spec
    for spec in [
        Spec(
            "cartpole",
            CartPole(),
            c.Mixed(0.4, c.LinearSoftmax((0.3, 0.5, 10.0, 2.0))),
            c.Mixed(0.3, _BALANCE),
            0.99,
        ),
        Spec(
            "acrobot",
            Acrobot(),
            c.Mixed(0.5, c.PushAlong(5, 1.0)),
            c.Mixed(0.1, c.PushAlong(5, 2.0)),
            0.98,
            300,
        ),
        Spec(
            "pendulum",
            Pendulum(),
            c.PushSometimes(0.3, c.Gaussian(c.SwingUp(0.7), 0.8, **_TORQUE)),
            c.Gaussian(c.SwingUp(), 0.3, **_TORQUE),
            0.97,
            100,
        ),
        Spec(
            "noisy_grid",
            NoisyGrid(),
            c.Mixed(0.6, c.GoDiagonal(2.0)),
            _GRID_TARGET,
            0.97,
            100,
        ),
        Spec("noisy_grid_on", NoisyGrid(), _GRID_TARGET, _GRID_TARGET, 0.97, 100),
        Spec(
            "mountain_car",
            MountainCar(noise=0.001),
            c.Mixed(0.5, c.PushAlong(1, 100.0)),
            c.Mixed(0.05, c.PushAlong(1, 400.0)),
            0.99,
        ),
        Spec("chain", Chain(), c.Fixed((0.5, 0.5)), c.Fixed((0.3, 0.7)), 0.95, 50),
    ]
}

_TORQUES = (-2.0, -1.0, 0.0, 1.0, 2.0)
_PLANE = {"low": (-1.0, -1.0), "high": (1.0, 1.0)}
_SYSTEM = LinearQuadratic(
    drift=(
        (1.0, 0.1, 0.0, 0.0),
        (0.0, 0.95, 0.1, 0.0),
        (0.0, 0.0, 1.0, 0.1),
        (0.1, 0.0, 0.0, 0.9),
    ),
    control=((0.0, 0.0), (0.3, 0.0), (0.0, 0.1), (0.0, 0.3)),
)
_HELD_GAIN = ((-0.8, -1.0, 0.0, 0.0), (0.0, 0.0, -0.6, -0.8))
_CAR = c.Mixed(0.2, c.PushAlong(1, 200.0))


def _random_world() -> EmbeddedMDP:
    generator = np.random.default_rng(7)
    mdp = random_mdp(40, 4, generator, branching=3)
    points = generator.permutation(
        np.stack(np.meshgrid(*[np.arange(4)] * 3), axis=-1).reshape(-1, 3)
    )[:40]
    return EmbeddedMDP(mdp, points / 4.0, jitter=0.1)


_RANDOM = _random_world()
_CHANCES = np.random.default_rng(8).dirichlet(np.ones(4), size=(2, 40))

HELD_OUT: dict[str, Spec] = {
    spec.name: spec
    for spec in [
        Spec(
            "cartpole_cost",
            Repriced(CartPole(push_noise=10.0), scale=0.0, at_end=-1.0),
            c.Mixed(0.5, c.LinearSoftmax((0.0, 0.2, 12.0, 3.0))),
            c.Mixed(0.2, c.LinearSoftmax((0.3, 0.7, 12.0, 3.0))),
            0.97,
        ),
        Spec(
            "puddle",
            PuddleWorld(),
            c.Fixed((0.35, 0.35, 0.15, 0.15)),
            c.Mixed(0.1, c.GoDiagonal(4.0)),
            0.98,
            100,
        ),
        Spec(
            "navigation",
            Navigation(),
            c.PushSometimes(
                0.3,
                c.Gaussian(
                    c.Linear(((-0.3, 0, -0.2, 0), (0, -0.3, 0, -0.2))), 0.5, **_PLANE
                ),
            ),
            c.Gaussian(
                c.Linear(((-0.8, 0, -0.5, 0), (0, -0.8, 0, -0.5))), 0.3, **_PLANE
            ),
            0.97,
            100,
        ),
        Spec(
            "pendulum_torques",
            Pendulum(_TORQUES, noise=0.1),
            c.Mixed(0.3, c.NearestTo(_TORQUES, c.SwingUp(1.0, (8.0, 1.5)), 1.0)),
            c.NearestTo(_TORQUES, c.SwingUp(), 3.0),
            0.98,
            100,
        ),
        Spec(
            "linear_quadratic",
            _SYSTEM,
            LinearGaussian(((-0.4, -0.6, 0.0, 0.0), (0.0, 0.0, -0.4, -0.5)), 0.8),
            LinearGaussian(_HELD_GAIN, 0.2),
            0.95,
            50,
        ),
        Spec(
            "queues_offset",
            Queues(),
            c.Fixed((0.4, 0.35, 0.25)),
            c.Scores(((3, 0, 0.0), (0, 6, 0.0), (2, 4, -2.0))),
            0.98,
        ),
        Spec(
            "inventory",
            Inventory(),
            c.Mixed(0.5, c.OrderUpTo(15, 0, 0.02)),
            c.OrderUpTo(20, 8, 0.1),
            0.97,
            104,
        ),
        Spec(
            "random_finite",
            Repriced(_RANDOM, offset=0.3),
            _RANDOM.policy(_CHANCES[0]),
            _RANDOM.policy(_CHANCES[1]),
            0.95,
            50,
        ),
        Spec(
            "acrobot_tiny",
            Repriced(Acrobot(torque_noise=0.3), scale=1e-3),
            c.Mixed(0.5, c.PushAlong(5, 3.0)),
            c.Mixed(0.05, c.PushAlong(5, 1.0)),
            0.99,
            250,
        ),
        Spec("mountain_car_on", MountainCar(noise=0.002), _CAR, _CAR, 0.98),
        Spec(
            "treatment",
            Treatment(),
            c.Mixed(
                0.3,
                c.Scores(
                    (
                        (-1, 0, 0, 0, 0, 0, 1),
                        (0,) * 7,
                        (1, 0, 0, 0, 0, 0, -1),
                        (1.5, 0, 0, 0, 0, 0, -2),
                    )
                ),
            ),
            c.Scores(
                (
                    (-1, 2, 0, 0, 0, 0, 0),
                    (0, 1, 0, 0, 0, 0, 0),
                    (2, -1, 0, 0, 0, 0, 0),
                    (4, -2, 0, 0, 0, 0, -1),
                )
            ),
            0.97,
            100,
        ),
    ]
}
