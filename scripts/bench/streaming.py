"""A log larger than memory, evaluated from disk: seconds a row, peak memory, and how near to its floor.

    python -m scripts.bench.streaming --rows 50_000_000 --columns 24

It writes a folder of shards (a linear system whose policy's value is known exactly; a row has ``--columns``
floats: observation, action, reward, next observation), evaluates the policy in a process of its own within
``--memory``, and removes the shards. The floor is the matrix products that the pass cannot do without, timed
on blocks in memory between the shards of the same pass, so that both see the same machine. ``--out FILE``
keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when run as a plain script


import numpy as np
import torch

import koffline
from koffline.data.disk.writer import ShardWriter
from koffline.envs.linear_quadratic import LinearGaussian, LinearQuadratic
from koffline.envs.rollouts import as_transitions, log_episodes
from koffline.jobs.status import JobStatus
from koffline.ope.streaming import sums as streaming_sums
from koffline.ope.streaming.settings import StreamSettings
from koffline.ope.streaming.sums import PassPlan
from koffline.policies import ContinuousPolicy
from koffline.store.run_record import versions

GAMMA, TIME_LIMIT = 0.95, 25
_ROWS_AT_ONCE = 500_000
_FLOOR_EVERY = 2  # stretches of shards


def make_world(inputs: int) -> tuple[LinearQuadratic, LinearGaussian, LinearGaussian]:
    """A rotating, damped system of ``inputs`` dimensions, one control; the log's policy, and the other."""
    drift = 0.9 * np.eye(inputs) + 0.15 * np.eye(inputs, k=1) - 0.15 * np.eye(inputs, k=-1)
    control = np.full((inputs, 1), 0.3 / math.sqrt(inputs))
    gain = np.full((1, inputs), -0.5 / math.sqrt(inputs))
    world = LinearQuadratic(
        tuple(map(tuple, drift.tolist())), tuple(map(tuple, control.tolist())), noise=0.3, start=0.7
    )
    logging = LinearGaussian(tuple(map(tuple, (0.5 * gain).tolist())), deviation=0.5)
    return world, logging, LinearGaussian(tuple(map(tuple, gain.tolist())))


def write_log(folder: Path, rows: int, inputs: int, shard_rows: int) -> float:
    """Shards of float32 rows; seconds that it took."""
    world, logging, _ = make_world(inputs)
    started, written = time.perf_counter(), 0
    with ShardWriter(folder, shard_rows) as writer:
        while written < rows:
            count = min(_ROWS_AT_ONCE, rows - written)
            generator = np.random.default_rng([7, written])
            log = as_transitions(log_episodes(world, logging, count, TIME_LIMIT, generator), world)
            columns = ("observations", "actions", "rewards", "next_observations")
            writer.append(log.replace(**{name: getattr(log, name).astype(np.float32) for name in columns}))
            written += count
    return time.perf_counter() - started


class Floor:
    """Times the products of a pass on one block in memory, every few stretches of shards."""

    def __init__(self) -> None:
        self.seconds, self.processor, self.rows, self.calls = 0.0, 0.0, 0, 0
        self.plan: PassPlan | None = None

    def __call__(self, status: JobStatus) -> None:
        """Hears of the pass."""
        if self.plan is None:
            return
        if status.done % _FLOOR_EVERY == 0:
            started, processor = time.perf_counter(), time.process_time()
            self.rows += run_products(self.plan)
            self.seconds += time.perf_counter() - started
            self.processor += time.process_time() - processor
            self.calls += 1


def run_products(plan: PassPlan) -> int:
    """The products of one block: phases, networks, and sums by group; rows of the block."""
    frame, rows = plan.frame, plan.block_rows
    dtype, features = frame.dtype, frame.features
    d, half, width = len(frame.units.input_location), frame.instrument_count // 2, frame.parameters + 1
    inputs, psi = torch.ones(rows, d, dtype=dtype), torch.ones(rows, 2 * half, dtype=dtype)
    weighted = torch.ones(rows, features.replicas, width, dtype=dtype)
    hidden = torch.ones(rows, max(features.sizes[1:-1]), dtype=dtype)
    bounds = np.linspace(0, rows, frame.groups + 1).astype(int).tolist()
    product = {}

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        shape = (left.shape[0], right.shape[1])
        out = product.setdefault(shape, torch.empty(shape, dtype=dtype))
        torch.mm(left, right, out=out)

    multiply(inputs, torch.ones(d, half, dtype=dtype))
    for _ in range(features.replicas * (1 + frame.next_draws)):
        for fan_in, fan_out in itertools.pairwise(features.sizes[:-1]):
            multiply(
                (inputs if fan_in == d else hidden)[:, :fan_in], torch.ones(fan_in, fan_out, dtype=dtype)
            )
    for begin, end in itertools.pairwise(bounds):
        multiply(psi[begin:end].mT, weighted[begin:end].flatten(1))
        for replica in range(features.replicas):
            part = weighted[begin:end, replica]
            multiply(part[:, :-1].mT, part)
            multiply(part.mT, part)
    return rows


