"""Logs of the kinds that users bring, each with several policies to rank and what they
are really worth.

    python -m scripts.bench.user_logs --half development         # builds what is missing, prints the table
    python -m scripts.bench.leaderboard --half development --out out/users.json

Everything is built from source into $KOFFLINE_BENCH_CACHE: locomotion policies by
``koffline online``, logs and truths by rollouts. The ``test`` half is for one run per
release, never for changing an estimator.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from scripts.bench import controllers as c
from scripts.bench.classic import CartPole, Pendulum
from scripts.bench.finite_worlds import grid_world
from scripts.bench.held_out_worlds import Inventory, Navigation, Queues, Treatment
from scripts.bench.leaderboard_problems import (
    BoardProblem,
    Still,
    Truncated,
    print_problem,
)
from scripts.bench.played_logs import SEEDS, PlayedProblem, Skill, Written
from scripts.bench.worlds import BestOffer, Clicks


def _locomotion(
    environment: str, steps: int, episodes: int, first: int = 0
) -> Callable[[], PlayedProblem]:
    """Two policies wrote the log, noisily; asked are one of them, its mean action, and
    one that did not.
    """
    writer, other, stranger = (Skill(steps, first + number) for number in range(SEEDS))
    return lambda: PlayedProblem(
        f"{environment} {steps}" + (f" from {first}" if first else ""),
        f"{environment}-v5",
        ((Skill(steps, first, 0.2), 1.0), (Skill(steps, first + 1, 0.1), 1.0)),
        {
            "writer": writer,
            "writer greedy": Skill(steps, first, greedy=True),
            "other": other,
            "stranger": stranger,
        },
        episodes,
    )


def _lander() -> PlayedProblem:
    """LunarLander (it needs box2d and pygame), γ 0.995; asked is also a pilot who did
    not fly.
    """
    pilot = {name: f"scripts.bench.lander:{name}" for name in ("steady", "late", "shy")}
    return PlayedProblem(
        "lander",
        "LunarLander-v3",
        (
            (Written(f"epsilon:0.2:{pilot['steady']}"), 1.0),
            (Written(f"epsilon:0.2:{pilot['late']}"), 1.0),
        ),
        {name: Written(policy) for name, policy in pilot.items()},
        150,
        0.995,
    )


def _treatment(rows: int) -> Callable[[], BoardProblem]:
    """A ward: few patients, four doses."""
    dose = c.Scores(
        (
            (-1, 2, 0, 0, 0, 0, 0),
            (0, 1, 0, 0, 0, 0, 0),
            (2, -1, 0, 0, 0, 0, 0),
            (4, -2, 0, 0, 0, 0, -1),
        )
    )
    usual = c.Mixed(0.5, c.Mixed(0.3, dose))
    targets = {
        "careful": dose,
        "half": c.Mixed(0.5, dose),
        "never": c.Fixed((0.85, 0.05, 0.05, 0.05)),
    }
    return lambda: BoardProblem(
        f"treatment {rows}", Treatment(), usual, targets, 0.97, 100, rows, ()
    )


def _queues(rows: int) -> Callable[[], BoardProblem]:
    serve = c.Scores(((3, 0, 0.0), (0, 6, 0.0), (2, 4, -2.0)))
    targets = {
        "longest": serve,
        "half": c.Mixed(0.5, serve),
        "overtime": c.Fixed((0.1, 0.1, 0.8)),
    }
    behavior = c.Fixed((0.4, 0.35, 0.25))
    return lambda: BoardProblem(
        f"queues {rows}", Queues(), behavior, targets, 0.98, 200, rows, ()
    )


def _shift(amount: float) -> Callable[[], BoardProblem]:
    """CartPole: the writer steers ever more against the target; at 1 it shows nothing
    of what is asked.
    """
    balance = c.LinearSoftmax((0.5, 1.0, 15.0, 4.0))
    writer = c.LinearSoftmax(
        tuple((1.0 - 2.0 * amount) * weight for weight in balance.weights)
    )
    targets = {
        "balance": balance,
        "balance 0.2": c.Mixed(0.2, balance),
        "balance 0.5": c.Mixed(0.5, balance),
    }
    return lambda: BoardProblem(
        f"shift {amount:g}", CartPole(), writer, targets, 0.98, 200, 10_000, ()
    )


def _sparse(rows: int) -> Callable[[], BoardProblem]:
    world = grid_world()
    targets = {
        "go": c.Fixed((0.1, 0.4, 0.4, 0.1)),
        "drift": c.Fixed((0.2, 0.4, 0.3, 0.1)),
        "idle": c.Fixed((0.25,) * 4),
    }
    behavior = c.Fixed((0.2, 0.3, 0.3, 0.2))
    return lambda: BoardProblem(
        f"sparse goal {rows}", world, behavior, targets, 0.98, 100, rows, ()
    )


def _clicks(rows: int, key: int) -> Callable[[], BoardProblem]:
    world = Clicks(key)
    best = BestOffer(world)
    targets = {
        "best 0.1": c.Mixed(0.1, best),
        "best 0.5": c.Mixed(0.5, best),
        "first": c.Fixed((0.92, *(0.02,) * 4)),
    }
    behavior = c.Mixed(0.4, c.Fixed((0.4, 0.3, 0.1, 0.1, 0.1)))
    return lambda: BoardProblem(
        f"clicks {rows}", world, behavior, targets, 0.9, 1, rows, ()
    )


def _inventory() -> BoardProblem:
    targets = {
        "to 20": c.OrderUpTo(20, 8, 0.1),
        "to 15": c.OrderUpTo(15, 4, 0.1),
        "to 30": c.OrderUpTo(30, 10, 0.1),
    }
    behavior = c.Mixed(0.5, c.OrderUpTo(15, 0, 0.02))
    return BoardProblem(
        "inventory continuing",
        Inventory(),
        behavior,
        targets,
        0.995,
        104,
        20_000,
        (),
        n_starts=4000,
    )


def _navigation() -> BoardProblem:
    plane = {"low": (-1.0, -1.0), "high": (1.0, 1.0)}

    def drive(gain: float, noise: float) -> Any:
        push = -gain
        brake = -0.6 * gain
        return c.Gaussian(
            c.Linear(((push, 0, brake, 0), (0, push, 0, brake))), noise, **plane
        )

    targets = {
        "firm": drive(0.8, 0.3),
        "soft": drive(0.4, 0.3),
        "loose": drive(0.2, 0.5),
    }
    behavior = c.PushSometimes(0.3, drive(0.3, 0.5))
    return BoardProblem(
        "navigation continuing",
        Navigation(),
        behavior,
        targets,
        0.99,
        100,
        10_000,
        (),
        n_starts=4000,
    )


def _pendulum() -> BoardProblem:
    targets = {
        "swing": Still(c.SwingUp()),
        "swing 0.3": Truncated(c.SwingUp(), 0.3),
        "weak": Still(c.SwingUp(0.4)),
    }
    behavior = Truncated(c.SwingUp(0.7), 0.8, uniform=0.3)
    return BoardProblem(
        "pendulum continuing",
        Pendulum(),
        behavior,
        targets,
        0.99,
        200,
        20_000,
        ("swing", "weak"),
        n_starts=4000,
    )


# steps, first seed
_RUNS = (
    (40_000, 0),
    (40_000, 3),
    (40_000, 6),
    (40_000, 9),
    (120_000, 6),
    (120_000, 9),
)
_ROBOTS = (("Hopper", 120), ("Walker2d", 120), ("HalfCheetah", 40))
Maker = Callable[[], "PlayedProblem | BoardProblem"]
HALVES: dict[str, tuple[Maker, ...]] = {
    "development": (
        *(
            _locomotion(robot, steps, episodes, first)
            for steps, first in _RUNS
            for robot, episodes in _ROBOTS
        ),
        *([_lander] if importlib.util.find_spec("Box2D") else []),
        _treatment(300),
        _treatment(3000),
        _clicks(3000, 0),
        _sparse(8000),
        _inventory,
        _shift(0.25),
        _shift(0.5),
        _shift(1.0),
    ),
    "test": (
        _locomotion("Hopper", 400_000, 120),
        _locomotion("Walker2d", 400_000, 120),
        _locomotion("HalfCheetah", 400_000, 60),
        _locomotion("Swimmer", 40_000, 50),
        _treatment(1000),
        _queues(300),
        _queues(1000),
        _clicks(10_000, 1),
        _sparse(3000),
        _navigation,
        _pendulum,
        _shift(0.1),
        _shift(0.75),
    ),
}


def problems(half: str) -> dict[str, PlayedProblem | BoardProblem]:
    """Problems of a half by name."""
    of_half = [make() for make in HALVES[half]]
    return {problem.name: problem for problem in of_half}


def main() -> None:
    """Build what is missing; print rows, episodes, the log's own return and the
    truths.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--half", choices=list(HALVES), default="development")
    for problem in problems(parser.parse_args().half).values():
        print_problem(problem)


if __name__ == "__main__":
    main()
