"""Tables as logs: every format, any order of rows, and what is refused or said."""

import uuid

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream, read_table
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data import table_rows
from tests.data.table_rows import (
    COLUMNS,
    FORMATS,
    MAPPING,
    assert_same,
    read,
    refusal,
    shuffled,
    walk,
    write,
)

N = 8  # rows of walk()
LISTS = {"x_1": None, "x_2": None}
SICK = {"status": ["sick"] * N}


class TestFormats:
    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_known_table_by_hand(self, tmp_path, suffix):
        log = read(walk(), tmp_path, name=f"log.{suffix}")
        # e0 ends by itself (3 rows), e1 has one open row (gone), e2 loses its last (3
        # of 4 rows)
        np.testing.assert_array_equal(log.observations[:, 0], [0, 0.5, 1, 2, 2.5, 3])
        np.testing.assert_array_equal(
            log.next_observations[:, 0], [0.5, 1, 1, 2.5, 3, 3.5]
        )
        np.testing.assert_array_equal(log.observations[:, 1], [10, 9, 8, 6, 5, 4])
        np.testing.assert_array_equal(log.actions, [1, 0, 0, 0, 0, 1])
        np.testing.assert_array_equal(log.rewards, [1, 2, 3, 5, 6, 7])
        np.testing.assert_array_equal(log.terminated, [0, 0, 1, 0, 0, 0])
        np.testing.assert_array_equal(log.truncated, [0, 0, 0, 0, 0, 1])
        np.testing.assert_array_equal(log.steps, [0, 1, 2, 0, 1, 2])
        assert log.action_space == Discrete(2)
        assert log.metadata.extra["action_names"] == ["left", "right"]
        assert "; 2 rows were left out" in " ".join(log.metadata.notes)

    def test_a_folder_a_pattern_and_remote_storage(self, tmp_path):
        table = pa.table(walk())
        whole = read(walk(), tmp_path)
        for i in (0, 1, 2):
            folder = tmp_path / "log" / f"part {i}"
            folder.mkdir(parents=True)
            write(
                table.filter(pa.compute.equal(table["id"], f"e{i}")),
                folder / "part-0.parquet",
            )
        (tmp_path / "log" / "_SUCCESS").touch()
        assert_same(open_transitions(tmp_path / "log", mapping=MAPPING), whole)
        for i in range(12):  # in natural order: 2 before 10
            write(table.slice(i, 1), tmp_path / f"piece-{i}.parquet")
        assert_same(
            open_transitions(str(tmp_path / "piece-*.parquet"), mapping=MAPPING), whole
        )
        fsspec.filesystem("memory").pipe(
            "/tables/log.parquet", (tmp_path / "log.parquet").read_bytes()
        )
        for name in (
            "memory://tables/log.parquet",
            "memory://tables",
            f"file://{tmp_path}/log.parquet",
        ):
            assert_same(open_transitions(name, mapping=MAPPING), whole)
        with pytest.raises(DataError, match="does not exist"):
            open_transitions("memory://tables/none.parquet", mapping=MAPPING)

    def test_columns_may_come_as_dictionaries_lists_and_bytes(self, tmp_path):
        plain = walk(a=[i % 2 for i in range(N)])
        expected = read(plain, tmp_path)
        stacked = np.stack([plain.pop("x_1"), plain.pop("x_2")], axis=1)
        ids = [uuid.uuid5(uuid.NAMESPACE_DNS, name).bytes for name in plain["id"]]
        columns = {
            **plain,
            "id": pa.array(ids, pa.binary(16)).dictionary_encode(),
            "r": pa.array(plain["r"]).dictionary_encode(),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(stacked.reshape(-1)), 2),
        }
        assert_same(read(pa.table(columns), tmp_path, observations="x"), expected)
        columns["x"] = pa.array(stacked.tolist(), pa.list_(pa.float64()))
        assert_same(read(pa.table(columns), tmp_path, observations="x"), expected)

    def test_dtypes_follow_the_types_not_the_values(self, tmp_path):
        narrow = {
            "x_1": np.arange(N, dtype=np.float32),
            "x_2": np.arange(N, dtype=np.int16),
        }
        assert read(walk(**narrow), tmp_path).observations.dtype == np.float32
        assert read(walk(x_1=np.arange(N)), tmp_path).observations.dtype == np.float64
        bytes_ = {
            "x_1": np.arange(N, dtype=np.uint8),
            "x_2": np.arange(N, dtype=np.uint8),
        }
        assert read(walk(**bytes_), tmp_path).observations.dtype == np.uint8
        log = read(walk(r=pa.array(range(N), pa.decimal128(10, 2))), tmp_path)
        np.testing.assert_array_equal(log.rewards, [0, 1, 2, 4, 5, 6])
        assert_same(
            read(walk(note=[{"deep": [1]}] * N), tmp_path), read(walk(), tmp_path)
        )