def peak_bytes() -> int:
    """Most memory that this process has held; what getrusage says includes its parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def evaluate(folder: str, inputs: int, memory: str, options: dict[str, Any], sender: Any) -> None:
    """In a process of its own: the estimate, its times and its peak memory."""
    torch.set_num_threads(1)
    world, _, target = make_world(inputs)
    policy = ContinuousPolicy(1, target.mean, name="linear")
    log = koffline.open_transitions(folder, lazy=True)
    floor = Floor()
    original = streaming_sums.sum_over_log
    times: dict[str, float] = {}

    def timed(plan: PassPlan, passes: Any, progress: Any = None) -> Any:
        floor.plan = plan
        times["before_pass"] = time.perf_counter() - started
        begun, processor = time.perf_counter(), time.process_time()
        found = original(plan, passes, floor)
        times["pass"] = time.perf_counter() - begun - floor.seconds
        times["processor"] = time.process_time() - processor - floor.processor
        return found

    from koffline.ope.streaming import estimating

    estimating.sum_over_log = timed
    started = time.perf_counter()
    estimate = koffline.evaluate(log, policy, GAMMA, stream=StreamSettings(memory=memory), **options)
    seconds = time.perf_counter() - started
    wall, processor = floor.seconds / floor.rows, floor.processor / floor.rows
    sender.send(
        {
            "value": estimate.value,
            "low": estimate.interval.low,
            "high": estimate.interval.high,
            "standard_error": estimate.diagnostics["group_standard_error"],
            "replica_standard_deviation": estimate.diagnostics["replica_standard_deviation"],
            "truth": world.policy_value(target, GAMMA),
            "by_head": estimate.diagnostics["estimates_by_head"],
            "warnings": list(estimate.warnings),
            "settings": estimate.settings,
            "seconds": seconds,
            "seconds_before_pass": times["before_pass"],
            "seconds_of_pass": times["pass"],
            "seconds_after_pass": seconds - times["before_pass"] - times["pass"] - floor.seconds,
            "processor_seconds_of_pass": times["processor"],
            "microseconds_per_row": 1e6 * times["pass"] / len(log),
            "floor_microseconds_per_row": 1e6 * wall,
            "ratio_to_floor": times["pass"] / len(log) / wall,
            "processor_microseconds_per_row": 1e6 * times["processor"] / len(log),
            "floor_processor_microseconds_per_row": 1e6 * processor,
            "processor_ratio_to_floor": times["processor"] / len(log) / processor,
            "floor_timings": floor.calls,
            "peak_bytes": peak_bytes(),
            "row_bytes": log.row_bytes,
        }
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write, evaluate, remove."""
    inputs = (arguments.columns - 2) // 2
    folder = Path(tempfile.mkdtemp(prefix="koffline-streaming-", dir=arguments.workdir))
    try:
        writing = write_log(folder / "log", arguments.rows, inputs, arguments.shard_rows)
        size = sum(file.stat().st_size for file in (folder / "log").iterdir())
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        options = {"steps": arguments.steps, "full_replicas": arguments.replicas}
        process = context.Process(
            target=evaluate, args=(str(folder / "log"), inputs, arguments.memory, options, sender)
        )
        process.start()
        sender.close()
        found = receiver.recv()
        process.join()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "rows": arguments.rows,
        "columns": 2 * inputs + 2,
        "memory": arguments.memory,
        "bytes_on_disk": size,
        "seconds_writing": writing,
        **found,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--columns", type=int, default=24, help="floats in a row")
    parser.add_argument("--shard-rows", type=int, default=1_000_000)
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--workdir", type=Path, help="where the shards go; default: the temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = measure(arguments)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
