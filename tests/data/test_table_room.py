"""Small tables that are large in memory: refused within a stated figure, whatever their size on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from koffline.untrusted import limits
from tests.data.table_rows import MAPPING, walk, write

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
before = peak()
try:
    if sys.argv[3] == "at once":
        open_transitions(sys.argv[2], mapping=MAPPING)
    else:
        rows = sum(len(piece) for piece in TableStream(sys.argv[2], MAPPING))
        print(f"{rows} rows")
except DataError as error:
    print(error)
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


def packed(table, path, chunk_rows=None):
    """An Arrow file with compressed buffers, by default in one record batch."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), table.schema, options=options) as file:
        file.write_table(table, max_chunksize=chunk_rows)
    return path


def parquet(table, path):
    pa.parquet.write_table(table, path, compression="zstd")
    return path


def lists(rows, longest):
    """Lists of one number, but for the last."""
    offsets = np.append(np.arange(rows), rows - 1 + longest).astype(np.int32)
    values = pa.repeat(pa.scalar(0.0), rows - 1 + longest)
    return zeros(rows, x_1=pa.ListArray.from_arrays(pa.array(offsets), values))


def numbers(path):
    return parquet(zeros(), path.with_suffix(".parquet"))


def text(path):
    return write(zeros(), path.with_suffix(".csv.gz"))


def one_batch(path):
    return packed(zeros(), path.with_suffix(".arrow"))


def small_batches(path):
    return packed(zeros(), path.with_suffix(".arrow"), 10_000)


def long_ids(path):
    """A text of 10 kB in 6,000 rows, held once in the file; numbers that do not compress are beside it."""
    numbers = {name: np.random.default_rng(0).normal(size=6000) for name in ("x_1", "r")}
    ids = pa.array(["e" * 10_000] * 6000, pa.large_string())
    return parquet(zeros(6000, id=ids, **numbers), path.with_suffix(".parquet"))


def one_long_list(path):
    return parquet(lists(1000, 7_500_000), path.with_suffix(".parquet"))


def a_list_in_every_row(path):
    """A dictionary of one list of 10,000 numbers, named by 1,000 rows."""
    entry = pa.array([[0.0] * 10_000])
    indices = pa.repeat(pa.scalar(0, pa.int8()), 1000)
    return packed(zeros(1000, x_1=pa.DictionaryArray.from_arrays(indices, entry)), path.with_suffix(".arrow"))


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
    small_batches: (f"its rows need {{}} {WHOLE}", "1000000 rows"),
    one_batch: (f"parts of it take 40.1 MB {AT_ONCE}",) * 2,
    long_ids: (f"its rows need {{}} {WHOLE}", f"its rows need {{}} {LONG}"),
    one_long_list: (f"parts of it take 60 MB {AT_ONCE}",) * 2,
    a_list_in_every_row: ("column x_1 is Unknown, needed are numbers (observations){}",) * 2,
    a_dictionary: (f"parts of it take 60 MB {AT_ONCE}",) * 2,
}


@pytest.mark.parametrize("way", ["at once", "in pieces"])
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_reading_stays_within_the_stated_figure(tmp_path, build, way):
    small, bomb = write(walk(), tmp_path / "small.csv"), build(tmp_path / "log")
    assert bomb.stat().st_size < ALLOWED / 4
    done = subprocess.run(
        [sys.executable, "-c", READ, str(small), str(bomb), way],
        env={**os.environ, "KOFFLINE_MAX_BYTES": str(ALLOWED)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    said, peak = done.stdout.splitlines()
    expected, _, ending = CASES[build][way == "in pieces"].partition("{}")
    assert said.removeprefix(f"{bomb} is not read: ").removeprefix(f"{bomb}: ").startswith(expected)
    assert said.endswith(ending)
    assert int(peak) < ALLOWED + (BESIDE_TEXT if build is text else BESIDE)


def test_the_default_is_a_quarter_of_what_a_process_may_use(monkeypatch):
    monkeypatch.delenv("KOFFLINE_MAX_BYTES", raising=False)
    monkeypatch.setattr(limits, "machine_memory", lambda: 8_000_000_000)
    assert limits.memory_allowance() == 2_000_000_000


def test_allowing_more_is_a_remedy(tmp_path, monkeypatch):
    path = parquet(zeros(10_000), tmp_path / "log.parquet")
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2800000")
    with pytest.raises(
        DataError, match=r"its rows need 2\.88 MB .*, allowed are 2\.8 MB; convert it in pieces"
    ):
        open_transitions(path, mapping=MAPPING)
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "3000000")
    assert len(open_transitions(path, mapping=MAPPING)) == 10_000


def test_numbers_count_as_they_are_in_the_log(tmp_path, monkeypatch):
    """A thousand flags are 125 bytes of a row in the file (0.9 MB of memory in all), and 4000 in a log."""
    flags = {f"x_{i}": pa.repeat(pa.scalar(True), 1000) for i in range(1000)}
    path = write(zeros(1000, **flags), tmp_path / "log.arrow")
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "20000000")
    with pytest.raises(DataError, match=r"its rows need 2.* MB of memory to be read, allowed are 20 MB"):
        open_transitions(path, mapping=MAPPING)


def test_columns_of_unequal_length(tmp_path):
    """The count of values of column r is changed from 1000 to 1001 where the Parquet file describes it."""
    path = parquet(zeros(1000), tmp_path / "log.parquet")
    content = bytearray(path.read_bytes())
    counted = content.index(b"\xd0\x0f", content.index(b"\x18\x01r", len(content) // 2))
    content[counted] += 2
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_transitions(path, mapping=MAPPING)
    said = "column r has 1001 values in 1000 rows; it is damaged: export it again"
    assert str(caught.value) == f"{path} is not read: {said}"


def test_an_arrow_file_that_ends_before_its_end(tmp_path):
    """The mark of the end of a stream is written over the second of its record batches."""
    path = write(walk(), tmp_path / "log.arrow")
    content = bytearray(path.read_bytes())
    place = [found.start() for found in re.finditer(b"\xff\xff\xff\xff", content)][2]
    content[place : place + 8] = b"\xff\xff\xff\xff\0\0\0\0"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_transitions(path, mapping=MAPPING)
    assert str(caught.value) == (
        f"{path} is not read: it has 1 of 3 parts that its end lists; copy or export it again"
    )
