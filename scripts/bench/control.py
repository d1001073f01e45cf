"""Do critics of the kernel loss learn control as well as the TD critics of the same
algorithms?

    python scripts/bench/control.py --logs pendulum_medium --algos sac,kloss_sac --seeds 3 --steps 5000
    python scripts/bench/control.py --seeds 3 --workers 2 --results docs/results/control.json
    python scripts/bench/control.py --logs pendulum_replay --algos iql,kloss_iql \\
        --set kloss_iql.bandwidth="1.0 median" --set kloss_iql.diag_weight=0.5

Every cell is one algorithm with one seed on one log of datasets/control: gradient steps
on the logged rows alone, and now and then the mean undiscounted return of its greedy
policy over episodes of the environment. Both sides of a pair have the same networks,
batches and scalers, and their own default learning rates; --original-rates also trains
the originals at other rates of the critic, and counts the best of them on each
log: originals are tuned with the environment's help, kernel-loss critics are not. --set
changes any field of an algorithm's configuration, with `*` for all algorithms. Cells
are files in --out named by everything they depend on but the code: cells that are there
are not computed again (--force does). Scores are returns on a scale where uniform
actions have 0 and the expert 100; a cell's score is the mean over the last quarter of
its evaluations, as nobody can tell from a log which of the last networks is the best.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import koffline
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, KofflineError
from koffline.jobs import Job, run_jobs
from scripts.bench.control_cells import (
    LOGS,
    ROOT,
    CellSettings,
    cell_path,
    is_whole,
    write_cell,
    write_reference,
)

PAIRS = {
    "discrete": (
        ("dqn", "kloss_dqn"),
        ("discrete_sac", "kloss_discrete_sac"),
        ("discrete_cql", "kloss_discrete_cql"),
    ),
    "continuous": (
        ("sac", "kloss_sac"),
        ("td3_plus_bc", "kloss_td3_plus_bc"),
        ("iql", "kloss_iql"),
        ("cql", "kloss_cql"),
    ),
}
# What else a critic of the kernel loss is tried with: s' valued by a slow copy, without
# gradient.
VARIANTS: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    "kloss_dqn": ((("diag_weight", None), ("tau", 0.02)),),
    "kloss_discrete_sac": ((("backup", "min"), ("diag_weight", None), ("tau", 0.005)),),
    "kloss_discrete_cql": ((("diag_weight", None), ("tau", 0.02)),),
    "kloss_sac": (
        (
            ("backup", "min"),
            ("conservative_weight", 0),
            ("diag_weight", 0.5),
            ("tau", 0.02),
        ),
    ),
    "kloss_cql": ((("backup", "min"), ("diag_weight", 0.5), ("tau", 0.02)),),
}
SLOW = ("cql",)  # minutes a cell: at its own learning rate alone


def algos_of(log: Transitions, wanted: list[str]) -> list[str]:
    """The algorithms to run on a log: those asked for that fit its actions."""
    kind = "continuous"
    other = "discrete"
    if isinstance(log.action_space, Discrete):
        kind = "discrete"
        other = "continuous"
    known = [algo for pair in PAIRS[kind] for algo in pair]
    if wanted == ["all"]:
        return known
    unfit = [algo for pair in PAIRS[other] for algo in pair]
    return [algo for algo in wanted if algo not in unfit]


def plan(options: argparse.Namespace) -> list[CellSettings]:
    """All cells that the options ask for."""
    names = options.logs.split(",")
    if names == ["all"]:
        names = sorted(path.stem for path in LOGS.glob("*.hdf5"))
    cells = []
    for name in names:
        if Path(name).suffix:
            path = Path(name)
        else:
            path = LOGS / f"{name}.hdf5"
        log = koffline.open_transitions(path)
        steps = dict(options.steps_of).get(
            str(log.metadata.extra["task"]), options.steps
        )
        for algo in algos_of(log, options.algos.split(",")):
            cells += [
                CellSettings(
                    name,
                    algo,
                    seed,
                    int(steps),
                    options.evaluate_every,
                    options.episodes,
                    tuple(options.hidden),
                    options.batch_size,
                    assignments,
                    options.device,
                )
                for assignments in variants_of(algo, log, options)
                for seed in range(options.seeds)
            ]
    return cells


def variants_of(
    algo: str, log: Transitions, options: argparse.Namespace
) -> list[tuple[tuple[str, Any], ...]]:
    """What --set says; besides, kernel-loss critics with --variants and originals at
    --original-rates.
    """
    assignments = assignments_of(algo, options.set)
    if algo.startswith("kloss_"):
        variants = [
            tuple(sorted([*assignments, *variant]))
            for variant in VARIANTS.get(algo, ())
        ]
        kind = log.metadata.extra.get("kind")
        if options.by_rule and variants and kind in ("random", "replay"):
            return [variants[0]]
        if not options.variants:
            variants = []
        return [tuple(assignments), *variants]
    if algo in SLOW:
        return [tuple(assignments)]
    if isinstance(log.action_space, Discrete):
        name = "learning_rate"
    else:
        name = "critic_learning_rate"
    if algo == "discrete_sac":
        name = "critic_learning_rate"
    rates = [
        [(name, float(rate))] for rate in options.original_rates.split(",") if rate
    ]
    return [
        tuple(assignments),
        *(tuple(sorted([*assignments, *rate])) for rate in rates),
    ]


def assignments_of(algo: str, texts: list[str]) -> list[tuple[str, Any]]:
    """The fields of an algorithm's configuration that --set names; values are JSON, or
    else text.
    """
    assignments = {}
    for text in texts:
        target, separator, value = text.partition("=")
        owner, dot, field = target.partition(".")
        if not (separator and dot):
            raise ConfigError(
                f"--set is {text!r}; write ALGO.FIELD=VALUE, for instance"
                " kloss_sac.bandwidth=1"
            )
        if owner in (algo, "*") or (owner == "kloss_*" and algo.startswith("kloss_")):
            try:
                assignments[field] = json.loads(value)
            except ValueError:
                assignments[field] = value
    return sorted(assignments.items())


def main(arguments: list[str] | None = None) -> None:
    """Run the cells, print the table, write the results."""
    from scripts.bench.control_report import collect, print_table, write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--logs", default="all", help="names in datasets/control, or files, by commas"
    )
    parser.add_argument("--algos", default="all", help="registered types, by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument(
        "--steps-of",
        action="append",
        default=[],
        type=lambda text: tuple(text.split("=")),
        metavar="ENV=STEPS",
        help="other than --steps for an environment",
    )
    parser.add_argument(
        "--original-rates",
        default="",
        help="more critic learning rates of the originals",
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="also kernel-loss critics with a slow copy",
    )
    parser.add_argument(
        "--by-rule",
        action="store_true",
        help=(
            "kernel-loss critics with a slow copy on random and replay logs, at their"
            " defaults on others"
        ),
    )
    parser.add_argument("--evaluate-every", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--set", action="append", default=[], metavar="ALGO.FIELD=VALUE"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "control", help="the cells' folder"
    )
    parser.add_argument("--force", action="store_true", help="compute cells again")
    parser.add_argument(
        "--results", type=Path, help="write the results here, with a table and a figure"
    )
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        cells = plan(options)
        jobs = [
            Job(
                f"{cell.algo} on {cell.log}",
                write_cell,
                (cell,),
                cell_path(cell, options.out),
                is_whole,
            )
            for cell in cells
        ]
        references = {}
        for env in sorted({_task(cell) for cell in cells}):
            path = options.out / f"reference-{env.replace('/', '-')}.json"
            references[env] = Job(
                f"references of {env}", write_reference, (env,), path, is_whole
            )
        if options.force:
            for job in jobs:
                job.path.unlink(missing_ok=True)
        run_jobs(list(references.values()))
        run_jobs(jobs, workers=options.workers)
        finished = [json.loads(job.path.read_text(encoding="utf-8")) for job in jobs]
        scales = {
            env: json.loads(job.path.read_text(encoding="utf-8"))
            for env, job in references.items()
        }
        results = collect(finished, scales, options)
        print_table(results)
        if options.results is not None:
            write_results(results, options.results)
    except KofflineError as error:
        parser.error(str(error))


def _task(cell: CellSettings) -> str:
    return str(koffline.open_transitions(cell.log_path).metadata.extra["task"])


if __name__ == "__main__":
    main()
