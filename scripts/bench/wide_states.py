"""Hundreds of binary columns: errors on MinAtar's Breakout and on a one-hot grid, and
what attempts to lessen them did.

    pip install --no-deps MinAtar==1.0.15
    python -m scripts.bench.wide_states --draws 3 --runs out/wide_states.jsonl
        --out docs/results/wide_states.json

Breakout: 400 binary columns, 20,000 rows, γ 0.99. The log's player follows the ball and
moves at random 47 times in 100; the player asked about does so 15 times in 100. With a
chance of 0.1 the game repeats the action before, which is not in the state. Its value
is by Monte Carlo, and its log holds the probabilities of its actions. Grid: 225 cells,
each a column; its value is exact. Worlds whose states lack nothing, by 1,000 steps,
tell how often the corrections by weights (`scripts.bench.backward_weights`) warn
wrongly. Networks: two on the whole log and eight on resampled episodes, everything else
by default. Each answer is one line of ``--runs``: called again, it goes on.

``--by-bricks`` instead trains three networks on one log without repeats, by default and
in other ways, and compares their values with the returns of the player asked about, by
the number of bricks that are gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from koffline import Discrete, Transitions
from koffline import fitting as fitting_module
from koffline.config import make_settings, parse_assignments
from koffline.errors import KofflineError
from koffline.ope.estimators.running import run_estimator
from koffline.ope.log import problem as problem_module
from koffline.ope.verdict import verdict_on
from koffline.ope.workspace import Workspace, open_workspace
from koffline.policies import DiscretePolicy
from koffline.replicas import StackedAdam
from scripts.bench.backward_weights import corrections
from scripts.bench.coverage import kept_runs
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import grid
from scripts.bench.percent_table import percent_table
from scripts.bench.user_logs import problems as user_problems
from tests.exact_problems import CASES, FiniteCase

_SHOWN = {
    "world": "world",
    "attempt": "attempt",
    "estimator": "estimator",
    "draws": "draws",
    "bias": "bias",
    "error": "mean error",
    "width": "mean width",
}
MISSING = (
    "Breakout needs the package MinAtar, which is not installed; pip install --no-deps"
    " MinAtar==1.0.15"
)
NAMES = ("kloss+fqe", "kloss", "fqe", "mwl", "drl", "wdr")
DEPTHS = (0, 1, 2, 4, 8, 16)  # of `scripts.bench.backward_weights`
NETWORKS = {"full_replicas": 2, "resampled_replicas": 8}
BREAKOUT = "breakout"
WITHOUT_REPEATS = "breakout without repeats"
GRID = "one-hot grid"
RIGHT_FINITE = (
    "chain_on",
    "chain_off",
    "chain_off_limited",
    "grid_on",
    "grid_off_limited",
    "grid_loop_off_limited",
)
RIGHT_OF_USERS = {
    "treatment, careful": ("treatment 3000", "careful"),
    "treatment, half": ("treatment 3000", "half"),
    "sparse goal, go": ("sparse goal 8000", "go"),
    "sparse goal, drift": ("sparse goal 8000", "drift"),
}
# draws at most of worlds that are only compared with
MOST_DRAWS = {WITHOUT_REPEATS: 2, GRID: 2}
_ROWS = 20_000
_GAMMA = 0.99
_LOGGED_AT_RANDOM = 0.47
_ASKED_AT_RANDOM = 0.15
_REPEATS = 0.1
_MOVES = (0, 1, 3)  # MinAtar's numbers of: stay, left, right
_STEPS_OF_EPISODE = 500
_STEPS_OF_TRUTH = 1500
_TRUTH_EPISODES = 4000


# --- Worlds ---------------------------------------------------------------------------


def follow_ball(observations: np.ndarray, at_random: float) -> np.ndarray:
    """Probabilities (N, 3) of stay, left, right: toward the column where a falling ball
    will be, or toward the middle; a share ``at_random`` is uniform.
    """
    screens = np.asarray(observations).reshape(-1, 10, 10, 4)
    places = np.arange(10)
    paddle = screens[:, 9, :, 0] @ places
    ball_x = screens[..., 1].sum(axis=1) @ places
    ball_y = screens[..., 1].sum(axis=2) @ places
    trail_x = screens[..., 2].sum(axis=1) @ places
    trail_y = screens[..., 2].sum(axis=2) @ places
    coming = np.clip(ball_x + np.sign(ball_x - trail_x), 0, 9)
    goal = np.where(ball_y >= trail_y, coming, 4.5)
    best = np.zeros(len(screens), dtype=np.int64)
    best[goal < paddle - 0.6] = 1
    best[goal > paddle + 0.6] = 2
    probabilities = np.full((len(screens), 3), at_random / 3.0)
    probabilities[np.arange(len(screens)), best] += 1.0 - at_random
    return probabilities


class Game:
    """MinAtar's Breakout, played episode by episode."""

    def __init__(self, seed: int, repeats: float, steps: int) -> None:
        try:
            from minatar.environment import Environment
        except ImportError:
            raise SystemExit(MISSING) from None
        self._game = Environment("breakout", sticky_action_prob=repeats)
        self._game.seed(seed)
        self._generator = np.random.default_rng(seed)
        self._steps = steps

    def episode(self, at_random: float) -> dict[str, list[Any]]:
        """Columns of one episode by the player that moves at random so often."""
        game = self._game
        game.reset()
        game.last_action = 0
        rows: dict[str, list[Any]] = {
            "observations": [game.state().reshape(-1)],
            "actions": [],
            "rewards": [],
            "probabilities": [],
        }
        ended = False
        while not ended and len(rows["actions"]) < self._steps:
            screen = rows["observations"][-1]
            probabilities = follow_ball(screen[None], at_random)[0]
            action = int(self._generator.choice(3, p=probabilities))
            reward, ended = game.act(_MOVES[action])
            rows["observations"].append(game.state().reshape(-1))
            rows["actions"].append(action)
            rows["rewards"].append(float(reward))
            rows["probabilities"].append(probabilities[action])
        rows["ended"] = [ended]
        return rows


