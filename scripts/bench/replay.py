"""ColumnarReplayBuffer beside d3rlpy's ReplayBuffer, in one run: sampling, building,
memory, fitting FQE.

Prints ratios of medians; the two sides take turns, so that a busy machine slows both.

    python scripts/bench/replay.py                # a million rows: a few minutes, about 4 GB
    python scripts/bench/replay.py --rows 50000
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch

from koffline.data import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Continuous, Transitions

d3rlpy = import_d3rlpy()

OBSERVATION_SIZE = 17
ACTION_SIZE = 6
EPISODE_LENGTH = 1000


def make_columns(n_rows: int) -> dict[str, np.ndarray]:
    """A log in the shape of the MuJoCo benchmarks: 17 numbers a state, 6 an action,
    limit 1000.
    """
    generator = np.random.default_rng(0)
    path = generator.standard_normal((n_rows + 1, OBSERVATION_SIZE), dtype=np.float32)
    ends = np.arange(1, n_rows + 1) % EPISODE_LENGTH == 0
    ends[-1] = True
    return {
        "observations": path[:-1],
        "next_observations": path[1:],
        "actions": generator.uniform(-1, 1, (n_rows, ACTION_SIZE)).astype(np.float32),
        "rewards": generator.standard_normal(n_rows, dtype=np.float32),
        "terminated": np.zeros(n_rows, dtype=np.bool_),
        "truncated": ends,
        "episode_ids": np.arange(n_rows) // EPISODE_LENGTH,
    }


def build_columnar(columns: dict[str, Any]) -> ColumnarReplayBuffer:
    return ColumnarReplayBuffer(
        Transitions(**columns, action_space=Continuous(ACTION_SIZE, -1.0, 1.0)), seed=0
    )


def build_stock(columns: dict[str, np.ndarray]) -> Any:
    return d3rlpy.dataset.MDPDataset(
        columns["observations"],
        columns["actions"],
        columns["rewards"],
        columns["terminated"].astype(np.float32),
        columns["truncated"].astype(np.float32),
        action_space=d3rlpy.ActionSpace.CONTINUOUS,
        action_size=ACTION_SIZE,
    )


def alternate(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int
) -> tuple[float, float]:
    """Median seconds of each side, called in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, call in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            call()
            side.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, ours: float, theirs: float, target: str) -> None:
    print(
        f"{name:34s} ours {ours:9.5f} s   d3rlpy {theirs:9.5f} s   ratio"
        f" {theirs / ours:6.1f}   {target}"
    )


def sample(buffer: Any, batch_size: int) -> None:
    """Twenty mini-batches."""
    for _ in range(20):
        buffer.sample_transition_batch(batch_size)


def peak_memory(build: Callable[[], Any]) -> float:
    """Peak bytes allocated while building, in megabytes."""
    gc.collect()
    tracemalloc.start()
    built = build()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del built
    return peak / 1e6


def fit_fqe(buffer: Any, n_steps: int, batch_size: int) -> None:
    """Stock FQE of a fresh stock policy."""
    d3rlpy.seed(0)
    policy = d3rlpy.algos.TD3PlusBCConfig().create()
    policy.create_impl((OBSERVATION_SIZE,), ACTION_SIZE)
    fqe = d3rlpy.ope.FQE(policy, d3rlpy.ope.FQEConfig(batch_size=batch_size))
    fqe.fit(
        buffer,
        n_steps=n_steps,
        n_steps_per_epoch=n_steps,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=500, help="gradient steps of a fit"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
    )
    columns = make_columns(args.rows)
    print(
        f"{args.rows} rows, observations {OBSERVATION_SIZE}, actions {ACTION_SIZE}, one"
        " thread"
    )

    built = alternate(
        lambda: build_columnar(columns),
        lambda: build_stock(columns),
        min(3, args.rounds),
    )
    report("build from arrays", *built, "target 5")
    megabytes = sum(column.nbytes for column in columns.values()) / 1e6
    peak = peak_memory(lambda: build_columnar(columns))
    print(
        f"{'memory to build':34s} ours {peak:.1f} MB beside {megabytes:.0f} MB of"
        " arrays   target: no copy"
    )

    ours = build_columnar(columns)
    theirs = build_stock(columns)
    for batch_size in (64, 256):
        sampled = alternate(
            partial(sample, ours, batch_size), partial(sample, theirs, batch_size), 50
        )
        report(f"sample_transition_batch, B = {batch_size}", *sampled, "target 20")
    for batch_size in (64, 100, 256):  # 100 is what FQE takes by default
        fit = partial(fit_fqe, n_steps=args.steps, batch_size=batch_size)
        fitted = alternate(partial(fit, ours), partial(fit, theirs), args.rounds)
        report(
            f"fit of FQE, {args.steps} steps, B = {batch_size}", *fitted, "target 1.4"
        )


if __name__ == "__main__":
    main()
