"""Tables as logs: every format, any order of rows, and what is refused or said."""

from __future__ import annotations

import datetime
import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.sources import open_transitions
from koffline.data.table.reading import TableStream, read_table
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.table_rows import FORMATS, MAPPING, shuffled, walk, write, write_text
from tests.reference_tables import rows_to_transitions

COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "steps")


def read(columns, tmp_path, action_space=None, name="log.parquet", **changes):
    mapping = {**MAPPING, **changes}
    return open_transitions(write(columns, tmp_path / name), action_space, mapping=mapping)


def refusal(columns, tmp_path, action_space=None, name="log.parquet", **changes):
    with pytest.raises(DataError) as caught:
        read(columns, tmp_path, action_space, name, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert "corrupt" not in message
    return message


def assert_same(log, other):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(log, name), getattr(other, name))


class TestFormats:
    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_known_table_by_hand(self, tmp_path, suffix):
        log = read(walk(), tmp_path, name=f"log.{suffix}")
        # e0 ends by itself (3 rows), e1 has one open row (gone), e2 loses its last (3 of 4 rows)
        np.testing.assert_array_equal(log.observations[:, 0], [0, 0.5, 1, 2, 2.5, 3])
        np.testing.assert_array_equal(log.next_observations[:, 0], [0.5, 1, 1, 2.5, 3, 3.5])
        np.testing.assert_array_equal(log.observations[:, 1], [10, 9, 8, 6, 5, 4])
        np.testing.assert_array_equal(log.actions, [1, 0, 0, 0, 0, 1])
        np.testing.assert_array_equal(log.rewards, [1, 2, 3, 5, 6, 7])
        np.testing.assert_array_equal(log.terminated, [0, 0, 1, 0, 0, 0])
        np.testing.assert_array_equal(log.truncated, [0, 0, 0, 0, 0, 1])
        np.testing.assert_array_equal(log.steps, [0, 1, 2, 0, 1, 2])
        assert log.action_space == Discrete(2)
        assert log.metadata.extra["action_names"] == ["left", "right"]
        assert "; 2 rows were left out" in " ".join(log.metadata.notes)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_the_order_of_rows_does_not_matter_within_episodes(self, tmp_path, suffix):
        log = read(walk(), tmp_path)
        mixed = shuffled(walk())
        found = read(mixed, tmp_path, name=f"mixed.{suffix}")
        first = list(dict.fromkeys(mixed["id"]))
        order = sorted(range(len(log)), key=lambda i: first.index(f"e{log.episode_ids[i]}"))
        for name in ("observations", "rewards", "next_observations", "actions"):
            np.testing.assert_array_equal(getattr(found, name), getattr(log, name)[order])
        assert "put together and in time order" in " ".join(found.metadata.notes)

    def test_a_folder_a_pattern_and_keys_in_folders(self, tmp_path):
        table = pa.table(walk())
        for i in (0, 1, 2):
            folder = tmp_path / "log" / f"id=e{i}"
            folder.mkdir(parents=True)
            rows = table.filter(pa.compute.equal(table["id"], f"e{i}"))
            write(rows.drop_columns(["id"]), folder / "part-0.parquet")
        (tmp_path / "log" / "_SUCCESS").touch()
        whole = read(walk(), tmp_path)
        assert_same(open_transitions(tmp_path / "log", mapping=MAPPING), whole)
        for i in range(12):  # in natural order: 2 before 10
            write(table.slice(i, 1), tmp_path / f"piece-{i}.parquet")
        assert_same(open_transitions(str(tmp_path / "piece-*.parquet"), mapping=MAPPING), whole)

    def test_remote_storage(self, tmp_path):
        import fsspec

        log = read(walk(), tmp_path)
        memory = fsspec.filesystem("memory")
        memory.pipe("/tables/log.parquet", (tmp_path / "log.parquet").read_bytes())
        assert_same(open_transitions("memory://tables/log.parquet", mapping=MAPPING), log)
        assert_same(open_transitions("memory://tables", mapping=MAPPING), log)
        assert_same(open_transitions(f"file://{tmp_path}/log.parquet", mapping=MAPPING), log)
        with pytest.raises(DataError, match="does not exist"):
            open_transitions("memory://tables/none.parquet", mapping=MAPPING)

    def test_columns_may_come_as_dictionaries_lists_and_bytes(self, tmp_path):
        plain = walk(a=[i % 2 for i in range(8)])
        stacked = np.stack([plain.pop("x_1"), plain.pop("x_2")], axis=1)
        ids = [uuid.uuid5(uuid.NAMESPACE_DNS, name).bytes for name in plain["id"]]
        found = {
            **plain,
            "id": pa.array(ids, pa.binary(16)).dictionary_encode(),
            "r": pa.array(plain["r"]).dictionary_encode(),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(stacked.reshape(-1)), 2),
        }
        log = read(pa.table(found), tmp_path, observations="x")
        assert_same(log, read(walk(a=[i % 2 for i in range(8)]), tmp_path))
        found["x"] = pa.array(stacked.tolist(), pa.list_(pa.float64()))
        assert_same(read(pa.table(found), tmp_path, observations="x"), log)

    def test_dtypes_follow_the_types_not_the_values(self, tmp_path):
        narrow = {"x_1": np.arange(8, dtype=np.float32), "x_2": np.arange(8, dtype=np.int16)}
        assert read(walk(**narrow), tmp_path).observations.dtype == np.float32
        assert read(walk(x_1=np.arange(8)), tmp_path).observations.dtype == np.float64
        bytes_ = {"x_1": np.arange(8, dtype=np.uint8), "x_2": np.arange(8, dtype=np.uint8)}
        assert read(walk(**bytes_), tmp_path).observations.dtype == np.uint8

    def test_decimals_are_read_and_said(self, tmp_path):
        prices = pa.array([None if i < 0 else i for i in range(8)], pa.decimal128(10, 2))
        log = read(walk(r=prices), tmp_path)
        np.testing.assert_array_equal(log.rewards, [0, 1, 2, 4, 5, 6])
        assert "decimals were read as float64: r" in log.metadata.notes


