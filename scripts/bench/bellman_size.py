"""How often does the Bellman test reject a right and a wrong value function? Random
MDPs with exact values.

    python scripts/bench/bellman_size.py --out docs/results/bellman-test.json
    python scripts/bench/bellman_size.py --time 100000
    python scripts/bench/bellman_size.py --pairs --out docs/results/bellman-test.json

With --pairs the level is checked without the library's sums over rows: places are few
here (40 pairs of state and action), so that T is a form of 40 sums of residuals, and
many more repetitions are affordable.

Every repetition draws a new MDP (20 states in the plane, 2 actions, γ = 0.9), a policy
and a log. Intervals of the rejection rates are Clopper-Pearson, 95 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import koffline
from koffline.config import make_bellman_settings
from koffline.ope.bellman_test.case import make_case
from koffline.ope.bellman_test.forms import (
    SignDraws,
    count_features,
    draw_signs,
    random_signs,
)
from koffline.ope.value_functions import as_value_function
from koffline.policies import DiscretePolicy
from scripts.bench.coverage import clopper_pearson
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp

STATES = 20
ACTIONS = 2
DISCOUNT = 0.9
LEVEL = 0.05
DRAWS = 499
SIZES = (100, 300, 1000)
PAIR_SIZES = (100, 300, 1000, 10_000)
PAIR_KINDS = ("iid", "trajectory")
FEATURES_FOR_MANY = 200  # rows beyond 3,000: fewer than the default 1,000, to save time


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the study: what is tested on which data."""

    data: str  # iid, trajectory, off-policy trajectory
    error: str  # none, constant, noise, fitted here, fitted elsewhere
    n: int
    repetitions: int


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """A random MDP seen in the plane, the policy to evaluate, a log of state numbers
    and Q^π (S, A).
    """

    transitions: koffline.Transitions
    policy: DiscretePolicy
    states_of: Callable[[np.ndarray], np.ndarray]
    q: np.ndarray
    table: np.ndarray
    scale: float


def draw_problem(cell: Cell, seed: int) -> Draw:
    """A new MDP, policy and log."""
    generator = np.random.default_rng(seed)
    mdp = random_mdp(STATES, ACTIONS, generator)
    world = EmbeddedMDP(mdp, generator.uniform(-1.0, 1.0, size=(STATES, 2)))
    target, other = (
        generator.dirichlet(np.full(ACTIONS, 2.0), size=STATES) for _ in range(2)
    )
    if cell.data.startswith("off-policy"):
        behavior = other
    else:
        behavior = target
    if cell.data == "iid":
        sample = mdp.sample_transitions(cell.n, behavior, generator)
        columns: tuple[np.ndarray, ...] = (
            sample.states,
            sample.actions,
            sample.rewards,
            sample.next_states,
        )
    else:
        columns = walk(mdp.transition, mdp.reward, behavior, cell.n, generator)
    log = as_log(world.coordinates, columns, cell.data != "iid")
    q = mdp.action_values(target, DISCOUNT)
    scale = float(np.sqrt(np.mean(np.square(q))))
    policy = DiscretePolicy(ACTIONS, world.policy(target), name="target")
    return Draw(log, policy, world.states_of, q, target, scale)


def walk(
    transition: np.ndarray,
    reward: np.ndarray,
    policy: np.ndarray,
    n: int,
    generator: np.random.Generator,
) -> tuple[np.ndarray, ...]:
    """States, actions, rewards, next states of one trajectory of n steps."""
    acts = policy.cumsum(axis=1)
    moves = transition.cumsum(axis=2)
    draws = generator.random((n, 2))
    states = np.zeros(n + 1, dtype=np.int64)
    actions = np.zeros(n, dtype=np.int64)
    states[0] = generator.integers(len(policy))
    for t in range(n):
        actions[t] = min(
            acts[states[t]].searchsorted(draws[t, 0], side="right"), acts.shape[1] - 1
        )
        cumulative = moves[states[t], actions[t]]
        states[t + 1] = min(
            cumulative.searchsorted(draws[t, 1] * cumulative[-1], side="right"),
            len(policy) - 1,
        )
    return states[:-1], actions, reward[states[:-1], actions, states[1:]], states[1:]


