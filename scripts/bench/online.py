"""Runs of online Trust-PCL in one stack against a plain one: ``python
scripts/bench/online.py [--out FILE]``.

Both sides play InvertedPendulum-v5 with the same algorithm, batch and networks; the
plain one (``plain_trust_pcl.py``) is one run with modules, autograd and
torch.optim.Adam. They take turns in one process on one thread; wall time per
environment step and run, medians over rounds, ratios round by round. The ratio of
processor time stands beside: a busy neighbour disturbs it less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy
# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from koffline.fitting import threads
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from scripts.bench import plain_trust_pcl as plain
from scripts.bench.plain_trust_pcl import PlainRun, PlainSettings

TARGET = 4.0  # least ratio of 12 runs


@dataclass(frozen=True)
class Side:
    """One side of a case: median microseconds per environment step and run."""

    microseconds: float


@dataclass(frozen=True)
class Result:
    """One comparison. ratio: of wall time, median over rounds; ratios: round by
    round.
    """

    critics: tuple[str, ...]
    runs: int
    plain: Side
    stacked: Side
    ratio: float
    ratios: tuple[float, ...]
    processor_ratio: float


def make_config(settings: PlainSettings) -> OnlineConfig:
    """The library's settings of a plain run, all of them stated, whatever the
    defaults.
    """
    return OnlineConfig(
        **asdict(settings),
        gamma=plain.DISCOUNT,
        window_length=plain.WINDOW,
        batch_size=plain.BATCH,
        path_length=plain.PATH,
        steps_per_iteration=plain.STEPS_PER_ITERATION,
        capacity=plain.CAPACITY,
        recency=plain.RECENCY,
        learning_starts=plain.LEARNING_STARTS,
        target_decay=plain.TARGET_DECAY,
        max_grad_norm=plain.MAX_GRAD_NORM,
        clip_adv=plain.CLIP_ADVANTAGE,
        divergence_per="step",
        kl_coef_initial=plain.FIRST_KL_COEF,
        hidden=(plain.HIDDEN, plain.HIDDEN),
        num_envs=1,
        windows_per_path=1,
        entropy_coef=0.0,
        diag_weight=None,
        kernel_inputs="state_action",
        standardise=True,
    )


def measure(
    environment: str,
    critics: Sequence[str],
    runs: int,
    rounds: int,
    steps: int,
    warm_up: int,
) -> Result:
    """Time rounds of `steps` environment steps per run, both sides in turn, after
    `warm_up` steps.
    """
    settings = [PlainSettings(environment, critic) for critic in critics]
    singles = [PlainRun(alone, seed) for seed, alone in enumerate(settings)]
    stack = LockStep(
        [OnlineRun(make_config(settings[k % len(settings)]), k) for k in range(runs)]
    )
    goal = warm_up
    play(singles, stack, goal)
    pairs = []
    for _ in range(rounds):
        goal += steps
        single, stacked = play(singles, stack, goal)
        pairs.append((single / (steps * len(singles)), stacked / (steps * runs)))
    for run in singles:
        run.close()
    stack.close()
    wall, processor = (
        tuple(float(single[i] / stacked[i]) for single, stacked in pairs)
        for i in range(2)
    )
    alone, many = (
        Side(1e6 * statistics.median(pair[side][0] for pair in pairs))
        for side in range(2)
    )
    medians = statistics.median(wall), statistics.median(processor)
    return Result(tuple(critics), runs, alone, many, medians[0], wall, medians[1])


def play(
    singles: Sequence[PlainRun], stack: LockStep, goal: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each side on its way to `goal` steps per run."""

    def play_plain() -> None:
        for run in singles:
            while run.steps < goal:
                run.iterate()

    def play_stack() -> None:
        while stack.steps < goal:
            stack.iterate()

    return timed(play_plain), timed(play_stack)


def timed(work: Callable[[], None]) -> np.ndarray:
    """Wall and processor seconds."""
    start = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - start


def describe(result: Result) -> str:
    """One line per side and the ratio."""
    lines = [f"{', '.join(result.critics)}; {result.runs} runs in the stack"]
    for name, side in (("plain", result.plain), ("stacked", result.stacked)):
        lines.append(
            f"  {name:8s} {side.microseconds:7.1f} µs per environment step and run"
        )
    low = min(result.ratios)
    high = max(result.ratios)
    verdict = "met" if result.ratio >= TARGET else "missed"
    lines.append(
        f"  ratio    {result.ratio:7.2f} ({low:.2f} to {high:.2f}; at least {TARGET:g}:"
        f" {verdict})"
    )
    lines.append(f"           {result.processor_ratio:7.2f} of processor time")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both sides of each case; write them with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", default="InvertedPendulum-v5")
    parser.add_argument(
        "--critics",
        nargs="*",
        default=["kloss", "kloss,fvi,td0,rg"],
        help="a case each",
    )
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=200, help="per run and round")
    parser.add_argument(
        "--warm-up", type=int, default=1500, help="steps per run before timing"
    )
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    results = []
    with threads(1):
        for critics in options.critics:
            names = critics.split(",")
            sizes = options.runs, options.rounds, options.steps, options.warm_up
            results.append(measure(options.environment, names, *sizes))
            print(describe(results[-1]), flush=True)
    if options.out:
        content = {
            "environment": options.environment,
            "steps": options.steps,
            "warm_up": options.warm_up,
        }
        content["cases"] = [asdict(result) for result in results]
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
