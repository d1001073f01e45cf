"""The leaderboard: koffline's estimators, d3rlpy's FQE, scope-rl's, on problems of
known value, in one run.

    python -m scripts.bench.leaderboard --half test --first-seed 4 --seeds 2
        --out docs/results/leaderboard.json --page docs/leaderboard.md   # once per
        release, new seeds: hours
    python -m scripts.bench.leaderboard --half development --out out/users.json
    python -m scripts.bench.leaderboard --quick     # a minute: one small problem

Every problem gives one log a seed and several policies to evaluate and rank. Rows are
kept in ``--out`` as they come, so that a run that was broken off goes on where it
stopped. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import koffline
from koffline.config import parse_assignments
from koffline.errors import KofflineError
from scripts.bench.leaderboard_methods import Answer, answer_all
from scripts.bench.leaderboard_problems import BOARD
from scripts.bench.specs import cache_directory
from scripts.bench.user_logs import HALVES
from scripts.bench.user_logs import problems as user_problems

# Shorter than the defaults, so that many small problems stay affordable.
SHORT = {"steps": 1500, "full_replicas": 2, "resampled_replicas": 8, "action_draws": 4}
QUICK = {"steps": 40, "full_replicas": 1, "resampled_replicas": 2}


def run_cell(
    problem: Any,
    name: str,
    seed: int,
    n_rows: int | None,
    options: dict[str, Any],
    fqe_steps: int,
) -> dict[str, Any]:
    """All answers about one policy from one log."""
    log = problem.log(seed, n_rows)
    policy = problem.policy(name)
    truth, error = problem.truth(name)
    started = time.perf_counter()
    try:
        answers = list(answer_all(log, policy, problem.gamma, seed, options, fqe_steps))
    except KofflineError as failure:  # koffline refuses the log: nobody else is asked
        answers = [Answer("koffline", reason=str(failure))]
    return {
        "problem": problem.name,
        "policy": name,
        "greedy": name in problem.greedy,
        "seed": seed,
        "n_rows": len(log),
        "n_episodes": log.n_episodes,
        "truth": truth,
        "truth_se": error,
        "seconds": round(time.perf_counter() - started, 2),
        "answers": [answer.as_dict() for answer in answers],
    }


def cells(problems: list[Any], seeds: range) -> Iterator[tuple[Any, str, int]]:
    """Seed by seed, so that a run that is broken off has seen every problem."""
    for seed in seeds:
        for problem in problems:
            for name in problem.targets:
                yield problem, name, seed


def run(
    problems: list[Any],
    seeds: range,
    options: dict[str, Any],
    fqe_steps: int,
    n_rows: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """All cells, those in ``out`` already left alone."""
    content: dict[str, Any] = {
        "koffline": koffline.__version__,
        "settings": options,
        "fqe_steps": fqe_steps,
    }
    done: list[dict[str, Any]] = []
    if out is not None and out.exists():
        done = json.loads(out.read_text())["cells"]
    seen = {(cell["problem"], cell["policy"], cell["seed"]) for cell in done}
    for problem, name, seed in cells(problems, seeds):
        if (problem.name, name, seed) in seen:
            continue
        cell = run_cell(problem, name, seed, n_rows, options, fqe_steps)
        done.append(cell)
        print(
            f"{problem.name:<20}{name:<18} seed {seed}: {cell['seconds']:>6.1f} s",
            flush=True,
        )
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_suffix(".part")
            part.write_text(as_text({**content, "cells": done}))
            part.replace(out)
    return {**content, "cells": done}


def as_text(content: dict[str, Any]) -> str:
    """JSON with one line per cell; models are named from the benchmark's own folder
    on.
    """
    head = json.dumps(
        {key: item for key, item in content.items() if key != "cells"}, allow_nan=False
    )
    lines = ",\n".join(json.dumps(cell, allow_nan=False) for cell in content["cells"])
    return f'{head[:-1]}, "cells": [\n{lines}\n]}}\n'.replace(
        f"{cache_directory()}/", ""
    )


def main() -> None:
    from scripts.bench.leaderboard_report import print_table, write_page

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "problems",
        nargs="*",
        help=f"of {', '.join(BOARD)}, or of --half (default: all)",
    )
    parser.add_argument(
        "--half",
        choices=list(HALVES),
        help="instead: logs of the kinds that users bring",
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--n-rows", type=int, help="rows of every log (default: the problem's own)"
    )
    parser.add_argument(
        "--fqe-steps", type=int, default=6000, help="gradient steps of d3rlpy's FQE"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="koffline's setting",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one small problem, hardly trained"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file of the rows, continued where it stopped"
    )
    parser.add_argument(
        "--page", type=Path, help="Markdown page with the tables; a figure beside it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.half:
        known = user_problems(options.half)
    else:
        known = {name: make() for name, make in BOARD.items()}
    names = options.problems
    short = SHORT
    if options.half:
        short = {}
    steps = options.fqe_steps
    rows = options.n_rows
    count = options.seeds
    if options.quick:
        names = names or ["graph short"]
        short = QUICK
        steps = 40
        if rows is None:
            rows = 256
        count = 1
    settings = {**short, **parse_assignments(options.option)}
    problems = [known[name] for name in names or list(known)]
    seeds = range(options.first_seed, options.first_seed + count)
    content = run(problems, seeds, settings, steps, rows, options.out)
    print_table(content)
    if options.page:
        write_page(content, options.page)


if __name__ == "__main__":
    main()