def as_log(
    points: np.ndarray, columns: tuple[np.ndarray, ...], is_episode: bool
) -> koffline.Transitions:
    states, actions, rewards, following = columns
    truncated = np.zeros(len(states), bool)
    episode_ids = None
    if is_episode:
        truncated[-1] = True
        episode_ids = np.zeros(len(states), dtype=np.int64)
    return koffline.Transitions(
        observations=points[states],
        actions=actions,
        rewards=rewards,
        next_observations=points[following],
        terminated=np.zeros(len(states), bool),
        truncated=truncated,
        action_space=koffline.Discrete(ACTIONS),
        episode_ids=episode_ids,
    )


def certainty_equivalence(draw: Draw, log: koffline.Transitions) -> np.ndarray:
    """LSTD-Q with one-hot features, a small ridge where pairs are missing: Q (S, A)."""
    pairs = draw.states_of(log.observations) * ACTIONS + log.actions
    following = draw.states_of(log.next_observations)
    size = STATES * ACTIONS
    now = np.eye(size)[pairs]
    later = np.zeros((len(log), size))
    for action in range(ACTIONS):
        later[np.arange(len(log)), following * ACTIONS + action] = draw.table[
            following, action
        ]
    matrix = now.T @ (now - DISCOUNT * later) + 1e-6 * np.eye(size)
    return np.linalg.solve(matrix, now.T @ log.rewards).reshape(STATES, ACTIONS)


