"""What a mapping may ask for: categories, formulas, ends, repeated rows, episodes of
one row; refusals.
"""

import numpy as np
import pytest

import koffline
from koffline.data.sources import open_transitions
from koffline.data.table.mapping import parse_formula
from koffline.errors import DataError, PolicyError
from tests.data.table_rows import MAPPING, read, refusal, shuffled, walk, write_text
from tests.refusals import one_line, succeed

N = 8  # rows of walk(): episodes of 3 (ends), 1 and 4
CITY = ["b", "a", "c", "a", "b", "b", "c", "a"]


class TestCategories:
    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_by_hand(self, tmp_path, suffix):
        encode = {"city": "one-hot", "size": {"ordinal": ["s", "m", "l"]}}
        table = walk(city=CITY, size=list("smlsmlsm"), x_2=None)
        mapping = {"observations": ["x_1", "city", "size"], "encode": encode}
        log = read(table, tmp_path, f"log.{suffix}", **mapping)
        assert log.feature_names == ("x_1", "city=a", "city=b", "city=c", "size")
        np.testing.assert_array_equal(
            log.observations[:3, 1:], [[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 2]]
        )
        np.testing.assert_array_equal(log.next_observations[0, 1:], [1, 0, 0, 1])

    @pytest.mark.parametrize(
        "name", ["a.hdf5", "a.npz", "a.parquet", "a.arrow", "shards", "minari:a/b-v0"]
    )
    def test_names_survive_conversion(self, tmp_path, monkeypatch, name):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        monkeypatch.chdir(tmp_path)
        encoded = {"observations": "x_1, city", "encode": {"city": "one-hot"}}
        whole = read(shuffled(walk(city=CITY)), tmp_path, **encoded)
        words = (
            f"data convert log.parquet {name} --observations x_1,city --action a"
            " --reward r "
        )
        words += "--episode id --time t --terminal done --encode city=one-hot"
        if name == "shards":
            words += " --shard-rows 4"
        assert "put together and in time order" in succeed(*words.split())
        log = open_transitions(name)
        assert log.sha256 == whole.sha256
        assert log.feature_names == ("x_1", "city=a", "city=b", "city=c")
        assert log.metadata.extra["action_names"] == ["left", "right"]
        table = log.metadata.features.table(log.observations)
        assert table["city"].to_list() == ["b", "b", "c", "b", "a", "c"]
        if name == "shards":
            lazy = open_transitions(name, lazy=True)
            assert (lazy.feature_names, len(lazy.shards)) == (log.feature_names, 2)

    def test_a_policy_asks_for_the_table(self, tmp_path):
        """A log of a table has it: test_table_inspection."""
        plain = read(walk(), tmp_path).with_metadata(
            koffline.data.transitions.Metadata()
        )
        with pytest.raises(PolicyError, match="asks for a table"):
            koffline.evaluate(
                plain, lambda table: table["city"] == "a", gamma=0.9, steps=10
            )

    def test_missing_categories(self, tmp_path):
        table = walk(city=["b", None, *CITY[2:]])
        mapping = {"observations": ["x_1", "city"], "encode": {"city": "one-hot"}}
        assert "values are missing (city: 1, of 8 rows)" in refusal(
            table, tmp_path, **mapping
        )
        log = read(table, tmp_path, **mapping, impute={"city": "zero"})
        np.testing.assert_array_equal(log.observations[1, 1:], [0, 0, 0])
        assert (
            log.metadata.features.table(log.observations)["city"].to_list()[1] is None
        )
        forward = read(table, tmp_path, **mapping, impute={"city": "forward"})
        np.testing.assert_array_equal(forward.observations[1, 1:], [0, 1, 0])

    def test_next_observations_share_the_categories(self, tmp_path):
        table = walk(x_1=None, x_2=None, city=CITY, next_city=["z", *CITY[1:]])
        names = {"observations": "city", "next_observations": "next_city"}
        log = read(table, tmp_path, **names, encode={"city": "one-hot"})
        assert log.feature_names == ("city=a", "city=b", "city=c", "city=z")
        np.testing.assert_array_equal(log.next_observations[0], [0, 0, 0, 1])

    @pytest.mark.parametrize(
        ("columns", "encode", "words"),
        [
            (
                {"city": CITY},
                {"city": {"one-hot": ["a", "b"]}},
                "holds 'c', no category of a, b",
            ),
            ({"city": [None] * N}, {"city": "one-hot"}, "city"),
            ({"city": CITY}, {"city": "dummy"}, "one-hot or ordinal by column"),
            (
                {"city": CITY, "city=a": [1] * N},
                {"city": "one-hot"},
                "would become city=a, another column",
            ),
            (
                {"city": CITY},
                {"r": "one-hot"},
                "encode names r, which is no observation",
            ),
            ({"city": CITY}, {}, "--encode city=one-hot (a state)"),
        ],
    )
    def test_refusals(self, tmp_path, columns, encode, words):
        names = ["x_1", "city"]
        if "city=a" in columns:
            names.append("city=a")
        assert words in refusal(
            walk(**columns), tmp_path, observations=names, encode=encode
        )

    def test_too_many(self, tmp_path):
        table = walk([2000], [False], x_1=[f"c{i}" for i in range(2000)])
        assert "more than 1000 categories" in refusal(
            table, tmp_path, encode={"x_1": "one-hot"}
        )


