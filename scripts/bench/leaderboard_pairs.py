"""Do paired differences of policies hold what they promise? Graph and grid, values exact, many logs.

    python -m scripts.bench.leaderboard_pairs --logs 10 --out docs/results/policy-pairs.json

For every log all policies of a problem are ranked by `koffline.select_policies`; kept for each pair: the
difference with its paired interval, the same interval had the two been estimated apart, and the truth.
Logs in ``--out`` already are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script

from koffline.ope.ranking import PolicyRanking, select_policies
from scripts.bench.leaderboard_problems import BOARD, BoardProblem

PROBLEMS = ("graph short", "grid")
SHORT = {"steps": 1500, "full_replicas": 2, "resampled_replicas": 12}


def rank(problem: BoardProblem, seed: int, n_rows: int | None, options: dict[str, Any]) -> PolicyRanking:
    policies = {name: problem.policy(name) for name in problem.targets}
    truths = {name: problem.truth(name)[0] for name in problem.targets}
    return select_policies(
        problem.log(seed, n_rows), policies, problem.gamma, truths=truths, seed=seed, **options
    )


def pairs_of(ranking: PolicyRanking) -> list[dict[str, Any]]:
    """One record for each pair; ``apart`` is the width of an interval from two unpaired estimates."""
    found = {policy.name: policy for policy in ranking.policies}
    records = []
    for pair in ranking.comparisons:
        better, worse = found[pair.better], found[pair.worse]
        assert better.truth is not None
        assert worse.truth is not None
        assert better.interval is not None
        assert worse.interval is not None
        truth = better.truth - worse.truth
        records.append(
            {
                "better": pair.better,
                "worse": pair.worse,
                "truth": truth,
                "covered": pair.low <= truth <= pair.high,
                "width": pair.high - pair.low,
                "apart": math.hypot(better.interval.width, worse.interval.width),
                "significant": pair.significant,
                "wrong": pair.significant and truth <= 0.0,
            }
        )
    return records


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Coverage, widths and errors over all logs of one problem."""
    pairs = [pair for row in rows for pair in row["pairs"]]
    ratios = sorted(pair["width"] / pair["apart"] for pair in pairs)
    return {
        "logs": len(rows),
        "pairs": len(pairs),
        "covered": sum(pair["covered"] for pair in pairs),
        "median_width_ratio": ratios[len(ratios) // 2],
        "significant": sum(pair["significant"] for pair in pairs),
        "wrong": sum(pair["wrong"] for pair in pairs),
        "logs_with_a_wrong_pair": sum(any(pair["wrong"] for pair in row["pairs"]) for row in rows),
        "logs_whose_best_is_a_candidate": sum(row["best_is_candidate"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--logs", type=int, default=10)
    parser.add_argument("--n-rows", type=int, help="rows of every log (default: the problem's own)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"settings": SHORT, "problems": {}, "rows": {}}
    if options.out and options.out.exists():
        content = json.loads(options.out.read_text())
    for name in options.problems or PROBLEMS:
        problem, rows = BOARD[name](), content["rows"].setdefault(name, [])
        for seed in range(len(rows), options.logs):
            ranking = rank(problem, 1000 + seed, options.n_rows, SHORT)
            best = max(ranking.policies, key=lambda policy: policy.truth or -math.inf)
            rows.append({"pairs": pairs_of(ranking), "best_is_candidate": best.maybe_best})
            content["problems"][name] = summarise(rows)
            print(f"{name} {seed}: {ranking.seconds:.0f} s", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(content) + "\n")
        print(name, content["problems"][name], flush=True)


if __name__ == "__main__":
    main()
