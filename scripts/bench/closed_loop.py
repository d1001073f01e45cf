"""Log → train → evaluate → choose → rollout: does the log alone say which trained
policy to take?

    python -m scripts.bench.closed_loop --workers 2 --results docs/results/closed_loop.json

On every log of CartPole and Pendulum in datasets/control each algorithm of
``control.py`` is trained once (an original at its own settings; its kernel-loss twin at
its defaults and, where there is one, with a slow copy). `koffline.evaluate` at its
defaults then values every last network from the same log. The choice is the policy
whose interval has the highest lower end, of those that the log answers for. Afterwards
the environment tells the discounted value of each policy, from 200 episodes of 1000
steps, and its score (uniform actions 0, the expert 100). The environment has no part in
training or choice. Cells are files in --out named by everything they depend on but the
code; those that are there stay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import koffline
from koffline.builders.control_learning import policy_returns
from koffline.builders.rollouts import RolloutPlayer, RolloutSettings
from koffline.data.replay import ColumnarReplayBuffer
from koffline.fitting import threads
from koffline.jobs import Job, run_jobs
from koffline.store.files import atomic_file
from scripts.bench import control
from scripts.bench.control_cells import (
    LOGS,
    ROOT,
    CellSettings,
    cell_path,
    is_whole,
    make_algo,
    write_reference,
)

SEED = 0
TRUTH_SEED = 21
STEPS = {"CartPole-v1": 5000, "Pendulum-v1": 3000}
EPISODES = 200
HORIZON = 1000


def write_cell(path: Path, settings: CellSettings) -> None:
    """Train, evaluate from the log, roll out."""
    from koffline.data import import_d3rlpy, quiet

    d3rlpy = import_d3rlpy()
    log = koffline.open_transitions(settings.log_path)
    env = str(log.metadata.extra["task"])
    gamma = float(log.metadata.gamma or 0.99)
    with threads(1), quiet():
        d3rlpy.seed(settings.seed)
        algo = make_algo(settings, log)
        algo.fit(
            ColumnarReplayBuffer(log, settings.seed),
            n_steps=settings.steps,
            n_steps_per_epoch=settings.steps,
            logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
            show_progress=False,
        )
        model = path.with_suffix(".d3")
        algo.save(str(model))
        estimate = koffline.evaluate(log, str(model), gamma=gamma, seed=SEED).as_dict()
        rollouts = RolloutSettings(env, EPISODES, time_limit=HORIZON, seed=TRUTH_SEED)
        with RolloutPlayer(rollouts, [str(model)]) as player:
            played = player.join(list(player.play(range(player.batches))))
        values = np.add.reduceat(
            played.rewards * gamma ** _steps(played), played.episode_starts
        )
        score = policy_returns(env, str(model), EPISODES, TRUTH_SEED).mean()
    result = {
        "name": path.stem,
        "log": settings.log,
        "env": env,
        "algo": settings.algo,
        "assignments": dict(settings.assignments),
        "estimate": {
            name: estimate[name]
            for name in ("value", "interval", "verdict", "estimator", "uplift")
        },
        "truth": float(values.mean()),
        "truth_se": float(values.std(ddof=1) / np.sqrt(len(values))),
        "return": float(score),
    }
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(result) + "\n", encoding="utf-8")


def _steps(log: Any) -> np.ndarray:
    """The number of each row within its episode."""
    lengths = np.diff(np.append(log.episode_starts, len(log)))
    return np.arange(len(log)) - np.repeat(log.episode_starts, lengths)


def plan() -> list[CellSettings]:
    """Every candidate of every log."""
    cells = []
    for path in sorted(LOGS.glob("*.hdf5")):
        log = koffline.open_transitions(path)
        steps = STEPS.get(str(log.metadata.extra["task"]), 0)
        if not steps:
            continue
        for algo in control.algos_of(log, ["all"]):
            for variant in ((), *control.VARIANTS.get(algo, ())):
                cells.append(
                    CellSettings(
                        path.stem,
                        algo,
                        SEED,
                        steps,
                        steps,
                        1,
                        (64, 64),
                        256,
                        tuple(sorted(variant)),
                    )
                )
    return cells


def summary(
    cells: list[dict[str, Any]], scales: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """One row a log: what was chosen, what was there to choose."""
    rows = []
    for log in dict.fromkeys(cell["log"] for cell in cells):
        here = [cell for cell in cells if cell["log"] == log]
        scale = scales[here[0]["env"]]
        for cell in here:
            span = scale["expert"] - scale["random"]
            cell["score"] = round(100.0 * (cell["return"] - scale["random"]) / span, 1)
        answered = [
            c for c in here if not c["estimate"]["verdict"]["answer"].startswith("not")
        ]
        held = sum(_holds(cell) for cell in answered)
        chosen = max(answered, key=_low, default=None)
        supported = [
            c for c in answered if c["estimate"]["verdict"]["answer"] == "supported"
        ]
        safe = max(supported, key=_low, default=chosen)
        scores = [cell["score"] for cell in here]
        rows.append(
            {
                "log": log,
                "candidates": len(here),
                "answerable": len(answered),
                "held": held,
                "chosen": chosen and name_of(chosen),
                "chosen_score": chosen and chosen["score"],
                "supported": len(supported),
                "chosen_supported": safe and name_of(safe),
                "chosen_supported_score": safe and safe["score"],
                "best": name_of(max(here, key=lambda cell: cell["score"])),
                "best_score": max(scores),
                "mean_score": round(float(np.mean(scores)), 1),
            }
        )
    return rows


def _low(cell: dict[str, Any]) -> float:
    return float(cell["estimate"]["interval"]["low"])


def _holds(cell: dict[str, Any]) -> bool:
    interval = cell["estimate"]["interval"]
    error = 2.0 * cell["truth_se"]
    return bool(interval["low"] - error <= cell["truth"] <= interval["high"] + error)


def name_of(cell: dict[str, Any]) -> str:
    """The algorithm, and whether with a slow copy."""
    if "tau" in cell["assignments"]:
        return f"{cell['algo']} (tau)"
    return str(cell["algo"])


def main() -> None:
    """Run what is missing, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "closed_loop")
    parser.add_argument("--results", type=Path, help="write the results here")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = plan()
    jobs = [
        Job(
            f"{c.algo} on {c.log}",
            write_cell,
            (c,),
            cell_path(c, options.out),
            is_whole,
        )
        for c in cells
    ]
    scales = {}
    for env in STEPS:
        path = options.out / f"reference-{env}.json"
        run_jobs([Job(f"references of {env}", write_reference, (env,), path, is_whole)])
        scales[env] = json.loads(path.read_text(encoding="utf-8"))
    run_jobs(jobs, workers=options.workers)
    results = [json.loads(job.path.read_text(encoding="utf-8")) for job in jobs]
    rows = summary(results, scales)
    text = page(rows, results)
    print(text)
    if options.results is not None:
        with atomic_file(options.results, force=True) as temporary:
            temporary.write_text(
                json.dumps({"logs": rows, "candidates": results}, indent=1) + "\n"
            )
        with atomic_file(
            options.results.parents[1] / "closed_loop.md", force=True
        ) as temporary:
            temporary.write_text(text, encoding="utf-8")