def breakout_log(seed: int, repeats: float) -> Transitions:
    """About 20,000 rows of whole episodes."""
    game = Game(seed, repeats, _STEPS_OF_EPISODE)
    parts: dict[str, list[np.ndarray]] = {}
    rows = 0
    episodes = 0
    while rows < _ROWS:
        episode = game.episode(_LOGGED_AT_RANDOM)
        count = len(episode["actions"])
        screens = np.array(episode["observations"], dtype=np.float32)
        is_last = np.arange(count) == count - 1
        columns = {
            "observations": screens[:-1],
            "next_observations": screens[1:],
            "actions": np.array(episode["actions"]),
            "rewards": np.array(episode["rewards"]),
            "terminated": is_last & episode["ended"][0],
            "truncated": is_last & (not episode["ended"][0]),
            "episode_ids": np.full(count, episodes),
            "behavior_log_probabilities": np.log(episode["probabilities"]),
        }
        for name, column in columns.items():
            parts.setdefault(name, []).append(column)
        rows += count
        episodes += 1
    joined = {name: np.concatenate(columns) for name, columns in parts.items()}
    return Transitions(
        observations=joined["observations"],
        actions=joined["actions"],
        rewards=joined["rewards"],
        next_observations=joined["next_observations"],
        terminated=joined["terminated"],
        truncated=joined["truncated"],
        episode_ids=joined["episode_ids"],
        behavior_log_probabilities=joined["behavior_log_probabilities"],
        action_space=Discrete(3),
    )


def breakout_truth(repeats: float) -> float:
    """Mean discounted return of the player asked about."""
    game = Game(seed=99, repeats=repeats, steps=_STEPS_OF_TRUTH)
    returns = []
    for _ in range(_TRUTH_EPISODES):
        rewards = np.array(game.episode(_ASKED_AT_RANDOM)["rewards"])
        returns.append(rewards @ _GAMMA ** np.arange(len(rewards)))
    error = np.std(returns) / np.sqrt(len(returns))
    print(f"truth {np.mean(returns):.4f} ± {error:.4f}", flush=True)
    return float(np.mean(returns))


def asked_player(observations: np.ndarray) -> np.ndarray:
    """The player asked about; columns beyond the screen's are not looked at."""
    return follow_ball(np.asarray(observations)[:, :400], _ASKED_AT_RANDOM)


def one_hot_grid() -> FiniteCase:
    """A grid of 15 times 15 cells with a goal in the far corner."""
    world = EmbeddedMDP(grid(15, 15, goal=20.0), np.eye(225))
    log = np.tile((0.35, 0.35, 0.15, 0.15), (225, 1))
    target = np.tile((0.45, 0.45, 0.05, 0.05), (225, 1))
    return FiniteCase(GRID, world, log, target, gamma=0.98, time_limit=100)


@dataclass(frozen=True, eq=False)
class Question:
    """A log, a policy and γ."""

    log: Transitions
    policy: DiscretePolicy
    gamma: float
    options: dict[str, Any] = field(default_factory=dict)


