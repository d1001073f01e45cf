"""Mini-batches from a log on disk: time beside one-row reading and a log in memory, and
how well they mix.

Prints medians of rounds in which the sides take turns, and ratios. Times are of the
processor, reading included, so that a busy machine changes them little. The log is made
for the run and removed afterwards.

    python -m scripts.bench.block_batches  # a million rows, about 200 MB of disk, two minutes
    python -m scripts.bench.block_batches --rows 200000 --pool 65536
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from koffline.data.disk.block_sampler import BlockSampler
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Transitions

OBSERVATION_SIZE = 17
ACTION_SIZE = 6
EPISODE_LENGTH = 1000
BATCH = 256
COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
)
KEYS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminals",
    "timeouts",
)
SHARD_ROWS = 125_000


def write_log(folder: Path, rows: int) -> None:
    """Episodes of 1000 steps in the shape of the MuJoCo benchmarks; rewards count rows:
    a sorted log.
    """
    with ShardWriter(folder, SHARD_ROWS) as writer:
        for first in range(0, rows, SHARD_ROWS):
            count = min(SHARD_ROWS, rows - first)
            generator = np.random.default_rng(first)
            path = generator.standard_normal(
                (count + 1, OBSERVATION_SIZE), dtype=np.float32
            )
            steps = np.arange(count) % EPISODE_LENGTH
            writer.append(
                Transitions(
                    observations=path[:-1],
                    next_observations=path[1:],
                    actions=generator.uniform(-1, 1, (count, ACTION_SIZE)).astype(
                        np.float32
                    ),
                    rewards=(first + np.arange(count)) / rows,
                    terminated=np.zeros(count, dtype=np.bool_),
                    truncated=np.append(steps[1:] == 0, True),
                    steps=steps,
                    action_space=Continuous(ACTION_SIZE, -1.0, 1.0),
                )
            )


class Sides:
    """One batch of 256 rows, each way."""

    def __init__(self, log: LazyTransitions, pool_rows: int) -> None:
        self._generator = np.random.default_rng(0)
        self._memory = log.load()
        self._file = h5py.File(log.shards[0].name, "r")
        self._sampler = BlockSampler(log, 0, pool_rows=pool_rows)
        self._sampler.draw(BATCH)

    def in_memory(self) -> None:
        """Random rows of columns in memory."""
        rows = self._generator.integers(len(self._memory), size=BATCH)
        for name in COLUMNS:
            getattr(self._memory, name).take(rows, axis=0)

    def shuffled_blocks(self) -> None:
        """The pool."""
        self._sampler.draw(BATCH)

    def one_row_at_a_time(self) -> None:
        """Random rows of one open HDF5 file."""
        for row in self._rows():
            for key in KEYS:
                self._file[key][row]

    def sorted_rows(self) -> None:
        """The same in one call for each column, as h5py allows where they are in
        order.
        """
        for key in KEYS:
            self._file[key][self._rows()]

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> np.ndarray:
        return np.sort(
            self._generator.choice(len(self._file["rewards"]), BATCH, replace=False)
        )


def micros(call: Callable[[], None], repeats: int) -> float:
    """Microseconds of processor time of one call."""
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats * 1e6


def time_sides(log: LazyTransitions, pool_rows: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a batch."""
    sides = Sides(log, pool_rows)
    repeats = {
        sides.in_memory: 200,
        sides.shuffled_blocks: 200,
        sides.one_row_at_a_time: 1,
    }
    repeats[sides.sorted_rows] = 1
    seconds: dict[str, list[float]] = {call.__name__: [] for call in repeats}
    for _ in range(rounds):
        for call, count in repeats.items():
            seconds[call.__name__].append(micros(call, count))
    sides.close()
    return {name: round(statistics.median(times), 1) for name, times in seconds.items()}


def mixing(
    log: LazyTransitions, pool_rows: int, block_rows: int | None, batches: int
) -> dict[str, Any]:
    """Variance of means of the sorted column, over that of uniform draws: of batches,
    and of 16 in a row.
    """
    sampler = BlockSampler(log, 1, pool_rows=pool_rows, block_rows=block_rows)
    means = np.array([sampler.draw(BATCH)["rewards"].mean() for _ in range(batches)])
    uniform = 1 / 12 / BATCH
    longer = means[: batches // 16 * 16].reshape(-1, 16).mean(axis=1)
    return {
        "pool_rows": sampler.pool_rows,
        "block_rows": sampler.block_rows,
        "blocks_in_pool": sampler.pool_rows // sampler.block_rows,
        "one_batch": round(float(np.mean((means - 0.5) ** 2) / uniform), 3),
        "sixteen_batches": round(
            float(np.mean((longer - 0.5) ** 2) / (uniform / 16)), 3
        ),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pool", type=int, default=2**18, help="rows of the pool")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--batches", type=int, default=16_000, help="of each line about mixing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_log(Path(scratch) / "log", arguments.rows)
        log = open_transitions(Path(scratch) / "log", lazy=True)
        times = {
            pool: time_sides(log, pool, arguments.rounds)
            for pool in (arguments.pool, 4 * arguments.pool)
        }
        sizes = [(arguments.pool, block) for block in (None, 256, 4096)] + [
            (4 * arguments.pool, None)
        ]
        mixed = [mixing(log, pool, block, arguments.batches) for pool, block in sizes]
    first = times[arguments.pool]
    ratios = {name: round(time / first["in_memory"], 1) for name, time in first.items()}
    print(
        json.dumps(
            {
                "microseconds_by_pool": times,
                "ratios_to_memory": ratios,
                "mixing": mixed,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