def page(rows: list[dict[str, Any]], cells: list[dict[str, Any]]) -> str:
    """docs/closed_loop.md."""
    answered = sum(row["answerable"] for row in rows)
    total = len(cells)
    supported = [
        cell for cell in cells if cell["estimate"]["verdict"]["answer"] == "supported"
    ]
    judged = [row for row in rows if row["chosen"] is not None]
    lost = float(np.mean([row["best_score"] - row["chosen_score"] for row in judged]))
    safe = float(
        np.mean([row["best_score"] - row["chosen_supported_score"] for row in judged])
    )
    luck = float(np.mean([row["best_score"] - row["mean_score"] for row in judged]))
    lines = [
        "# Choose a trained policy from the log alone",
        "",
        (
            "You trained many policies from a log. Which one should run? Evaluate each"
            " on the same log. Among those with an answer (verdict *supported* or *with"
            " care*) take the one whose interval has the highest lower end."
        ),
        "",
        (
            f"**The policies chosen so score {lost:.0f} points less than the best"
            f" candidate, on average over {len(judged)} logs; a candidate drawn at"
            f" random scores {luck:.0f} less** (uniform actions 0, the expert 100). If"
            " a *supported* candidate is preferred to one *with care*, the choice"
            f" scores {safe:.0f} less (last columns)."
        ),
        "",
        (
            "On each log every algorithm of [Control](control.md) was trained once:"
            " the TD original at its own settings, the kernel-loss version at its"
            f" defaults and with a slow copy (tau). Of these {total} candidates"
            f" {answered} got an answer. The 95 % interval held the true value for"
            f" {sum(row['held'] for row in rows)} of these, and for"
            f" {sum(map(_holds, supported))} of the {len(supported)} *supported* ones."
            " Two reasons for the misses: a policy trained on the log was selected for"
            " what its critic overestimates, and the candidates of a log share its"
            " episodes."
        ),
        "",
        (
            "| log | candidates | answered | hold | chosen | its score | best score |"
            " mean score | chosen, supported first | its score |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['log']} | {row['candidates']} | {row['answerable']} |"
            f" {row['held']} | {row['chosen']} | {row['chosen_score']} |"
            f" {row['best_score']} ({row['best']}) | {row['mean_score']} |"
            f" {row['chosen_supported']} | {row['chosen_supported_score']} |"
            for row in rows
        ),
        "",
        (
            "Made by `python -m scripts.bench.closed_loop`. Every candidate with its"
            " verdict, estimate, interval and true value is in"
            " `docs/results/closed_loop.json`."
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
