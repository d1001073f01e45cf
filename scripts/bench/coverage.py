"""How often does the bootstrap interval hold the truth? Many draws of problems whose answer is exact.

    python scripts/bench/coverage.py --draws 26 --n-rows 2000 --option steps=2000 --runs out/coverage.jsonl
        --out docs/results/coverage.json

Estimates are made draw by draw over all problems and written to ``--runs`` at once: called again, it goes on.
Coverage is counted twice: of the exact J over the start distribution, and of J from the drawn start states.
Intervals of the counts are Clopper–Pearson.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

from scipy import stats

import koffline
from koffline.config import parse_assignments
from tests.exact_problems import EXACT_PROBLEMS


def clopper_pearson(hits: int, draws: int, level: float = 0.95) -> tuple[float, float]:
    """Interval for a binomial probability."""
    tail = (1.0 - level) / 2.0
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, draws - hits + 1))
    high = 1.0 if hits == draws else float(stats.beta.ppf(1.0 - tail, hits + 1, draws - hits))
    return low, high


def measure(name: str, draw: int, n_rows: int, options: dict[str, Any]) -> dict[str, Any]:
    """One estimate; its interval may be refused."""
    problem = EXACT_PROBLEMS[name](1000 + draw, n_rows)
    estimate = koffline.evaluate(problem.transitions, problem.policy, problem.gamma, seed=draw, **options)
    interval = estimate.interval
    return {
        "problem": name,
        "seed": draw,
        "value": estimate.value,
        "truth": problem.value,
        "at_starts": problem.value_at_starts,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "verdict": estimate.verdict.answer,
        "reasons": estimate.verdict.reasons,
        "steps": estimate.diagnostics["training_steps"],
        "seconds": estimate.seconds,
    }


def summarise(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Coverage, width and error on one problem, or on all."""
    made = [run for run in runs if run["low"] is not None]
    covered = sum(run["low"] <= run["truth"] <= run["high"] for run in made)
    low, high = clopper_pearson(covered, len(made)) if made else (0.0, 1.0)
    errors = [(run["value"] - run["truth"]) / abs(run["truth"]) for run in runs]
    widths = [(run["high"] - run["low"]) / abs(run["truth"]) for run in made]
    return {
        "problem": name,
        "draws": len(runs),
        "without_interval": len(runs) - len(made),
        "covered": covered,
        "covered_at_starts": sum(run["low"] <= run["at_starts"] <= run["high"] for run in made),
        "coverage": covered / max(1, len(made)),
        "coverage_low": low,
        "coverage_high": high,
        "mean_relative_width": sum(widths) / max(1, len(widths)),
        "mean_absolute_relative_error": sum(map(abs, errors)) / len(errors),
        "mean_relative_error": sum(errors) / len(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems (default: all)")
    parser.add_argument("--draws", type=int, default=26)
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines, one for each estimate")
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    options, names = parse_assignments(arguments.option), arguments.names or list(EXACT_PROBLEMS)
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.runs.read_text().splitlines() if arguments.runs.exists() else []
    runs = [json.loads(line) for line in lines]
    done = {(run["problem"], run["seed"]) for run in runs}
    for draw in range(arguments.draws):
        for name in names:
            if (name, draw) in done:
                continue
            runs.append(measure(name, draw, arguments.n_rows, options))
            with arguments.runs.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    rows = [summarise(name, [run for run in runs if run["problem"] == name]) for name in names]
    rows.append(summarise("all", runs))
    answers = sorted({run["verdict"] for run in runs})
    rows += [summarise(answer, [run for run in runs if run["verdict"] == answer]) for answer in answers]
    for row in rows:
        print(
            f"{row['problem']:<28} covered {row['covered']:>3}/{row['draws']} "
            f"[{row['coverage_low']:.2f}, {row['coverage_high']:.2f}]  "
            f"width {row['mean_relative_width']:.3f}  error {row['mean_absolute_relative_error']:.3f} "
            f"(bias {row['mean_relative_error']:+.3f})"
        )
    if arguments.out:
        content = {"command": " ".join(sys.argv), "n_rows": arguments.n_rows, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
