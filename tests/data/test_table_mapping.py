"""Which column is what: names, patterns, dicts and YAML files, and how mistakes are put."""

from __future__ import annotations

import pickle

import pytest

import koffline
from koffline.data.table.mapping import TableMapping, as_mapping, resolved
from koffline.errors import DataError

LEAST = {"observations": "x_*", "action": "a", "reward": "r"}
NAMES = ("x_10", "x_2", "r", "a", "x_1", "obs[0]", "obs[1]", "t", "next_x_1", "next_x_2", "next_x_10")


def roles(names=NAMES, **changes):
    return resolved(TableMapping(**{**LEAST, **changes}), names, "log.csv")


@pytest.mark.parametrize(
    ("names", "observations", "found"),
    [
        (NAMES, "x_*", ("x_1", "x_2", "x_10")),
        (NAMES, ["x_2", "x_*", "t"], ("x_2", "x_1", "x_10", "t")),
        (NAMES, "t, x_?", ("t", "x_1", "x_2")),
        (NAMES, "obs[*]", ("obs[0]", "obs[1]")),
        (("x*", "x1", "a", "r"), "x*", ("x*",)),
        (("x,y", "x", "y", "a", "r"), "x,y", ("x,y",)),
    ],
)
def test_patterns(names, observations, found):
    """In natural order, each column once; a name is a name first."""
    assert roles(names, observations=observations).observations == found


def test_a_pattern_takes_no_column_with_another_role():
    names = [name for name in NAMES if "obs" not in name]
    found = roles(names, observations="*", episode="t", next_observations="next_*", impute={"x_1": 1, "": 0})
    assert found.observations == ("x_1", "x_2", "x_10")
    assert found.next_observations == ("next_x_1", "next_x_2", "next_x_10")
    assert dict(found.impute)["x_1"] == 1
    assert dict(found.impute)["next_x_10"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": None}, "lacks reward"),
        ({"observations": []}, "lacks observations"),
        ({"reward": 3}, "reward is 3; give one column name"),
        ({"behavior_probability": "p", "behavior_log_probability": "q"}, "keep one"),
        ({"gamma": 1.0}, "between 0 and 1"),
        ({"impute": "median"}, "give zero, mean, forward or a number"),
        ({"impute": {"x_1": "inf"}}, "impute is {'x_1': 'inf'}"),
        ({"action_names": "left"}, "give a list"),
        ({"action_names": ["a", "a"]}, "each once"),
        ({"rewards": "r"}, "unknown key 'rewards'; did you mean 'reward'?"),
        ({"observations": "y_*"}, r"no column fits observations 'y_\*'"),
        ({"reward": "rr"}, r"no column 'rr' \(reward\); did you mean 'r'"),
        (
            {"observations": ["x_1"], "next_observations": "next_*"},
            "3 columns are next_observations, 1 observ",
        ),
    ],
)
def test_mistakes(changes, words):
    with pytest.raises(DataError, match=words) as caught:
        roles(**changes)
    assert "\n" not in str(caught.value)


def test_a_file_is_the_same_as_keywords(tmp_path):
    path = tmp_path / "columns.yaml"
    path.write_text(
        "observations: [x_*]\naction: a\nreward: r\nimpute: {x_1: mean, x_2: 0.5}\naction_names: [l, r]\n"
    )
    mapping = as_mapping(path)
    impute = {"x_1": "mean", "x_2": 0.5}
    assert mapping == TableMapping(["x_*"], "a", "r", impute=impute, action_names=["l", "r"])
    assert as_mapping(mapping) is mapping
    assert pickle.loads(pickle.dumps(mapping)) == mapping
    assert koffline.TableMapping is TableMapping