def question_of(world: str, draw: int) -> Question:
    """The question of a world about one draw of its log."""
    if world in RIGHT_FINITE or world in RIGHT_OF_USERS:
        return right_question(world)
    if world == GRID:
        drawn = one_hot_grid()(7000 + draw, _ROWS)
        assert isinstance(drawn.policy, DiscretePolicy)
        return Question(drawn.transitions, drawn.policy, drawn.gamma)
    repeats = _REPEATS
    if world == WITHOUT_REPEATS:
        repeats = 0.0
    policy = DiscretePolicy(3, asked_player, "follows the ball")
    return Question(breakout_log(1 + draw, repeats), policy, _GAMMA)


def right_question(name: str) -> Question:
    """A question whose state lacks nothing, with the probabilities of its log's
    actions.
    """
    if name in RIGHT_FINITE:
        case = next(case for case in CASES if case.name == name)
        assert isinstance(case, FiniteCase)
        drawn = case(900, 2000)
        log = drawn.transitions
        states = case.world.states_of(log.observations)
        chances = case.behavior[states, log.actions]
        log = dataclasses.replace(log, behavior_log_probabilities=np.log(chances))
        policy = drawn.policy
        gamma = drawn.gamma
    else:
        problem_name, target = RIGHT_OF_USERS[name]
        problem = user_problems("development")[problem_name]
        log = problem.log(500)
        policy = problem.policy(target)
        gamma = problem.gamma
    assert isinstance(policy, DiscretePolicy)
    return Question(log, policy, gamma, options={"steps": 1000})


# --- Attempts -------------------------------------------------------------------------


def as_it_is(question: Question) -> dict[str, Any]:
    """The default, and what weights by earlier visits add to it."""
    with opened(question) as workspace:
        result = answers(workspace)
        if question.log.behavior_log_probabilities is not None:
            by_weights = corrections(workspace, DEPTHS)
            result["corrections"] = by_weights.plain
            result["centred"] = by_weights.centred
    return result


def last_action_known(question: Question) -> dict[str, Any]:
    """The action before, one-hot, as columns of the state."""
    log = question.log
    taken = np.eye(3, dtype=np.float32)[log.actions]
    before = np.roll(taken, 1, axis=0)
    before[log.unit_starts] = (1.0, 0.0, 0.0)
    widened = dataclasses.replace(
        log,
        observations=np.hstack([log.observations, before]),
        next_observations=np.hstack([log.next_observations, taken]),
    )
    with opened(dataclasses.replace(question, log=widened)) as workspace:
        return answers(workspace)


def by_half_gap(question: Question) -> dict[str, Any]:
    """Columns of two values are divided by half of their gap, not by their standard
    deviation, which is small where one of the values is rare.
    """
    observations = question.log.observations
    low = observations.min(axis=0)
    high = observations.max(axis=0)
    has_two = ((observations == low) | (observations == high)).all(axis=0) & (
        low < high
    )
    usual = problem_module._measure

    def measure(*arguments: Any, **options: Any) -> problem_module.Measures:
        measures = usual(*arguments, **options)
        scale = np.where(has_two, (high - low) / 2.0, measures.input_scale)
        mean = np.where(has_two, observations.mean(axis=0), measures.input_location)
        return dataclasses.replace(measures, input_scale=scale, input_location=mean)

    with (
        mock.patch.object(problem_module, "_measure", measure),
        opened(question) as workspace,
    ):
        return answers(workspace)


ATTEMPTS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "as it is": as_it_is,
    "columns of two values by half their gap": by_half_gap,
    "last action in the state": last_action_known,
}
CELLS = (
    (BREAKOUT, "as it is"),
    (BREAKOUT, "columns of two values by half their gap"),
    (BREAKOUT, "last action in the state"),
    (WITHOUT_REPEATS, "as it is"),
    (GRID, "as it is"),
)


def opened(question: Question) -> Any:
    """The open workspace of a question."""
    options = {"gamma": question.gamma, "cores": 1, **NETWORKS, **question.options}
    return open_workspace(
        question.log,
        question.policy,
        make_settings(options),
    )


