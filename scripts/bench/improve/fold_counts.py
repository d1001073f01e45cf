"""Three parts beside five folds: how often does `koffline.improve` recommend, and how
often falsely? Small one-step logs with known values, whole searches.

    python -m scripts.bench.improve.fold_counts --portfolio small --draws 20
    python -m scripts.bench.improve.fold_counts --draws 400     # days of one core

``nothing``: every arm pays alike, so that every recommendation is false. ``offers``:
better offers exist. Every log is searched in both ways. ``--portfolio small``: three
candidates that are trained for 300 steps; ``whole``: the defaults. Searches that are
done are kept in ``--out``, and the same command goes on. ``--minutes`` ends after so
much processor time. Writes docs/results/improve_folds.json from all that is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import koffline
from scripts.bench.improve import cells
from scripts.bench.improve.answers import number_of, text_of
from scripts.bench.improve.logs import equal_arms, offers
from scripts.bench.improve.worlds import Bandit

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "improve_folds.json"
KINDS = ("nothing", "offers")
WAYS = {"three parts": 1, "five folds": 5}
PORTFOLIOS: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {
        "candidates": (
            "clone_mode",
            "kernel_policy_iteration-1",
            "discrete_cql-alpha_0.5",
        ),
        "training_steps": 300,
        "choosing_steps": 300,
        "certifying_steps": 300,
        "full_replicas": 2,
        "resampled_replicas": 6,
    },
}
_ROUNDING = 1e-9  # of uplifts that are 0


def world_of(kind: str, draw: int, rows: int) -> Bandit:
    """A world with a fresh log."""
    if kind == "nothing":
        return equal_arms(f"folds {draw}", rows, 5, 0.3)
    return offers(f"folds {draw}", rows, draw)


def measure(kind: str, draw: int, rows: int, portfolio: str) -> list[dict[str, Any]]:
    """Both ways on one log: what they say, the truth, and seconds of processor time."""
    world = world_of(kind, draw, rows)
    records = []
    for way, folds in WAYS.items():
        started = time.process_time()
        result = koffline.improve(
            world.log(),
            gamma=world.gamma,
            seed=draw,
            cores=1,
            settings={**PORTFOLIOS[portfolio], "folds": folds},
        )
        seconds = time.process_time() - started
        truth = 0.0
        if result.policy is not None:
            truth = world.value(result.policy).value - world.behavior_value().value
        low = None
        if result.interval is not None:
            low = result.interval.low
        records.append(
            {
                "kind": kind,
                "draw": draw,
                "rows": rows,
                "portfolio": portfolio,
                "way": way,
                "recommended": result.recommended,
                "uplift": number_of(result.uplift),
                "low": number_of(low),
                "truth": round(truth, 6),
                "reason": text_of(result.reason),
                "seconds": round(seconds, 1),
            }
        )
    return records


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each portfolio, size, kind and way: logs, recommendations, false ones, the
    mean true uplift with its standard error, and mean seconds.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("portfolio", "rows", "kind", "way"))
        groups.setdefault(key, []).append(record)
    rows = []
    for (portfolio, size, kind, way), group in sorted(groups.items()):
        truths = [record["truth"] for record in group]
        mean = sum(truths) / len(group)
        squares = sum((truth - mean) ** 2 for truth in truths)
        false = [
            record
            for record in group
            if record["recommended"] and record["truth"] <= _ROUNDING
        ]
        rows.append(
            {
                "portfolio": portfolio,
                "rows": size,
                "kind": kind,
                "way": way,
                "logs": len(group),
                "recommended": sum(record["recommended"] for record in group),
                "false": len(false),
                "uplift": round(mean, 5),
                "error": round(
                    math.sqrt(squares / max(1, len(group) - 1) / len(group)), 5
                ),
                "seconds": round(
                    sum(record["seconds"] for record in group) / len(group), 1
                ),
            }
        )
    return rows


def main() -> None:
    """Measure what is missing, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "improve_folds")
    parser.add_argument("--portfolio", choices=sorted(PORTFOLIOS), default="whole")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    for draw in range(options.draws):
        plan = [
            cells.Cell(
                f"{options.portfolio} {kind} {options.rows} {draw:05}",
                partial(measure, kind, draw, options.rows, options.portfolio),
            )
            for kind in KINDS
        ]
        if time.process_time() > 60.0 * options.minutes:
            break
        cells.run(plan, options.out)
    records = [record for cell in cells.results(options.out) for record in cell]
    content = {
        "command": "python -m scripts.bench.improve.fold_counts",
        "rows": summary(records),
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
