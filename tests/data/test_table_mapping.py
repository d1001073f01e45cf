"""Which column is what: names, patterns, dicts and YAML files, and how mistakes are put."""

from __future__ import annotations

import pickle

import pytest

import koffline
from koffline.data.table.mapping import TableMapping, as_mapping, natural_key, own_mapping, resolved, unmapped
from koffline.errors import DataError

LEAST = {"observations": "x_*", "action": "a", "reward": "r"}
NAMES = ("x_10", "x_2", "r", "a", "x_1", "obs[0]", "obs[1]", "t", "next_x_1", "next_x_2", "next_x_10")


def roles(names=NAMES, **changes):
    return resolved(TableMapping(**{**LEAST, **changes}), names, "log.csv")


def refusal(call, *arguments, **keywords):
    with pytest.raises(DataError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestPatterns:
    def test_natural_order(self):
        assert roles().observations == ("x_1", "x_2", "x_10")
        assert sorted(["b", "a10b", "a2b", "a", "2", "10"], key=natural_key) == [
            "2",
            "10",
            "a",
            "a2b",
            "a10b",
            "b",
        ]

    def test_several_patterns_in_their_order_each_column_once(self):
        assert roles(observations=["x_2", "x_*", "t"]).observations == ("x_2", "x_1", "x_10", "t")
        assert roles(observations="t, x_?").observations == ("t", "x_1", "x_2")

    def test_a_pattern_takes_no_column_with_another_role(self):
        names = [name for name in NAMES if "obs" not in name]
        found = roles(names, observations="*", episode="t", next_observations="next_*")
        assert found.observations == ("x_1", "x_2", "x_10")
        assert found.next_observations == ("next_x_1", "next_x_2", "next_x_10")

    def test_brackets_are_letters(self):
        assert roles(observations="obs[*]").observations == ("obs[0]", "obs[1]")

    def test_a_name_with_a_star_or_a_comma_is_a_name_first(self):
        assert roles(("x*", "x1", "a", "r"), observations="x*").observations == ("x*",)
        assert roles(("x,y", "x", "y", "a", "r"), observations="x,y").observations == ("x,y",)


class TestMistakes:
    def test_nearest_name(self):
        assert "no column 'rewrd' (reward); did you mean 'reward'?" in refusal(
            roles, ("x_1", "a", "reward"), reward="rewrd"
        )
        assert "no column fits observations 'y_*'" in refusal(roles, observations="y_*")

    def test_header_twice_or_missing(self):
        assert "more than one column named a" in refusal(roles, ("a", "a", "x_1", "r"))
        assert "no columns" in refusal(roles, ())

    def test_unequal_next_observations(self):
        message = refusal(roles, observations=["x_1"], next_observations="next_*")
        assert "3 columns are next_observations, 1 observations" in message

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"reward": None}, "lacks reward"),
            ({"observations": []}, "lacks observations"),
            ({"reward": 3}, "reward is 3"),
            ({"reward": ""}, "reward is ''"),
            ({"action": [1]}, r"action is \[1\]"),
            ({"observations": {"a": 1}}, "observations is"),
            ({"behavior_probability": "p", "behavior_log_probability": "q"}, "keep one"),
            ({"gamma": 1.0}, "between 0 and 1"),
            ({"gamma": "high"}, "between 0 and 1"),
            ({"impute": "median"}, "give zero, mean, forward or a number"),
            ({"impute": {"x_1": "inf"}}, "x_1.: .inf"),
            ({"impute": True}, "impute is True"),
            ({"impute": [1, 2]}, r"impute is \[1, 2\]"),
            ({"action_names": "left"}, "give a list"),
            ({"action_names": ["a", "a"]}, "each once"),
            ({"action_names": [1.5]}, "give a list"),
        ],
    )
    def test_records_that_contradict_themselves(self, changes, words):
        with pytest.raises(DataError, match=words):
            TableMapping(**{**LEAST, **changes})

    def test_unknown_keys(self):
        assert "unknown key 'rewards'; did you mean 'reward'?" in refusal(
            as_mapping, {**LEAST, "rewards": "r"}
        )

    def test_a_table_without_mapping_shows_its_columns_and_a_command(self):
        message = str(unmapped(["s0", "s1", "user_id", "step", "action", "reward", "done"], "log.csv", "CSV"))
        assert "columns s0, s1, user_id" in message
        assert "--observations 's*' --action action --reward reward --episode user_id --time step" in message
        assert "--terminal done" in message
        many = str(unmapped([f"c{i}" for i in range(100)], "log.csv", "CSV"))
        assert "(100 in all)" in many


class TestFiles:
    def write(self, tmp_path, text):
        path = tmp_path / "columns.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def test_the_same_as_keywords(self, tmp_path):
        text = (
            "observations: [x_*]\naction: a\nreward: r\nimpute: {x_1: mean, x_2: 0.5}\naction_names: [l, r]\n"
        )
        mapping = as_mapping(self.write(tmp_path, text))
        assert mapping == TableMapping(
            ["x_*"], "a", "r", impute={"x_1": "mean", "x_2": 0.5}, action_names=["l", "r"]
        )
        assert as_mapping(mapping) is mapping
        assert pickle.loads(pickle.dumps(mapping)) == mapping
        assert koffline.TableMapping is TableMapping

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "lacks observations, action, reward"),
            ("- a\n", "holds a list"),
            ("reward: r\nreward: q\n", "twice"),
            ("reward: [\n", "not valid YAML"),
            ("reward: !!python/object/apply:os.getcwd []\n", "YAML|not read"),
            (b"\xff\xfe\x00", "UTF-8"),
            ("a: " + "[" * 500 + "]" * 500, "nested"),
            ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "unknown key"),
            ("1: r\n", "unknown key '1'"),
            ("x" * 2**21, "larger than"),
        ],
    )
    def test_files_that_are_none(self, tmp_path, text, words):
        with pytest.raises(DataError, match=words):
            as_mapping(self.write(tmp_path, text))

    def test_no_file(self, tmp_path):
        assert "cannot be read" in refusal(as_mapping, tmp_path / "none.yaml")
        assert "no regular file" in refusal(as_mapping, tmp_path)


def test_our_own_names_need_no_mapping():
    names = ["observations_0", "actions", "rewards", "terminals", "steps", "episode_ids"]
    found = own_mapping(names)
    assert found is not None
    assert (found.observations, found.time, found.truncated) == (("observations_*",), "steps", None)
    assert own_mapping([name for name in names if name != "terminals"]) is None
