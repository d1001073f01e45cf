"""Ids that begin anew, ids without a name, and numbered columns that are no next
observations.
"""

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.errors import DataError
from tests.refusals import run_cli, succeed

MAPPING = {
    "observations": "x",
    "action": "action",
    "reward": "reward",
    "episode": "episode",
    "last_row": "terminal",
}
LENGTHS = [4, 6, 3, 5, 7] * 5


def walks(**columns):
    """Columns of 25 episodes of 3 to 7 steps that end, with other columns added."""
    generator = np.random.default_rng(0)
    n = sum(LENGTHS)
    last = np.concatenate([np.arange(length) == length - 1 for length in LENGTHS])
    rows = {
        "t": np.concatenate([np.arange(length) for length in LENGTHS]),
        "x": generator.normal(size=n),
        "action": generator.integers(2, size=n),
        "reward": generator.random(n),
        "done": last.astype(int),
    }
    return pl.DataFrame({**rows, **columns})


def by_episode(values):
    return np.repeat(values, LENGTHS)


class TestIdsThatBeginAnew:
    """Five ids, used five times each in one file, with a step that begins anew."""

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "log.csv"
        walks(episode=by_episode(np.arange(25) % 5)).write_csv(path)
        return path

    def test_inspect_proposes_the_starts(self, path):
        inspection = inspect_table(path)
        assert inspection.mapping["starts"] == "t == 0"
        assert inspection.mapping["observations"] == ["x"]
        assert "ids begin anew" in " ".join(inspection.problems)
        log = open_transitions(path, mapping=inspection.mapping)
        assert (len(log), log.n_episodes) == (sum(LENGTHS), 25)

    def test_the_refusal_names_a_remedy_that_loses_no_row(self, path):
        mapping = {**MAPPING, "time": "t"}
        with pytest.raises(DataError) as refusal:
            open_transitions(path, mapping=mapping)
        words = str(refusal.value)
        assert "where ids begin anew inside the file, make them different" in words
        assert "drop" not in words
        assert "--starts 't == 0'" in words
        del mapping["episode"], mapping["time"]
        log = open_transitions(path, mapping={**mapping, "starts": "t == 0"})
        assert (len(log), log.n_episodes) == (sum(LENGTHS), 25)

    def test_rows_that_are_dropped_beside_others_are_a_caution(self, path):
        mapping = {**MAPPING, "time": "t", "drop_duplicates": "first"}
        notes = open_transitions(path, mapping=mapping).metadata.notes
        assert any(
            note.startswith("order: ") and "dropped that stand elsewhere" in note
            for note in notes
        )

    def test_without_a_step_the_caution_names_the_cause(self, path):
        notes = open_transitions(path, mapping=MAPPING).metadata.notes
        assert any("where ids begin anew" in note for note in notes)


@pytest.mark.parametrize(
    ("values", "is_id"),
    [
        (np.arange(25), True),
        ([f"game {i}" for i in range(25)], True),
        (np.random.default_rng(1).permutation(1000)[:25], True),
        (np.arange(25) // 2, False),
        (np.random.default_rng(1).normal(size=25), False),
    ],
    ids=["numbers", "texts", "numbers in no order", "groups", "quantities"],
)
def test_a_column_that_changes_wherever_the_step_begins_anew_is_the_id(
    tmp_path, values, is_id
):
    path = tmp_path / "log.csv"
    walks(run=by_episode(values)).write_csv(path)
    inspection = inspect_table(path)
    if is_id:
        assert inspection.mapping["episode"] == "run"
        assert inspection.mapping["time"] == "t"
        assert inspection.mapping["observations"] == ["x"]
    else:
        assert inspection.mapping["starts"] == "t == 0"
    log = open_transitions(path, mapping=inspection.mapping)
    assert log.n_episodes == 25


@pytest.mark.parametrize(
    ("names", "is_shifted", "following"),
    [
        (("s1", "s2"), True, ["s2"]),
        (("s", "s2"), True, ["s2"]),
        (("obs1", "obs2"), True, ["obs2"]),
        (("s1", "s2"), False, None),
        (("s1", "s2", "s3"), False, None),
        (("s0", "s1", "s2"), False, None),
        (("o1", "o2", "o10"), False, None),
        (("S1", "S2", "S3"), False, None),
    ],
)
def test_numbered_columns_are_numbers_of_one_state(
    tmp_path, names, is_shifted, following
):
    """Unless the second is the first one row later."""
    n = sum(LENGTHS)
    generator = np.random.default_rng(2)
    columns = {name: generator.normal(size=n) for name in names}
    if is_shifted:
        first = columns[names[0]]
        second = np.append(first[1:], 0.0)
        done = walks()["done"].to_numpy() == 1
        columns[names[1]] = np.where(done, generator.normal(size=n), second)
    path = tmp_path / "log.csv"
    rows = walks(**columns).drop("x")
    rows = rows.with_columns(id=pl.Series(by_episode(np.arange(25))))
    rows.write_csv(path)
    inspection = inspect_table(path)
    assert inspection.mapping.get("next_observations") == following
    if following is None:
        assert inspection.mapping["observations"] == list(names)
    else:
        assert inspection.mapping["observations"] == [names[0]]


def test_next_columns_of_numbered_ones_keep_their_partners(tmp_path):
    """s0, s1, s2 beside next_s0, next_s1, next_s2."""
    n = sum(LENGTHS)
    generator = np.random.default_rng(2)
    states = {f"s{i}": generator.normal(size=n) for i in range(3)}
    later = {f"next_{name}": np.roll(column, -1) for name, column in states.items()}
    path = tmp_path / "log.csv"
    walks(**states, **later).drop("x").write_csv(path)
    mapping = inspect_table(path).mapping
    assert mapping["observations"] == list(states)
    assert mapping["next_observations"] == list(later)


def test_inspect_takes_what_its_user_knows(tmp_path):
    """Columns whose names say nothing are named as options, and are no observations."""
    path = tmp_path / "log.csv"
    out = tmp_path / "m.yaml"
    rows = walks(game=by_episode(np.arange(25)))
    rows.rename({"action": "move", "reward": "points"}).write_csv(path)
    unnamed = run_cli("data", "inspect", path, "--out", out)
    assert "--action COLUMN" in unnamed.stdout
    assert "--reward COLUMN" in unnamed.stdout
    succeed(
        "data",
        "inspect",
        path,
        "--out",
        out,
        "--force",
        "--action",
        "move",
        "--reward",
        "points",
    )
    log = open_transitions(path, mapping=out)
    assert log.feature_names == ("x",)
    np.testing.assert_allclose(log.rewards, rows["reward"].to_numpy())


def test_inspect_refuses_a_column_that_is_not_there(tmp_path):
    path = tmp_path / "log.csv"
    walks().write_csv(path)
    refusal = run_cli("data", "inspect", path, "--action", "mvoe")
    assert refusal.exit_code == 2
    assert "mvoe" in refusal.stderr
