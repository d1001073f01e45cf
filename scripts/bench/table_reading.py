"""Reading a Parquet table, at once and piece by piece: processor time a row and peak
memory.

    python -m scripts.bench.table_reading --rows 1000000 --out docs/results/table_reading.json

The table has 17 observations in float32, an action, a reward, an episode and a step.
Its episodes lie together, or side by side: row by row, one step of each. Every way of
reading runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet

from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream
from koffline.store.run_record import versions

OBSERVATIONS = 17
EPISODE_LENGTH = 1000
MAPPING = {
    "observations": ["x_*"],
    "action": "action",
    "reward": "reward",
    "episode": "episode",
    "time": "step",
    "last_row": "cut",
}
ALONE = "pyarrow.parquet.read_table alone"


def write_table(path: Path, rows: int, together: bool) -> None:
    """A table of random numbers."""
    generator = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {
        f"x_{i}": generator.random(rows, np.float32) for i in range(OBSERVATIONS)
    }
    columns |= {"action": np.arange(rows) % 2, "reward": generator.random(rows)}
    numbers = np.arange(rows)
    episodes = rows // EPISODE_LENGTH
    if together:
        columns["episode"] = numbers // EPISODE_LENGTH
    else:
        columns["episode"] = numbers % episodes
    if together:
        columns["step"] = numbers % EPISODE_LENGTH
    else:
        columns["step"] = numbers // episodes
    pl.DataFrame(columns).write_parquet(path)


def measure(path: Path, way: str, answer: Any) -> None:
    """Read the table in one way and send seconds of the processor, rows and the peak in
    bytes.
    """
    began = time.process_time()
    if way == "at once":
        rows = len(open_transitions(path, mapping=MAPPING))
    elif way == "piece by piece":
        rows = sum(len(piece) for piece in TableStream(path, MAPPING))
    else:
        rows = pyarrow.parquet.read_table(path, use_threads=False).num_rows
    seconds = time.process_time() - began
    answer.send(
        (seconds, rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for together in (True, False):
            path = Path(folder) / "table.parquet"
            # in a process of its own: the readers would inherit the peak of this one
            writer = context.Process(
                target=write_table, args=(path, arguments.rows, together)
            )
            writer.start()
            writer.join()
            for way in (ALONE, "at once", "piece by piece"):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=measure, args=(path, way, there))
                process.start()
                seconds, rows, peak = here.recv()
                process.join()
                episodes = "together" if together else "side by side"
                results.append(
                    {
                        "way": way,
                        "episodes": episodes,
                        "rows": rows,
                        "microseconds_per_row": 1e6 * seconds / rows,
                        "peak_bytes": peak,
                    }
                )
                shown = f"{1e6 * seconds / rows:.2f} µs a row, {peak / 1e9:.2f} GB"
                print(f"{way:<36} episodes {episodes:<14} {shown}", flush=True)
    if arguments.out is not None:
        content = {
            "table_rows": arguments.rows,
            "found": results,
            "versions": versions(),
        }
        arguments.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
