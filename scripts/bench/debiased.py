"""The two experiments of deeply debiased intervals (Shi et al., ICML 2021), with
koffline's default interval.

    python scripts/bench/debiased.py --draws 100 --runs out/debiased.jsonl --out docs/results/debiased.json

Glucose: a diabetic's glucose over 15 lagged numbers, five doses of insulin, 20 patients
× 200 steps, γ 0.95.
Pole: a cart with noise and rewards that fall with its distance, 10 runs × 300 steps, γ
0.98. Both are logged by the softmax of a target's values and continue without an end;
starts are 1000 states after a burn-in. Worlds and settings are those of the authors'
published code; their targets are networks, ours are written down or fitted here, so
that values differ and shares are compared. Each draw is one line of ``--runs``: called
again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from scipy.special import softmax

from koffline.config import parse_assignments
from koffline.envs.boxes import Actions, Outcome, States, draw_actions
from koffline.ope.evaluation import estimate_all
from scripts.bench.classic import CartPole, PlainWorld
from scripts.bench.controllers import Fixed, LinearSoftmax
from scripts.bench.coverage import clopper_pearson, kept_runs
from scripts.bench.rollouts import as_transitions, log_episodes, monte_carlo_value

Array = np.ndarray
_NAMES = ("kloss", "mwl", "drl")
_GIVEN = 1000
_TRUTH_STARTS = 10_000
# of fitted Q-iteration
_SWEEPS = 60
_TRAIN_ROWS = 60_000
_RIDGE = 1e-3


@dataclass(frozen=True)
class Glucose(PlainWorld):
    """Four lags each of glucose (mg/dl), diet and exercise, three of the dose; noise 10
    mg/dl.
    """

    noise: float = 10.0
    n_actions: int = 5
    burn_in: int = 1000

    def reset(self, n: int, generator: np.random.Generator) -> States:
        state = np.zeros((n, 15))
        state[:, :4] = generator.normal(162.0, 60.0, (n, 4))
        for lag in range(4):
            state[:, 4 + lag], state[:, 8 + lag] = self._events(n, generator)
        state[:, 12:] = generator.choice(5, (n, 3), p=_DOSES)
        return state

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """The reward is that of the glucose that follows: 0 between 80 and 140."""
        known = np.column_stack([state, action])
        level = (
            39.03
            + known @ _EFFECTS
            + self.noise * generator.standard_normal(len(state))
        )
        diet, exercise = self._events(len(state), generator)
        columns = [
            state[:, 1:4],
            level,
            state[:, 5:8],
            diet,
            state[:, 9:12],
            exercise,
            state[:, 13:],
            action,
        ]
        high = np.maximum(level - 140.0, 0.0)
        low = np.maximum(80.0 - level, 0.0)
        reward = -(high**1.35) / 30.0 - low**2 / 30.0
        return Outcome(
            np.column_stack(columns), reward, np.zeros(len(state), dtype=bool)
        )

    def _events(self, n: int, generator: np.random.Generator) -> tuple[Array, Array]:
        """Meals and exercise: rare, of random size."""
        eats = generator.random(n) < 0.17
        diet = np.where(eats, np.abs(generator.normal(44.4, 35.5, n)), 0.0)
        moves = generator.random(n) < 0.05
        exercise = np.where(moves, np.abs(generator.normal(4.9, 1.04, n)), 0.0)
        return diet, exercise


_DOSES = np.array([0.805, 0.084, 0.072, 0.029, 0.010])
# on the next glucose, oldest lag first
_EFFECTS = np.array(
    [
        *(-0.008, 0.106, -0.481, 1.171),
        *(0.008, -0.004, 0.08, 0.23),
        *(0.009, -1.542, 3.097, -3.489),
        *(-0.30402253, -2.02343638, -0.3310525, -0.43941028),
    ]
)


@dataclass(frozen=True)
class Pole(PlainWorld):
    """CartPole with noise 0.01 on each coordinate; a fallen pole stays where it
    fell.
    """

    noise: float = 0.01
    n_actions: int = 2
    burn_in: int = 500

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return CartPole().reset(n, generator)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        following = CartPole().step(state, action, generator).state
        fallen = (np.abs(state[:, 0]) > 2.4) | (
            np.abs(state[:, 2]) > 12 * 2 * np.pi / 360
        )
        reward = 1.0 - following[:, 0] ** 2 / 11.52 - following[:, 2] ** 2 / 288.0
        following = following + self.noise * generator.standard_normal(state.shape)
        following[fallen] = state[fallen]
        return Outcome(following, reward, np.zeros(len(state), dtype=bool))


@dataclass(frozen=True, eq=False)
class QuadraticValues:
    """Values (N, n) of actions, quadratic in standardised observations: a policy by
    their softmax.
    """

    mean: Array
    deviation: Array
    weights: Array  # (k, n)
    temperature: float = 0.0  # 0: the best action

    def features(self, observations: Array) -> Array:
        """(N, k)."""
        scaled = (observations - self.mean) / self.deviation
        pairs = [scaled[:, i, None] * scaled[:, i:] for i in range(scaled.shape[1])]
        return np.hstack([np.ones((len(scaled), 1)), scaled, *pairs])

    def __call__(self, observations: Array) -> Array:
        values = self.features(observations.astype(np.float64)) @ self.weights
        if self.temperature == 0.0:
            return np.eye(values.shape[1])[values.argmax(axis=1)]
        return softmax(values / self.temperature, axis=1)


def fit_values(world: Glucose, gamma: float) -> QuadraticValues:
    """Fitted Q-iteration on uniform doses, quadratic in the state."""
    generator = np.random.default_rng(417)
    uniform = Fixed((0.2,) * 5)
    log = log_episodes(world, uniform, _TRAIN_ROWS, 300, generator)
    raw = log.observations.astype(np.float64)
    values = QuadraticValues(raw.mean(axis=0), raw.std(axis=0), np.zeros((136, 5)))
    now, later = (
        values.features(part.astype(np.float64))
        for part in (raw, log.next_observations)
    )
    solvers = []
    for dose in range(5):
        mine = np.flatnonzero(log.actions == dose)
        states = now[mine]
        solvers.append(
            (
                mine,
                np.linalg.inv(states.T @ states + _RIDGE * len(mine) * np.eye(136))
                @ states.T,
            )
        )
    for _ in range(_SWEEPS):
        target = log.rewards + gamma * (later @ values.weights).max(axis=1)
        columns = [solve @ target[mine] for mine, solve in solvers]
        values = QuadraticValues(
            values.mean, values.deviation, np.stack(columns, axis=1)
        )
    return values


@dataclass(frozen=True, eq=False)
class Experiment:
    """A world with its behaviour and target policies; ``episodes`` of ``steps`` are a
    log.
    """

    name: str
    world: Any
    behavior: Any
    target: Any
    gamma: float
    episodes: int
    steps: int

    def starts(self, n: int, generator: np.random.Generator) -> States:
        """States of the behaviour policy after its burn-in."""
        state = self.world.reset(n, generator)
        for _ in range(self.world.burn_in):
            action = draw_actions(self.behavior, self.world.observe(state), generator)
            state = self.world.step(state, action, generator).state
        return state

    @cached_property
    def given(self) -> Array:
        """Start states as observations."""
        return self.world.observe(self.starts(_GIVEN, np.random.default_rng(0)))

    @cached_property
    def truth(self) -> tuple[float, float]:
        """Value and its standard error."""
        generator = np.random.default_rng(1)
        starts = self.starts(_TRUTH_STARTS, generator)
        value = monte_carlo_value(
            self.world, self.target, self.gamma, starts, generator
        )
        return value.value, value.standard_error

    def measure(self, draw: int, options: dict[str, Any]) -> dict[str, Any]:
        """One log, all estimators."""
        generator = np.random.default_rng([7, draw])
        world = _Started(self.world, self.starts(self.episodes, generator))
        log = log_episodes(
            world, self.behavior, self.episodes * self.steps, self.steps, generator
        )
        table = estimate_all(
            as_transitions(log, world),
            self.target,
            self.gamma,
            names=_NAMES,
            bounds=False,
            initial_observations=self.given,
            seed=draw,
            **options,
        )
        estimates = {
            row.name: row.estimate for row in table.rows if row.estimate is not None
        }
        return {
            "experiment": self.name,
            "draw": draw,
            "truth": self.truth[0],
            "truth_se": self.truth[1],
            "verdict": table.verdict.answer,
            "answers": {
                name: [
                    estimate.value,
                    *(
                        [estimate.interval.low, estimate.interval.high]
                        if estimate.interval
                        else []
                    ),
                ]
                for name, estimate in estimates.items()
            },
        }


@dataclass(frozen=True, eq=False)
class _Started:
    """A world that starts in given states."""

    world: Any
    starts: States

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def reset(self, n: int, generator: np.random.Generator) -> States:
        return self.starts[:n]


def glucose() -> Experiment:
    world = Glucose()
    target = fit_values(world, 0.95)
    behavior = QuadraticValues(
        target.mean, target.deviation, target.weights, temperature=1.0
    )
    return Experiment("glucose", world, behavior, target, 0.95, episodes=20, steps=200)


def pole() -> Experiment:
    slopes = (0.5, 1.0, 15.0, 4.0)
    target = LinearSoftmax(tuple(1e6 * slope for slope in slopes))
    return Experiment(
        "pole", Pole(), LinearSoftmax(slopes), target, 0.98, episodes=10, steps=300
    )


EXPERIMENTS: dict[str, Callable[[], Experiment]] = {"glucose": glucose, "pole": pole}


def measure_cell(
    experiments: dict[str, Experiment], options: dict[str, Any], name: str, draw: int
) -> dict[str, Any]:
    return experiments[name].measure(draw, options)


def summarise(name: str, estimator: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Coverage, error, width; ``width_over_oracle``: over that of a normal interval of
    the errors' spread.
    """
    answered = [
        run for run in runs if run["experiment"] == name and estimator in run["answers"]
    ]
    errors = np.array([run["answers"][estimator][0] - run["truth"] for run in answered])
    intervals = [
        (run["truth"], *run["answers"][estimator][1:])
        for run in answered
        if run["answers"][estimator][1:]
    ]
    covered = sum(low <= truth <= high for truth, low, high in intervals)
    width = float("nan")
    low = 0.0
    high = 1.0
    if intervals:
        width = float(np.mean([end - start for _, start, end in intervals]))
        low, high = clopper_pearson(covered, len(intervals))
    over_oracle = None
    if len(answered) > 1:
        over_oracle = width / (2 * 1.96 * float(errors.std(ddof=1)))
    return {
        "experiment": name,
        "estimator": estimator,
        "draws": len(answered),
        "intervals": len(intervals),
        "covered": covered,
        "coverage": [covered / max(1, len(intervals)), low, high],
        "truth": answered[0]["truth"],
        "bias": float(errors.mean()),
        "rmse": float(np.sqrt(np.square(errors).mean())),
        "width": width,
        "width_over_oracle": over_oracle,
        "verdicts": {
            answer: sum(run["verdict"] == answer for run in answered)
            for answer in sorted({run["verdict"] for run in answered})
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)} (default: both)"
    )
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    parser.add_argument(
        "--runs", type=Path, required=True, help="JSON lines, one for each log"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = parse_assignments(arguments.option)
    names = arguments.experiments or list(EXPERIMENTS)
    experiments = {name: EXPERIMENTS[name]() for name in names}
    cells = ((name, draw) for draw in range(arguments.draws) for name in names)
    measure = partial(measure_cell, experiments, options)
    runs = kept_runs(arguments.runs, ("experiment", "draw"), cells, measure)
    rows = [summarise(name, estimator, runs) for name in names for estimator in _NAMES]
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
