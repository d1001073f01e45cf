"""What last rows of episodes hold: steps, final states, words for no action, limits."""

import numpy as np
import polars as pl
import pytest
import yaml

from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.data.table.mapping import TableMapping
from koffline.data.table.reading import TableStream
from koffline.errors import DataError
from tests.refusals import assert_refused, run_cli, succeed

LENGTH = 6
EPISODES = 40


def episodes(outcome=False):
    """Columns of 40 episodes of 6 steps: a counter, an action, and a reward for every
    step; half of them end. outcome: the last reward is 5.
    """
    generator = np.random.default_rng(0)
    rows = []
    for episode in range(EPISODES):
        ended = episode % 2 == 0
        for step in range(LENGTH):
            is_last = step == LENGTH - 1
            reward = 1.0 + generator.random()
            if outcome and is_last:
                reward += 5.0
            action = int(generator.integers(3))
            place = episode + 0.1 * step + generator.random()
            rows.append((episode, step, place, action, reward, is_last and ended))
    names = ("id", "t", "x", "a", "r", "done")
    return pl.DataFrame(rows, schema=names, orient="row")


def with_final_rows(frame, action, reward, share=1.0):
    """A row below each episode (of a share of them) with its final state, a dummy
    action and reward; the flag of the end moves there.
    """
    parts = []
    for episode in range(EPISODES):
        rows = frame.filter(pl.col("id") == episode)
        if episode < share * EPISODES:
            last = rows.tail(1).with_columns(
                t=pl.lit(LENGTH, pl.Int64),
                x=pl.col("x") + 0.5,
                a=pl.lit(action, frame.schema["a"]),
                r=pl.lit(reward, pl.Float64),
            )
            rows = pl.concat([rows.with_columns(done=False), last])
        parts.append(rows)
    return pl.concat(parts)


def as_rlds(frame):
    """The rows with the names and flags of RLDS, without ids and times."""
    is_last = pl.col("id") != pl.col("id").shift(-1)
    is_first = pl.col("id") != pl.col("id").shift(1)
    return frame.select(
        observation="x",
        action="a",
        reward="r",
        is_first=is_first.fill_null(True),
        is_last=is_last.fill_null(True),
        is_terminal="done",
    )


RLDS = {
    "observations": "observation",
    "action": "action",
    "reward": "reward",
    "starts": "is_first",
    "terminal": "is_terminal",
}


def written(frame, path):
    """The path of a file with the rows: Parquet, CSV or NPZ by its name."""
    if path.suffix == ".npz":
        np.savez(path, **{name: frame[name].to_numpy() for name in frame.columns})
    elif path.suffix == ".csv":
        frame.write_csv(path)
    else:
        frame.write_parquet(path)
    return path


def assert_right(log, frame):
    """The log holds the steps of `episodes`, with their rewards and ends."""
    ended = frame["done"].to_numpy()
    np.testing.assert_array_equal(np.asarray(log.rewards), frame["r"].to_numpy())
    np.testing.assert_array_equal(np.asarray(log.actions), frame["a"].to_numpy())
    np.testing.assert_array_equal(np.asarray(log.terminated), ended)
    is_last = frame["t"].to_numpy() == LENGTH - 1
    np.testing.assert_array_equal(np.asarray(log.truncated), is_last & ~ended)
    final = np.asarray(log.next_observations)[is_last, 0]
    np.testing.assert_allclose(final, frame["x"].to_numpy()[is_last] + 0.5)
    assert not log.metadata.lost_last_rows


@pytest.mark.parametrize("name", ["log.parquet", "log.csv", "log.npz"])
def test_inspect_reads_the_last_rows_of_rlds_as_final_states(tmp_path, name):
    """Their dummy action is one that others take, and their reward is 0."""
    right = episodes()
    path = written(as_rlds(with_final_rows(right, 2, 0.0)), tmp_path / name)
    inspection = inspect_table(path)
    assert inspection.mapping["final_state"] is True
    assert inspection.open == {}
    assert_right(open_transitions(path, mapping=inspection.mapping), right)


