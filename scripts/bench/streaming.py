"""A log larger than memory, evaluated from disk: seconds a row and peak memory.

    python -m scripts.bench.streaming --rows 2_000_000 --columns 24

It writes a folder of shards (a linear system whose policy's value is known exactly; a
row has ``--columns``
floats: observation, action, reward, next observation) and evaluates the policy in
processes of their own, once with the rows of the sample alone and once with all: the
difference is the passes. ``--out FILE`` keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import koffline
from koffline.data.disk.writer import ShardWriter
from koffline.ope.stream_settings import StreamSettings
from koffline.policies import ContinuousPolicy
from koffline.store.run_record import versions
from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from scripts.bench.rollouts import as_transitions, log_episodes

GAMMA = 0.95
TIME_LIMIT = 25
_ROWS_AT_ONCE = 500_000


def make_world(inputs: int) -> tuple[LinearQuadratic, LinearGaussian, LinearGaussian]:
    """A rotating, damped system of ``inputs`` dimensions, one control; the log's
    policy, and the other.
    """
    drift = (
        0.9 * np.eye(inputs) + 0.15 * np.eye(inputs, k=1) - 0.15 * np.eye(inputs, k=-1)
    )
    control = np.full((inputs, 1), 0.3 / math.sqrt(inputs))
    gain = np.full((1, inputs), -0.5 / math.sqrt(inputs))
    world = LinearQuadratic(
        tuple(map(tuple, drift.tolist())),
        tuple(map(tuple, control.tolist())),
        noise=0.3,
        start=0.7,
    )
    logging = LinearGaussian(tuple(map(tuple, (0.5 * gain).tolist())), deviation=0.5)
    return world, logging, LinearGaussian(tuple(map(tuple, gain.tolist())))


def write_log(folder: Path, rows: int, inputs: int, shard_rows: int) -> float:
    """Shards of float32 rows; seconds that it took."""
    world, logging, _ = make_world(inputs)
    started = time.perf_counter()
    written = 0
    with ShardWriter(folder, shard_rows) as writer:
        while written < rows:
            count = min(_ROWS_AT_ONCE, rows - written)
            generator = np.random.default_rng([7, written])
            log = as_transitions(
                log_episodes(world, logging, count, TIME_LIMIT, generator), world
            )
            columns = ("observations", "actions", "rewards", "next_observations")
            writer.append(
                log.replace(
                    **{name: getattr(log, name).astype(np.float32) for name in columns}
                )
            )
            written += count
    return time.perf_counter() - started


def peak_bytes() -> int:
    """Most memory that this process has held; what getrusage says includes its
    parent's.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(
        next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    )


def evaluate(
    folder: str, inputs: int, memory: str, options: dict[str, Any], sender: Any
) -> None:
    """In a process of its own: the estimate, its times and its peak memory."""
    torch.set_num_threads(1)
    world, _, target = make_world(inputs)
    policy = ContinuousPolicy(1, target.mean, name="linear")
    log = koffline.open_transitions(folder, lazy=True)
    started = time.perf_counter()
    processor = time.process_time()
    estimate = koffline.evaluate(
        log, policy, GAMMA, stream=StreamSettings(memory=memory), **options
    )
    low = None
    high = None
    if estimate.interval is not None:
        low = estimate.interval.low
        high = estimate.interval.high
    sender.send(
        {
            "value": estimate.value,
            "low": low,
            "high": high,
            "truth": world.policy_value(target, GAMMA),
            "warnings": list(estimate.warnings),
            "settings": estimate.settings,
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - processor,
            "peak_bytes": peak_bytes(),
            "row_bytes": log.row_bytes,
        }
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write, evaluate twice, remove."""
    inputs = (arguments.columns - 2) // 2
    options = {
        "steps": arguments.steps,
        "sample_rows": arguments.sample_rows,
        "estimator": arguments.estimator,
    }
    results = {}
    for name, rows in (("sample", arguments.sample_rows), ("all", arguments.rows)):
        folder = Path(
            tempfile.mkdtemp(prefix="koffline-streaming-", dir=arguments.workdir)
        )
        try:
            write_log(folder / "log", rows, inputs, arguments.shard_rows)
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=evaluate,
                args=(str(folder / "log"), inputs, arguments.memory, options, sender),
            )
            process.start()
            sender.close()
            results[name] = receiver.recv()
            process.join()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    passes = (
        results["all"]["processor_seconds"] - results["sample"]["processor_seconds"]
    )
    return {
        "rows": arguments.rows,
        "columns": 2 * inputs + 2,
        "memory": arguments.memory,
        "microseconds_per_row": 1e6 * passes / arguments.rows,
        **results,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--columns", type=int, default=24, help="floats in a row")
    parser.add_argument("--shard-rows", type=int, default=500_000)
    parser.add_argument("--sample-rows", type=int, default=200_000)
    parser.add_argument("--estimator", default="kloss")
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument(
        "--workdir",
        type=Path,
        help="where the shards go; default: the temporary folder",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = json.dumps(measure(arguments), indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
