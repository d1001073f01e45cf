"""Small tables as people keep them, and the formats they keep them in."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
from hypothesis import strategies as st

from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.refusals import one_line

MAPPING = {
    "observations": "x_*",
    "action": "a",
    "reward": "r",
    "episode": "id",
    "time": "t",
    "terminal": "done",
}
# MAPPING as options of a command.
OPTIONS = (
    *("--observations", "x_*", "--action", "a", "--reward", "r"),
    *("--episode", "id", "--time", "t", "--terminal", "done"),
)
COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
    "steps",
)
# Every format that is read; CSV knows no types but those of the mapping.
FORMATS = ("parquet", "feather", "arrow", "arrows", "csv", "csv.gz", "tsv")


def walk(
    lengths=(3, 1, 4), ends=(True, False, False), **columns: Any
) -> dict[str, Any]:
    """Columns of a few episodes; any may be replaced, added, or left out with None."""
    ids = [f"e{i}" for i, length in enumerate(lengths) for _ in range(length)]
    n = len(ids)
    table = {
        "id": ids,
        "t": [t for length in lengths for t in range(length)],
        "x_1": [0.5 * i for i in range(n)],
        "x_2": [10.0 - i for i in range(n)],
        "a": ["left" if i % 3 else "right" for i in range(n)],
        "r": [1.0 + i for i in range(n)],
        "done": [
            ended and t == length
            for length, ended in zip(lengths, ends, strict=True)
            for t in range(1, length + 1)
        ],
    }
    table.update(columns)
    return {name: column for name, column in table.items() if column is not None}


def shuffled(columns: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The rows in another order."""
    order = np.random.default_rng(seed).permutation(len(next(iter(columns.values()))))
    return {name: [column[i] for i in order] for name, column in columns.items()}


def write(columns: dict[str, Any] | pa.Table, path: Path) -> Path:
    """The table in the format that the name tells."""
    table = columns
    if not isinstance(table, pa.Table):
        table = pa.table(table)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=4)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path)
    elif path.suffix in (".arrow", ".arrows"):
        new = pa.ipc.new_stream
        if path.suffix == ".arrow":
            new = pa.ipc.new_file
        with new(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=3)
    else:
        delimiter = ","
        if path.suffix == ".tsv":
            delimiter = "\t"
        compression = None
        if path.suffix == ".gz":
            compression = "gzip"
        with pa.output_stream(path, compression=compression) as stream:
            pa.csv.write_csv(table, stream, pa.csv.WriteOptions(delimiter=delimiter))
    return path


def write_text(text: str | bytes, path: Path) -> Path:
    """A CSV file as it stands."""
    if isinstance(text, str):
        text = text.encode()
    path.write_bytes(text)
    return path


def read(columns, folder, name="log.parquet", action_space=None, **changes):
    """The log of these columns, by the mapping with changes; read in pieces it is the
    same.
    """
    path = write(columns, folder / name)
    mapping = {**MAPPING, **changes}
    log = open_transitions(path, action_space, mapping=mapping)
    assert_same_in_pieces(path, mapping, log, action_space=action_space)
    return log


def refusal(source, folder=None, name="log.parquet", **changes):
    """The message, in one line, on columns that are written to a folder, or on a
    file.
    """
    path = source
    if folder is not None:
        path = write(source, folder / name)
    with one_line(DataError) as caught:
        open_transitions(path, mapping={**MAPPING, **changes})
    return str(caught.value)


def assert_same(log, other):
    """The same rows in the same order."""
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(log, name), getattr(other, name))


def assert_same_in_pieces(path, mapping, whole, piece_rows=2, action_space=None):
    """The rows, notes and extra of a log read at once, as those read in pieces; the
    stream.
    """
    stream = TableStream(path, mapping, action_space, piece_rows=piece_rows)
    pieces = list(stream)
    names = COLUMNS[:-1]
    if whole.has_episodes:
        names = (*COLUMNS, "episode_ids")
    for name in names:
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(joined, getattr(whole, name))
    assert {piece.action_space for piece in pieces} == {whole.action_space}
    assert stream.metadata.notes == whole.metadata.notes
    assert stream.metadata.extra == whole.metadata.extra
    return stream


@st.composite
def tables(draw):
    """Rows of a few episodes in any order, some with flags and next observations."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    rows = []
    for episode, length in enumerate(lengths):
        ends = draw(st.sampled_from(["open", "done", "cut"]))
        times = sorted(
            draw(st.sets(st.integers(-50, 50), min_size=length, max_size=length))
        )
        for i, t in enumerate(times):
            last = i == length - 1
            number = float(len(rows))
            rows.append(
                {
                    "id": f"ep {episode}",
                    "t": t,
                    "x_1": number,
                    "x_10": -number,
                    "a": len(rows) % 3,
                    "r": number / 2,
                    "done": last and ends == "done",
                    "cut": last and ends == "cut",
                    "next_x_1": number + 0.5,
                    "next_x_10": 7.0,
                }
            )
    is_shuffled = draw(st.booleans())
    if is_shuffled:
        return draw(st.permutations(rows))
    return rows
