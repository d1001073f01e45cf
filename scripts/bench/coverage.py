"""How often does the bootstrap interval hold the truth? Many draws of problems whose answer is exact.

    python scripts/bench/coverage.py --draws 40 --n-rows 2000 --out docs/results/coverage.json

Coverage is counted twice: of the exact J over the start distribution, and of J from the drawn start states.
Intervals of the counts are Clopper–Pearson.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
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


def study(name: str, draws: int, n_rows: int, options: dict[str, Any]) -> dict[str, Any]:
    """Coverage, width and error on one problem."""
    covered = at_starts = 0
    widths, errors = [], []
    for draw in range(draws):
        problem = EXACT_PROBLEMS[name](1000 + draw, n_rows)
        estimate = koffline.evaluate(problem.transitions, problem.policy, problem.gamma, seed=draw, **options)
        low, high = estimate.interval.low, estimate.interval.high
        covered += low <= problem.value <= high
        at_starts += low <= problem.value_at_starts <= high
        widths.append((high - low) / abs(problem.value))
        errors.append((estimate.value - problem.value) / abs(problem.value))
    low, high = clopper_pearson(covered, draws)
    return {
        "problem": name,
        "n_rows": n_rows,
        "draws": draws,
        "covered": covered,
        "covered_at_starts": at_starts,
        "coverage": covered / draws,
        "coverage_low": low,
        "coverage_high": high,
        "mean_relative_width": sum(widths) / draws,
        "mean_absolute_relative_error": sum(map(abs, errors)) / draws,
        "mean_relative_error": sum(errors) / draws,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems (default: all)")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    options, rows = parse_assignments(arguments.option), []
    for name in arguments.names or EXACT_PROBLEMS:
        started = time.perf_counter()
        row = study(name, arguments.draws, arguments.n_rows, options)
        rows.append(row)
        print(
            f"{name:<28} covered {row['covered']:>3}/{row['draws']} "
            f"[{row['coverage_low']:.2f}, {row['coverage_high']:.2f}]  "
            f"at starts {row['covered_at_starts']:>3}  "
            f"width {row['mean_relative_width']:.3f}  "
            f"error {row['mean_absolute_relative_error']:.3f} "
            f"(bias {row['mean_relative_error']:+.3f})  {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            content = {"command": " ".join(sys.argv), "koffline": koffline.__version__, "rows": rows}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    hits, draws = sum(row["covered"] for row in rows), sum(row["draws"] for row in rows)
    low, high = clopper_pearson(hits, draws)
    print(f"all: {hits}/{draws} = {hits / draws:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
