"""Doubly robust estimates of one-step logs (bandits): by a regression on rewards, and
by the kernel-loss networks that other estimators read.

    pip install --no-deps obp==0.4.1    # or without OBP's problem
    python -m scripts.bench.one_step --runs out/one_step.jsonl
        --out docs/results/one_step.json

Problems: the clicks of the leaderboard's two halves (5 offers), rare clicks (30 items,
a click in 220 rows), OBP's synthetic bandit (10 actions; `scripts.bench.obp`), 20,000
rows of 30 items, and the two campaigns of the Open Bandit Dataset, whose truth is the
target's own click rate and whose draws are only seeds of networks. All settings are the
defaults. ``seconds`` is processor time of `dr`, all that it needs from an open
workspace on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline import Transitions
from koffline.config import make_settings
from koffline.ope.estimators.doubly_robust import DR, MAGIC, WDR
from koffline.ope.importance.episodes import with_unknown_actions
from koffline.ope.workspace import open_workspace
from scripts.bench import open_bandit
from scripts.bench.coverage import kept_runs
from scripts.bench.doubly_robust import RareClicks
from scripts.bench.user_logs import problems as user_problems

OVER_EPISODES = {"dr": DR, "wdr": WDR, "magic": MAGIC}
REGRESSION = "regression"
KERNEL_LOSS = "kernel loss"
_GAMMA = 0.9  # makes no difference


@dataclass(frozen=True)
class Bandit:
    """One question: a log by seed, a policy, and its value.

    draws: logs at most; an expensive or real log has fewer.
    """

    log: Callable[[int], Transitions]
    policy: Any
    truth: float
    draws: int = 1000


def _clicks(half: str, name: str, target: str) -> Bandit:
    problem = user_problems(half)[name]
    value, _ = problem.truth(target)
    return Bandit(lambda seed: problem.log(seed, None), problem.policy(target), value)


def _rare() -> Bandit:
    world = RareClicks()
    return Bandit(lambda seed: world.log(seed, 10_000), world.policy, world.truth())


def _many() -> Bandit:
    world = RareClicks(rate=0.05)
    log = partial(world.log, rows=20_000)
    return Bandit(log, world.policy, world.truth(), draws=6)


def _real(campaign: str) -> Bandit:
    rate, _ = open_bandit.own_rate(campaign)
    log = open_bandit.random_log(campaign)
    return Bandit(lambda seed: log, open_bandit.thompson(campaign), rate, draws=2)


def _synthetic() -> Bandit:
    from scripts.bench import obp

    world = obp.World()
    return Bandit(lambda seed: world.log(seed).transitions, world.policy, world.truth())


PROBLEMS: dict[str, Callable[[], Bandit]] = {
    "clicks 3000": lambda: _clicks("development", "clicks 3000", "best 0.1"),
    "clicks 10000": lambda: _clicks("test", "clicks 10000", "best 0.5"),
    "rare clicks": _rare,
    "20,000 rows, 30 items": _many,
    "OBP synthetic": _synthetic,
    "Open Bandit, men": lambda: _real("men"),
    "Open Bandit, women": lambda: _real("women"),
}


@cache
def _problem(name: str) -> Bandit:
    return PROBLEMS[name]()


def measure(problem: str, seed: int) -> dict[str, Any]:
    """One log: value and interval of each estimator by both models, and processor
    seconds of the first one.
    """
    bandit = _problem(problem)
    settings = make_settings({"gamma": _GAMMA, "seed": seed, "cores": 1})
    with (
        open_workspace(bandit.log(seed), bandit.policy, settings) as workspace,
        torch.no_grad(),
    ):
        answers: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for model in (REGRESSION, KERNEL_LOSS):
            started = time.process_time()
            if model == REGRESSION:
                values = workspace.row_values_of_episodes
            else:
                values = workspace.row_values
                if workspace.known_actions is not None:
                    values = with_unknown_actions(
                        values, workspace.transitions, workspace.known_actions
                    )
            episodes = workspace.episodes
            of_model = {}
            for name, estimator in OVER_EPISODES.items():
                estimate = estimator.from_episodes(
                    episodes, values, level=settings.level, seed=seed
                )
                seconds.setdefault(model, time.process_time() - started)
                interval = None
                if estimate.interval is not None:
                    interval = [estimate.interval.low, estimate.interval.high]
                of_model[name] = {"value": estimate.value, "interval": interval}
            answers[model] = of_model
    print(problem, seed, seconds, flush=True)
    return {
        "problem": problem,
        "seed": seed,
        "truth": bandit.truth,
        "answers": answers,
        "seconds": seconds,
    }


def cells(draws: int, names: list[str]) -> Iterator[tuple[str, int]]:
    """Problem and seed, all problems of a seed before the next seed."""
    for seed in range(draws):
        for name in names:
            needs_obp = name == "OBP synthetic"
            if needs_obp and importlib.util.find_spec("obp") is None:
                continue
            if seed < _problem(name).draws:
                yield name, seed


def summarise(
    runs: list[dict[str, Any]], problem: str, model: str, name: str
) -> dict[str, Any]:
    """Errors relative to the truth, intervals that held it, and processor seconds."""
    of_problem = [run for run in runs if run["problem"] == problem]
    answered = [(run["truth"], run["answers"][model][name]) for run in of_problem]
    errors = np.array([(answer["value"] - truth) / truth for truth, answer in answered])
    intervals = [
        (truth, *answer["interval"])
        for truth, answer in answered
        if answer["interval"] is not None
    ]
    held = sum(low <= truth <= high for truth, low, high in intervals)
    widths = [(high - low) / truth for truth, low, high in intervals]
    mean_width = None
    if widths:
        mean_width = float(np.mean(widths))
    return {
        "problem": problem,
        "model": model,
        "estimator": name,
        "logs": len(answered),
        "mean_error": float(errors.mean()),
        "root_mean_square": float(np.sqrt(np.square(errors).mean())),
        "median_error": float(np.median(np.abs(errors))),
        "held": held,
        "intervals": len(intervals),
        "mean_width": mean_width,
        "seconds": float(np.mean([run["seconds"][model] for run in of_problem])),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """A Markdown table, one line for each problem, estimator and version."""
    print(
        "| log | estimator | model | logs | mean error | root mean square | median |"
        " held | width | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        width = "–"
        if row["mean_width"] is not None:
            width = f"{row['mean_width']:.1%}"
        columns = (
            row["problem"],
            f"`{row['estimator']}`",
            row["model"],
            str(row["logs"]),
            f"{row['mean_error']:+.1%}",
            f"{row['root_mean_square']:.2%}",
            f"{row['median_error']:.2%}",
            f"{row['held']} of {row['intervals']}",
            width,
            f"{row['seconds']:.1f}",
        )
        print(f"| {' | '.join(columns)} |")


def main() -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("problems", nargs="*", help="(default: all)")
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines")
    parser.add_argument("--draws", type=int, default=20, help="logs of a problem")
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems = arguments.problems or list(PROBLEMS)
    runs = kept_runs(
        arguments.runs,
        ("problem", "seed"),
        cells(arguments.draws, problems),
        measure,
    )
    rows = [
        summarise(runs, problem, model, name)
        for problem in problems
        if any(run["problem"] == problem for run in runs)
        for name in OVER_EPISODES
        for model in (REGRESSION, KERNEL_LOSS)
    ]
    print_table(rows)
    if arguments.out is not None:
        command = shlex.join(["python", "-m", "scripts.bench.one_step", *sys.argv[1:]])
        content = {"command": command, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
