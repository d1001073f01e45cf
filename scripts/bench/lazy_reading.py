"""How fast are blocks of rows read from shards on disk? As ratios to a copy of the raw
bytes.

    python scripts/bench/lazy_reading.py --rows 1000000

The log has 17 observations and 6 actions in float32, independent rows in episodes of
500. All take turns within one run, and the least time of several rounds counts: the
  bytes come from the system's cache, so the
numbers are what reading costs a processor, not a disk. "blocks" are checked rows as
every pass gets them, "scattered" runs of 256 rows at random places of open shards, as
training gets them. ``--out FILE`` keeps the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.flat import flat_arrays
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Transitions

EPISODE = 500
OBSERVATIONS = 17
ACTIONS = 6
RUN_ROWS = 256


def make_log(rows: int) -> Transitions:
    """A log whose content does not matter."""
    generator = np.random.default_rng(0)
    observations = generator.standard_normal((rows, OBSERVATIONS), dtype=np.float32)
    ends = np.arange(rows) % EPISODE == EPISODE - 1
    return Transitions(
        observations=observations,
        actions=generator.standard_normal((rows, ACTIONS), dtype=np.float32),
        rewards=generator.standard_normal(rows, dtype=np.float32),
        next_observations=np.roll(observations, -1, axis=0),
        terminated=np.zeros(rows, dtype=bool),
        truncated=ends,
        action_space=Continuous(ACTIONS),
        steps=np.arange(rows) % EPISODE,
    )


def read_blocks(log: LazyTransitions) -> None:
    for block in log.blocks():
        block.rewards[-1]


def read_scattered(log: LazyTransitions, runs: int) -> None:
    """Runs of rows at random places, each shard opened once."""
    generator = np.random.default_rng(1)
    for shard, info in enumerate(log.shards):
        with log.open_shard(shard) as opened:
            for start in generator.integers(
                0, info.rows - RUN_ROWS, runs // len(log.shards)
            ):
                opened.block(int(start), int(start) + RUN_ROWS)


def copy_mapped(folder: Path, names: list[str]) -> None:
    for name in names:
        mapped = np.load(folder / name, mmap_mode="r")
        for start in range(0, len(mapped), 32_768):
            np.array(mapped[start : start + 32_768])


def read_raw(folder: Path, names: list[str]) -> None:
    for name in names:
        with (folder / name).open("rb", buffering=0) as file:
            while file.read(2**23):
                pass


def measure(rows: int, rounds: int) -> list[dict[str, Any]]:
    """One row per way of reading: seconds, rows and megabytes per second, ratio to
    copying a memory map.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = make_log(rows)
        with ShardWriter(folder / "shards", max(1, len(log) // 4)) as writer:
            writer.append(log)
        lazy = open_transitions(folder / "shards", lazy=True)
        plain = []
        for key, array in flat_arrays(log).items():
            np.save(folder / f"{key}.npy", array)
            plain.append(f"{key}.npy")
        size = sum(array.nbytes for array in flat_arrays(log).values())
        runs = max(len(log) // RUN_ROWS // 4, 4)
        timed: dict[str, tuple[int, Callable[[], None]]] = {
            "copy of a memory map": (rows, lambda: copy_mapped(folder, plain)),
            "raw read": (rows, lambda: read_raw(folder, plain)),
            "shards, blocks": (rows, lambda: read_blocks(lazy)),
            "shards, scattered": (runs * RUN_ROWS, lambda: read_scattered(lazy, runs)),
        }
        seconds = {name: float("inf") for name in timed}
        for _ in range(rounds):
            for name, (_, call) in timed.items():
                began = time.perf_counter()
                call()
                seconds[name] = min(seconds[name], time.perf_counter() - began)
        floor = seconds["copy of a memory map"] / rows
        return [
            {
                "what": name,
                "rows_per_second": read / seconds[name],
                "megabytes_per_second": read / rows * size / seconds[name] / 1e6,
                "microseconds_per_256_rows": seconds[name] / read * 256e6,
                "ratio_to_copy": seconds[name] / read / floor,
            }
            for name, (read, _) in timed.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measure(options.rows, options.rounds)
    print(f"{'':32}{'rows/s':>12}{'MB/s':>8}{'us/256 rows':>13}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['what']:32}{row['rows_per_second']:12,.0f}{row['megabytes_per_second']:8,.0f}"
            f"{row['microseconds_per_256_rows']:13.1f}{row['ratio_to_copy']:8.1f}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