def answers(workspace: Workspace) -> dict[str, Any]:
    """Values and intervals by estimator, the verdict, and what the networks' rows
    tell.
    """
    by_name: dict[str, Any] = {}
    verdict = None
    for name in NAMES:
        try:
            estimate = run_estimator(workspace, name)
        except KofflineError as failure:
            by_name[name] = {"value": None, "interval": None, "reason": str(failure)}
            continue
        ends = None
        if estimate.interval is not None:
            ends = [estimate.interval.low, estimate.interval.high]
        by_name[name] = {"value": estimate.value, "interval": ends}
        if name == NAMES[0]:
            verdict = verdict_on(workspace, estimate).answer
    memory = workspace.memory_shift
    result = {
        "answers": by_name,
        "verdict": verdict,
        "steps": workspace.fitted.record.steps,
        "held_out_kernel_ratio": workspace.held_pass.diagnostics(
            workspace.problem.reward_scale
        )["held_out_kernel_ratio"],
        "memory_shift": memory and memory.value,
        "memory_p_value": memory and memory.p_value,
    }
    result["direct"] = float(workspace.held_values.starts.mean())
    return result


# --- Values by the number of bricks gone ---------------------------------------------

OTHER_WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "as it is": ({}, 0.0),
    "500 steps": ({"steps": 500}, 0.0),
    "1000 steps": ({"steps": 1000}, 0.0),
    "16 units, 2000 steps": ({"steps": 2000, "hidden_units": (16,)}, 0.0),
    "first layer decays, 0.1": ({}, 0.1),
    "first layer decays, 1": ({}, 1.0),
}
BRICKS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 8), (9, 14), (15, 30))
_SCREEN = 400
_PLAYED = 800


class DecayedAdam(StackedAdam):
    """Adam that also moves the first layer's weights toward zero at every step.
    (Loshchilov & Hutter 2019)
    """

    decay = 0.0
    weights = 0

    def update(self, flat: Any, gradient: Any, rates: Any) -> None:
        """A step, after the decay."""
        flat[:, : self.weights].mul_(1.0 - self.decay * rates)
        super().update(flat, gradient, rates)


def bricks_gone(screens: np.ndarray) -> np.ndarray:
    """Number (N,) of the 30 bricks that are gone."""
    return 30.0 - screens.reshape(-1, 10, 10, 4)[..., 3].sum(axis=(1, 2))


def played_screens() -> dict[str, np.ndarray]:
    """Screens, actions, discounted returns and γ^step of the player asked about."""
    game = Game(seed=4242, repeats=0.0, steps=_STEPS_OF_TRUTH)
    parts: dict[str, list[np.ndarray]] = {}
    for _ in range(_PLAYED):
        episode = game.episode(_ASKED_AT_RANDOM)
        powers = _GAMMA ** np.arange(len(episode["rewards"]))
        discounted = np.array(episode["rewards"]) * powers
        columns = {
            "screens": np.array(episode["observations"][:-1], dtype=np.float32),
            "actions": np.array(episode["actions"]),
            "returns": discounted[::-1].cumsum()[::-1] / powers,
            "powers": powers,
        }
        for name, column in columns.items():
            parts.setdefault(name, []).append(column)
    return {name: np.concatenate(columns) for name, columns in parts.items()}


def values_by_bricks() -> dict[str, Any]:
    """Mean value of the player's screens by every way of training, beside its mean
    return, weighted by its discounted visits.
    """
    question = question_of(WITHOUT_REPEATS, 0)
    played = played_screens()
    gone = bricks_gone(played["screens"])
    gone_in_log = bricks_gone(question.log.observations)
    powers = played["powers"]
    bins = [(gone >= low) & (gone <= high) for low, high in BRICKS]
    by_way: dict[str, Any] = {}
    for way, (options, decay) in OTHER_WAYS.items():
        few = {"full_replicas": 1, "resampled_replicas": 2, "steps": 4000, **options}
        DecayedAdam.decay = decay
        DecayedAdam.weights = _SCREEN * 64
        optimiser = StackedAdam
        if decay:
            optimiser = DecayedAdam
        changed = dataclasses.replace(question, options=few)
        with (
            mock.patch.object(fitting_module, "StackedAdam", optimiser),
            opened(changed) as workspace,
        ):
            fitted = workspace.fitted
            diagnostics = workspace.held_pass.diagnostics(
                workspace.problem.reward_scale
            )
            value_function = fitted.value_function(question.log)
        values = value_function.function(played["screens"], played["actions"])
        by_way[way] = {
            "value": float(fitted.values_of("kloss")[0, 1]),
            "held_out_kernel_ratio": diagnostics["held_out_kernel_ratio"],
            "values": [
                float(np.average(values[is_in], weights=powers[is_in]))
                for is_in in bins
            ],
        }
        print(way, json.dumps(by_way[way]), flush=True)
    return {
        "bricks": BRICKS,
        "rows": [
            int(((gone_in_log >= low) & (gone_in_log <= high)).sum())
            for low, high in BRICKS
        ],
        "visits": [float(powers[is_in].sum() / powers.sum()) for is_in in bins],
        "returns": [
            float(np.average(played["returns"][is_in], weights=powers[is_in]))
            for is_in in bins
        ],
        "ways": by_way,
    }


