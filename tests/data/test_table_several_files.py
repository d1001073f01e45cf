"""Tables in several files: a column is one kind of thing in all of them."""

import itertools

import pyarrow as pa
import pyarrow.parquet
import pytest

from koffline.data.sources import convert_to_shards, open_transitions
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.refusals import one_line

MAPPING = {
    "observations": "x",
    "action": "a",
    "reward": "r",
    "episode": "e",
    "time": "t",
}
MAPPING |= {"last_row": "terminal"}
ROLES = (
    {"time": "u"},
    {"reward": "u"},
    {"observations": "u"},
    {"action": "u"},
    {"by": "u"},
    {"terminal": "u"},
    {"episode": "u"},
)
KINDS = {
    "number": pa.array([0, 1]),
    "instant": pa.array([0, 1], pa.timestamp("s")),
    "instant in UTC": pa.array([0, 1], pa.timestamp("s", "UTC")),
    "day": pa.array([0, 1], pa.int32()).cast(pa.date32()),
    "length": pa.array([0, 1], pa.duration("s")),
    "hour": pa.array([0, 1], pa.int32()).cast(pa.time32("s")),
    "flag": pa.array([False, True]),
    "text": pa.array(["0", "1"]),
    "bytes": pa.array([b"0", b"1"]),
    "list of numbers": pa.array([[0], [1]]),
    "list of instants": pa.array([[0], [1]], pa.list_(pa.timestamp("s"))),
    "list of flags": pa.array([[False], [True]]),
    "struct": pa.array([{"a": 0}, {"a": 1}]),
}


def folder_of(path, *columns):
    """A folder with a Parquet file for each column, which is called u."""
    path.mkdir()
    for i, column in enumerate(columns):
        rows = {
            "x": [1.0, 2.0],
            "a": [0, 1],
            "r": [1.0, 1.0],
            "e": [i, i],
            "t": [0, 1],
            "u": column,
        }
        pa.parquet.write_table(pa.table(rows), path / f"{i}.parquet")
    return path


@pytest.mark.parametrize(("first", "later"), [*itertools.permutations(KINDS, 2)])
def test_columns_of_different_kinds_are_refused_in_both_orders(tmp_path, first, later):
    """polars casts instants to whole numbers without loss, and the other way round."""
    folder = folder_of(tmp_path / "log", KINDS[first], KINDS[later])
    named = 0
    for role in ROLES:
        mapping = {**MAPPING, **role}
        with one_line(DataError) as caught:
            open_transitions(folder, mapping=mapping)
        with one_line(DataError):
            list(TableStream(folder, mapping))
        with one_line(DataError):
            convert_to_shards(folder, tmp_path / "shards", 10, mapping=mapping)
        assert not (tmp_path / "shards").exists()
        named += "1.parquet: column u is " in str(caught.value)
    # no role takes these, in whatever file
    if first not in (
        "struct",
        "list of instants",
    ):
        assert named


@pytest.mark.parametrize("later", ["number", "day", "text", "flag", "list of numbers"])
def test_one_kind_in_all_files_is_read(tmp_path, later):
    """Files without values of a column may give it any type."""
    role = {"day": "time", "text": "action", "flag": "action"}.get(
        later, "observations"
    )
    empty = pa.nulls(2, KINDS[later].type)
    for number, other in enumerate((KINDS[later], empty)):
        folder = folder_of(tmp_path / str(number), KINDS[later], other)
        mapping = {**MAPPING, "time": None, role: "u"}
        if other is empty:
            with pytest.raises(DataError, match="values are missing"):
                open_transitions(folder, mapping=mapping)
        else:
            assert len(open_transitions(folder, mapping=mapping)) == 4


def test_a_file_without_rows_may_have_any_types(tmp_path):
    folder = folder_of(tmp_path / "log", KINDS["number"])
    nothing = pa.table(
        {name: pa.nulls(0, pa.string()) for name in ("x", "a", "r", "e", "t")}
    )
    pa.parquet.write_table(nothing, folder / "1.parquet")
    assert len(open_transitions(folder, mapping=MAPPING)) == 2


@pytest.mark.parametrize("actions", [("0 1", "mail call"), ("mail call", "0 1")])
def test_csv_files_that_number_or_name_the_actions(tmp_path, actions):
    for i, pair in enumerate(actions):
        first, second = pair.split()
        text = f"x,a,r,e,t\n1,{first},1,{i},0\n2,{second},1,{i},1\n"
        (tmp_path / f"{i}.csv").write_text(text, encoding="utf-8")
    with one_line(DataError) as caught:
        open_transitions(tmp_path, mapping=MAPPING)
    assert "1.csv: column a holds " in str(caught.value)
    log = open_transitions(
        tmp_path, mapping={**MAPPING, "action_names": ["0", "1", "mail", "call"]}
    )
    assert sorted(log.actions.tolist()) == [0, 1, 2, 3]


def test_a_list_beside_a_number_as_next_observation(tmp_path):
    folder = folder_of(tmp_path / "log", KINDS["list of numbers"])
    with pytest.raises(
        DataError, match="next observations must be of the same kind as observations"
    ):
        open_transitions(folder, mapping={**MAPPING, "next_observations": "u"})
