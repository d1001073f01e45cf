"""Do the intervals of all estimators hold the truth? Many draws of problems whose answer is exact.

    python scripts/bench/estimator_coverage.py --draws 20 --names mql,mwl --out docs/results/estimators.json

Every draw is one table of estimates; each of its intervals is counted by estimator and kind. Intervals of the
counts are Clopper–Pearson. The truth is J over the start distribution.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

import koffline
from koffline.config import parse_assignments
from koffline.ope.evaluation import estimate_all
from koffline.ope.results import Interval
from scripts.bench.coverage import clopper_pearson
from tests.exact_problems import EXACT_PROBLEMS

Records = dict[str, list[dict[str, float]]]


def draw_once(
    name: str, draw: int, n_rows: int, names: list[str] | None, bounds: bool, options: dict[str, Any]
) -> Records:
    """What every interval of one table did: held the truth, its width, the error of its estimate."""
    problem = EXACT_PROBLEMS[name](3000 + draw, n_rows)
    table = estimate_all(
        problem.transitions, problem.policy, problem.gamma, names=names, bounds=bounds, seed=draw, **options
    )
    found: Records = defaultdict(list)

    def note(label: str, interval: Interval | None, value: float | None) -> None:
        scale = abs(problem.value)
        found[label].append(
            {
                "made": float(interval is not None),
                "covered": float(interval is not None and interval.holds(problem.value)),
                "width": interval.width / scale if interval is not None else 0.0,
                "error": 0.0 if value is None else (value - problem.value) / scale,
            }
        )

    for row in table.rows:
        if row.estimate is not None:
            kind = row.estimate.interval.kind if row.estimate.interval is not None else "none"
            note(f"{row.name} {kind}", row.estimate.interval, row.estimate.value)
    for bound in table.bounds:
        note(bound.kind, bound.interval, None)
    return found


def summarise(records: list[dict[str, float]]) -> dict[str, float]:
    """Coverage among the intervals that were made, and means."""
    made = int(sum(record["made"] for record in records))
    covered = int(sum(record["covered"] for record in records))
    low, high = clopper_pearson(covered, made) if made else (0.0, 1.0)
    return {
        "draws": len(records),
        "made": made,
        "covered": covered,
        "coverage": covered / made if made else 0.0,
        "coverage_low": low,
        "coverage_high": high,
        "mean_relative_width": sum(record["width"] for record in records) / max(made, 1),
        "mean_relative_error": sum(record["error"] for record in records) / len(records),
        "mean_absolute_relative_error": sum(abs(record["error"]) for record in records) / len(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", help="problems (default: all)")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--names", help="estimators, comma-separated (default: all)")
    parser.add_argument("--no-bounds", action="store_true", help="leave out what belongs to no estimator")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    names = arguments.names.split(",") if arguments.names else None
    options = parse_assignments(arguments.option)
    by_problem: dict[str, Records] = {}
    pooled: Records = defaultdict(list)
    for name in arguments.problems or EXACT_PROBLEMS:
        started, found = time.perf_counter(), defaultdict(list)
        for draw in range(arguments.draws):
            for label, records in draw_once(
                name, draw, arguments.n_rows, names, not arguments.no_bounds, options
            ).items():
                found[label] += records
                pooled[label] += records
        by_problem[name] = {label: summarise(records) for label, records in found.items()}
        covered = ", ".join(f"{label} {s['covered']}/{s['made']}" for label, s in by_problem[name].items())
        print(f"{name} ({time.perf_counter() - started:.0f} s): {covered}", flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "command": " ".join(sys.argv),
                "koffline": koffline.__version__,
                "all": {label: summarise(records) for label, records in pooled.items()},
                "problems": by_problem,
            }
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{'interval':<34}{'covered':>12}{'95 % of it':>18}{'width':>8}{'|error|':>9}{'bias':>8}")
    for label, records in pooled.items():
        s = summarise(records)
        print(
            f"{label:<34}{s['covered']:>6}/{s['made']:<5}{s['coverage_low']:>10.3f}–{s['coverage_high']:.3f}"
            f"{s['mean_relative_width']:>10.3f}{s['mean_absolute_relative_error']:>9.3f}"
            f"{s['mean_relative_error']:>+8.3f}"
        )


if __name__ == "__main__":
    main()
