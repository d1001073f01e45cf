"""Small tables that are large in memory: refused within a stated figure, whatever their
size on disk.
"""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tests.data.table_rows import walk, write

ALLOWED = 20_000_000
ROWS = 1_000_000  # of six numbers
# What readers take beside: code on its first use; of text its blocks of 4 MB, read
# ahead and cut into fields.
BESIDE = 25_000_000
BESIDE_TEXT = 150_000_000
READ = """
import sys
import pyarrow.csv, pyarrow.parquet
from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.data.table_rows import MAPPING

def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))

open_transitions(sys.argv[1], mapping=MAPPING)
for path in sys.argv[2:]:
    for in_pieces in (False, True):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        before = peak()
        try:
            pieces = TableStream(path, MAPPING) if in_pieces else [open_transitions(path, mapping=MAPPING)]
            print(sum(map(len, pieces)), "rows")
        except DataError as error:
            print(error)
        pieces = None
        print((peak() - before) * 1024)
"""


def zeros(rows=ROWS, **columns):
    """Episodes of 100 steps."""
    nothing = pa.repeat(pa.scalar(0.0), rows)
    steps = np.arange(rows)
    made = {
        "id": steps // 100,
        "t": steps % 100,
        "x_1": nothing,
        "r": nothing,
        "done": steps % 100 == 99,
    }
    return pa.table({**made, "a": pa.repeat(pa.scalar(0), rows), **columns})


def parquet(path, table):
    pa.parquet.write_table(table, path, compression="zstd")


def long_ids(path):
    """A text of 10 kB in 6,000 rows, held once in the file; numbers that do not
    compress are beside it.
    """
    numbers = {
        name: np.random.default_rng(0).normal(size=6000) for name in ("x_1", "r")
    }
    parquet(
        path,
        zeros(6000, id=pa.array(["e" * 10_000] * 6000, pa.large_string()), **numbers),
    )


TEXT = "text.csv.gz"
# name of a file, what writes it, words about it at once and in pieces
CASES = [
    (
        "numbers.parquet",
        lambda path: parquet(path, zeros()),
        "convert it in pieces",
        "1000000 rows",
    ),
    (TEXT, lambda path: write(zeros(), path), "convert it in pieces", "1000000 rows"),
    (
        "ids.parquet",
        long_ids,
        "convert it in pieces",
        "give its longest episodes several ids",
    ),
]


def test_reading_stays_within_the_stated_figure(tmp_path):
    small = write(walk(), tmp_path / "small.csv")
    bombs = [tmp_path / name for name, *_ in CASES]
    for bomb, (_, build, *_) in zip(bombs, CASES, strict=True):
        build(bomb)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(small), *map(str, bombs)],
        env={**os.environ, "KOFFLINE_MAX_BYTES": str(ALLOWED)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    lines = iter(done.stdout.splitlines())
    for bomb, (name, _, *ways) in zip(bombs, CASES, strict=True):
        assert bomb.stat().st_size < ALLOWED / 4
        for words in ways:
            line = next(lines)
            peak = int(next(lines))
            assert words in line
            assert line == words or "allowed are 20 MB" in line
            assert peak < ALLOWED + (BESIDE_TEXT if name == TEXT else BESIDE), name
