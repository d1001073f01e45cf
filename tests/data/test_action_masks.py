"""Masks of available actions: checks, files, tables, and what is done to the rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import koffline
from koffline.data.copies import without_copies
from koffline.data.disk.log import joined
from koffline.data.replay import to_d3rlpy
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.data.splitting import split_log
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from tests.refusals import assert_refused, run_cli

ROWS = 24
ACTIONS = 3
LENGTH = 4


def columns(**changes: Any) -> dict[str, Any]:
    """Columns of six episodes of four rows, the odd ones cut, with masks of both
    states.
    """
    generator = np.random.default_rng(2)
    steps = np.tile(np.arange(LENGTH), ROWS // LENGTH)
    is_last = steps == LENGTH - 1
    is_odd = np.arange(ROWS) // LENGTH % 2 == 1
    states = generator.normal(size=(ROWS + 1, 2))
    following = states[1:]
    actions = generator.integers(ACTIONS, size=ROWS)
    mask = generator.random((ROWS + 1, ACTIONS)) < 0.5
    mask[np.arange(ROWS), actions] = True
    mask[-1, 0] = True
    kept = {
        "observations": states[:-1],
        "actions": actions,
        "rewards": generator.normal(size=ROWS),
        "next_observations": following,
        "terminated": is_last & ~is_odd,
        "truncated": is_last & is_odd,
        "action_space": Discrete(ACTIONS),
        "steps": steps,
        "action_mask": mask[:-1],
        "next_action_mask": mask[1:],
        **changes,
    }
    return {name: value for name, value in kept.items() if value is not None}


def masked_log(**changes: Any) -> Transitions:
    return Transitions(**columns(**changes))


def assert_same_masks(log: Transitions, expected: Transitions) -> None:
    np.testing.assert_array_equal(log.action_mask, expected.action_mask)
    np.testing.assert_array_equal(log.next_action_mask, expected.next_action_mask)
    assert log.sha256 == expected.sha256


def test_next_masks_are_those_of_the_rows_below() -> None:
    is_last = np.arange(ROWS) % LENGTH == LENGTH - 1
    terminated = {"terminated": is_last, "truncated": np.zeros(ROWS, bool)}
    log = masked_log(next_action_mask=None, **terminated)
    np.testing.assert_array_equal(log.next_action_mask[0], log.action_mask[1])
    assert log.next_action_mask[is_last].all()  # without influence
    np.testing.assert_array_equal(log.initial_action_mask(), log.action_mask[::LENGTH])


def test_digests_count_masks_only_where_there_are_some() -> None:
    plain = masked_log(action_mask=None, next_action_mask=None)
    assert plain.sha256.startswith("844f0bd23723d9c0")  # before there were masks
    assert masked_log().sha256 != plain.sha256
    of_terminal = columns()["next_action_mask"].copy()
    of_terminal[columns()["terminated"]] = False  # without influence
    assert masked_log(next_action_mask=of_terminal).sha256 == masked_log().sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action_mask": np.ones((ROWS, 2))}, "expected (N, 3)"),
        ({"action_mask": np.ones(ROWS)}, "expected (N, 3)"),
        ({"action_mask": np.full((ROWS, 3), 2)}, "neither true nor false"),
        ({"action_mask": np.full((ROWS, 3), np.nan)}, "neither true nor false"),
        (
            {"action_mask": np.zeros((ROWS, 3))},
            "no action is available in the state in 24",
        ),
        (
            {"action_mask": 1 - np.eye(3)[columns()["actions"]]},
            "the logged action was not available in 24 rows (first: row 0)",
        ),
        ({"action_mask": None}, "next_action_mask is given without action_mask"),
        (
            {"next_action_mask": None},
            "no row follows 3 rows that did not terminate (first: row 7)",
        ),
        (
            {"next_action_mask": np.zeros((ROWS, 3))},
            "no action is available in the next state",
        ),
        ({"action_mask": np.ones((ROWS - 1, 3))}, "has 23 rows"),
        (
            {
                "actions": np.zeros((ROWS, 3)),
                "action_space": koffline.Continuous(3),
            },
            "is for discrete actions",
        ),
    ],
)
def test_masks_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as error:
        masked_log(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["log.hdf5", "log.npz", "log.parquet", "log.arrow", "log.csv", "minari"]
)
def test_files_keep_masks(name: str, tmp_path: Path) -> None:
    log = masked_log()
    target = tmp_path / name
    format = None
    if name == "minari":
        format = "minari"
    write_transitions(log, target, format)
    again = open_transitions(target)
    np.testing.assert_array_equal(again.action_mask, log.action_mask)
    np.testing.assert_array_equal(again.next_action_mask, log.next_action_mask)
    assert open_transitions(target).columns.keys() >= {"action_mask"}


def test_shards_keep_masks_and_are_read_in_blocks(tmp_path: Path) -> None:
    log = masked_log()
    write_transitions(log, tmp_path / "log.hdf5")
    shards = convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", 8)
    assert len(shards.shards) == 3
    assert_same_masks(shards.load(), log)
    first = joined(list(shards.shard_blocks(0, 3)))
    np.testing.assert_array_equal(first.action_mask, log.action_mask[:8])
    np.testing.assert_array_equal(first.next_action_mask, log.next_action_mask[:8])


def test_masks_follow_their_rows() -> None:
    log = masked_log()
    np.testing.assert_array_equal(
        log.select([5, 2]).action_mask, log.action_mask[[5, 2]]
    )
    chosen = log.select_episodes([3, 1])
    np.testing.assert_array_equal(chosen.action_mask[:LENGTH], log.action_mask[12:16])
    np.testing.assert_array_equal(
        chosen.next_action_mask[LENGTH:], log.next_action_mask[4:8]
    )
    kept, held_out = split_log(log, 0.5, 0)
    assert held_out is not None
    assert len(kept.action_mask) + len(held_out.action_mask) == ROWS


def test_episodes_with_other_masks_are_no_copies() -> None:
    log = masked_log()
    twice = log.select_episodes([0, 0])
    assert len(without_copies(twice).kept) == 1
    mask = twice.action_mask.copy()
    mask[:LENGTH] = True
    assert len(without_copies(twice.replace(action_mask=mask)).kept) == 2


def test_arrays_of_other_programs_under_usual_names(tmp_path: Path) -> None:
    log_columns = columns(next_action_mask=None, action_space=None, steps=None)
    arrays = {
        "observations": log_columns["observations"],
        "actions": log_columns["actions"],
        "rewards": log_columns["rewards"],
        "terminals": log_columns["terminated"],
        "timeouts": log_columns["truncated"],
        "action_masks": log_columns["action_mask"].astype(np.float32),
    }
    np.savez(tmp_path / "log.npz", **arrays)
    log = open_transitions(tmp_path / "log.npz")
    # the last rows of three cut episodes have no next observation
    assert len(log) == ROWS - 3
    assert log.action_space == Discrete(ACTIONS)
    np.testing.assert_array_equal(log.action_mask[:4], log_columns["action_mask"][:4])
    np.testing.assert_array_equal(
        log.next_action_mask[6], log_columns["action_mask"][7]
    )
    # with next observations those rows say not what was available next
    arrays["next_observations"] = log_columns["next_observations"]
    log = open_transitions(arrays)
    assert len(log) == ROWS - 3
    assert any(
        "which actions were available next" in note for note in log.metadata.notes
    )
    # no masks of these actions
    log = open_transitions({**arrays, "action_masks": np.ones(ROWS)})
    assert log.action_mask is None
    assert any("action_masks was left out" in note for note in log.metadata.notes)


def test_lists_of_episodes() -> None:
    log_columns = columns()
    episodes = [
        {
            "observations": np.zeros((3, 2)),
            "actions": log_columns["actions"][:2],
            "rewards": np.zeros(2),
            "terminations": False,
            "action_mask": np.concatenate(
                [log_columns["action_mask"][:2], [[0, 1, 0]]]
            ),
        }
    ]
    log = open_transitions(episodes)
    np.testing.assert_array_equal(log.next_action_mask[1], [False, True, False])


MAPPING = {
    "observations": "x",
    "action": "a",
    "reward": "r",
    "episode": "id",
    "time": "t",
    "terminal": "d",
}
BASE = {
    "id": [0, 0, 0, 1, 1, 1],
    "t": [0, 1, 2, 0, 1, 2],
    "x": [0.1, 0.5, 0.3, 0.2, 0.7, 0.9],
    "r": [1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    "d": [0, 0, 1, 0, 0, 1],
}
NUMBERS = [0, 1, 0, 2, 1, 0]
LABELS = ["a", "b", "a", "c", "b", "a"]
MASKS = [[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0]]
AVAILABLE = [[i for i in range(3) if mask[i]] for mask in MASKS]
FLAGS = {f"can_{i}": [mask[i] for mask in MASKS] for i in range(3)}


@pytest.mark.parametrize(
    ("added", "masks"),
    [
        ({"a": NUMBERS, **FLAGS}, "can_*"),
        ({"a": NUMBERS, "can": MASKS}, "can"),
        ({"a": NUMBERS, "can": AVAILABLE}, "can"),
        ({"a": LABELS, "can": [["abc"[i] for i in row] for row in AVAILABLE]}, "can"),
        ({"a": LABELS, "can": MASKS}, "can"),
        # by the ends of the names, whatever their order
        (
            {"a": LABELS, **{f"can_{'abc'[i]}": FLAGS[f"can_{i}"] for i in (2, 0, 1)}},
            ["can_c", "can_a", "can_b"],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["frame", "parquet", "csv"])
def test_tables_say_which_actions_were_available(
    added: dict[str, Any], masks: Any, kind: str, tmp_path: Path
) -> None:
    source: Any = pl.DataFrame({**BASE, **added})
    nested = [name for name, type in source.schema.items() if type.is_nested()]
    if kind == "parquet":
        source.write_parquet(tmp_path / "log.parquet")
        source = tmp_path / "log.parquet"
    elif kind == "csv":
        if nested and isinstance(added[nested[0]][0][0], str):
            pytest.skip("CSV has no lists of texts")
        texts = {name: list(map(json.dumps, added[name])) for name in nested}
        source.with_columns(
            **{name: pl.Series(texts[name]) for name in nested}
        ).write_csv(tmp_path / "log.csv")
        source = tmp_path / "log.csv"
    log = open_transitions(source, mapping={**MAPPING, "action_mask": masks})
    np.testing.assert_array_equal(log.action_mask, MASKS)
    np.testing.assert_array_equal(log.next_action_mask[:2], MASKS[1:3])


def test_available_actions_that_were_never_taken_are_actions() -> None:
    can = [["a", "z"], ["b"], ["a"], ["c"], ["b"], ["a"]]
    frame = pl.DataFrame({**BASE, "a": LABELS, "can": can})
    log = open_transitions(frame, mapping={**MAPPING, "action_mask": "can"})
    assert log.metadata.extra["action_names"] == ["a", "b", "c", "z"]
    assert log.action_mask[0].tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("added", "masks", "words"),
    [
        ({"a": [1] * 6, "can": [[0, 1]] * 6}, "can", "may be flags of all actions, or"),
        ({"a": [1] * 6, "can": [[0, 2]] * 6}, "can", "neither all flags"),
        ({"a": NUMBERS, "can": [[], *AVAILABLE[1:]]}, "can", "neither all flags"),
        ({"a": NUMBERS, "can": [None, *AVAILABLE[1:]]}, "can", "values are missing"),
        ({"a": NUMBERS, "can": ["0 1"] * 6}, "can", "neither yes nor no"),
        ({"a": NUMBERS, **FLAGS}, ["can_0", "can_1"], "row 3"),
        ({"a": LABELS, **FLAGS}, "can_*", "has no column for action 'a'"),
        ({"a": NUMBERS, **FLAGS, "can_1": [5] * 6}, "can_*", "neither yes nor no"),
        ({"a": NUMBERS, **FLAGS}, "could_*", "no column fits action_mask"),
        (
            {"a": NUMBERS, "can_0": [1] * 6, "can_1": [0] * 6, "can_2": [1] * 6},
            "can_*",
            "the logged action was not available in 2 rows (first: row 1)",
        ),
    ],
)
def test_tables_whose_masks_cannot_be_are_refused(
    added: dict[str, Any], masks: Any, words: str
) -> None:
    frame = pl.DataFrame({**BASE, **added})
    with pytest.raises(DataError) as error:
        open_transitions(frame, mapping={**MAPPING, "action_mask": masks})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_inspect_proposes_columns_and_info_shows_them(tmp_path: Path) -> None:
    flags = {f"action_mask_{i}": FLAGS[f"can_{i}"] for i in range(3)}
    frame = pl.DataFrame({**BASE, "action": NUMBERS, **flags})
    assert koffline.inspect(frame).mapping["action_mask"] == list(flags)
    lists = pl.DataFrame({**BASE, "action": NUMBERS, "legal_actions": AVAILABLE})
    assert koffline.inspect(lists).mapping["action_mask"] == ["legal_actions"]
    write_transitions(masked_log(), tmp_path / "log.hdf5")
    shown = run_cli("data", "info", tmp_path / "log.hdf5")
    assert "action-masks" in shown.output
    summary = json.loads(
        run_cli("data", "info", tmp_path / "log.hdf5", "--json").stdout
    )
    assert summary["has_action_masks"] is True


def test_what_does_not_know_masks_says_so(tmp_path: Path) -> None:
    log = masked_log()
    for refused in (
        lambda: koffline.ColumnarReplayBuffer(log),
        lambda: to_d3rlpy(log),
        lambda: koffline.improve(log, gamma=0.9),
    ):
        with pytest.raises(DataError, match="action_mask, which") as error:
            refused()
        assert "\n" not in str(error.value)
    # the remedy
    koffline.ColumnarReplayBuffer(log.replace(action_mask=None, next_action_mask=None))
    write_transitions(log, tmp_path / "log.hdf5")
    assert_refused(
        run_cli("improve", tmp_path / "log.hdf5", "--gamma", "0.9"),
        "action_mask",
        "leave it out",
    )