class TestFormulas:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("2 * x_1 - x_2 / 4", lambda x, y: 2 * x - y / 4),
            ("-x_1", lambda x, y: -x),
            (
                "max(x_1, x_2, 3) - min(x_1, 1)",
                lambda x, y: np.fmax(np.fmax(x, y), 3) - np.fmin(x, 1),
            ),
            (
                "(x_1 > 1) * 5 + (0 < x_2 <= 9)",
                lambda x, y: (x > 1) * 5 + ((y > 0) & (y <= 9)),
            ),
            ("`x_1` + `the cost`", lambda x, y: x + 1),
        ],
    )
    def test_values(self, tmp_path, text, value):
        table = walk(**{"the cost": [1] * N})
        # a pattern takes none of a formula
        mapping = {
            "observations": ["x_1", "x_2"],
            "reward": text,
        }
        log = read(table, tmp_path, **mapping)
        expected = value(np.array(table["x_1"]), np.array(table["x_2"]))
        np.testing.assert_allclose(log.rewards, expected[[0, 1, 2, 4, 5, 6]])

    @pytest.mark.parametrize(
        "text",
        [
            "x_1 ** 9",
            "__import__('os')",
            "x_1.y",
            "x_1[0]",
            "lambda: 1",
            "'a' + x_1",
            "abs(x_1)",
            "x_1 +",
            "x_1 if 1 else 2",
            "sum(x_1)",
            "(" * 300,
            "x_1 + " + "9" * 5000,
            "x_1 and x_2",
        ],
    )
    def test_nothing_else_is_read(self, text):
        with pytest.raises(DataError, match="cannot be read"):
            parse_formula(text)

    def test_a_column_comes_first_and_unknown_ones_are_named(self, tmp_path):
        table = walk(**{"x_1 - x_2": [5.0] * N})
        assert read(table, tmp_path, reward="x_1 - x_2").rewards.tolist() == [5.0] * 6
        assert "no column 'y' (reward 'y - 1')" in refusal(
            walk(), tmp_path, reward="y - 1"
        )
        assert "(reward); did you mean" in refusal(walk(), tmp_path, reward="rr")
        assert "column 1 / x_1 holds inf (wrong in 1 row)" in refusal(
            walk(), tmp_path, reward="1 / x_1"
        )
        table = walk(r=[None, *range(7)])
        assert "values are missing (reward: 1, of 8 rows)" in refusal(
            table, tmp_path, reward="2 * r"
        )
        assert (
            len(read(table, tmp_path, reward="2 * r", impute={"reward": "zero"})) == 6
        )

    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_texts_say_what_a_flag_and_a_reward_are(self, tmp_path, suffix):
        plain = read(walk(), tmp_path, f"plain.{suffix}")
        table = walk(
            status=[
                " sick",
                *("died" if done else "sick" for done in walk()["done"][1:]),
            ]
        )
        mapping = {
            "terminal": "status == 'died'",
            "reward": "r - 5 * (status == 'died')",
        }
        log = read(table, tmp_path, f"log.{suffix}", **mapping)
        np.testing.assert_array_equal(log.terminated, plain.terminated)
        np.testing.assert_array_equal(log.rewards, plain.rewards - 5 * plain.terminated)
        logs = [
            read(
                table,
                tmp_path,
                f"log.{suffix}",
                terminal=None,
                truncated=flag,
                last_row="cut",
            ).truncated
            for flag in ("done", "max(status == 'died', t > 90)")
        ]
        np.testing.assert_array_equal(*logs)


