"""How often do intervals from sums hold the truth? Twelve exact problems, estimates as of logs on disk.

    python scripts/bench/streaming_coverage.py --draws 30 --out docs/results/streaming-coverage.json

Each log is cut into shards and evaluated as ``koffline evaluate --lazy`` does: networks from a sample, one
pass, a jackknife over groups of units. ``truth`` is the value over the world's start distribution. Intervals
of the counts are Clopper–Pearson.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.ope.streaming import estimating
from koffline.ope.streaming.sampling import Request, sample_and_train
from koffline.ope.streaming.settings import StreamSettings
from koffline.store.run_record import versions
from scripts.bench.coverage import clopper_pearson
from tests.data.shards_in_memory import MemoryShards
from tests.exact_problems import EXACT_PROBLEMS

NAMES = ("kloss", "mql")
_SHARDS = 4


def in_shards(log: Transitions) -> MemoryShards:
    """The log in a few shards of whole episodes."""
    units = np.array_split(np.arange(log.n_episodes or len(log)), _SHARDS)
    if log.has_episodes:
        return MemoryShards([log.select_episodes(some) for some in units])
    return MemoryShards([log.select(some) for some in units])


def measure(name: str, seed: int, n_rows: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One log, one pass, every estimator."""
    problem = EXACT_PROBLEMS[name](seed, n_rows)
    settings = EvaluationSettings(gamma=problem.gamma, seed=seed, **options)
    log: Any = in_shards(problem.transitions)
    request = Request(log, problem.policy, settings, StreamSettings())
    rows = []
    with torch.no_grad():
        plan = estimating._plan(request)
        sampled = sample_and_train(request, plan, learned=True)
        reader, sums = estimating._pass(request, plan, sampled)
        for estimator in NAMES:
            chosen = dataclasses.replace(
                request, settings=settings.model_copy(update={"estimator": estimator})
            )
            point = estimating._answer(chosen, sampled, reader, sums).point
            assert point.interval is not None
            rows.append(
                {
                    "problem": name,
                    "estimator": estimator,
                    "seed": seed,
                    "covered": point.interval.holds(problem.value),
                    "error": (point.value - problem.value) / abs(problem.value),
                    "relative_width": point.interval.width / abs(problem.value),
                }
            )
    return rows


def summarise(rows: list[dict[str, Any]], n_rows: int) -> list[dict[str, Any]]:
    """One line for each estimator and problem, and one over all problems."""
    found = []
    for estimator in NAMES:
        for name in (*EXACT_PROBLEMS, "all"):
            some = [row for row in rows if row["estimator"] == estimator and name in (row["problem"], "all")]
            covered = sum(row["covered"] for row in some)
            if not some:
                continue
            low, high = clopper_pearson(covered, len(some))
            found.append(
                {
                    "estimator": estimator,
                    "problem": name,
                    "n_rows": n_rows,
                    "draws": len(some),
                    "coverage": covered / len(some),
                    "coverage_low": low,
                    "coverage_high": high,
                    "mean_relative_width": float(np.mean([row["relative_width"] for row in some])),
                    "mean_absolute_relative_error": float(np.mean([abs(row["error"]) for row in some])),
                    "mean_relative_error": float(np.mean([row["error"] for row in some])),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems (default: all)")
    parser.add_argument("--draws", type=int, default=26, help="logs of each problem")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    options = {"steps": arguments.steps, "hidden_units": (32, 32)}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.draws):
        for name in arguments.names or EXACT_PROBLEMS:
            rows += measure(name, seed, arguments.n_rows, options)
        print(f"seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        found = {
            "command": "scripts/bench/streaming_coverage.py " + " ".join(sys.argv[1:]),
            "settings": {**options, "level": 0.95},
            "versions": versions(),
            "rows": summarise(rows, arguments.n_rows),
        }
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["rows"]:
        print(
            f"{row['estimator']:8} {row['problem']:26} {row['coverage']:6.1%} "
            f"[{row['coverage_low']:.1%}, {row['coverage_high']:.1%}] of {row['draws']:4}  "
            f"width {row['mean_relative_width']:.3g}  error {row['mean_absolute_relative_error']:.3g} "
            f"bias {row['mean_relative_error']:+.3g}"
        )


if __name__ == "__main__":
    main()
