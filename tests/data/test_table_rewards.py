"""Rewards in rows that are left out: moved to the action that earned them, asked about,
or let go.
"""

import re

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from tests.data.table_rows import (
    MAPPING,
    OPTIONS,
    read,
    refusal,
    shuffled,
    walk,
    write,
)
from tests.refusals import assert_refused, one_line, run_cli, succeed

OUTCOMES = {"impute": {"a": "cut"}}


def stays(n=30, outcome=1.0, cost=-0.1):
    """Stays of three decisions, each with a cost, and a discharge row that has the
    outcome alone.
    """
    lengths = [4] * n
    count = 4 * n
    step = np.arange(count) % 4
    rewards = np.where(
        step == 3, np.where(np.arange(count) // 4 % 2, outcome, -outcome), cost
    )
    actions = [None if number == 3 else "treat" for number in step]
    return walk(lengths, [True] * n, r=rewards.tolist(), a=actions)


@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_reward_without_an_action_is_added_to_the_row_whose_action_earned_it(
    tmp_path, name, mixed
):
    """In memory and in pieces; the reward that stood there stays; the flag of the end
    moves, too.
    """
    table = shuffled(stays()) if mixed else stays()
    log = read(table, tmp_path, name, **OUTCOMES, reward_row="previous")
    by_episode = log.rewards.reshape(30, 3)
    np.testing.assert_allclose(by_episode[:, :2], -0.1)
    signs = np.sign(by_episode[:, 2])
    np.testing.assert_allclose(by_episode[:, 2], signs - 0.1)
    assert signs.sum() == 0
    np.testing.assert_array_equal(log.terminated.reshape(30, 3), [[0, 0, 1]] * 30)


def test_it_is_asked_and_both_answers_that_the_message_names_are_right(tmp_path):
    path = write(stays(), tmp_path / "log.csv")
    options = [*OPTIONS, "--impute", "a=cut"]
    for command in (
        ("data", "info", path),
        ("data", "convert", path, tmp_path / "s", "--shard-rows", 30),
    ):
        assert_refused(
            run_cli(*command, *options),
            "30 last rows of episodes have no action and a reward (-1",
        )
    assert not (tmp_path / "s").exists()
    message = run_cli("data", "info", path, *options).stderr
    named = re.findall(r"\((--reward-row \w+)\)", message)
    assert named == ["--reward-row previous", "--reward-row drop"]
    for answer, total in zip(named, (-9.0, -9.0), strict=True):
        target = tmp_path / f"{answer[-4:]}.npz"
        succeed("data", "convert", path, target, *options, *answer.split())
        log = open_transitions(target)
        assert log.rewards.sum() == pytest.approx(total)
        assert np.abs(log.rewards).max() == pytest.approx(
            1.1 if "previous" in answer else 0.1
        )
    succeed(
        "data",
        "convert",
        path,
        tmp_path / "s",
        "--shard-rows",
        30,
        *options,
        *named[0].split(),
    )
    np.testing.assert_array_equal(
        open_transitions(tmp_path / "s").rewards,
        open_transitions(tmp_path / "ious.npz").rewards,
    )


def test_parts_of_a_table_in_several_files(tmp_path):
    frame = pl.DataFrame(stays())
    folder = tmp_path / "parts"
    folder.mkdir()
    for i, begin in enumerate(range(0, 120, 50)):  # inside episodes
        frame[begin : begin + 50].write_parquet(folder / f"part-{i}.parquet")
    frame.write_parquet(tmp_path / "log.parquet")
    mapping = {**MAPPING, **OUTCOMES, "reward_row": "previous"}
    parts, whole = (
        open_transitions(source, mapping=mapping)
        for source in (folder, tmp_path / "log.parquet")
    )
    np.testing.assert_array_equal(parts.rewards, whole.rewards)


@pytest.mark.parametrize(
    ("rewards", "actions", "impute", "expected"),
    [
        # a missing reward counts as 0 where one is moved to it
        ([1, None, 5, 7], ["l", "r", None, "l"], {"r": "zero"}, [1, 5]),
        # from several rows without an action; those after it go as before
        ([1, 2, 5, 7], ["l", "r", None, None], {}, [1, 14]),
        # a missing reward that gets none is imputed as before
        ([None, 2, 5, 7], ["l", "r", "l", None], {"r": "zero"}, [0, 2, 12]),
        # rewards that are whole numbers in small types do not overflow
        (
            np.array([100, 100, 100, 100], np.int8),
            ["l", "r", "l", None],
            {},
            [100, 100, 200],
        ),
    ],
)
def test_by_hand(tmp_path, rewards, actions, impute, expected):
    table = walk((4,), (False,), r=rewards, a=actions)
    log = read(table, tmp_path, impute={"a": "cut", **impute}, reward_row="previous")
    np.testing.assert_array_equal(log.rewards, expected)


def test_a_reward_before_every_action_of_its_episode_is_refused(tmp_path):
    table = walk((3, 3), (True, True), a=[None, "l", "r", "l", "r", "l"])
    message = refusal(table, tmp_path, impute={"a": "cut"}, reward_row="previous")
    assert (
        "1 reward stands in rows without an action, with none above in the episode"
        in message
    )


def test_an_action_that_is_missing_inside_an_episode_is_no_outcome(tmp_path):
    table = walk((4, 4), (True, True), a=["l", "r", "l", "r", "l", None, "l", "r"])
    assert len(read(table, tmp_path, impute={"a": "cut"})) == 5


class TestLastRowsOfCutEpisodes:
    """They have no next observation; a reward of another size in them is an outcome."""

    @staticmethod
    def table(last, usual=0.0, n=40):
        rewards = [
            value for i in range(n) for value in (usual, usual, usual, last * (-1) ** i)
        ]
        return walk([4] * n, [False] * n, r=rewards, done=None)

    def test_outcomes_are_asked_about(self, tmp_path):
        path = write(self.table(1.0), tmp_path / "log.parquet")
        mapping = {**MAPPING, "terminal": None, "last_row": "cut"}
        with one_line(
            DataError,
            match="40 of 40 rows that are left out hold rewards unlike all others",
        ) as e:
            open_transitions(path, mapping=mapping)
        assert "--last-row terminal" in str(e.value)
        ended = open_transitions(path, mapping={**mapping, "last_row": "terminal"})
        assert np.abs(ended.rewards).sum() == 40
        assert not open_transitions(
            path, mapping={**mapping, "reward_row": "drop"}
        ).rewards.any()

    @pytest.mark.parametrize(
        "kind", ["noise", "trend", "few", "sparse ends", "heavy tails"]
    )
    def test_usual_rewards_are_not(self, tmp_path, kind):
        n = 40
        generator = np.random.default_rng(0)
        step = np.arange(4 * n) % 4
        rewards = {
            "noise": generator.normal(size=4 * n),
            "trend": step + 0.1 * generator.normal(size=4 * n),
            "few": np.where((step == 3) & (np.arange(4 * n) < 8), 5.0, 0.0),
            "sparse ends": (generator.random(4 * n) < 0.05) * 1.0,
            "heavy tails": generator.standard_t(1.5, size=4 * n),
        }[kind]
        table = walk([4] * n, [False] * n, r=rewards.tolist(), done=None)
        assert len(read(table, tmp_path, terminal=None, last_row="cut")) == 3 * n
