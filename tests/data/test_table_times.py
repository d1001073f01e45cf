"""Times in tables: rows come in the order of the instants, whatever way these are
written.
"""

from datetime import datetime, timedelta

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.data.table.reading import TableStream
from koffline.data.table.time_forms import forms_of
from koffline.errors import DataError
from tests.data.table_rows import MAPPING, walk, write

NAIVE = (
    "times in t have no UTC offset and were read as UTC; where a local clock was set"
    " back, rows of that hour may be out of order"
)
UNLIKE = (
    "no number or time like those above; write all in one way, as in"
    " 2024-01-31T12:00:00+01:00"
)
# Texts in the order of time.
ORDERED = {
    "offsets": [
        "2024-01-01T23:30:00+02:00",
        "2024-01-01T21:40:00Z",
        "2024-01-01T16:50:00-05:00",
    ],
    "offsets without a colon": [
        "2024-01-01T23:30:00+0200",
        "2024-01-01T21:40:00Z",
        "2024-01-02T00:00:00+02",
    ],
    "a clock set back": [
        "2024-10-27T02:30:00+02:00",
        "2024-10-27T02:10:00+01:00",
        "2024-10-27T02:30:00+01:00",
    ],
    "fractions": [
        "2024-01-01T12:00:00Z",
        "2024-01-01T12:00:00.5Z",
        "2024-01-01T12:00:00.500001Z",
    ],
    "nanoseconds": [
        "2024-01-01T12:00:00.000000001Z",
        "2024-01-01T12:00:00.000000002Z",
        "2024-01-01T12:01Z",
    ],
    "dates": ["2024-01-31", "2024-02-01", "2024-10-01"],
    "dates and times": ["2024-01-31", "2024-01-31 00:00:00.25", "2024-01-31T00:30"],
    "numbers": ["9", "10.5", "1e3"],
    "spaces around": [" 2024-01-02T03:03", "2024-01-02T03:04 ", " 2024-01-02T03:05 "],
}
WITHOUT_OFFSET = {"dates and times", "spaces around"}


def rewards(path, stream):
    """In the order of rows, with the notes; ``stream``: by pieces of at least 2
    rows.
    """
    if not stream:
        log = open_transitions(path, mapping=MAPPING)
        return log.rewards.tolist(), log.metadata.notes
    opened = TableStream(path, MAPPING, piece_rows=2)
    all_rewards = np.concatenate([piece.rewards for piece in opened]).tolist()
    return all_rewards, opened.metadata.notes


@pytest.mark.parametrize("kind", ORDERED)
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_texts_are_ordered_as_times(tmp_path, kind, order):
    texts = [ORDERED[kind][i] for i in order]
    # two episodes whose rows alternate
    columns = walk(
        (3, 3),
        (True, True),
        id=["e", "f"] * 3,
        t=[text for text in texts for _ in "ef"],
    )
    columns["r"] = [10.0 * episode + i for i in order for episode in (1, 2)]
    columns["done"] = [i // 2 == order.index(2) for i in range(6)]
    for ending, stream in (("csv", False), ("arrow", True)):
        read_rewards, notes = rewards(
            write(columns, tmp_path / f"log.{ending}"), stream
        )
        assert read_rewards == [10.0, 11.0, 12.0, 20.0, 21.0, 22.0]
        assert (NAIVE in notes) == (kind in WITHOUT_OFFSET)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (
            ["2024-01-01T00:00Z", "2024-01-01T01:00", "9"],
            f"holds '2024-01-01T01:00' in row 2, {UNLIKE}",
        ),
        (["1", "2", "2024-03-01"], f"holds '2024-03-01' in row 3, {UNLIKE}"),
        (["2024-01-01", "23:59", "00:10"], f"holds '23:59' in row 2, {UNLIKE}"),
        (
            ["2024-01-01", "2024-02-30", "2024-03-01"],
            f"holds '2024-02-30' in row 2, {UNLIKE}",
        ),
        (
            ["2024-01-01", "2300-01-01", "2024-03-01"],
            f"holds '2300-01-01' in row 2, {UNLIKE}",
        ),
        (
            [
                "2024-01-01T12:00:00+02:00",
                "2024-01-01T10:00:00Z",
                "2024-01-01T10:00:01Z",
            ],
            (
                "1 row has the time of another row of their episode (first: episode"
                " 'e0', t 2024-01-01 10:00:00.000000000+00:00); name a finer time"
                " column, or drop doubles (--drop-duplicates exact, first or last)"
            ),
        ),
    ],
    ids=["naive below", "numbers", "of day", "no date", "too far", "one instant"],
)
def test_what_is_refused(tmp_path, monkeypatch, times, words):
    # rows are counted through batches
    monkeypatch.setattr("koffline.data.table.table_rows.BATCH_ROWS", 2)
    for ending, stream in (("csv", False), ("parquet", True)):
        path = write(walk((3,), (True,), t=times), tmp_path / f"log.{ending}")
        with pytest.raises(DataError) as caught:
            rewards(path, stream)
        assert (
            str(caught.value).removeprefix(f"{path}: ").removeprefix("column t ")
            == words
        )


