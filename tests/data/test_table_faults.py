"""Tables from strangers and from broken disks: one line each, nothing read that is not
there.
"""

import gzip
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

from koffline.data.sources import open_raw, open_transitions
from koffline.data.table import reading as pieces
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.data.table_rows import (
    FORMATS,
    MAPPING,
    refusal,
    shuffled,
    walk,
    write,
    write_text,
)

BODY = "id,t,x_1,a,r,done\ne,0,1,0,1,0\ne,1,2,0,1,1\n"


def rows_or_message(path):
    try:
        return len(open_raw(path, None, MAPPING).columns["rewards"]), ""
    except DataError as error:
        return 0, str(error)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_cut_is_an_error_in_one_line_or_a_whole_table(tmp_path, suffix):
    content = write(walk(), tmp_path / f"log.{suffix}").read_bytes()
    for size in np.linspace(0, len(content) - 1, 20).astype(int):
        path = tmp_path / f"cut.{suffix}"
        path.write_bytes(content[:size])
        rows, message = rows_or_message(path)
        assert "\n" not in message
        # a CSV file may end after any line, an Arrow stream without its mark of the end
        if rows:
            assert suffix in ("csv", "tsv", "arrows")
            assert rows <= 6
        else:
            assert "cut" in message


# name and content of a file, words of the refusal
FILES = [
    *((f"a.{suffix}", b"", "empty") for suffix in ("parquet", "csv", "arrow")),
    ("b.csv", "id,t,x_1,a,r,done\n", "no rows"),
    ("a.parquet", b"a,b\n1,2\n", "corrupt Parquet"),
    ("a.csv", b"\x80\x04\x95pickle", "is no table that koffline knows"),
    ("a.npy", b"\x93NUMPY\x01\x00v\x00{'descr'", "is no table that koffline knows"),
    ("a.tfrecord", b"\x10\0\0\0\0\0\0\0abcdef", "is no table that koffline knows"),
    ("a", "x,a\n1,2\n".encode("utf-16"), "is no table, or not UTF-8 text"),
    ("a.pkl.gz", gzip.compress(b"\x80\x04\x95\xff"), "is no table, or not UTF-8 text"),
    ("a.csv", BODY.encode("utf-16"), "not UTF-8"),
    ("a.csv", BODY.replace("e,", "é,").encode("latin-1"), "not UTF-8"),
    (
        "a.csv",
        BODY + "e,2,3,0,1,1,9\n",
        "more fields than the first line, its header (id, t,",
    ),
    ("a.csv", BODY.replace("\ne,1", '\n"e,1'), "quote mark that is not closed"),
    ("a.csv", BODY.replace("x_1", "r"), "more than one column named r"),
    ("bomb.csv.gz", gzip.compress(bytes(2**25)), "line ends"),
    ("zeros.csv", BODY.encode() + bytes(2**20), "zeros.csv"),
    (
        "a.csv",
        BODY.replace("1,2,", "1,oops,"),
        "x_1 is not all numbers: row 2 holds 'oops'",
    ),
    ("a.csv", BODY.replace("1,2,", "1,1e400,"), "holds inf in row 1"),
    ("a.csv", BODY.replace("e,1,", "e,,"), "values are missing (t: 1, of 2 rows)"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES)
def test_files_that_are_refused(tmp_path, name, content, words):
    assert words in refusal(write_text(content, tmp_path / name))


def test_a_mapping_is_for_tables_and_asked_for(tmp_path):
    path = write(walk(), tmp_path / "log.parquet")
    for source, declared, words in (
        (tmp_path / "none", {"mapping": MAPPING}, "does not exist"),
        (
            write_text(b"PK\3\4", tmp_path / "log.npz"),
            {"mapping": MAPPING},
            "corrupt NPZ file",
        ),
        (path, {"mapping": MAPPING, "lazy": True}, "--shard-rows"),
        (
            open_transitions(path, mapping=MAPPING),
            {"mapping": MAPPING},
            "in memory already",
        ),
    ):
        with pytest.raises(DataError, match=words):
            open_transitions(source, **declared)
    for suffix in FORMATS:  # known by their content, but for text
        name = (
            "log.dat" if suffix in ("parquet", "arrow", "arrows") else f"log.{suffix}"
        )
        path = write(walk(), tmp_path / f"log.{suffix}").rename(tmp_path / name)
        with pytest.raises(
            DataError, match="--action a --reward r --episode id --time t"
        ):
            open_transitions(path)


def test_links_in_folders_are_not_followed(tmp_path):
    inside = tmp_path / "in"
    outside = tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    write(walk(), outside / "other.parquet")
    write(walk(), inside / "log.parquet")
    (inside / "more").symlink_to(outside)
    assert len(open_transitions(inside, mapping=MAPPING)) == 6


def test_statistics_on_which_arrow_ends_the_process():
    """Found by fuzzing; in a process of its own, which the fault would end."""
    path = Path(__file__).parent / "files" / "damaged_statistics.parquet"
    code = (
        "import sys; from koffline.data.sources import open_transitions\nfrom"
        " koffline.errors import DataError\nfrom koffline.data.table.reading import"
        " TableStream; from tests.data.table_rows import MAPPING\nfor read in"
        " (open_transitions, TableStream):\n    try:\n        read(sys.argv[1],"
        " mapping={**MAPPING, 'action': 'x_0'})\n    except DataError as error:\n      "
        "  print(error)"
    )
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        words, cwd=path.parents[3], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count(
            "corrupt Parquet file (OSError: Repetition level histogram size mismatch"
        )
        == 2
    )