class TestActions:
    def test_numbers_become_a_discrete_or_continuous_space(self, tmp_path):
        assert read(walk(a=[0, 1, 2, 0, 1, 2, 0, 1]), tmp_path).action_space == Discrete(3)
        assert read(walk(a=[0.5] * 8), tmp_path).action_space == Continuous(1)
        log = read(walk(a_1=[0.5] * 8, a_2=[0.25] * 8), tmp_path, action=["a_1", "a_2"])
        assert log.action_space == Continuous(2)
        np.testing.assert_array_equal(log.actions[0], [0.5, 0.25])
        assert read(walk(a=[0.5] * 8), tmp_path, Continuous(1, -1, 1)).action_space == Continuous(1, -1, 1)

    def test_whole_numbers_as_fractions_are_pointed_out(self, tmp_path):
        log = read(walk(a=[0.0, 1.0] * 4), tmp_path)
        assert log.action_space == Continuous(1)
        assert "--discrete N" in " ".join(log.metadata.notes)
        assert read(walk(a=[0.0, 1.0] * 4), tmp_path, Discrete(2)).action_space == Discrete(2)

    def test_yes_and_no_are_two_actions(self, tmp_path):
        log = read(walk(a=[i % 2 == 0 for i in range(8)]), tmp_path)
        assert log.metadata.extra["action_names"] == [False, True]
        np.testing.assert_array_equal(log.actions, [1, 0, 1, 1, 0, 1])

    def test_names_say_order_and_number(self, tmp_path):
        log = read(walk(), tmp_path, action_names=["right", "stay", "left"])
        assert log.action_space == Discrete(3)
        np.testing.assert_array_equal(log.actions, [0, 2, 2, 2, 2, 0])
        assert "holds 'right', which action_names lacks" in refusal(walk(), tmp_path, action_names=["left"])
        message = refusal(walk(), tmp_path, action_names=[True, False])
        assert "quotes" in message
        doses = walk(a=[10, 20, 30, 10, 20, 30, 10, 20])
        assert read(doses, tmp_path, action_names=[10, 20, 30]).action_space == Discrete(3)

    def test_csv_numbers_are_numbers_and_texts_are_names(self, tmp_path):
        assert read(walk(a=[0, 1] * 4), tmp_path, name="a.csv").action_space == Discrete(2)
        assert read(walk(a=[0.5, 1] * 4), tmp_path, name="b.csv").action_space == Continuous(1)
        log = read(walk(a=["1", "up"] * 4), tmp_path, name="c.csv")
        assert log.metadata.extra["action_names"] == ["1", "up"]

    def test_refusals(self, tmp_path):
        assert "10000 different actions" in refusal(_many_names(), tmp_path)
        text = walk(a_1=["x"] * 8, a_2=[1] * 8)
        assert "beside 1 other columns (action)" in refusal(text, tmp_path, action="a_?")
        assert "numbers" in refusal(walk(a=[datetime.date(2020, 1, 1)] * 8), tmp_path)