def test_times_rise_across_pieces_without_episodes(tmp_path, monkeypatch):
    """In one record the order is judged on the instants, to the nanosecond, also
    between two batches.
    """
    monkeypatch.setattr("koffline.data.table.table_rows.BATCH_ROWS", 2)
    times = [
        f"2024-10-27T0{2 - (i > 1)}:59:59.00000000{i}+0{2 - (i > 1)}:00"
        for i in range(4)
    ]
    path = write(walk((4,), (True,), t=times), tmp_path / "log.csv")
    mapping = {**MAPPING, "episode": None}
    all_rewards = np.concatenate(
        [piece.rewards for piece in TableStream(path, mapping, piece_rows=1)]
    )
    assert all_rewards.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (
        open_transitions(path, mapping=mapping).rewards.tolist() == all_rewards.tolist()
    )


@pytest.mark.parametrize(
    ("kind", "is_naive"),
    [
        (pa.timestamp("us"), True),
        (pa.timestamp("ns", "Europe/Berlin"), False),
        (pa.date32(), False),
    ],
    ids=str,
)
def test_types_are_ordered_by_the_same_rule(tmp_path, kind, is_naive):
    times = (
        pa.array([3, 1, 2])
        .cast(pa.int32() if kind == pa.date32() else pa.int64())
        .cast(kind)
    )
    columns = walk((3,), (True,), t=times, done=[True, False, False])
    read_rewards, notes = rewards(write(columns, tmp_path / "log.parquet"), False)
    assert read_rewards == [2.0, 3.0, 1.0]
    assert (NAIVE in notes) == is_naive


def test_a_missing_time_of_a_first_row_is_a_problem_of_the_table(tmp_path) -> None:
    path = tmp_path / "log.csv"
    lines = ["patient,t,x,action,reward,done", "0,,0.5,0,0.1,0", "0,1,0.6,1,0.2,1"]
    lines += [f"{p},{t},{p + t / 7},{t % 2},0.{p},{t}" for p in (1, 2) for t in (0, 1)]
    path.write_text("\n".join(lines) + "\n")
    assert any("t: 1 value is missing" in text for text in inspect_table(path).problems)


@pytest.mark.parametrize(
    "form",
    [
        "%d/%m/%Y %H:%M",
        "%m/%d/%Y %H:%M:%S",
        "%m/%d/%Y %I:%M %p",
        "%d.%m.%Y %H:%M",
        "%d %b %Y %H:%M",
        "%d/%b/%Y:%H:%M:%S +0100",
        "%a %b %d %H:%M:%S %Y",
    ],
)
def test_inspect_says_in_which_form_times_are_written(tmp_path, form) -> None:
    """The 28th comes before the 1st as text in some forms, and as time in none."""
    start = datetime(2021, 2, 25, 7, 30)
    times = [start + timedelta(hours=13 * k) for k in range(12)]
    frame = pl.DataFrame(
        {
            "user": [1] * 6 + [2] * 6,
            "when": [time.strftime(form) for time in times],
            "x": np.arange(12.0),
            "action": [0, 1] * 6,
            "reward": np.linspace(0.0, 1.0, 12),
        }
    )
    path = tmp_path / "log.csv"
    frame.sample(fraction=1.0, shuffle=True, seed=1).write_csv(path)
    inspection = inspect_table(path)
    assert inspection.mapping["time"] == "when"
    assert inspection.mapping["time_format"] == form.replace("+0100", "%z")
    assert not any("no number or time" in problem for problem in inspection.problems)
    mapping = {**inspection.mapping, "last_row": "terminal"}
    log = open_transitions(path, mapping=mapping)
    np.testing.assert_array_equal(log.observations[:, 0], np.arange(12.0))


def test_days_that_may_be_months_are_asked_about(tmp_path) -> None:
    frame = pl.DataFrame(
        {
            "user": [1] * 4 + [2] * 4,
            "when": [f"0{1 + k % 4}/0{1 + k // 4}/2021 10:00" for k in range(8)],
            "x": np.arange(8.0),
            "action": [0, 1] * 4,
            "reward": np.arange(8.0),
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    inspection = inspect_table(tmp_path / "log.csv")
    forms = [answer["time_format"] for answer in inspection.open["time_format"]]
    assert forms == ["%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M"]


def test_times_that_are_read_anyway_get_no_form(tmp_path) -> None:
    for texts in (["2021-03-01 10:00", "2021-03-02 10:00"], ["1", "2"], ["a", "b"]):
        assert forms_of(pl.Series("when", texts)) == []
