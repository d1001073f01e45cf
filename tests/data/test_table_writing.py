"""Logs as tables and back: the same rows, spaces and metadata."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.table.arrow_files import write_table
from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.errors import DataError
from tests.data.logs import drawn_logs, small

DESCRIBED = Metadata(gamma=0.9, extra={"task": "walk", "action_names": ["l", "r"]}, notes=("made by hand",))


def round_trip(log, path):
    write_transitions(log, path, force=True)
    return open_transitions(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
class TestTypedFormats:
    @settings(max_examples=8, deadline=None)
    @given(drawn=drawn_logs())
    def test_everything_comes_back(self, tmp_path_factory, suffix, drawn):
        log = drawn.log()
        found = round_trip(log, tmp_path_factory.mktemp("t") / f"log.{suffix}")
        assert found.sha256 == log.sha256
        assert found.action_space == log.action_space
        assert found.observations.dtype == log.observations.dtype
        assert found.actions.dtype == log.actions.dtype
        assert found.has_episodes == log.has_episodes

    def test_metadata(self, tmp_path, suffix):
        log = small(metadata=DESCRIBED)
        found = round_trip(log, tmp_path / f"log.{suffix}")
        assert found.metadata.gamma == 0.9
        assert found.metadata.extra == DESCRIBED.extra
        assert found.metadata.notes == DESCRIBED.notes
        assert found.metadata.sha256 == log.sha256

    def test_pictures_and_long_vectors_are_lists(self, tmp_path, suffix):
        pictures = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3, 1)
        for observations in (pictures, np.ones((4, 1001), dtype=np.float32)):
            log = small(observations=observations, next_observations=observations)
            found = round_trip(log, tmp_path / f"log.{suffix}")
            np.testing.assert_array_equal(found.observations, observations)
            assert found.observations.dtype == observations.dtype

    def test_an_edited_file_says_so(self, tmp_path, suffix):
        path = tmp_path / f"log.{suffix}"
        write_transitions(small(), path)
        table = _read(path)
        table = table.set_column(table.schema.get_field_index("rewards"), "rewards", pa.array([9.0] * 4))
        _write(table, path)
        assert "it was edited" in " ".join(open_transitions(path).metadata.notes)

    def test_a_damaged_description(self, tmp_path, suffix):
        path = tmp_path / f"log.{suffix}"
        write_transitions(small(), path)
        _write(_read(path).replace_schema_metadata({"koffline": "{"}), path)
        with pytest.raises(DataError, match="description is damaged"):
            open_transitions(path)
        # with a mapping of one's own the description is left alone
        mapping = {
            "observations": "observations_*",
            "action": "actions",
            "reward": "rewards",
            "terminal": "terminals",
        }
        assert len(open_transitions(path, mapping=mapping)) > 0


def _read(path):
    return pa.parquet.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


def _write(table, path):
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
        return
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


class TestCsv:
    @settings(max_examples=8, deadline=None)
    @given(drawn=drawn_logs())
    def test_rows_come_back_exactly(self, tmp_path_factory, drawn):
        log = drawn.log()
        path = tmp_path_factory.mktemp("t") / "log.csv"
        if len(log.observation_shape) != 1:
            return
        write_transitions(log, path)
        found = open_transitions(path, log.action_space)
        if log.observations.dtype != np.uint8:
            assert found.sha256 == log.sha256

    def test_pictures_do_not_fit(self, tmp_path):
        pictures = np.zeros((4, 2, 2), dtype=np.uint8)
        with pytest.raises(DataError, match="write parquet"):
            write_transitions(small(observations=pictures, next_observations=pictures), tmp_path / "log.csv")
        assert list(tmp_path.iterdir()) == []


def test_existing_files_stay(tmp_path):
    path = tmp_path / "log.parquet"
    write_table(small(), path, "parquet")
    before = path.read_bytes()
    with pytest.raises(DataError, match="exists already"):
        write_table(small(rewards=[0.0] * 4), path, "parquet")
    assert path.read_bytes() == before


def test_the_same_bytes_again(tmp_path):
    for suffix in ("parquet", "arrow", "csv"):
        for name in ("a", "b"):
            write_transitions(small(), tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_spaces_survive(tmp_path):
    for space, actions in ((Discrete(7), [0, 1, 1, 0]), (Continuous(2, -2, 2), np.ones((4, 2)))):
        found = round_trip(small(actions=np.asarray(actions), action_space=space), tmp_path / "log.parquet")
        assert found.action_space == space
