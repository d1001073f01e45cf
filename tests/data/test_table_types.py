"""Types of columns that are rare, narrow, or of another library: they are read, or
refused in one line.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from koffline.data.sources import open_raw, open_transitions
from koffline.data.spaces import Bounds
from koffline.data.table.inspection import inspect_table
from koffline.data.table.reading import TableStream
from koffline.errors import DataError

ROWS = {
    "x": [1.0, 2.0, 3.0],
    "a": [0, 1, 0],
    "r": [1.0, 1.0, 2.0],
    "e": [1, 1, 2],
    "t": [1, 2, 3],
}
MAPPING = {
    "observations": "x",
    "action": "a",
    "reward": "r",
    "episode": "e",
    "time": "t",
    "last_row": "terminal",
}
# What one column may be besides; the column is called u.
ROLES = (
    {"observations": "u"},
    {"action": "u"},
    {"reward": "u"},
    {"reward": "2 * u"},
    {"weight": "u"},
    {"episode": "u"},
    {"time": "u"},
    {"cluster": "u"},
    {"by": "u"},
    {"terminal": "u", "last_row": None},
    {"terminal": "u == 'a'", "last_row": None},
    {"observations": ["x", "u"], "encode": {"u": "one-hot"}},
)


def days(*numbers):
    return pa.array(numbers, pa.int32()).cast(pa.date32())


def instants(*seconds, zone=None):
    return pa.array(seconds, pa.timestamp("s", zone))


def columns():
    """Columns of three values by name, of types and with values that polars does not
    know.
    """
    return {
        "dense union": pa.UnionArray.from_dense(
            pa.array([0, 0, 0], pa.int8()),
            pa.array([0, 1, 2], pa.int32()),
            [pa.array([1.0, 2.0, 3.0])],
        ),
        "sparse union": pa.UnionArray.from_sparse(
            pa.array([0, 0, 0], pa.int8()), [pa.array([1, 2, 3])]
        ),
        "list of unions": pa.nulls(
            3, pa.list_(pa.dense_union([pa.field("a", pa.int64())]))
        ),
        "lists of no width": pa.array([[], [], []], pa.list_(pa.float64(), 0)),
        "empty lists": pa.array([[], [], []], pa.list_(pa.float64())),
        "views of lists": pa.array([[1.0], [2.0], [3.0]], pa.list_view(pa.float64())),
        "calendar lengths": pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval()),
        "run ends": pa.RunEndEncodedArray.from_arrays([3], [1.0]),
        "a struct with one name twice": pa.nulls(
            3, pa.struct([("a", pa.int64()), ("a", pa.int64())])
        ),
        "an empty struct": pa.array([{}] * 3, pa.struct([])),
        "bytes of no width": pa.array([b""] * 3, pa.binary(0)),
        "bytes that are no text": pa.array([b"\xff", b"a", b"b"]),
        "a map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
        "decimals of 256 bits": pa.array([1, 2, 3], pa.decimal256(50, 2)),
        "decimals of thousands": pa.nulls(3, pa.decimal128(10, -2)),
        "json": pa.ExtensionArray.from_storage(
            pa.json_(pa.string()), pa.array(["1"] * 3)
        ),
        "booleans of 8 bits": pa.ExtensionArray.from_storage(
            pa.bool8(), pa.array([1, 0, 1], pa.int8())
        ),
        "uuid": pa.ExtensionArray.from_storage(
            pa.uuid(), pa.array([b"\xff" * 16] * 3, pa.binary(16))
        ),
        "zone Z": instants(1, 2, 3, zone="Z"),
        "zone on Mars": instants(1, 2, 3, zone="Mars/Olympus"),
        "lists in zone Z": pa.array([[1]] * 3, pa.list_(pa.timestamp("us", "Z"))),
        "a dictionary in zone Z": pa.DictionaryArray.from_arrays(
            pa.array([0, 1, 1]), instants(1, 2, zone="Z")
        ),
        "the year 300,000": instants(10**13, 1, 2),
        "the year 300,000 in Tokyo": instants(10**13, 1, 2, zone="Asia/Tokyo"),
        "the last second of 9999 in Tokyo": instants(
            253_402_300_799, 0, 1, zone="Asia/Tokyo"
        ),
        "the year 0": instants(-62_135_596_801, 0, 1),
        "a dictionary of the year 300,000": pa.DictionaryArray.from_arrays(
            pa.array([0, 0, 0]), instants(10**13)
        ),
        "lists of the year 300,000": pa.array(
            [[10**13]] * 3, pa.list_(pa.timestamp("s"))
        ),
        "structs of the year 300,000": pa.array(
            [{"a": 10**13}] * 3, pa.struct([("a", pa.timestamp("s"))])
        ),
        "the last day of 32 bits": days(2**31 - 1, 1, 2),
        "lengths of 3 billion years": (
            pa.array([2**60, 1, 2], pa.int64()).cast(pa.duration("ms"))
        ),
        "lengths of time": pa.array([1, 2, 2], pa.duration("us")),
        "a clock that shows 25 hours": (
            pa.array([90_000, 1, 2], pa.int32()).cast(pa.time32("s"))
        ),
        "half a day as a date": pa.array([1, 2, 3], pa.int64()).cast(pa.date64()),
    }


def write(column, path, metadata=None):
    """A Parquet or Arrow file with this column, called u; False if the format cannot
    hold its type.
    """
    table = pa.table(ROWS).append_column(
        pa.field("u", column.type, metadata=metadata), column
    )
    try:
        if path.suffix == ".parquet":
            pa.parquet.write_table(table, path)
        else:
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_file(file, table.schema) as writer,
            ):
                writer.write_table(table)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError):
        path.unlink(missing_ok=True)
        return False
    return True


def read_in_every_role(path):
    """By role of u the refusal, empty if it is read.

    Without a role it must be no hindrance.
    """
    open_transitions(path, mapping=MAPPING)
    assert {column.name for column in inspect_table(path).columns} == {*ROWS, "u"}
    outcomes = {}
    for role in ROLES:
        mapping = {
            name: value
            for name, value in {**MAPPING, **role}.items()
            if value is not None
        }
        try:
            open_raw(path, None, mapping).transitions()
        except DataError as error:
            outcomes[str(role)] = str(error)
        else:
            outcomes[str(role)] = ""
    return outcomes


def read_all(folder):
    """Run in a process of its own, whose standard error is looked at."""
    for i, (name, column) in enumerate(columns().items()):
        for suffix in (".arrow", ".parquet"):
            if write(column, folder / f"{i}{suffix}"):
                refusals = read_in_every_role(folder / f"{i}{suffix}").values()
                assert not any(
                    "truncated or corrupt" in refusal for refusal in refusals
                ), (
                    name,
                    suffix,
                    refusals,
                )
                assert not any("\n" in refusal for refusal in refusals), (
                    name,
                    suffix,
                    refusals,
                )
                print(name, suffix, "" in refusals)


def test_rare_types_leave_nothing_on_standard_error(tmp_path):
    """polars prints a panic there before Python sees an exception, also for a column
    that nobody uses.
    """
    code = (
        "import pathlib, sys; from tests.data.test_table_types import read_all\n"
        "read_all(pathlib.Path(sys.argv[1]))"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    variables = {**os.environ, "RUST_BACKTRACE": "1"}
    done = subprocess.run(
        words, cwd=root, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) > len(columns())
    for name in (
        "zone Z",
        "zone on Mars",
        "a dictionary in zone Z",
        "booleans of 8 bits",
    ):
        assert f"{name} .arrow True" in lines
    for name in (
        "dense union",
        "lists of no width",
        "the year 300,000",
        "the last day of 32 bits",
    ):
        assert f"{name} .arrow False" in lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "the year 300,000",
            (
                "column u .* holds a time that no calendar has, 10000000000000000 ms"
                " since 1970"
            ),
        ),
        ("the last day of 32 bits", "2147483647 days since 1970; check its unit"),
        ("lengths of 3 billion years", "holds a duration that no calendar has"),
        ("half a day as a date", "column u is damaged"),
        ("calendar lengths", "column u has a type that is not read"),
    ],
)
def test_a_column_that_cannot_be_shown_is_named(tmp_path, name, words):
    path = tmp_path / "log.arrow"
    assert write(columns()[name], path)
    with pytest.raises(DataError, match=words):
        open_transitions(path, mapping={**MAPPING, "time": "u"})


def test_an_unknown_zone_changes_no_instant(tmp_path):
    """The second row comes first; the instants are those that the file holds in UTC."""
    for name, zone in (("known", "Europe/Berlin"), ("unknown", "Mars/Olympus")):
        write(instants(60, 0, 120, zone=zone), tmp_path / f"{name}.arrow")
    logs = [
        open_transitions(tmp_path / f"{name}.arrow", mapping={**MAPPING, "time": "u"})
        for name in ("known", "unknown")
    ]
    assert logs[0].observations.ravel().tolist() == [2.0, 1.0, 3.0]
    assert logs[0].sha256 == logs[1].sha256


def test_metadata_of_a_field_does_not_change_its_type(tmp_path):
    for metadata in (
        {b"ARROW:extension:name": b"foo"},
        {b"ARROW:extension:name": b"polars.x"},
    ):
        for suffix in (".arrow", ".parquet"):
            path = tmp_path / f"log{suffix}"
            assert write(pa.array(["a", "b", "c"]), path, metadata)
            assert open_raw(
                path, None, {**MAPPING, "action": "u"}
            ).transitions().actions.tolist() == [
                0,
                1,
                2,
            ]


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize("extreme", [False, True])
def test_whole_numbers_of_any_width(tmp_path, kind, extreme):
    """Each role takes the numbers as they are, from the smallest to the largest."""
    low = 0
    high = 1
    if extreme:
        low = int(np.iinfo(kind).min)
        high = int(np.iinfo(kind).max)
    numbers = pa.array(np.array([low, high, low, high], kind))
    path = tmp_path / "log.parquet"
    plain = {
        "x": [1.0, 2.0, 3.0, 4.0],
        "a": [0, 1, 0, 1],
        "r": [1.0] * 4,
        "e": [1, 1, 2, 2],
        "u": numbers,
    }
    pa.parquet.write_table(pa.table(plain), path)
    mapping = {**MAPPING, "time": None}
    for role, key, expected in (
        ({"time": "u"}, "rewards", [1.0] * 4),
        ({"reward": "u"}, "rewards", numbers),
        ({"reward": "2 * u - 1"}, "rewards", [2.0 * low - 1.0, 2.0 * high - 1.0] * 2),
        ({"observations": "u"}, "observations", numbers),
        ({"action": "u", "action_names": [low, high]}, "actions", [0, 1, 0, 1]),
    ):
        log = open_transitions(path, mapping={**mapping, **role})
        np.testing.assert_allclose(
            getattr(log, key).ravel(), np.array(expected, np.float64), rtol=1e-7
        )
        pieces = TableStream(path, {**mapping, **role}, piece_rows=2)
        assert sum(map(len, pieces)) == 4
    space = Bounds(float(low), float(high)) if extreme else None
    log = open_transitions(path, space, mapping={**mapping, "action": "u"})
    np.testing.assert_allclose(
        log.actions.ravel(), np.array(numbers, np.float64), rtol=1e-7
    )


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int16", "uint16", "int32", "uint64", "float32"]
)
def test_a_gap_between_narrow_times_is_found(tmp_path, kind):
    """From -100 to 100 is 200 steps, which 8 bits do not hold."""
    low = 0 if kind.startswith("u") else -100
    times = [*range(low, low + 11), low + 127 if kind == "uint8" else 100]
    rows = len(times)
    table = {
        "x": range(rows),
        "a": [0, 1] * (rows // 2),
        "r": [1.0] * rows,
        "e": [1] * rows,
    }
    path = tmp_path / "log.parquet"
    pa.parquet.write_table(
        pa.table({**table, "t": pa.array(np.array(times, kind))}), path
    )
    notes = open_transitions(path, mapping=MAPPING).metadata.notes
    assert any("1 step is longer than others" in note for note in notes)


def test_a_number_beyond_16_bits_is_imputed(tmp_path):
    path = tmp_path / "log.parquet"
    half = pa.array([np.float16(1.0), None, np.float16(3.0)], pa.float16())
    pa.parquet.write_table(pa.table({**ROWS, "u": half}), path)
    log = open_transitions(
        path, mapping={**MAPPING, "observations": "u", "impute": {"u": 1e6}}
    )
    assert log.observations.ravel().tolist() == [1.0, 1e6, 3.0]