class TestEndsOfEpisodes:
    def test_they_are_said(self, tmp_path):
        table = walk(done=None)
        words = refusal(table, tmp_path, terminal=None)
        assert "--terminal" in words
        assert "--last-row terminal" in words
        ended = read(table, tmp_path, terminal=None, last_row="terminal")
        np.testing.assert_array_equal(ended.terminated, [0, 0, 1, 1, 0, 0, 0, 1])
        cut = read(table, tmp_path, terminal=None, last_row="cut")
        assert not cut.terminated.any()
        np.testing.assert_array_equal(cut.truncated, [0, 1, 0, 0, 1])
        # with flags: only where an episode has none
        assert read(walk(), tmp_path, last_row="terminal").terminated.sum() == 3

    def test_cut_ends_an_episode_before_a_missing_value(self, tmp_path):
        table = walk((4, 4), (True, True), r=[1, None, 3, 4, 5, 6, None, 8])
        log = read(table, tmp_path, impute={"reward": "cut"})
        np.testing.assert_array_equal(log.rewards, [1, 5, 6])
        np.testing.assert_array_equal(log.truncated, [1, 0, 1])
        assert not log.terminated.any()
        # of the rows cut off
        np.testing.assert_array_equal(log.next_observations[:, 0], [0.5, 2.5, 3.0])
        assert "5 rows were left out: from a missing value on" in " ".join(
            log.metadata.notes
        )
        # a missing observation cannot be the next one of the row above
        table = walk((4, 4), (True, True), x_1=[0, 1, 2, None, 4, 5, 6, 7])
        log = read(table, tmp_path, impute={"x_1": "cut"})
        np.testing.assert_array_equal(log.rewards, [1, 2, 5, 6, 7, 8])
        np.testing.assert_array_equal(log.truncated, [0, 1, 0, 0, 0, 0])

    @pytest.mark.parametrize("column", ["a", "r", "p", "x_1"])
    def test_whatever_is_missing(self, tmp_path, column):
        table = walk((4, 4), (True, True), p=[0.5] * N)
        values = list(table[column])
        values[5] = None
        table[column] = values
        log = read(table, tmp_path, behavior_probability="p", impute={column: "cut"})
        n_rows = 5
        if column == "x_1":
            n_rows = 4
        assert len(log) == n_rows
        assert np.isfinite(log.rewards).all()


def test_which_of_repeated_rows_is_kept(tmp_path):
    table = walk((3, 3), (True, True))
    doubled = {name: [*column, column[1], column[4]] for name, column in table.items()}
    assert "--drop-duplicates exact" in refusal(doubled, tmp_path)
    log = read(doubled, tmp_path, drop_duplicates="exact")
    np.testing.assert_array_equal(log.rewards, table["r"])
    assert "2 repeated rows were dropped" in log.metadata.notes
    doubled["r"][-1] = 99.0
    assert "1 row has the time of another row" in refusal(
        doubled, tmp_path, drop_duplicates="exact"
    )
    for kept, reward in (("first", 5.0), ("last", 99.0)):
        rewards = read(doubled, tmp_path, drop_duplicates=kept).rewards
        np.testing.assert_array_equal(rewards, [1, 2, 3, 4, reward, 6])


class TestRowsThatAreEpisodes:
    def test_every_row_ends(self, tmp_path):
        table = walk(done=None, r=[1.0, None, *range(6)])
        alone = {"episode": None, "terminal": None}
        log = read(table, tmp_path, **alone, one_step=True, impute={"reward": "cut"})
        assert (log.n_episodes, len(log)) == (7, 7)
        assert log.terminated.all()
        np.testing.assert_array_equal(log.next_observations, log.observations)
        assert "leave such rows out" in refusal(table, tmp_path, **alone, one_step=True)

    @pytest.mark.parametrize("time", [None, "t"])
    def test_nothing_is_guessed(self, tmp_path, time):
        table = walk(t=range(N), done=[False] * N)
        for terminal in ("done", None):
            words = refusal(table, tmp_path, episode=None, time=time, terminal=terminal)
            assert "--one-step" in words
            assert "--episode" in words
        assert (
            read(table, tmp_path, episode=None, time=time, one_step=False).n_episodes
            == 1
        )


def test_refusals_name_all_that_is_wrong_with_the_mapping_then_with_the_rows(tmp_path):
    body = "id,t,x_1,x_2,city,a,r,done\n" + "".join(
        f"{i // 4},{i % 4},{'' if i == 2 else i},{i},b,{i % 2},{i},{i % 4 == 3}\n"
        for i in range(8)
    )
    path = write_text(body + "1,3,1,1,a,1,1,True\n", tmp_path / "log.csv")
    names = {
        "observations": "speed",
        "action": "acts",
        "reward": "gains",
        "episode": "usr",
    }
    misspelt = {**MAPPING, **names, "encode": {"town": "one-hot"}}
    missing_columns = [f"no column '{name}' ({role})" for role, name in names.items()]
    lacking = {"observations": "x_*", "impute": "median", "tme": "t", "gamma": 2}
    for declared, words in (
        (
            misspelt,
            ["has 5 problems: (1) ", *missing_columns, "no column 'town' (encode)"],
        ),
        (
            {**MAPPING, "observations": "x_*"},
            [
                "has 3 problems: (1) ",
                "values are missing (x_1: 1, of 9 rows)",
                "1 row has the time of another row",
                "column done is set in 1 row whose episode goes on",
            ],
        ),
        (
            lacking,
            [
                (
                    "impute is 'median': input should be 'zero', 'mean', 'forward' or"
                    " 'cut', or input"
                ),
                "unknown key 'tme'; did you mean 'time'?",
                "gamma is 2",
                "lacks action, reward",
            ],
        ),
    ):
        with one_line(DataError, *words):
            open_transitions(path, mapping=declared)