@pytest.mark.parametrize(
    ("values", "mapping", "requested", "space", "kept"),
    [
        ([0, 1, 2, 0, 1, 2, 0, 1], {}, None, Discrete(3), [0, 1, 2, 1, 2, 0]),
        ([0.5] * N, {}, Continuous(1, -1, 1), Continuous(1, -1, 1), [[0.5]] * 6),
        (
            [0, 1, 2, 3, 4, 5, 6, 19_999],
            {},
            Discrete(20_000),
            Discrete(20_000),
            [0, 1, 2, 4, 5, 6],
        ),
        ([i % 2 == 0 for i in range(N)], {}, None, Discrete(2), [1, 0, 1, 1, 0, 1]),
        (
            None,
            {"action_names": ["right", "stay", "left"]},
            None,
            Discrete(3),
            [0, 2, 2, 2, 2, 0],
        ),
        (
            [10, 20, 30, 10, 20, 30, 10, 20],
            {"action_names": [30, 10, 20]},
            None,
            Discrete(3),
            [1, 2, 0, 2, 0, 1],
        ),
    ],
)
def test_action_spaces(tmp_path, values, mapping, requested, space, kept):
    log = read(
        walk() if values is None else walk(a=values),
        tmp_path,
        action_space=requested,
        **mapping,
    )
    assert log.action_space == space
    np.testing.assert_array_equal(log.actions, kept)


class TestEpisodes:
    def test_one_record_is_cut_by_its_flags(self, tmp_path):
        table = walk(
            t=range(N), done=[False, False, True, False, False, True, False, False]
        )
        log = read(table, tmp_path, episode=None)
        np.testing.assert_array_equal(log.steps, [0, 1, 2, 0, 1, 2, 0])
        assert "taken as one record" in " ".join(log.metadata.notes)

    def test_rows_that_stand_alone(self, tmp_path):
        table = walk(y_1=[1.0] * N, y_2=[2.0] * N)
        log = read(
            table, tmp_path, episode=None, time=None, next_observations=["y_1", "y_2"]
        )
        assert not log.has_episodes
        np.testing.assert_array_equal(log.next_observations, [[1.0, 2.0]] * N)


class TestFlagsProbabilitiesAndWeights:
    @pytest.mark.parametrize(
        "values", [[0, 1], [0.0, 1.0], ["False", "True"], ["no", "yes"], [" f", "T "]]
    )
    def test_ways_to_say_yes(self, tmp_path, values):
        done = [values[flag] for flag in walk()["done"]]
        for name in ("log.parquet", "log.csv"):
            assert_same(
                read(walk(done=done), tmp_path, name=name), read(walk(), tmp_path)
            )

    def test_probabilities_and_weights(self, tmp_path):
        p = np.linspace(0.1, 1.0, N)
        kept = [0, 1, 2, 4, 5, 6]
        log = read(
            walk(p=p, w=range(N)), tmp_path, behavior_probability="p", weight="w"
        )
        np.testing.assert_allclose(
            log.behavior_log_probabilities, np.log(p[kept]), rtol=1e-15
        )
        np.testing.assert_array_equal(log.weights, kept)
        log = read(walk(p=np.log(p)), tmp_path, behavior_log_probability="p")
        np.testing.assert_array_equal(log.behavior_log_probabilities, np.log(p)[kept])
        # may be above 1
        dense = read(walk(a=[0.5] * N, p=[1.5] * N), tmp_path, behavior_probability="p")
        np.testing.assert_allclose(dense.behavior_log_probabilities, np.log(1.5))


