"""Tables from strangers and from broken disks: one line each, nothing read that is not there."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.sources import open_raw, open_transitions
from koffline.data.table import reading as pieces
from koffline.data.table.files import is_table_source
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.data.table_rows import FORMATS, MAPPING, shuffled, walk, write, write_text


def refusal(source, mapping=MAPPING, **keywords):
    with pytest.raises(DataError) as caught:
        open_transitions(source, mapping=mapping, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows_or_message(path):
    try:
        return len(open_raw(path, None, MAPPING).columns["rewards"]), ""
    except DataError as error:
        return 0, str(error)


class TestDamage:
    @pytest.mark.parametrize("suffix", FORMATS)
    def test_every_cut_is_an_error_in_one_line_or_a_whole_table(self, tmp_path, suffix):
        content = write(walk(), tmp_path / f"log.{suffix}").read_bytes()
        whole = open_transitions(tmp_path / f"log.{suffix}", mapping=MAPPING)
        for size in np.linspace(0, len(content) - 1, 40).astype(int):
            path = tmp_path / f"cut.{suffix}"
            path.write_bytes(content[:size])
            rows, message = rows_or_message(path)
            assert "\n" not in message
            if rows:  # a CSV file may end after any line, an Arrow stream without its mark of the end
                assert suffix in ("csv", "tsv", "arrows")
                assert rows <= len(whole)
            else:
                assert "cut" in message

    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from(FORMATS),
        st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=8)), max_size=6),
    )
    def test_changed_bytes(self, tmp_path_factory, suffix, changes):
        path = write(walk(), tmp_path_factory.mktemp("t") / f"log.{suffix}")
        content = bytearray(path.read_bytes())
        for place, new in changes:
            at = place % len(content)
            content[at : at + len(new)] = new
        path.write_bytes(content)
        assert "\n" not in rows_or_message(path)[1]

    def test_empty_files_and_tables(self, tmp_path):
        for name in ("a.parquet", "a.csv", "a.arrow"):
            (tmp_path / name).touch()
            assert "empty" in refusal(tmp_path / name)
        nothing = pa.table({name: pa.array(column).slice(0, 0) for name, column in walk().items()})
        assert "no rows" in refusal(write(nothing, tmp_path / "b.parquet"))
        assert "no rows" in refusal(write_text("id,t,x_1,a,r,done\n", tmp_path / "b.csv"))

    def test_other_files_by_the_name_of_a_table(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"a,b\n1,2\n")
        assert "corrupt Parquet" in refusal(tmp_path / "a.parquet")
        (tmp_path / "a.csv").write_bytes(b"\x80\x04\x95pickle")
        assert "no table" in refusal(tmp_path / "a.csv") or "UTF-8" in refusal(tmp_path / "a.csv")
        (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(100))
        assert "version 1" in refusal(tmp_path / "old.feather")

    def test_a_mapping_is_for_tables(self, tmp_path):
        path = tmp_path / "log.hdf5"
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
        assert "a mapping is for tables" in refusal(path)
        assert "a mapping is for tables" in refusal(tmp_path)
        assert "does not exist" in refusal(tmp_path / "none.parquet")
        assert "does not exist" in refusal(tmp_path / "none.csv")
        assert "--shard-rows" in refusal(write(walk(), tmp_path / "log.parquet"), lazy=True)
        log = open_transitions(tmp_path / "log.parquet", mapping=MAPPING)
        assert "in memory already" in refusal(log)

    def test_without_a_mapping(self, tmp_path):
        for suffix in FORMATS:
            message = refusal(write(walk(), tmp_path / f"log.{suffix}"), mapping=None)
            assert "--observations 'x_*' --action a --reward r --episode id --time t" in message

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, tmp_path):
        path = write(walk(), tmp_path / "log.parquet")
        path.chmod(0)
        assert "no permission" in refusal(path)


@pytest.mark.parametrize("way", ["", "lazily: "])
def test_statistics_on_which_arrow_ends_the_process(way):
    """Found by fuzzing; in a process of its own, which the fault would end."""
    path = Path(__file__).parent / "files" / "damaged_statistics.parquet"
    read = "TableStream" if way else "open_transitions"
    code = (
        "import sys; from koffline.data.sources import open_transitions\n"
        "from koffline.errors import DataError\n"
        "from koffline.data.table.reading import TableStream; from tests.data.table_rows import MAPPING\n"
        f"try:\n    {read}(sys.argv[1], {'' if way else 'mapping='}{{**MAPPING, 'action': 'x_0'}})\n"
        "except DataError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=path.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is a truncated or corrupt Parquet file (Repetition level histogram size mismatch" in done.stdout


class TestBombs:
    """Small files that would be large on disk; those that would be large in memory: test_table_room."""

    def test_rows_of_one_value(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KOFFLINE_MAX_BYTES", "2000000")
        monkeypatch.setattr("koffline.data.table.rows.EXPANSION", 100)
        columns = {name: pa.repeat(pa.scalar(column[-1]), 100_000) for name, column in walk().items()}
        path = tmp_path / "log.parquet"
        pa.parquet.write_table(pa.table(columns), path, compression="zstd")
        with pytest.raises(DataError, match="made to fill disks"):
            TableStream(path, MAPPING)


class TestCsvText:
    BODY = "id,t,x_1,a,r,done\ne,0,1,0,1,0\ne,1,2,0,1,1\n"

    def read(self, tmp_path, text, name="log.csv"):
        return open_transitions(write_text(text, tmp_path / name), mapping=MAPPING)

    def test_marks_ends_and_separators(self, tmp_path):
        plain = self.read(tmp_path, self.BODY)
        assert len(plain) == 2
        for text in (
            "\ufeff" + self.BODY,
            self.BODY.replace("\n", "\r\n"),
            self.BODY.replace("\n", "\r"),
            self.BODY.replace("\n", "\n\n"),
            self.BODY.replace(",2,", ", 2 ,"),
            self.BODY.replace(",", ";"),
            self.BODY.replace(",", "|"),
            self.BODY.replace("x_1", '"x_1"'),
            self.BODY.rstrip("\n"),
        ):
            assert self.read(tmp_path, text).sha256 == plain.sha256
        assert self.read(tmp_path, self.BODY, "log.data").sha256 == plain.sha256

    def test_other_encodings(self, tmp_path):
        assert "UTF-16" in refusal(write_text(self.BODY.encode("utf-16"), tmp_path / "a.csv"))
        latin = self.BODY.replace("e,", "é,").encode("latin-1")
        assert "not UTF-8" in refusal(write_text(latin, tmp_path / "b.csv"))
        latin = self.BODY.replace("id", "idé").encode("latin-1")
        assert "not UTF-8" in refusal(write_text(latin, tmp_path / "c.csv"))

    def test_rows_of_unequal_length(self, tmp_path):
        assert "has a row of more fields than the 6 of its header" in refusal(
            write_text(self.BODY + "e,2,3,0,1,1,9\n", tmp_path / "a.csv")
        )

    def test_headers_twice(self, tmp_path):
        assert "more than one column named r" in refusal(
            write_text(self.BODY.replace("x_1", "r"), tmp_path / "a.csv")
        )

    def test_a_long_line_and_a_small_bomb(self, tmp_path):
        line = write_text("id,t,x_1,a,r,done\n" + '"' + "e" * 2**23 + '",0,1,0,1,0\n', tmp_path / "a.csv")
        assert "\n" not in refusal(line)
        (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(bytes(2**25)))
        assert "line ends" in refusal(tmp_path / "bomb.csv.gz") or "zero bytes" in refusal(
            tmp_path / "bomb.csv.gz"
        )
        (tmp_path / "zeros.csv").write_bytes(self.BODY.encode() + bytes(2**20))
        assert "\n" not in refusal(tmp_path / "zeros.csv")


class TestRecognition:
    def test_by_content_for_parquet_and_arrow(self, tmp_path):
        for suffix in ("parquet", "arrow", "arrows"):
            path = write(walk(), tmp_path / f"log.{suffix}")
            renamed = path.rename(tmp_path / f"{suffix}.dat")
            assert is_table_source(str(renamed))
            assert len(open_transitions(renamed, mapping=MAPPING)) == 6

    def test_what_is_no_table(self, tmp_path):
        assert not is_table_source("minari:some/set-v0")
        assert not is_table_source(str(tmp_path))
        assert not is_table_source(str(tmp_path / "none*"))
        (tmp_path / "notes.txt").write_text("a,b\n")
        assert not is_table_source(str(tmp_path / "notes.txt"))

    def test_links_in_folders_are_not_followed(self, tmp_path):
        inside, outside = tmp_path / "in", tmp_path / "out"
        inside.mkdir()
        outside.mkdir()
        write(walk(), outside / "other.parquet")
        write(walk(), inside / "log.parquet")
        (inside / "more").symlink_to(outside)
        assert len(open_transitions(inside, mapping=MAPPING)) == 6


class TestStreams:
    def test_many_parts_share_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pieces, "_MOST_PARTS", 3)
        table = shuffled(walk([3] * 20, [True] * 20))
        path = write(table, tmp_path / "log.parquet")
        stream = TableStream(path, MAPPING, piece_rows=1, scratch=tmp_path)
        found = list(stream)
        assert not stream.contiguous
        assert len(found) == 3
        whole = open_transitions(path, mapping=MAPPING)
        np.testing.assert_array_equal(np.concatenate([each.rewards for each in found]), whole.rewards)
        assert [each.name for each in tmp_path.iterdir()] == ["log.parquet"]

    def test_a_pass_that_is_left_leaves_nothing(self, tmp_path):
        path = write(shuffled(walk([3] * 20, [True] * 20)), tmp_path / "log.parquet")
        pass_ = iter(TableStream(path, MAPPING, piece_rows=1, scratch=tmp_path))
        next(pass_)
        pass_.close()
        assert [each.name for each in tmp_path.iterdir()] == ["log.parquet"]

    def test_no_room_for_parts(self, tmp_path):
        path = write(shuffled(walk()), tmp_path / "log.parquet")
        with pytest.raises(DataError, match="TMPDIR"):
            list(TableStream(path, MAPPING, piece_rows=1, scratch=tmp_path / "none"))

    def test_without_episodes_rows_come_in_time(self, tmp_path):
        table = walk((8,), (True,))
        path = write(table, tmp_path / "log.parquet")
        assert len(next(iter(TableStream(path, {**MAPPING, "episode": None})))) == 8
        path = write(shuffled(table), tmp_path / "mixed.parquet")
        with pytest.raises(DataError, match="do not rise"):
            list(TableStream(path, {**MAPPING, "episode": None}))

    def test_pieces_of_at_least_one_row(self, tmp_path):
        path = write(walk(), tmp_path / "log.parquet")
        with pytest.raises(DataError, match="at least 1"):
            TableStream(path, MAPPING, piece_rows=0)

    def test_remote_parts(self, tmp_path):
        path = write(shuffled(walk()), tmp_path / "log.parquet")
        fsspec.filesystem("memory").pipe("/streams/log.parquet", path.read_bytes())
        rows = sum(len(piece) for piece in TableStream("memory://streams/log.parquet", MAPPING, piece_rows=2))
        assert rows == len(open_transitions(path, mapping=MAPPING))
