"""Small tables that are large in memory: refused within a stated figure, whatever their size on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tests.data.table_rows import walk, write

ALLOWED = 20_000_000
ROWS = 1_000_000  # of six numbers
# What readers take beside: code on its first use; of text its blocks of 4 MB, read ahead and cut into fields.
BESIDE, BESIDE_TEXT = 25_000_000, 150_000_000
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
    nothing, steps = pa.repeat(pa.scalar(0.0), rows), np.arange(rows)
    made = {
        "id": steps // 100,
        "t": steps % 100,
        "x_1": nothing,
        "a": pa.repeat(pa.scalar(0), rows),
        "r": nothing,
    }
    return pa.table({**made, "done": steps % 100 == 99, **columns})


def packed(table, path):
    """An Arrow file with compressed buffers in one record batch."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), table.schema, options=options) as file:
        file.write_table(table)
    return path


def parquet(table, path):
    pa.parquet.write_table(table, path, compression="zstd")
    return path


def numbers(path):
    return parquet(zeros(), path.with_suffix(".parquet"))


def text(path):
    return write(zeros(), path.with_suffix(".csv.gz"))


def one_batch(path):
    return packed(zeros(), path.with_suffix(".arrow"))


def long_ids(path):
    """A text of 10 kB in 6,000 rows, held once in the file; numbers that do not compress are beside it."""
    numbers = {name: np.random.default_rng(0).normal(size=6000) for name in ("x_1", "r")}
    ids = pa.array(["e" * 10_000] * 6000, pa.large_string())
    return parquet(zeros(6000, id=ids, **numbers), path.with_suffix(".parquet"))


def a_dictionary(path):
    ids = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), 9), pa.array(["e" * 60_000_000]))
    return packed(zeros(9, id=ids), path.with_suffix(".arrow"))


IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"
ALLOW = "or allow more bytes (KOFFLINE_MAX_BYTES)"
WHOLE = f"of memory to be read, allowed are 20 MB; {IN_PIECES}, {ALLOW}"
AT_ONCE = f"at once, allowed are 20 MB; write it in smaller row groups, {ALLOW}"
LONG = f"of memory to be read, allowed are 20 MB; give its longest episodes several ids, {ALLOW}"
CASES = {
    numbers: (f"its rows need 288 MB {WHOLE}", "1000000 rows"),
    text: (f"its rows need {{}} {WHOLE}", "1000000 rows"),
    one_batch: (f"parts of it take 40.1 MB {AT_ONCE}",) * 2,
    long_ids: (f"its rows need {{}} {WHOLE}", f"its rows need {{}} {LONG}"),
    a_dictionary: (f"parts of it take 60 MB {AT_ONCE}",) * 2,
}


def test_reading_stays_within_the_stated_figure(tmp_path):
    small, bombs = (
        write(walk(), tmp_path / "small.csv"),
        [build(tmp_path / build.__name__) for build in CASES],
    )
    done = subprocess.run(
        [sys.executable, "-c", READ, str(small), *map(str, bombs)],
        env={**os.environ, "KOFFLINE_MAX_BYTES": str(ALLOWED)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    lines = iter(done.stdout.splitlines())
    for (build, ways), bomb in zip(CASES.items(), bombs, strict=True):
        assert bomb.stat().st_size < ALLOWED / 4
        for way in ways:
            said, peak = next(lines), int(next(lines))
            expected, _, ending = way.partition("{}")
            assert said.removeprefix(f"{bomb} is not read: ").removeprefix(f"{bomb}: ").startswith(expected)
            assert said.endswith(ending)
            assert peak < ALLOWED + (BESIDE_TEXT if build is text else BESIDE), build.__name__