def test_flags_of_rlds_leave_a_question_where_last_rows_have_rewards(tmp_path):
    """Then they may be steps: both answers are read."""
    right = episodes()
    path = written(as_rlds(right), tmp_path / "log.parquet")
    inspection = inspect_table(path)
    assert inspection.open["final_state"] == [
        {"final_state": True},
        {"final_state": False},
    ]
    with pytest.raises(DataError, match="leaves final_state open"):
        TableMapping(**inspection.mapping)
    answered = {**inspection.mapping, "final_state": False}
    log = open_transitions(path, mapping=answered)
    assert int(log.terminated.sum()) == EPISODES // 2
    assert log.rewards.max() == right["r"].max()


def test_a_mapping_of_rlds_that_does_not_say_it_is_refused_and_the_remedy_works(
    tmp_path,
):
    right = episodes()
    path = written(as_rlds(with_final_rows(right, 2, 0.0)), tmp_path / "log.parquet")
    names = tmp_path / "m.yaml"
    names.write_text(yaml.safe_dump(RLDS))
    refusal = run_cli("data", "info", path, "--mapping", names)
    assert_refused(refusal, "is_last", "--final-state yes")
    succeed("data", "info", path, "--mapping", names, "--final-state", "yes")
    log = open_transitions(path, mapping={**RLDS, "final_state": "yes"})
    assert_right(log, right)
    streamed = list(TableStream(path, {**RLDS, "final_state": True}))
    assert sum(len(piece) for piece in streamed) == len(log)
    kept = open_transitions(path, mapping={**RLDS, "final_state": "no"})
    assert len(kept) > len(log)


def test_rewards_of_final_states_are_asked_about_and_moved(tmp_path):
    """RLDS says that they mean nothing, and other programs write the outcome there."""
    right = episodes(outcome=True)
    moved = right.with_columns(
        r=pl.when(pl.col("t") == LENGTH - 1).then(pl.col("r") - 5).otherwise("r")
    )
    path = written(as_rlds(with_final_rows(moved, 2, 5.0)), tmp_path / "log.parquet")
    mapping = {**RLDS, "final_state": True}
    with pytest.raises(DataError, match="--reward-row previous"):
        open_transitions(path, mapping=mapping)
    log = open_transitions(path, mapping={**mapping, "reward_row": "previous"})
    np.testing.assert_allclose(log.rewards, right["r"].to_numpy())


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    "value", ["discharge", -1], ids=["a text", "a number beside codes"]
)
def test_an_action_that_stands_in_last_rows_alone_is_a_question(tmp_path, value, share):
    """The answer that it means no action gives the log of the steps."""
    right = episodes()
    if isinstance(value, str):
        right = right.with_columns(pl.format("take {}", "a").alias("a"))
    path = written(with_final_rows(right, value, 0.0, share), tmp_path / "log.csv")
    inspection = inspect_table(path)
    assert inspection.open["no_action"] == [{"no_action": [value]}, {"no_action": []}]
    mapping = {**inspection.mapping, "no_action": [value]}
    log = open_transitions(path, mapping=mapping)
    if share < 1.0:
        # cut episodes without a final state lose their last row
        assert len(log) == len(right) - EPISODES // 4
        assert int(log.terminated.sum()) == EPISODES // 2
        return
    codes = right["a"].rank("dense").cast(pl.Int64) - 1
    assert_right(log, right.with_columns(a=codes))
    as_decision = open_transitions(
        path, mapping={**inspection.mapping, "no_action": []}
    )
    assert as_decision.action_space.n == 4
    out = tmp_path / "m.yaml"
    succeed("data", "inspect", path, "--out", out)
    refusal = run_cli("data", "info", path, "--mapping", out)
    assert_refused(refusal, "leaves no_action open", f"--no-action {value}")
    succeed("data", "info", path, "--mapping", out, "--no-action", value)


def test_an_end_that_the_last_row_without_an_action_has_moves_up(tmp_path):
    """last_row: terminal beside impute: {action: cut} ends the episodes, with one
    note.
    """
    right = episodes().with_columns(done=pl.col("t") == LENGTH - 1)
    table = with_final_rows(right, None, 0.0).drop("done")
    path = written(table, tmp_path / "log.csv")
    mapping = {
        "observations": "x",
        "action": "a",
        "reward": "r",
        "episode": "id",
        "time": "t",
        "impute": {"a": "cut"},
    }
    log = open_transitions(path, mapping={**mapping, "last_row": "terminal"})
    assert_right(log, right)
    notes = " ".join(log.metadata.notes)
    assert "marked as truncated" not in notes
    assert "left out" not in notes
    assert f"{EPISODES} last rows hold the final state alone" in notes
    cut = open_transitions(path, mapping={**mapping, "last_row": "cut"})
    assert not np.asarray(cut.terminated).any()