def tested_table(cell: Cell, draw: Draw, seed: int) -> np.ndarray:
    """The value function under test, (S, A)."""
    generator = np.random.default_rng(seed + 10**6)
    if cell.error == "constant":
        return draw.q + 0.3 * draw.scale
    if cell.error == "noise":
        return draw.q + 0.1 * generator.standard_normal(draw.q.shape)
    if cell.error == "fitted here":
        return certainty_equivalence(draw, draw.transitions)
    if cell.error == "fitted elsewhere":
        fresh = draw.transitions.select(np.arange(len(draw.transitions) // 2))
        return certainty_equivalence(draw, fresh)
    return draw.q


def repeat(cell: Cell, seed: int) -> dict[str, float]:
    """The p-value, and the power that the test states for a constant error."""
    draw = draw_problem(cell, seed)
    table = tested_table(cell, draw, seed)
    log = draw.transitions
    if cell.error == "fitted elsewhere":
        log = log.select(np.arange(len(log) // 2, len(log)))
    q = as_value_function(
        lambda s, a: table[draw.states_of(s), a],
        log.action_space,
        log.observation_shape,
    )
    features = None
    if cell.n > 3000:
        features = FEATURES_FOR_MANY
    settings = make_bellman_settings(
        gamma=DISCOUNT, seed=seed, draws=DRAWS, features=features
    )
    case = make_case(q, log, draw.policy, settings)
    drawn = draw_signs(case, count_features(case), np.random.default_rng(seed))
    if case.is_hopeless:
        power = 0.0
    else:
        power = drawn.power(0.3 * draw.scale, LEVEL)
    return {"p_value": drawn.p_value(drawn.statistic), "power": power}


def study(cell: Cell) -> dict[str, Any]:
    """Rejection rates of one cell."""
    started = time.perf_counter()
    first = 1000 * zlib.crc32(repr(cell).encode())  # every line has logs of its own
    results = [repeat(cell, first + number) for number in range(cell.repetitions)]
    stated = float(np.mean([result["power"] for result in results]))
    return {
        **dataclasses.asdict(cell),
        **rate_of([result["p_value"] for result in results]),
        "stated_power_constant": round(stated, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def cells(repetitions: int, sizes: Sequence[int]) -> Iterator[Cell]:
    """The study, cheap cells first; `study_by_pairs` has the level of one step at
    larger n.
    """
    for n in sizes:
        yield Cell("iid", "constant", n, repetitions)
        yield Cell("trajectory", "noise", n, repetitions)
        if n > 300:
            continue
        yield Cell("iid", "none", n, repetitions)
        yield Cell("trajectory", "none", n, repetitions)
        yield Cell("off-policy trajectory", "none", n, repetitions)
        yield Cell("iid", "noise", n, repetitions)
        yield Cell("trajectory", "constant", n, repetitions)
        if n == 300:
            yield Cell("iid", "fitted here", n, repetitions)
            yield Cell("iid", "fitted elsewhere", 2 * n, repetitions)


def repeat_by_pairs(data: str, n: int, seed: int) -> float:
    """p-value of the true Q from sums over state-action pairs; the kernel is that of
    `bellman_test`.
    """
    draw = draw_problem(Cell(data, "none", n, 1), seed)
    log = draw.transitions
    states = draw.states_of(log.observations)
    following = draw.states_of(log.next_observations)
    later = (draw.table * draw.q).sum(axis=1)[following]
    residuals = log.rewards + DISCOUNT * later - draw.q[states, log.actions]
    pairs, first, numbers = np.unique(
        states * ACTIONS + log.actions, return_index=True, return_inverse=True
    )
    q = as_value_function(
        lambda s, a: draw.q[draw.states_of(s), a],
        log.action_space,
        log.observation_shape,
    )
    case = make_case(q, log, draw.policy, make_bellman_settings(gamma=DISCOUNT))
    gram = case.kernel.gram(case.inputs[first]).numpy()
    scores = residuals[:, None] * np.eye(len(pairs))[numbers]  # (n, pairs)
    total = scores.sum(axis=0)
    drawn = random_signs((DRAWS, n), np.random.default_rng(seed)) @ scores  # (B, pairs)
    statistics = np.einsum("bp,pq,bq->b", drawn, gram, drawn, optimize=True) / n
    statistic = float(total @ gram @ total) / n
    return SignDraws(statistic, statistics, np.zeros(DRAWS), 0.0, 0.0, 0.0).p_value(
        statistic
    )


def study_by_pairs(sizes: Sequence[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Rejection rates of the true Q, one row per size and kind of data."""
    for n in sizes:
        for data in PAIR_KINDS:
            started = time.perf_counter()
            results = [
                repeat_by_pairs(data, n, 10**7 + number)
                for number in range(repetitions)
            ]
            spent = round(time.perf_counter() - started, 1)
            yield {
                "data": data,
                "n": n,
                "repetitions": repetitions,
                **rate_of(results),
                "seconds": spent,
            }


def rate_of(p_values: Sequence[float]) -> dict[str, Any]:
    """Rejections at the level, with their interval."""
    rejected = int(sum(p_value <= LEVEL for p_value in p_values))
    low, high = clopper_pearson(rejected, len(p_values))
    rate = round(rejected / len(p_values), 4)
    return {
        "rejected": rejected,
        "rate": rate,
        "low": round(low, 4),
        "high": round(high, 4),
    }


def write_out(path: Path | None, **parts: list[dict[str, Any]]) -> None:
    """The file with these parts replaced, the others as they are."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        content = json.loads(path.read_text())
    else:
        content = {}
    command = (
        "python scripts/bench/bellman_size.py [--pairs] --out"
        " docs/results/bellman-test.json"
    )
    content.update(
        command=command,
        koffline=koffline.__version__,
        level=LEVEL,
        draws=DRAWS,
        **parts,
    )
    path.write_text(json.dumps(content, indent=1) + "\n")


def kept_rows(path: Path | None, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Rows of an earlier run that this one does not make anew."""
    if path is None or not path.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    new = [identity(dataclasses.asdict(cell)) for cell in cells]
    return [row for row in rows if identity(row) not in new]


def identity(row: dict[str, Any]) -> list[Any]:
    """What tells one line from another."""
    return [row[name] for name in ("data", "error", "n")]


def measure_time(n: int) -> None:
    """Seconds of whole tests at n rows."""
    draw = draw_problem(Cell("iid", "none", n, 1), 0)
    started = time.perf_counter()
    result = koffline.bellman_test(
        lambda s, a: draw.q[draw.states_of(s), a],
        draw.transitions,
        draw.policy,
        DISCOUNT,
    )
    spent = time.perf_counter() - started
    print(
        f"n = {n}: {spent:.1f} s, {result.features} features, p = {result.p_value:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=500, help="of every line")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="only these n; other rows of the file stay"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="the level alone, from sums over pairs"
    )
    parser.add_argument(
        "--time",
        type=int,
        metavar="N",
        help="only measure the time of one test of N rows",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.time:
        measure_time(arguments.time)
        return
    if arguments.pairs:
        by_pairs = []
        for row in study_by_pairs(arguments.sizes or PAIR_SIZES, arguments.repetitions):
            by_pairs.append(row)
            print(row, flush=True)
            write_out(arguments.out, size_by_pairs=by_pairs)
        return
    chosen = list(cells(arguments.repetitions, arguments.sizes or SIZES))
    rows = kept_rows(arguments.out, chosen)
    for cell in chosen:
        rows.append(study(cell))
        print(
            f"{cell.data:<22}{cell.error:<17}n={cell.n:<6}{rows[-1]['rate']:.3f} "
            f" {rows[-1]['seconds']} s",
            flush=True,
        )
        write_out(arguments.out, rows=sorted(rows, key=lambda row: row["n"]))


if __name__ == "__main__":
    main()