# --- Runs -----------------------------------------------------------------------------


def cells(draws: int) -> Iterator[tuple[str, str, int]]:
    """Yield (world, attempt, draw), draw by draw; the worlds whose states lack nothing
    last.
    """
    for draw in range(draws):
        for world, attempt in CELLS:
            if draw < MOST_DRAWS.get(world, draws):
                yield world, attempt, draw
    for world in (*RIGHT_FINITE, *RIGHT_OF_USERS):
        yield world, "as it is", 0


def truths(path: Path) -> dict[str, float]:
    """True values by world, kept in a file because Breakout's take a minute each."""
    if path.exists():
        kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    values = {
        BREAKOUT: breakout_truth(_REPEATS),
        WITHOUT_REPEATS: breakout_truth(0.0),
        GRID: one_hot_grid()(0, 100).value,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values) + "\n", encoding="utf-8")
    return values


def summarise(
    runs: list[dict[str, Any]], truth_of: dict[str, float]
) -> list[dict[str, Any]]:
    """Mean signed and absolute errors, relative to the truth, and intervals that hold
    it, by world, attempt and estimator.
    """
    summary = []
    for world, attempt in CELLS:
        of_cell = [
            run for run in runs if (run["world"], run["attempt"]) == (world, attempt)
        ]
        truth = truth_of[world]
        for name in NAMES:
            of_name = [run["answers"][name] for run in of_cell]
            of_name = [answer for answer in of_name if answer["value"] is not None]
            if not of_name:
                continue
            errors = [(answer["value"] - truth) / abs(truth) for answer in of_name]
            ends = [answer["interval"] for answer in of_name if answer["interval"]]
            width = None
            if ends:
                width = float(np.mean([high - low for low, high in ends])) / abs(truth)
            summary.append(
                {
                    "world": world,
                    "attempt": attempt,
                    "estimator": name,
                    "truth": truth,
                    "draws": len(of_name),
                    "errors": errors,
                    "bias": float(np.mean(errors)),
                    "error": float(np.mean(np.abs(errors))),
                    "intervals": len(ends),
                    "covered": sum(low <= truth <= high for low, high in ends),
                    "width": width,
                }
            )
    return summary


def table_of_weights(runs: list[dict[str, Any]]) -> str:
    """A markdown table of the centred corrections by depth, each with its distance from
    zero in standard errors.
    """
    depths = [str(depth) for depth in DEPTHS[1:]]
    lines = [
        "| world | draw | " + " | ".join(f"{depth} steps" for depth in depths) + " |",
        "| --- |" + " --- |" * (1 + len(depths)),
    ]
    for run in json.loads(json.dumps(runs)):  # depths are texts, as in the file
        if run["attempt"] != "as it is" or "centred" not in run:
            continue
        shown = []
        for depth in depths:
            value, error = run["centred"][depth]
            shown.append(f"{value:+.3f} ({value / error:+.1f})")
        lines.append(f"| {run['world']} | {run['draw']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    """Answer what is missing, then print and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("out/wide_states.jsonl"))
    parser.add_argument("--set", nargs="*", default=[], help="settings, as steps=4000")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--by-bricks", action="store_true", help="values by the number of bricks gone"
    )
    arguments = parser.parse_args()
    command = shlex.join(["python", "-m", "scripts.bench.wide_states", *sys.argv[1:]])
    if arguments.by_bricks:
        content = {"command": command, **values_by_bricks()}
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(content) + "\n", encoding="utf-8")
        return
    options = parse_assignments(arguments.set)

    def measure(world: str, attempt: str, draw: int) -> dict[str, Any]:
        started = time.process_time()
        question = question_of(world, draw)
        question = dataclasses.replace(
            question, options={**question.options, **options}
        )
        result = ATTEMPTS[attempt](question)
        seconds = round(time.process_time() - started, 1)
        print(f"{world}, {attempt}, draw {draw}: {seconds} s", flush=True)
        return {
            "world": world,
            "attempt": attempt,
            "draw": draw,
            **result,
            "seconds": seconds,
        }

    truth_of = truths(arguments.runs.with_suffix(".truths.json"))
    names = ("world", "attempt", "draw")
    runs = kept_runs(arguments.runs, names, cells(arguments.draws), measure)
    summary = summarise(runs, truth_of)
    print(percent_table(summary, _SHOWN))
    print(table_of_weights(runs))
    if arguments.out is not None:
        content = {"command": command, "summary": summary, "runs": runs}
        arguments.out.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