@pytest.mark.parametrize(
    ("columns", "key", "answers"),
    [
        ({}, "last_row", [{"last_row": "cut"}, {"last_row": "terminal"}]),
        (
            {"reason": ["timeout", "won"]},
            "last_row",
            [
                {"terminal": "reason == 'won'"},
                {"last_row": "cut"},
                {"last_row": "terminal"},
            ],
        ),
        (
            {"reason": ["max_steps", "died"], "done": [True, True]},
            "terminal",
            [{"terminal": "reason == 'died'"}, {"terminal": "done"}],
        ),
        ({"reason": ["lost", "won"], "done": [True, True]}, None, None),
        ({"reason": ["timeout", "won"], "done": [False, True]}, None, None),
    ],
    ids=[
        "equal lengths",
        "reasons",
        "reasons beside a flag",
        "no limit among the reasons",
        "the flag knows",
    ],
)
def test_what_the_rows_do_not_say_is_asked(tmp_path, columns, key, answers):
    """columns: what odd and even episodes have in their last rows."""
    table = episodes().drop("done")
    is_last = table["t"].to_numpy() == LENGTH - 1
    is_odd = table["id"].to_numpy() % 2
    for name, values in columns.items():
        inner = None
        if name == "done":
            inner = False
        column = [inner] * len(table)
        for row in np.flatnonzero(is_last):
            column[row] = values[is_odd[row]]
        table = table.with_columns(pl.Series(name, column))
    inspection = inspect_table(written(table, tmp_path / "log.csv"))
    if key is None:
        assert inspection.open == {}
    else:
        assert inspection.open == {key: answers}
    assert "reason" not in inspection.mapping["observations"]


@pytest.mark.parametrize(
    "column",
    [[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [5, 4, 3, 2, 1, 0], [3, 3, 3, 3, 3, 7]],
    ids=["share of the course", "countdown", "a stage"],
)
def test_a_quantity_that_the_step_tells_stays_an_observation(tmp_path, column):
    table = episodes().drop("done")
    table = table.with_columns(stage=pl.Series(column * EPISODES))
    inspection = inspect_table(written(table, tmp_path / "log.csv"))
    assert "stage" in inspection.mapping["observations"]
    assert inspection.open.keys() == {"last_row"}


def test_a_code_in_last_rows_alone_is_a_question_of_the_observations(tmp_path):
    """It may be a quantity, and it may be the mark of an end."""
    table = episodes().drop("done")
    generator = np.random.default_rng(1)
    code = np.where(table["t"] == LENGTH - 1, 9, generator.integers(3, size=len(table)))
    path = written(table.with_columns(code=pl.Series(code)), tmp_path / "log.csv")
    inspection = inspect_table(path)
    assert inspection.open["observations"] == [
        {"observations": ["x"]},
        {"observations": ["x", "code"]},
    ]
    assert {"terminal": "code == 9"} in inspection.open["last_row"]


@pytest.mark.parametrize("has_rewards", [False, True])
def test_flat_files_with_the_flags_of_rlds(tmp_path, has_rewards):
    """Keys of koffline beside is_first and is_last; last rows with rewards are steps."""
    right = episodes()
    rows = right
    if not has_rewards:
        rows = with_final_rows(right, 2, 0.0)
    flags = as_rlds(rows)
    path = tmp_path / "log.npz"
    np.savez(
        path,
        observations=rows["x"].to_numpy().reshape(-1, 1),
        actions=rows["a"].to_numpy(),
        rewards=rows["r"].to_numpy(),
        terminals=rows["done"].to_numpy(),
        is_first=flags["is_first"].to_numpy(),
        is_last=flags["is_last"].to_numpy(),
    )
    log = open_transitions(path)
    notes = " ".join(log.metadata.notes)
    assert ("hold the final state alone" in notes) is not has_rewards
    if not has_rewards:
        assert_right(log, right)
