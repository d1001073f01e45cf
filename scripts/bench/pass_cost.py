"""What a pass over a log costs on many machines: formulas, the constants measured here, and what follows.

    python -m scripts.bench.pass_cost --rows 200_000 --out docs/results/pass-cost.json

Writes a small log, trains short networks, counts and times the pass of `koffline evaluate --lazy`, and
prints the table of docs/many_machines.md for 1e9 and 1e11 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import koffline
from koffline.data.disk.writer import ShardWriter
from koffline.ope.streaming import estimating
from koffline.ope.streaming.sums import PassPlan, sum_over_log, sum_over_shards
from koffline.policies import ContinuousPolicy
from koffline.store.run_record import versions

CORES, NETWORK, STORAGE = 16, 1.25e9, 1.0e9  # of a machine: cores, bytes/s of 10 Gbit/s, bytes/s read


@dataclass(frozen=True)
class Sizes:
    """What the products of a pass depend on: see `flops_per_row`."""

    inputs: int  # d: observation and continuous action
    kernel_inputs: int  # of ψ: d, or observation and one-hot action
    hidden: tuple[int, ...]
    outputs: int = 1  # actions, or 1
    draws: int = 1  # next actions per row of a continuous policy
    replicas: int = 3
    instruments: int = 1000

    @property
    def parameters(self) -> int:
        """p, the last layer with its constant."""
        return (self.hidden[-1] + 1) * self.outputs


def flops_per_row(sizes: Sizes) -> dict[str, int]:
    """Two for each multiplication and addition of the matrix products over one row, by product."""
    p, r, m = sizes.parameters, sizes.replicas, sizes.instruments
    layers = sum(a * b for a, b in itertools.pairwise((sizes.inputs, *sizes.hidden)))
    return {
        "instruments": 2 * sizes.kernel_inputs * (m // 2),
        "networks": 2 * r * (1 + sizes.draws) * layers,
        "projected": 2 * m * r * (p + 1),
        "temporal": 2 * r * p * (p + 1),
        "squares": 2 * r * (p + 1) ** 2,
    }


def record_bytes(sizes: Sizes, groups: int) -> int:
    """The sums that travel once per stretch of shards."""
    p = sizes.parameters
    return 8 * groups * (sizes.replicas * (sizes.instruments + 2 * p + 1) * (p + 1) + sizes.replicas * p + 4)


@dataclass(frozen=True)
class Cost:
    """A pass over ``rows`` rows on ``machines`` machines."""

    rows: float
    machines: int
    terabytes: float
    petaflops: float
    seconds_computing: float
    seconds_reading: float
    gigabytes_of_sums: float
    seconds_of_sums: float


def cost(rows: float, machines: int, measured: dict[str, Any]) -> Cost:
    """Rows are shared out evenly; the sums of at most 256 stretches travel to one machine."""
    bytes_read = rows * measured["bytes_per_row"]
    sums = min(256, max(1, rows / 2**18)) * measured["record_bytes"]
    return Cost(
        rows=rows,
        machines=machines,
        terabytes=bytes_read / 1e12,
        petaflops=rows * measured["flops_per_row"] / 1e15,
        seconds_computing=rows * measured["microseconds_per_row"] / 1e6 / (machines * CORES),
        seconds_reading=bytes_read / (machines * STORAGE),
        gigabytes_of_sums=sums / 1e9,
        seconds_of_sums=sums / NETWORK,
    )


def make_log(folder: Path, rows: int, observation: int) -> None:
    """Rows of 2 × observation + 2 floats in episodes of 50 steps, in four shards."""
    generator = np.random.default_rng(0)
    walk = generator.normal(size=(rows + 1, observation)).astype(np.float32)
    steps = np.arange(rows) % 50
    log = koffline.Transitions(
        observations=walk[:-1],
        actions=generator.uniform(-1, 1, (rows, 1)).astype(np.float32),
        rewards=walk[:-1, 0] + generator.normal(size=rows).astype(np.float32),
        next_observations=walk[1:],
        terminated=np.zeros(rows, dtype=bool),
        truncated=steps == 49,
        action_space=koffline.Continuous(1, -1.0, 1.0),
        episode_ids=np.arange(rows) // 50,
        steps=steps,
    )
    with ShardWriter(folder, shard_rows=rows // 4) as writer:
        writer.append(log)


def planned(log: Any, policy: Any, **options: Any) -> PassPlan:
    """The plan of the pass that an evaluation makes."""
    kept: list[PassPlan] = []

    def noted(plan: PassPlan, *rest: Any) -> Any:
        kept.append(plan)
        return sum_over_log(plan, *rest)

    original, estimating.sum_over_log = estimating.sum_over_log, noted
    try:
        koffline.evaluate(log, policy, 0.95, **options)
    finally:
        estimating.sum_over_log = original
    return kept[0]


def counted_flops(plan: PassPlan) -> float:
    """Floating-point operations of all matrix products of one shard, per row."""
    counter = FlopCounterMode(display=False)
    with counter:
        sum_over_shards(plan, (0,))
    return counter.get_total_flops() / plan.log.shards[0].rows


def measure(rows: int, observation: int, repeats: int = 3) -> dict[str, Any]:
    """The constants of one core, in seconds that it worked."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        make_log(Path(scratch) / "log", rows, observation)
        log: Any = koffline.open_transitions(Path(scratch) / "log", lazy=True)
        policy = ContinuousPolicy(1, lambda observations: np.tanh(observations[:, :1]), name="tanh")
        plan = planned(log, policy, steps=20)
        best = float("inf")
        for _ in range(repeats):
            started = time.process_time()
            sums = sum_over_shards(plan, tuple(range(len(log.shards))))
            best = min(best, time.process_time() - started)
        size = sum(path.stat().st_size for path in (Path(scratch) / "log").iterdir())
        sizes = Sizes(observation + 1, observation + 1, (64, 64))
        return {
            "rows": rows,
            "columns": 2 * observation + 2,
            "microseconds_per_row": 1e6 * best / rows,
            "bytes_per_row": size / rows,
            "flops_per_row": sum(flops_per_row(sizes).values()),
            "flops_counted": counted_flops(plan),
            "flops_by_product": flops_per_row(sizes),
            "record_bytes": len(pickle.dumps(sums, protocol=5)),
            "record_bytes_formula": record_bytes(sizes, plan.frame.groups),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--observation", type=int, default=11)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    measured = measure(given.rows, given.observation)
    costs = [
        cost(rows, machines, measured) for rows, machines in ((1e9, 1), (1e9, 10), (1e11, 10), (1e11, 100))
    ]
    result = {"measured": measured, "costs": [asdict(one) for one in costs], "versions": versions()}
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
