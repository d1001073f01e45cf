"""Worlds whose logged state is not the whole state, or that change: does the verdict
say so?

    python -m scripts.bench.memory --seeds 2 --runs out/memory.jsonl --out docs/results/memory.json

Each world is evaluated with ``history`` 0 and 1, those that drift, the Markov parents
and the exact problems with 0: of the last two nothing should be said. The truth of a
world that drifts is that of its end. Answers are written to ``--runs`` at once: called
again, it goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import koffline
from koffline.data.transitions import Transitions
from koffline.envs.boxes import Actions, Observations, Outcome, States
from koffline.store.files import atomic_file
from scripts.bench import controllers as c
from scripts.bench.classic import Around, CartPole
from scripts.bench.coverage import kept_runs
from scripts.bench.held_out_worlds import Repriced
from scripts.bench.problems import DEVELOPMENT, Spec
from scripts.bench.rollouts import EpisodeLog, as_transitions, log_episodes
from scripts.bench.specs import policy_of
from tests.exact_problems import EXACT_PROBLEMS

EXACT_ROWS = 2000


@dataclass(frozen=True)
class Remembering(Around):
    """Another world with a last column of state that nobody sees; ``kind`` says what it
    does.

    switch: changing the action costs ``size``. bonus: action 0 pays ``size`` a step
    later. delay: an action acts a step later. type: each episode is of one of two
    types, which pay ``size`` for other actions. mode: rewards are higher or lower by
    ``size``; the mode changes more often after action 0.
    """

    kind: str
    size: float = 0.0

    def reset(self, n: int, generator: np.random.Generator) -> States:
        state = np.asarray(self.world.reset(n, generator), dtype=np.float64).reshape(
            n, -1
        )
        drawn = generator.integers(2, size=n).astype(np.float64)
        return np.column_stack(
            [
                state,
                drawn if self.kind in ("delay", "type", "mode") else np.full(n, -1.0),
            ]
        )

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        visible = state[:, :-1]
        hidden = state[:, -1]
        if self.kind == "delay":
            acting = hidden.astype(np.int64)
        else:
            acting = action
        following, reward, ended = self.world.step(visible, acting, generator)
        left = np.asarray(action, dtype=np.float64)
        if self.kind == "switch":
            reward = reward - self.size * ((left != hidden) & (hidden >= 0.0))
        elif self.kind == "bonus":
            is_first = hidden == 0.0
            reward = reward + self.size * is_first
        elif self.kind == "type":
            reward = reward + self.size * np.where(
                hidden == 1.0, left == 0.0, left != 0.0
            )
            left = hidden
        elif self.kind == "mode":
            flips = generator.random(len(hidden)) < np.where(left == 0.0, 0.2, 0.05)
            reward = reward + self.size * (2.0 * hidden - 1.0)
            left = np.where(flips, 1.0 - hidden, hidden)
        following = np.asarray(following, dtype=np.float64).reshape(len(visible), -1)
        return Outcome(np.column_stack([following, left]), reward, ended)

    def observe(self, state: States) -> Observations:
        return self.world.observe(state[:, :-1])


@dataclass(frozen=True)
class Blinkered(Around):
    """Another world of which some columns are observed."""

    columns: tuple[int, ...]

    def observe(self, state: States) -> Observations:
        return self.world.observe(state)[:, list(self.columns)]


def _with_memory(parent: str, kind: str, size: float = 0.0, **changes: Any) -> Spec:
    spec = DEVELOPMENT[parent]
    policies = {
        "behavior": spec.behavior,
        "target": spec.target,
        "gamma": spec.gamma,
        **changes,
    }
    policies.setdefault("time_limit", spec.time_limit)
    return Spec(
        f"{parent}, {kind}",
        Remembering(spec.world, kind, size),
        **policies,
        n_starts=5000,
    )


_TURN = {"behavior": c.Fixed((0.5, 0.5)), "target": c.Fixed((0.1, 0.9))}
_TORQUE = {"low": (-2.0,), "high": (2.0,)}
WORLDS: dict[str, Spec] = {
    spec.name: spec
    for spec in [
        _with_memory("chain", "switch", 0.3, **_TURN),
        _with_memory("chain", "bonus", 0.3, **_TURN),
        _with_memory("chain", "delay"),
        _with_memory("chain", "type", 0.3),
        _with_memory("chain", "mode", 0.3),
        _with_memory("noisy_grid", "switch", 0.3),
        _with_memory("noisy_grid", "delay"),
        _with_memory("noisy_grid", "type", 0.3),
        _with_memory("noisy_grid", "mode", 0.5),
        _with_memory("cartpole", "switch", 0.5, gamma=0.98),
        _with_memory("cartpole", "delay", gamma=0.98),
        _with_memory("acrobot", "switch", 0.3),
        Spec(
            "cartpole, positions only",
            Blinkered(DEVELOPMENT["cartpole"].world, (0, 2)),
            c.Mixed(0.6, c.LinearSoftmax((0.3, 10.0))),
            c.Mixed(0.2, c.LinearSoftmax((0.3, 10.0))),
            0.98,
        ),
        Spec(
            "pendulum, angle only",
            Blinkered(DEVELOPMENT["pendulum"].world, (0, 1)),
            c.Gaussian(c.Linear(((0.0, -1.0),)), 0.8, **_TORQUE),
            c.Gaussian(c.Linear(((0.0, -3.0),)), 0.3, **_TORQUE),
            0.95,
            100,
        ),
    ]
}


def _drifting(
    name: str, parent: str, worlds: Sequence[Any]
) -> tuple[Spec, Sequence[Any]]:
    return (
        dataclasses.replace(
            DEVELOPMENT[parent], name=name, world=worlds[-1], n_starts=5000
        ),
        worlds,
    )


def _repriced(parent: str, scales: Iterable[float]) -> list[Repriced]:
    return [Repriced(DEVELOPMENT[parent].world, scale=float(scale)) for scale in scales]


DRIFTS = {
    spec.name: (spec, worlds)
    for spec, worlds in [
        _drifting(
            "chain, rewards rise",
            "chain",
            _repriced("chain", np.linspace(0.5, 1.5, 10)),
        ),
        _drifting(
            "chain, rewards jump", "chain", _repriced("chain", np.repeat((0.5, 1.5), 5))
        ),
        _drifting(
            "noisy_grid, costs rise",
            "noisy_grid",
            _repriced("noisy_grid", np.linspace(0.7, 1.3, 10)),
        ),
        _drifting(
            "cartpole, rougher pushes",
            "cartpole",
            [CartPole(push) for push in np.linspace(0, 20, 10)],
        ),
    ]
}


def drifting_log(name: str, seed: int, n_rows: int) -> Transitions:
    """One log of as many rows in each of the worlds, one after the other."""
    spec, worlds = DRIFTS[name]
    generator = np.random.default_rng(seed)
    parts: list[EpisodeLog] = []
    for world in worlds:
        part = log_episodes(
            world, spec.behavior, n_rows // len(worlds), spec.time_limit, generator
        )
        first = 0
        if parts:
            first = parts[-1].episode_ids[-1] + 1
        parts.append(dataclasses.replace(part, episode_ids=part.episode_ids + first))
    columns = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in vars(parts[0])
    }
    return as_transitions(EpisodeLog(**columns), spec.world)


def questions(seeds: int, n_rows: int) -> Iterator[tuple[str, int, int]]:
    """Yield (world, seed, history)."""
    for seed in range(seeds):
        for name in WORLDS:
            yield from ((name, seed, history) for history in (0, 1))
        yield from ((name, seed, 0) for name in (*DRIFTS, *DEVELOPMENT))
    for seed in range(3 * seeds):
        yield from (
            (name, seed, 0) for name in EXACT_PROBLEMS if not name.endswith("tuples")
        )


def answer(
    name: str, seed: int, history: int, n_rows: int, options: dict[str, Any]
) -> dict[str, Any]:
    """One evaluation."""
    if name in EXACT_PROBLEMS:
        exact = EXACT_PROBLEMS[name](3000 + seed, EXACT_ROWS)
        log = exact.transitions
        policy = exact.policy
        gamma = exact.gamma
        truth = exact.value
    elif name in DRIFTS:
        spec = DRIFTS[name][0]
        log = drifting_log(name, seed, n_rows)
        policy = policy_of(spec.world, spec.target, name)
        gamma = spec.gamma
        truth = spec.truth().value
    else:
        problem = (WORLDS.get(name) or DEVELOPMENT[name])(seed, n_rows)
        log = problem.transitions()
        policy = problem.policy()
        gamma = problem.spec.gamma
        truth = problem.truth.value
    estimate = koffline.evaluate(
        log, policy, gamma, seed=seed, estimator="kloss", history=history, **options
    )
    interval = None
    if estimate.interval is not None:
        interval = [estimate.interval.low, estimate.interval.high]
    return {
        "world": name,
        "seed": seed,
        "history": history,
        "truth": truth,
        "value": estimate.value,
        "interval": interval,
        "verdict": estimate.verdict.answer,
        "state": estimate.verdict.because("state", "drift"),
        "shift": estimate.diagnostics["memory_shift"],
        "p_value": estimate.diagnostics["memory_p_value"],
        "drift": estimate.diagnostics["drift_shift"],
        "drift_p_value": estimate.diagnostics["drift_p_value"],
    }


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    """Mean absolute error, intervals that hold, and how many answers speak of a state
    or a drift.
    """
    known = [run for run in runs if run["interval"] is not None]
    held = sum(
        run["interval"][0] <= run["truth"] <= run["interval"][1] for run in known
    )
    error = np.mean(
        [abs(run["value"] - run["truth"]) / abs(run["truth"]) for run in runs]
    )
    warned = sum(bool(run["state"]) for run in runs)
    return [f"{error:.0%}", f"{held} of {len(known)}", f"{warned} of {len(runs)}"]


def as_table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row for each world, one for all parents, one for all exact
    problems.
    """
    lines = [
        "| world | off by | held | said | with the row before: off by | held | said |",
        "|" + "---|" * 7,
    ]
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in (*WORLDS, *DRIFTS)}
    groups |= {
        "Markov parents": tuple(DEVELOPMENT),
        "exact problems": tuple(EXACT_PROBLEMS),
    }
    for title, names in groups.items():
        cells: list[str] = []
        for history in (0, 1):
            of_group = [
                run
                for run in runs
                if run["world"] in names and run["history"] == history
            ]
            if of_group:
                cells += _cells(of_group)
            else:
                cells += ["", "", ""]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Answer what is missing, then write the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--n-rows", type=int, default=5000)
    parser.add_argument("--runs", type=Path, default=Path("out/memory.jsonl"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def measure(name: str, seed: int, history: int) -> dict[str, Any]:
        run = answer(name, seed, history, arguments.n_rows, {})
        print(
            f"{name} {seed} history {history}: {run['value']:.4g} {run['interval']},"
            f" truth {run['truth']:.4g}, {run['verdict']} {run['state']}",
            flush=True,
        )
        return run

    cells = questions(arguments.seeds, arguments.n_rows)
    runs = kept_runs(arguments.runs, ("world", "seed", "history"), cells, measure)
    print(as_table(runs))
    if arguments.out is not None:
        with atomic_file(arguments.out, force=True) as temporary:
            temporary.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
