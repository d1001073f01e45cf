"""How often the tests of a log's structure are right: false alarms on right logs,
detection of faults.

    python -m scripts.bench.structure --draws 9 --fault-draws 1 --seed 11 --out docs/results/structure.json

Each draw simulates one log of every world in ``structure_worlds`` and runs all tests on
it; the first draws also on copies with each fault in 1 %, 10 % and all of the places
where the fault can be.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.structure import symptoms_of
from scripts.bench.structure_worlds import FAULTS, as_log, play, with_fault, worlds

SHARES = (0.01, 0.1, 1.0)


def measure(draws: int, fault_draws: int, rows: int, seed: int) -> dict[str, Any]:
    """False alarms by world and test, and the share of faulty logs in which some test
    saw something.
    """
    alarms: list[dict[str, Any]] = []
    right = 0
    seen: dict[str, dict[str, list[int]]] = {
        fault: {str(share): [] for share in SHARES} for fault in FAULTS
    }
    by_world: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    slowest = 0.0
    total = 0.0
    for draw in range(draws):
        generator = np.random.default_rng([seed, draw])
        for world in worlds(generator):
            episodes = play(world, rows=rows, generator=generator)
            log = as_log(world, episodes)
            begun = time.process_time()
            symptoms = symptoms_of(log)
            seconds = time.process_time() - begun
            slowest = max(slowest, seconds)
            total = total + seconds
            right += 1
            alarms += [
                {
                    "world": world.name,
                    "draw": draw,
                    "test": symptom.test,
                    "text": symptom.text,
                }
                for symptom in symptoms
            ]
            if draw >= fault_draws:
                continue
            for fault in FAULTS:
                for share in SHARES:
                    wrong = with_fault(world, episodes, fault, share, generator)
                    if wrong is None:
                        continue
                    is_seen = int(bool(symptoms_of(wrong)))
                    seen[fault][str(share)].append(is_seen)
                    by_world[fault][f"{world.name} {share}"].append(is_seen)
    return {
        "draws": draws,
        "fault_draws": fault_draws,
        "rows": rows,
        "seed": seed,
        "right_logs": right,
        "false_alarms": alarms,
        "logs_with_false_alarms": len(
            {(alarm["world"], alarm["draw"]) for alarm in alarms}
        ),
        "seconds_per_log": total / max(1, right),
        "slowest_seconds": slowest,
        "detected": {
            fault: {share: [sum(hits), len(hits)] for share, hits in by_share.items()}
            for fault, by_share in seen.items()
        },
        "detected_by_world": {
            fault: {key: [sum(hits), len(hits)] for key, hits in parts.items()}
            for fault, parts in by_world.items()
        },
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=9)
    parser.add_argument("--fault-draws", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(
        draws=arguments.draws,
        fault_draws=arguments.fault_draws,
        rows=arguments.rows,
        seed=arguments.seed,
    )
    for alarm in result["false_alarms"]:
        print(alarm["world"], "|", alarm["test"], "|", alarm["text"])
    print(
        f"{result['logs_with_false_alarms']} of {result['right_logs']} right logs get a"
        f" caution; {result['seconds_per_log']:.2f} s a log, slowest"
        f" {result['slowest_seconds']:.2f} s"
    )
    for fault, shares in result["detected"].items():
        print(
            f"{fault:32}",
            "  ".join(f"{share}: {hit}/{of}" for share, (hit, of) in shares.items()),
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