def _many_names():
    n = 10_001
    return {
        "id": ["e"] * n,
        "t": range(n),
        "x_1": [0.0] * n,
        "a": [f"name {i}" for i in range(n)],
        "r": [0.0] * n,
        "done": [False] * n,
    }


class TestTime:
    @pytest.mark.parametrize(
        "time",
        [
            [datetime.datetime(2020, 1, 1) + datetime.timedelta(hours=i) for i in range(8)],
            [datetime.date(2020, 1, 1 + i) for i in range(8)],
            [f"2020-01-0{i + 1}" for i in range(8)],
            [i / 7 for i in range(8)],
        ],
        ids=["timestamps", "dates", "texts", "fractions"],
    )
    def test_anything_sortable(self, tmp_path, time):
        plain = read(walk(), tmp_path)
        for name in ("log.parquet", "log.csv"):
            found = read(shuffled(walk(t=time)), tmp_path, name=name)
            assert sorted(found.rewards) == sorted(plain.rewards)
            np.testing.assert_array_equal(np.diff(found.rewards)[found.steps[1:] > 0], 1)

    @pytest.mark.parametrize("times", [[str(i) for i in range(12)], [f"{i + 3}.5" for i in range(12)]])
    def test_texts_of_numbers_sort_as_numbers_in_every_format(self, tmp_path, times):
        """ "10" comes after "9", in files with types too."""
        for name in ("log.parquet", "log.arrow", "log.csv"):
            found = read(walk((12,), (True,), t=times), tmp_path, name=name)
            np.testing.assert_array_equal(found.rewards, np.arange(1.0, 13.0))

    def test_doubles_are_counted(self, tmp_path):
        message = refusal(walk(t=[0, 1, 1, 0, 0, 1, 1, 1]), tmp_path)
        assert "3 rows have the time of another row" in message
        assert "episode 'e0', t 1" in message
        assert "name the episode column" in refusal(walk(), tmp_path, episode=None)

    def test_gaps_are_said(self, tmp_path):
        lengths = (40,)
        times = [t + (t > 20) for t in range(40)]
        log = read(walk(lengths, (True,), t=times), tmp_path)
        assert "1 of 39 steps within episodes span more time" in " ".join(log.metadata.notes)
        irregular = read(walk(lengths, (True,), t=[t * t for t in range(40)]), tmp_path)
        assert "span more time" not in " ".join(irregular.metadata.notes)

    def test_without_time_the_table_is_in_order(self, tmp_path):
        log = read(walk(), tmp_path, time=None)
        assert_same(log, read(walk(), tmp_path))
        assert "no time column" in " ".join(log.metadata.notes)

    def test_what_gives_no_order(self, tmp_path):
        assert "no order in time" in refusal(walk(t=[[1]] * 8), tmp_path)
        assert "no order in time" in refusal(walk(t=[True] * 8), tmp_path)