class TestImputation:
    def test_on_request_and_said(self, tmp_path):
        table = walk(
            x_1=[1.0, None, 3.0, 4.0, None, 6.0, np.nan, 8.0], r=[None] + [1.0] * 7
        )
        mean = read(table, tmp_path, impute={"x_1": "mean", "r": "zero"})
        np.testing.assert_allclose(mean.observations[:, 0], [1, 4.4, 3, 4.4, 6, 4.4])
        assert mean.rewards[0] == 0
        assert "3 missing values in x_1 were replaced (mean 4.4)" in mean.metadata.notes
        assert (
            read(table, tmp_path, impute={"x_1": -1, "r": 0}).observations[1, 0] == -1
        )
        table["x_1"][4] = 5.0
        forward = read(table, tmp_path, impute={"x_1": "forward", "r": 0})
        np.testing.assert_array_equal(forward.observations[:, 0], [1, 1, 3, 5, 6, 6])

    def test_means_are_the_same_in_pieces(self, tmp_path, monkeypatch):
        monkeypatch.setattr("koffline.data.table.table_rows.BATCH_ROWS", 3)
        values = [None if i % 5 == 0 else 1e9 / (i + 1) for i in range(40)]
        path = write(
            shuffled(walk([8] * 5, [True] * 5, x_1=values)), tmp_path / "log.parquet"
        )
        mapping = {**MAPPING, "impute": {"x_1": "mean", "x_2": "forward"}}
        whole = open_transitions(path, mapping=mapping)
        table_rows.assert_same_in_pieces(path, mapping, whole, piece_rows=8)
        assert "8 missing values in x_1 were replaced (mean" in " ".join(
            whole.metadata.notes
        )


# columns of the table, changes of the mapping, words of the refusal
REFUSALS = [
    (
        {"a": ["x"] * 7 + ["y"]},
        {"action_names": ["x"]},
        "holds 'y', action_names are ('x',)",
    ),
    (
        {"a": [[0.0, 1.0]] * N},
        {"action_names": ["x"]},
        "holds '[0.0, 1.0]', action_names are ('x',)",
    ),
    ({"a": ["l"] * 7 + ["x" * 2000]}, {}, "or a text of more than 1000 letters"),
    (
        {"a": [*range(7), 2**62]},
        {},
        (
            f"up to {2**62}, and the file declares no action space; declare quantities"
            " (--continuous LOW HIGH), or choices 0, 1, 2, … (--discrete N)"
        ),
    ),
    (
        {"a": [*range(7), 19_999]},
        {},
        "whole numbers from 0 up to 19999, and the file declares",
    ),
    (
        {"t": [0, 1, 1, 0, 0, 1, 2, 3]},
        {},
        "1 row has the time of another row of their episode (first: episode 'e0', t 1)",
    ),
    ({}, {"episode": None}, "name the episode column"),
    ({"t": [True] * N}, {}, "no order in time"),
    (
        {"done": [True, False, True, False, True, True, False, False]},
        {},
        "set in 3 rows whose episode goes on (2 episodes)",
    ),
    ({"done": ["0"] * 7 + ["maybe"]}, {}, "holds 'maybe', neither yes nor no"),
    (
        {"p": [1.5] + [0.5] * 7},
        {"behavior_probability": "p"},
        "p holds 1.5 (wrong in 1 row)",
    ),
    (
        {
            "x_1": [None, np.nan, *range(6)],
            "r": [None, *range(7)],
            "a": [None, *"1234567"],
        },
        {},
        (
            "values are missing (x_1: 2, r: 1, a: 1, of 8 rows); replace them (--impute"
            " COLUMN=mean, of categories"
        ),
    ),
    (
        {"x_1": [None, *range(7)], "x_2": [None, *range(7)]},
        {"impute": "forward"},
        (
            "x_1 has 1 missing value with no earlier",
            "x_2 has 1 missing value with no earlier",
        ),
    ),
    ({}, {"time": None, "drop_duplicates": "exact"}, "needs a time column"),
    (
        {},
        {"observations": ["x_1", "r"]},
        "observations name r, the reward or the action",
    ),
    ({}, {"one_step": True}, "beside episode, terminal; keep one or the other"),
    *(
        (SICK, {"terminal": flag}, words)
        for flag, words in (
            ("status", "compare: \"status == '…'\""),
            ("2 * (status == 'sick')", "neither yes nor no"),
            ("x_1 == 'sick'", "compare it with a number"),
            ("status < 'sick'", "cannot be read"),
            ("(status == 'sick') + status", "cannot be read"),
            ("status == 'Sick'", "no row fulfils status == 'Sick'"),
        )
    ),
    (
        SICK,
        {"reward": "status + 1"},
        ("status is not all numbers", "\"status == '…'\" (a reward)"),
    ),
    (
        {"status": [None, *["sick"] * 7]},
        {"terminal": "status == 'died'"},
        "no row fulfils",
    ),
    (
        {**LISTS, "x": [[1.0]] * 7 + [[1.0, 2.0]]},
        {"observations": "x"},
        "1 and 2 numbers",
    ),
    (
        {**LISTS, "x": [[1.0, np.inf]] * N},
        {"observations": "x"},
        "observations holds inf in row 0 at [1]",
    ),
    ({"r": [-np.inf] + [0.5] * 7}, {}, "column r holds -inf (wrong in 1 row)"),
    ({"a": [-np.inf] + [0.5] * 7}, {}, "holds -inf in row 0"),
    *(
        ({"x_1": column}, {}, "needed are numbers")
        for column in (
            pa.array([{"deep": 1}] * N),
            pa.array([[[1.0]]] * N),
            pa.nulls(N),
        )
    ),
    (
        {"x_1": ["1"] * 7 + ["1,5"]},
        {},
        "x_1 is not all numbers: row 8 holds '1,5'; write no comma if",
    ),
]


