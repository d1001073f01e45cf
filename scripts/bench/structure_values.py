"""Whether a log with a fault can be called supported and be wrong: values of faulty
logs against the truth.

    python -m scripts.bench.structure_values --draws 1 --out docs/results/structure-values.json
    python -m scripts.bench.structure_values --draws 1 --values OLD.json --out NEW.json

For every world of ``structure_worlds`` and every fault in 10 % and all places, the
value of the uniform policy (γ = 0.9) is estimated from those logs in which no test of
structure sees anything, and compared with a simulation of 30,000 episodes. A log is
*missed* if the verdict is "supported" and the value is off by more than 1.5 half-widths
of the interval plus two standard errors of the simulation.

The second command runs the tests of structure anew and takes truths and values from
earlier results of the same seed and steps: after a change of those tests only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

import koffline
from koffline.data.structure import symptoms_of
from koffline.data.transitions import Transitions
from scripts.bench.structure_worlds import (
    FAULTS,
    World,
    as_log,
    play,
    with_fault,
    worlds,
)

GAMMA = 0.9
HORIZON = 80  # steps: 0.9^80 is 2e-4
EPISODES = 30_000
_TRUTH = 99  # random stream of the simulation
SHARES = (0.1, 1.0)
FAR = 1.5  # half-widths
_JUDGED = ("value", "half_width", "verdict", "missed")


def truth_of(world: World, generator: Generator) -> tuple[float, float]:
    """Value of the uniform policy by simulation, and its standard error."""
    returns = np.zeros(EPISODES)
    for number in range(EPISODES):
        state = world.start(generator)
        for step in range(HORIZON):
            action = (
                int(generator.integers(world.actions))
                if world.actions
                else float(generator.uniform(-1.0, 1.0))
            )
            state, reward, terminated = world.step(state, action, generator)
            returns[number] += GAMMA**step * reward
            if terminated:
                break
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(EPISODES))


def judged(log: Transitions, truth: tuple[float, float], steps: int) -> dict[str, Any]:
    """Value, half-width, verdict, and whether the log is missed."""
    estimate = koffline.evaluate(log, "uniform", gamma=GAMMA, steps=steps, seed=0)
    if estimate.interval is None:
        half = None
    else:
        half = 0.5 * estimate.interval.width
    is_supported = estimate.verdict.answer == "supported"
    error = abs(estimate.value - truth[0])
    is_far = half is not None and error > FAR * half + 2.0 * truth[1]
    return {
        "value": estimate.value,
        "half_width": half,
        "verdict": estimate.verdict.answer,
        "missed": bool(is_supported and is_far),
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which log a row of the results is about."""
    return row["world"], row["draw"], row["fault"], row["share"]


def main() -> None:
    """Measure, print, and write the results after every world, so that a killed run
    loses little.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--values", type=Path, help="earlier results")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    earlier: dict[tuple[Any, ...], dict[str, Any]] = {}
    if arguments.values is not None:
        results = json.loads(arguments.values.read_text(encoding="utf-8"))
        earlier = {key_of(result): result for result in results}
    rows: list[dict[str, Any]] = []
    for draw in range(arguments.draws):
        generator = np.random.default_rng([arguments.seed, draw])
        for world in worlds(generator):
            if world.goes_on:
                continue  # its logs start anywhere in the stream
            episodes = play(world, rows=arguments.rows, generator=generator)
            known = earlier.get((world.name, draw, "none", 0.0))
            if known is not None:
                truth = (known["truth"], known["truth_error"])
            else:
                truth = truth_of(
                    world, np.random.default_rng([arguments.seed, draw, _TRUTH])
                )
            logs = {("none", 0.0): as_log(world, episodes)}
            for fault in FAULTS:
                for share in SHARES:
                    wrong = with_fault(world, episodes, fault, share, generator)
                    if wrong is not None:
                        logs[fault, share] = wrong
            for (fault, share), log in logs.items():
                row: dict[str, Any] = {
                    "world": world.name,
                    "draw": draw,
                    "fault": fault,
                    "share": share,
                    "truth": truth[0],
                    "truth_error": truth[1],
                    "seen": [symptom.test for symptom in symptoms_of(log)],
                }
                before = earlier.get(key_of(row), {})
                if not row["seen"] and "value" in before:
                    row |= {name: before[name] for name in _JUDGED}
                elif not row["seen"]:
                    row |= judged(log, truth=truth, steps=arguments.steps)
                rows.append(row)
                if row.get("missed"):
                    print(row, flush=True)
            if arguments.out is not None:
                arguments.out.write_text(
                    json.dumps(rows, indent=1) + "\n", encoding="utf-8"
                )
    for fault in ("none", *FAULTS):
        of_fault = [row for row in rows if row["fault"] == fault]
        seen = sum(bool(row["seen"]) for row in of_fault)
        missed = sum(bool(row.get("missed")) for row in of_fault)
        print(
            f"{fault:32} {len(of_fault)} logs, {seen} seen, {missed} supported and"
            " wrong"
        )


if __name__ == "__main__":
    main()