class TestEpisodes:
    def test_one_record_is_cut_by_its_flags(self, tmp_path):
        done = [False, False, True, False, False, True, False, False]
        log = read(walk(t=range(8), done=done), tmp_path, episode=None)
        np.testing.assert_array_equal(log.steps, [0, 1, 2, 0, 1, 2, 0])
        assert "taken as one record" in " ".join(log.metadata.notes)

    def test_rows_that_stand_alone(self, tmp_path):
        table = walk(y_1=[1.0] * 8, y_2=[2.0] * 8)
        log = read(table, tmp_path, episode=None, time=None, next_observations=["y_1", "y_2"])
        assert not log.has_episodes
        assert len(log) == 8
        np.testing.assert_array_equal(log.next_observations, [[1.0, 2.0]] * 8)

    def test_truncation_moves_to_the_row_above(self, tmp_path):
        table = walk(cut=[False] * 7 + [True])
        log = read(table, tmp_path, truncated="cut")
        np.testing.assert_array_equal(log.truncated, [0, 0, 0, 0, 0, 1])
        log = read(walk(cut=[False] * 8), tmp_path, truncated="cut")
        assert not log.truncated.any()

    def test_nothing_is_lost_where_next_observations_are_given(self, tmp_path):
        table = walk(next_x_1=[0.0] * 8, next_x_2=[1.0] * 8)
        log = read(table, tmp_path, next_observations="next_*")
        assert len(log) == 8
        np.testing.assert_array_equal(log.truncated, [0, 0, 0, 1, 0, 0, 0, 1])

    def test_an_episode_that_goes_on_after_its_end(self, tmp_path):
        message = refusal(walk(done=[True, False, True, False, True, True, False, False]), tmp_path)
        assert "set in 3 rows whose episode goes on afterwards (2 episodes)" in message

    def test_whole_number_ids_stay(self, tmp_path):
        log = read(walk(id=[7, 7, 7, 2, 5, 5, 5, 5]), tmp_path)
        assert list(dict.fromkeys(log.episode_ids)) == [7, 5]

    def test_no_row_left(self, tmp_path):
        assert "no row has a next observation" in refusal(walk((1, 1), (False, False)), tmp_path)


class TestFlagsAndProbabilities:
    @pytest.mark.parametrize(
        "values",
        [[0, 1], [0.0, 1.0], ["False", "True"], ["no", "yes"], [" f", "T "]],
    )
    def test_ways_to_say_yes(self, tmp_path, values):
        done = [values[flag] for flag in walk()["done"]]
        for name in ("log.parquet", "log.csv"):
            assert_same(read(walk(done=done), tmp_path, name=name), read(walk(), tmp_path))

    def test_neither_yes_nor_no(self, tmp_path):
        assert "holds 2" in refusal(walk(done=[0, 0, 1, 0, 0, 0, 2, 2]), tmp_path)
        assert "holds 'maybe' (1 row is neither" in refusal(walk(done=["0"] * 7 + ["maybe"]), tmp_path)

    def test_probabilities(self, tmp_path):
        p = np.linspace(0.1, 1.0, 8)
        kept = [0, 1, 2, 4, 5, 6]
        log = read(walk(p=p), tmp_path, behavior_probability="p")
        np.testing.assert_allclose(log.behavior_log_probabilities, np.log(p[kept]), rtol=1e-15)
        log = read(walk(p=np.log(p)), tmp_path, behavior_log_probability="p")
        np.testing.assert_array_equal(log.behavior_log_probabilities, np.log(p)[kept])
        message = refusal(walk(p=[0.0] * 8), tmp_path, behavior_probability="p")
        assert "column p holds 0 (8 rows hold no probability of an action" in message
        assert "holds 2 (8 rows hold no" in refusal(walk(p=[2.0] * 8), tmp_path, behavior_probability="p")

    def test_weights(self, tmp_path):
        log = read(walk(w=range(8)), tmp_path, weight="w")
        np.testing.assert_array_equal(log.weights, [0, 1, 2, 4, 5, 6])