def test_columns_of_unequal_length(tmp_path):
    """The count of values of column r is changed from 1000 to 1001 where the Parquet
    file describes it.
    """
    columns = {
        name: pa.repeat(pa.scalar(column[0]), 1000)
        for name, column in walk(id=[0] * 8).items()
    }
    path = tmp_path / "log.parquet"
    pa.parquet.write_table(pa.table(columns), path)
    content = bytearray(path.read_bytes())
    content[
        content.index(b"\xd0\x0f", content.index(b"\x18\x01r", len(content) // 2))
    ] += 2
    path.write_bytes(content)
    message = "column r has 1001 values in 1000 rows; it is damaged: export it again"
    assert refusal(path) == f"{path} is not read: {message}"


def test_an_arrow_file_that_ends_before_its_end(tmp_path):
    """The mark of the end of a stream is written over the second of its record
    batches.
    """
    path = write(walk(), tmp_path / "log.arrow")
    content = bytearray(path.read_bytes())
    place = [match.start() for match in re.finditer(b"\xff\xff\xff\xff", content)][2]
    content[place : place + 8] = b"\xff\xff\xff\xff\0\0\0\0"
    path.write_bytes(content)
    message = (
        "is a truncated or corrupt Arrow file (Unexpected empty message in IPC file"
        " format)"
    )
    assert refusal(path) == f"{path} {message}; copy or export it again"


def test_arrow_files_of_polars(tmp_path):
    """Their texts are views, and no stream could be read from the file's middle."""
    path = tmp_path / "log.arrow"
    table = walk()
    pl.DataFrame(table).write_ipc(path)
    log = open_transitions(path, mapping=MAPPING)
    assert (
        log.sha256
        == open_transitions(
            write(table, tmp_path / "log.parquet"), mapping=MAPPING
        ).sha256
    )


def test_csv_marks_ends_and_separators(tmp_path):
    plain = open_transitions(write_text(BODY, tmp_path / "log.csv"), mapping=MAPPING)
    assert len(plain) == 2
    for text in (
        "\ufeff" + BODY,
        BODY.replace("\n", "\r\n"),
        BODY.replace("\n", "\r"),
        BODY.replace("\n", "\n\n"),
        BODY.replace(",2,", ", 2 ,"),
        BODY.replace(",", ";"),
        BODY.replace(",", "|"),
        BODY.replace("x_1", '"x_1"'),
        BODY.rstrip("\n"),
    ):
        for name in ("log.csv", "log.data"):
            read = open_transitions(write_text(text, tmp_path / name), mapping=MAPPING)
            assert read.sha256 == plain.sha256


class TestStreams:
    def test_rows_of_one_value(self, tmp_path, monkeypatch):
        """Small files that would be large on disk; those that would be large in memory:
        test_table_room.
        """
        monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2000000")
        monkeypatch.setattr("koffline.data.table.table_rows.EXPANSION", 100)
        columns = {
            name: pa.repeat(pa.scalar(column[-1]), 100_000)
            for name, column in walk().items()
        }
        path = tmp_path / "log.parquet"
        pa.parquet.write_table(pa.table(columns), path, compression="zstd")
        with pytest.raises(DataError, match="made to fill disks"):
            TableStream(path, MAPPING)

    def test_parts_are_few_and_removed_and_may_come_from_elsewhere(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(pieces, "_MOST_PARTS", 3)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        path = write(shuffled(walk([3] * 20, [True] * 20)), tmp_path / "log.parquet")
        whole = open_transitions(path, mapping=MAPPING)
        fsspec.filesystem("memory").pipe("/streams/log.parquet", path.read_bytes())
        for source in (path, "memory://streams/log.parquet"):
            stream = TableStream(source, MAPPING, piece_rows=1)
            read_pieces = list(stream)
            assert not stream.contiguous
            assert len(read_pieces) == 3
            np.testing.assert_array_equal(
                np.concatenate([piece.rewards for piece in read_pieces]), whole.rewards
            )
        left = iter(stream)
        next(left)
        left.close()
        assert [piece.name for piece in tmp_path.iterdir()] == ["log.parquet"]
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        with pytest.raises(DataError, match="TMPDIR"):
            list(TableStream(path, MAPPING, piece_rows=1))
