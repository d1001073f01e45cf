"""How far are the estimates from Monte-Carlo truths? Development and held-out problems,
in one table.

    python scripts/bench/accuracy.py --set held-out --seeds 3

Each row is one log: the estimate by head (kloss, fqe and, for comparison, lstd share
one run and its features), errors relative to the truth from the log's own start states,
and whether the interval of kloss covers it. ``--out FILE`` keeps the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import koffline
from koffline.config import parse_assignments
from koffline.ope.evaluation import estimate_all
from scripts.bench.problems import DEVELOPMENT, HELD_OUT

HEADS = ("kloss", "fqe", "lstd")


def measure(
    name: str, spec: Any, seed: int, n_rows: int, options: dict[str, Any]
) -> dict[str, Any]:
    """One log, one estimate."""
    problem = spec(seed, n_rows)
    settings = {"names": HEADS, "bounds": False, "seed": seed, **options}
    table = estimate_all(problem.transitions(), problem.policy(), **settings)
    estimates = {
        row.name: row.estimate for row in table.rows if row.estimate is not None
    }
    truth = problem.at_starts.value
    interval = estimates["kloss"].interval
    return {
        "problem": name,
        "seed": seed,
        "n_rows": n_rows,
        "truth": truth,
        "error": {head: (estimates[head].value - truth) / abs(truth) for head in HEADS},
        "low": interval and interval.low,
        "high": interval and interval.high,
        "covered": interval is not None and interval.holds(truth),
        "relative_width": interval and interval.width / abs(truth),
        "coverage": table.diagnostics["coverage"],
        "verdict": table.verdict.answer,
        "reasons": [str(reason) for reason in table.verdict.reasons],
        "warnings": [*table.warnings, *estimates["kloss"].warnings],
        "seconds": table.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems (default: all of the set)")
    parser.add_argument(
        "--set", dest="group", choices=["development", "held-out"], default="held-out"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--n-rows", type=int, default=20_000)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    if arguments.group == "development":
        problems = DEVELOPMENT
    else:
        problems = HELD_OUT
    options = parse_assignments(arguments.option)
    rows = []
    print(
        f"{'problem':<18}{'seed':>5}{'truth':>10}"
        + "".join(f"{head:>9}" for head in HEADS),
        end="",
    )
    print(f"{'width':>8}{'covered':>9}{'support':>9}{'seconds':>9}")
    for name in arguments.names or problems:
        for seed in range(arguments.seeds):
            row = measure(name, problems[name], seed, arguments.n_rows, options)
            rows.append(row)
            errors = "".join(f"{row['error'][head]:>+9.3f}" for head in HEADS)
            if row["relative_width"] is None:
                width = "none"
            else:
                width = f"{row['relative_width']:.3f}"
            print(f"{name:<18}{seed:>5}{row['truth']:>10.4g}{errors}{width:>8}", end="")
            print(
                f"{row['covered']!s:>9}{row['coverage']:>9.2f}{row['seconds']:>9.1f}",
                flush=True,
            )
            for warning in row["warnings"]:
                print(f"    {warning}")
    for title, summary in (
        ("mean |error|", statistics.mean),
        ("median |error|", statistics.median),
    ):
        print(
            f"{title:<33}"
            + "".join(
                f"{summary([abs(r['error'][h]) for r in rows]):>9.4f}" for h in HEADS
            )
        )
    print(f"intervals that cover: {sum(r['covered'] for r in rows)} of {len(rows)}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "command": " ".join(sys.argv),
            "koffline": koffline.__version__,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