class TestMissing:
    def test_counts_by_column(self, tmp_path):
        table = walk(
            x_1=[None, np.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            r=[1.0, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            a=["left"] * 7 + [None],
        )
        for name in ("log.parquet", "log.csv"):
            message = refusal(table, tmp_path, name=name)
            assert "missing (x_1: 2, r: 1, a: 1, of 8 rows)" in message
            assert "--impute x_1=mean" in message

    def test_imputed_on_request_and_said(self, tmp_path):
        table = walk(x_1=[1.0, None, 3.0, 4.0, None, 6.0, np.nan, 8.0])
        mean = read(table, tmp_path, impute="mean")
        np.testing.assert_allclose(mean.observations[:, 0], [1, 4.4, 3, 4.4, 6, 4.4])
        assert "3 missing values in x_1 were replaced (mean 4.4)" in mean.metadata.notes
        assert read(table, tmp_path, impute={"x_1": "zero"}).observations[1, 0] == 0
        assert read(table, tmp_path, impute={"x_*": -1}).observations[1, 0] == -1
        table["x_1"][4] = 5.0
        forward = read(table, tmp_path, impute={"x_1": "forward"})
        np.testing.assert_array_equal(forward.observations[:, 0], [1, 1, 3, 5, 6, 6])
        table["x_1"][4] = None
        assert "1 missing value with no earlier" in refusal(table, tmp_path, impute="forward")

    def test_rewards_only_by_name(self, tmp_path):
        table = walk(r=[None] + [1.0] * 7)
        assert "r: 1" in refusal(table, tmp_path, impute="zero")
        assert read(table, tmp_path, impute={"r": "zero"}).rewards[0] == 0
        assert "cannot be" not in refusal(walk(a=[None] * 8), tmp_path, impute="zero")
        assert "only observations, reward and weight" in refusal(walk(), tmp_path, impute={"a": "zero"})

    def test_lists_take_constants(self, tmp_path):
        table = walk(x_1=None, x_2=None, x=[[1.0, None]] * 8)
        assert "x: 8" in refusal(table, tmp_path, observations="x")
        log = read(table, tmp_path, observations="x", impute="zero")
        np.testing.assert_array_equal(log.observations, [[1.0, 0.0]] * 6)
        assert "only a constant" in refusal(table, tmp_path, observations="x", impute="mean").replace(
            "where ", ""
        )
        table["x"] = [None] * 7 + [[1.0, 2.0]]
        message = refusal(table, tmp_path, observations="x")
        assert "x: 7" in message

    def test_infinities_are_not_missing(self, tmp_path):
        assert "inf" in refusal(walk(x_1=[np.inf] * 8), tmp_path)


class TestTypes:
    @pytest.mark.parametrize(
        "column",
        [
            pa.array([{"deep": 1}] * 8),
            pa.array([[("k", 1)]] * 8, pa.map_(pa.string(), pa.int64())),
            pa.array([[[1.0]]] * 8),
            pa.array([datetime.date(2020, 1, 1)] * 8),
            pa.array(["1"] * 8),
            pa.array([b"1"] * 8),
            pa.nulls(8),
        ],
        ids=["struct", "map", "nested list", "date", "text", "bytes", "null"],
    )
    def test_observations_must_be_numbers(self, tmp_path, column):
        message = refusal(walk(x_1=column), tmp_path)
        assert "column x_1 is" in message
        assert "numbers" in message

    def test_struct_columns_that_are_not_named_do_no_harm(self, tmp_path):
        table = walk(note=[{"deep": [1]}] * 8)
        assert_same(read(table, tmp_path), read(walk(), tmp_path))

    def test_lists_of_unequal_length(self, tmp_path):
        table = walk(x_1=None, x_2=None, x=[[1.0]] * 7 + [[1.0, 2.0]])
        assert "1 and 2 numbers" in refusal(table, tmp_path, observations="x")
        table["y"] = [1.0] * 8
        assert "beside 1 other" in refusal(table, tmp_path, observations=["x", "y"])
        assert "no number in a row" in refusal(
            walk(x_1=None, x_2=None, x=pa.array([[]] * 8, pa.list_(pa.float64()))), tmp_path, observations="x"
        )

    def test_identifiers_as_numbers(self, tmp_path):
        assert "no float holds exactly" in refusal(walk(x_1=[2**53 + 1] * 8), tmp_path)
        assert "no float holds exactly" in refusal(walk(x_1=pa.array([2**64 - 1] * 8, pa.uint64())), tmp_path)

    def test_text_among_numbers_in_csv(self, tmp_path):
        text = "id,t,x_1,a,r,done\ne,0,1,0,1,0\ne,1,oops,0,1,1\n"
        with pytest.raises(DataError, match=r"column x_1 in row 2 is not all numbers \('oops'\)"):
            read_table(write_text(text, tmp_path / "log.csv"), MAPPING)

    def test_files_of_one_table_agree(self, tmp_path):
        write(walk(), tmp_path / "a.parquet")
        write(walk(x_1=["z"] * 8), tmp_path / "b.parquet")
        with pytest.raises(DataError, match=r"b\.parquet: column x_1 is String, in the first file Float64"):
            read_table(tmp_path, MAPPING)
        write(walk(x_1=None), tmp_path / "b.parquet")
        with pytest.raises(DataError, match="lacks column x_1"):
            read_table(tmp_path, MAPPING)
        write(walk(), tmp_path / "c.csv")
        with pytest.raises(DataError, match="CSV and Parquet"):
            read_table(tmp_path, MAPPING)


FLAGS = st.booleans()


@st.composite
def tables(draw):
    """Rows of a few episodes in any order, some with flags and next observations."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    rows = []
    for episode, length in enumerate(lengths):
        ends = draw(st.sampled_from(["open", "done", "cut"]))
        times = sorted(draw(st.sets(st.integers(-50, 50), min_size=length, max_size=length)))
        for i, t in enumerate(times):
            last = i == length - 1
            number = float(len(rows))
            rows.append(
                {"id": f"ep {episode}", "t": t, "x_1": number, "x_10": -number, "a": len(rows) % 3,
                 "r": number / 2, "done": last and ends == "done", "cut": last and ends == "cut",
                 "next_x_1": number + 0.5, "next_x_10": 7.0}
            )  # fmt: skip
    if draw(FLAGS):
        rows = draw(st.permutations(rows))
    return rows


def test_means_are_the_same_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("koffline.data.table.rows.BATCH_ROWS", 3)
    values = [None if i % 5 == 0 else 1e9 / (i + 1) for i in range(40)]
    path = write(shuffled(walk([8] * 5, [True] * 5, x_1=values)), tmp_path / "log.parquet")
    mapping = {**MAPPING, "impute": {"x_1": "mean", "x_2": "forward"}}
    whole, stream = open_transitions(path, mapping=mapping), TableStream(path, mapping, piece_rows=8)
    found = np.concatenate([piece.observations for piece in stream])
    np.testing.assert_array_equal(found, whole.observations)
    assert stream.metadata.notes == whole.metadata.notes
    assert "8 missing values in x_1 were replaced (mean" in " ".join(whole.metadata.notes)


def test_wide_rows_come_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("koffline.data.table.rows._BATCH_BYTES", 10_000)
    columns = {**walk([3] * 20, [True] * 20, x_1=None, x_2=None), "x": [[float(i)] * 100 for i in range(60)]}
    path, mapping = write(columns, tmp_path / "log.parquet"), {**MAPPING, "observations": "x"}
    pieces = list(TableStream(path, mapping))
    assert len(pieces) > 4  # 12 rows of 100 float64 fill the bytes of a piece
    whole = open_transitions(path, mapping=mapping)
    np.testing.assert_array_equal(np.concatenate([each.observations for each in pieces]), whole.observations)


class TestAgainstTheReference:
    @settings(max_examples=30, deadline=None)
    @given(tables(), FLAGS, FLAGS, st.integers(1, 20), st.sampled_from(["parquet", "csv"]))
    def test_at_once_and_in_pieces(self, tmp_path_factory, rows, has_cut, has_next, piece_rows, suffix):
        expected = rows_to_transitions([dict(row) for row in rows], ["x_1", "x_10"], has_cut, has_next)
        path = tmp_path_factory.mktemp("tables") / f"log.{suffix}"
        write({name: [row[name] for row in rows] for name in rows[0]}, path)
        mapping = {**MAPPING, "truncated": "cut" if has_cut else None}
        mapping["next_observations"] = "next_*" if has_next else ()
        if not expected:
            with pytest.raises(DataError, match="no row has a next"):
                read_table(path, mapping)
            with pytest.raises(DataError, match="no row has a next"):
                list(TableStream(path, mapping))
            return
        log = read_table(path, mapping).transitions()
        assert log.observations.tolist() == [row["observation"] for row in expected]
        assert log.next_observations.tolist() == [row["next_observation"] for row in expected]
        assert log.actions.tolist() == [row["action"] for row in expected]
        assert log.rewards.tolist() == [row["reward"] for row in expected]
        assert log.terminated.tolist() == [row["terminated"] for row in expected]
        assert log.truncated.tolist() == [row["truncated"] for row in expected]
        assert log.steps.tolist() == [row["step"] for row in expected]
        stream = TableStream(path, mapping, piece_rows=piece_rows)
        pieces = list(stream)
        for name in (*COLUMNS, "episode_ids"):
            joined = np.concatenate([getattr(piece, name) for piece in pieces])
            np.testing.assert_array_equal(joined, getattr(log, name))
        assert {piece.action_space for piece in pieces} == {log.action_space}
        assert stream.metadata.notes == log.metadata.notes
