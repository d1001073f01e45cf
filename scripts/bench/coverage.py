"""How often do intervals hold the truth, and how far are estimates from the best
possible? Exact problems.

    python scripts/bench/coverage.py --draws 26 --n-rows 2000 --runs out/coverage.jsonl
        --out docs/results/coverage.json

Tables are made draw by draw over all problems and written to ``--runs`` at once: called
again, it goes on. The truth is J over the start distribution. ``efficiency`` is MSE · n
over the semiparametric bound (see `scripts.bench.efficiency`), from errors within five
deviations of their median. Intervals of counts are Clopper–Pearson.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from scipy import stats

from koffline.config import parse_assignments
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import AVERAGED
from scripts.bench.efficiency import efficiency_bound
from tests.exact_problems import CASES, EXACT_PROBLEMS

NAMES = "kloss+fqe,kloss,fqe,lstd,mql,lstdq,mwl,dualdice,drl"


def clopper_pearson(hits: int, draws: int, level: float = 0.95) -> tuple[float, float]:
    """Interval for a binomial probability."""
    tail = (1.0 - level) / 2.0
    if hits == 0:
        low = 0.0
    else:
        low = float(stats.beta.ppf(tail, hits, draws - hits + 1))
    if hits == draws:
        high = 1.0
    else:
        high = float(stats.beta.ppf(1.0 - tail, hits + 1, draws - hits))
    return low, high


def kept_runs(
    path: Path,
    names: Sequence[str],
    cells: Iterable[tuple[str | int, ...]],
    measure: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
    """A record for each cell: from a file of JSON lines, or made by ``measure`` and
    written there at once.

    names: the fields of a record that tell its cell.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        runs = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        runs = []
    done = {tuple(run[name] for name in names) for run in runs}
    for cell in cells:
        if cell not in done:
            runs.append(measure(*cell))
            with path.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    return runs


def measure(
    name: str, draw: int, n_rows: int, names: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """One table; an interval may be refused."""
    problem = EXACT_PROBLEMS[name](1000 + draw, n_rows)
    settings = {"names": names, "bounds": False, "seed": draw, **options}
    table = estimate_all(problem.transitions, problem.policy, problem.gamma, **settings)
    answers = {}
    for row in table.rows:
        if row.estimate is not None:
            interval = row.estimate.interval
            if interval is None:
                ends = None
            else:
                ends = [interval.low, interval.high]
            answers[row.name] = {"value": row.estimate.value, "interval": ends}
    return {
        "problem": name,
        "seed": draw,
        "n_rows": n_rows,
        "truth": problem.value,
        "answers": answers,
        "verdict": table.verdict.answer,
        "reasons": [str(reason) for reason in table.verdict.reasons],
        "seconds": table.seconds,
    }


def summarise(name: str, estimator: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Coverage, width and error of an estimator over runs, all relative to the
    truth.
    """
    answered = [
        (run, run["answers"][estimator]) for run in runs if estimator in run["answers"]
    ]
    intervals = [
        (run["truth"], *answer["interval"])
        for run, answer in answered
        if answer["interval"] is not None
    ]
    covered = sum(low <= truth <= high for truth, low, high in intervals)
    low = 0.0
    high = 1.0
    if intervals:
        low, high = clopper_pearson(covered, len(intervals))
    errors = np.array(
        [
            (answer["value"] - run["truth"]) / abs(run["truth"])
            for run, answer in answered
        ]
    )
    deviation = None
    if len(errors) > 1:
        deviation = float(errors.std(ddof=1))
    mean_width = None
    median_width = None
    over_oracle = None
    widths = [(end - start) / abs(truth) for truth, start, end in intervals]
    if widths:
        mean_width = float(np.mean(widths))
        median_width = float(np.median(widths))
        if deviation:
            over_oracle = mean_width / (3.92 * deviation)
    return {
        "problem": name,
        "estimator": estimator,
        "draws": len(answered),
        "without_interval": len(answered) - len(intervals),
        "covered": covered,
        "coverage": covered / max(1, len(intervals)),
        "coverage_low": low,
        "coverage_high": high,
        "mean_relative_width": mean_width,
        "median_relative_width": median_width,
        "mean_absolute_relative_error": float(np.abs(errors).mean()),
        "mean_relative_error": float(errors.mean()),
        # over the width of a normal interval with it, on one problem:
        "deviation": deviation,
        "width_over_oracle": over_oracle,
    }


def efficiency(
    bound: float, runs: list[dict[str, Any]], estimator: str
) -> float | None:
    """MSE · n / bound; None where there is no bound."""
    errors = np.array(
        [run["answers"][estimator]["value"] - run["truth"] for run in runs]
    )
    off = np.abs(errors - np.median(errors))
    kept = errors[off <= 5.0 * 1.4826 * np.median(off)]
    rows = runs[0]["n_rows"]
    if not np.isfinite(bound):
        return None
    return float(np.square(kept).mean()) * rows / bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", help="problems (default: all)")
    parser.add_argument("--draws", type=int, default=26)
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--names", default=NAMES, help=f"estimators (default: {NAMES})")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    parser.add_argument(
        "--runs", type=Path, required=True, help="JSON lines, one for each table"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    options = parse_assignments(arguments.option)
    names = arguments.problems or list(EXACT_PROBLEMS)
    estimators = arguments.names.split(",")
    fixed = {"n_rows": arguments.n_rows, "names": estimators, "options": options}
    cells = ((name, draw) for draw in range(arguments.draws) for name in names)
    runs = kept_runs(
        arguments.runs, ("problem", "seed"), cells, partial(measure, **fixed)
    )
    rows = []
    bounds = {case.name: efficiency_bound(case) for case in CASES if case.name in names}
    for estimator in estimators:
        for name in names:
            of_problem = [run for run in runs if run["problem"] == name]
            share = efficiency(bounds[name], of_problem, estimator)
            rows.append(summarise(name, estimator, of_problem) | {"efficiency": share})
        rows.append(summarise("all", estimator, runs))
    for answer in sorted({run["verdict"] for run in runs}):
        rows.append(
            summarise(
                answer, AVERAGED, [run for run in runs if run["verdict"] == answer]
            )
        )
    for row in rows:
        share = row.get("efficiency")
        over_bound = ""
        if share is not None:
            over_bound = f"  MSE·n/bound {share:.2f}"
        print(
            f"{row['estimator']:<9} {row['problem']:<26} covered"
            f" {row['covered']:>3}/{row['draws']} [{row['coverage_low']:.2f},"
            f" {row['coverage_high']:.2f}]  width {row['mean_relative_width'] or 0:.3f}"
            f"  error {row['mean_absolute_relative_error']:.3f} (bias"
            f" {row['mean_relative_error']:+.3f}){over_bound}"
        )
    if arguments.out:
        content = {
            "command": " ".join(sys.argv),
            "n_rows": arguments.n_rows,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