@pytest.mark.parametrize(("columns", "mapping", "words"), REFUSALS)
def test_refusals(tmp_path, columns, mapping, words):
    message = refusal(walk(**columns), tmp_path, **mapping)
    for word in (words,) if isinstance(words, str) else words:
        assert word in message
    assert "corrupt" not in message


class TestOtherRefusals:
    def test_more_actions_than_the_table_names(self, tmp_path):
        path = write(walk(a=["l", "r"] * 4), tmp_path / "log.csv")
        with pytest.raises(
            DataError, match=r"a holds 2 actions, and another number is asked"
        ):
            open_transitions(path, Discrete(4), mapping=MAPPING)

    def test_files_of_one_table_agree(self, tmp_path):
        write(walk(), tmp_path / "a.parquet")
        for columns, words in (
            (
                walk(x_1=["z"] * N),
                r"b\.parquet: column x_1 is String, in the first file Float64",
            ),
            (walk(x_1=None), "lacks column x_1"),
        ):
            write(columns, tmp_path / "b.parquet")
            with pytest.raises(DataError, match=words):
                read_table(tmp_path, MAPPING)
        ids = [f"f{i}" for i in range(N)]
        write(walk(id=ids, x_1=range(N), done=[True] * N), tmp_path / "b.parquet")
        # whole numbers are fractions
        assert len(read_table(tmp_path, MAPPING).columns["rewards"]) == 6 + N
        write(walk(), tmp_path / "c.csv")
        with pytest.raises(DataError, match="CSV and Parquet"):
            read_table(tmp_path, MAPPING)


def read_slowly(rows, state, has_truncated, has_next):
    """Transitions, one after the other, in the order of their episode's first step,
    then of time.

    Rows are dicts with the keys of ``state``, a, r, id, t, done and, where asked for,
    cut and next_<state>.
    """
    episodes = {}
    for row in rows:
        episodes.setdefault(row["id"], []).append(row)
    all_rows = []
    for steps in sorted(
        episodes.values(),
        key=lambda steps: rows.index(min(steps, key=lambda r: r["t"])),
    ):
        steps.sort(key=lambda r: r["t"])
        kept = []
        for i, row in enumerate(steps):
            last = i == len(steps) - 1
            here = [row[name] for name in state]
            if has_next:
                following = [row[f"next_{name}"] for name in state]
            elif not last:
                following = [steps[i + 1][name] for name in state]
            elif row["done"]:
                following = here
            else:
                continue
            cut = has_truncated and bool(row["cut"])
            row_values = (
                here,
                row["a"],
                row["r"],
                following,
                bool(row["done"]),
                cut,
                len(kept),
            )
            kept.append(dict(zip(COLUMNS, row_values, strict=True)))
        if kept and not steps[-1]["done"] and (not has_truncated or steps[-1]["cut"]):
            kept[-1]["truncated"] = True
        all_rows += kept
    return all_rows


@settings(max_examples=25, deadline=None)
@given(
    table_rows.tables(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 20),
    st.sampled_from(["parquet", "csv"]),
)
def test_the_reference_at_once_and_in_pieces(
    tmp_path_factory, rows, has_cut, has_next, piece_rows, suffix
):
    expected = read_slowly(
        [dict(row) for row in rows], ["x_1", "x_10"], has_cut, has_next
    )
    path = tmp_path_factory.mktemp("tables") / f"log.{suffix}"
    write({name: [row[name] for row in rows] for name in rows[0]}, path)
    mapping = {**MAPPING, "truncated": "cut" if has_cut else None}
    mapping["next_observations"] = "next_*" if has_next else ()
    if not expected:
        for reader in (read_table, lambda *arguments: list(TableStream(*arguments))):
            with pytest.raises(DataError, match="no row has a next"):
                reader(path, mapping)
        return
    log = read_table(path, mapping).transitions()
    for name in COLUMNS:
        assert getattr(log, name).tolist() == [row[name] for row in expected]
    table_rows.assert_same_in_pieces(path, mapping, log, piece_rows)
