"""Tables that are wide, actions that are no choices, numbers that are none: said in the user's own words."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet
import pytest

from koffline.data.raw import merge_different
from koffline.data.sources import open_transitions
from koffline.data.summary import print_summary, summarise
from koffline.data.table import rows
from koffline.data.table.reading import TableStream
from koffline.data.transitions import Discrete
from koffline.errors import DataError
from tests.data.logs import small
from tests.data.table_rows import MAPPING, walk, write

N = 8


def refusal(columns, tmp_path, suffix="parquet", **mapping):
    path = write(columns, tmp_path / f"log.{suffix}")
    with pytest.raises(DataError) as caught:
        open_transitions(path, mapping={**MAPPING, **mapping})
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


class TestManyColumns:
    @pytest.mark.parametrize("columns", [50, 200])
    def test_a_schema_is_made_once_per_opening(self, tmp_path, monkeypatch, columns):
        path = write(walk(**{f"x_{i}": [0.0] * N for i in range(3, columns)}), tmp_path / "log.parquet")
        asked, original = [], pyarrow.parquet.ParquetFile.schema_arrow
        counting = property(lambda self: asked.append(1) or original.fget(self))
        monkeypatch.setattr(pyarrow.parquet.ParquetFile, "schema_arrow", counting)
        assert open_transitions(path, mapping=MAPPING).observation_shape == (columns - 1,)
        assert len(asked) <= 6

    def test_many_thousands_are_read(self, tmp_path):
        wide = {f"x_{i}": [float(i)] * N for i in range(3, 5003)}
        for suffix in ("parquet", "csv", "arrow"):
            log = open_transitions(write(walk(**wide), tmp_path / f"log.{suffix}"), mapping=MAPPING)
            np.testing.assert_array_equal(log.observations[0, 2:], np.arange(3, 5003))

    @pytest.mark.parametrize("suffix", ["parquet", "csv", "arrow"])
    def test_more_than_the_limit_are_refused(self, tmp_path, monkeypatch, suffix):
        monkeypatch.setattr(rows, "_MOST_COLUMNS", 6)
        message = refusal(walk(), tmp_path, suffix)
        assert "has 7 columns, more than 6; store observations as one column of lists" in message


class TestNumbersThatAreNoChoices:
    @pytest.mark.parametrize("largest", [2**62, 10**9, 2**20])
    def test_too_many_for_any_space(self, tmp_path, largest):
        message = refusal(walk(a=[0, 1, 2, 3, 4, 5, 6, largest]), tmp_path)
        assert f"up to {largest}, 8 different ones" in message
        assert "--continuous LOW HIGH" in message
        assert "without gaps" in message
        assert "--discrete" not in message

    def test_few_of_many_want_a_declaration(self, tmp_path):
        columns = walk(a=[0, 1, 2, 3, 4, 5, 6, 19_999])
        assert "20000 choices (--discrete 20000)" in refusal(columns, tmp_path)
        log = open_transitions(tmp_path / "log.parquet", Discrete(20_000), mapping=MAPPING)
        assert log.action_space == Discrete(20_000)

    def test_up_to_ten_thousand_are_taken(self, tmp_path):
        path = write(walk(a=[0, 1, 2, 3, 4, 5, 6, 9_999]), tmp_path / "log.parquet")
        assert open_transitions(path, mapping=MAPPING).action_space == Discrete(10_000)

    def test_many_of_many_are_taken_in_batches_too(self, tmp_path, monkeypatch):
        monkeypatch.setattr(rows, "BATCH_ROWS", 1000)
        actions = list(range(0, 20_000, 5))
        one = len(actions)
        columns = walk((one,), (True,), a=actions)
        path = write(columns, tmp_path / "log.parquet")
        assert open_transitions(path, mapping=MAPPING).action_space == Discrete(19_996)
        assert TableStream(path, MAPPING).action_space == Discrete(19_996)

    @pytest.mark.parametrize("lazy", [False, True])
    def test_files_that_declare_nothing_are_alike(self, tmp_path, lazy):
        made = {
            "observations": np.zeros((4, 1)),
            "next_observations": np.ones((4, 1)),
            "actions": np.array([0, 1, 2, 10**6]),
            "rewards": np.zeros(4),
            "terminals": np.array([0, 0, 0, 1]),
            "timeouts": np.zeros(4),
        }
        np.savez(tmp_path / "log.npz", **made)
        with pytest.raises(DataError, match=r"log\.npz: .*4 different ones.*1000001 choices"):
            open_transitions(tmp_path / "log.npz", lazy=lazy)

    def test_counting_ends_where_enough_is_known(self, monkeypatch):
        monkeypatch.setattr("koffline.data.raw.ENOUGH_DIFFERENT", 3)
        seen = merge_different(None, np.array([5, 5, 1]))
        seen = merge_different(seen, np.array([1, 7, 9]))
        assert seen.tolist() == [1, 5, 7, 9]
        assert merge_different(seen, np.array([2])) is seen


class TestHugeSpaces:
    def test_a_summary_shows_a_few_actions(self, capsys):
        print_summary(summarise(small(action_space=Discrete(2**20))))
        out = capsys.readouterr().out
        assert "action 11 " in out
        assert "action 12 " not in out
        assert f"{2**20 - 12} more" in out

    def test_a_warning_names_a_few_actions(self):
        from koffline.data.findings import inspect_log
        from koffline.data.raw import RawLog

        log = small(action_space=Discrete(2**20))
        columns = {k: v for k, v in vars(log).items() if isinstance(v, np.ndarray)}
        messages = [finding.message for finding in inspect_log(RawLog(columns, log.action_space))]
        unused = next(message for message in messages if "never appear" in message)
        assert "actions 2, 3, 4, " in unused
        assert f"21, … ({2**20 - 2} in all) never appear" in unused


class TestWords:
    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_probability_above_one(self, tmp_path, suffix):
        message = refusal(walk(p=[0.5] * 7 + [1.5]), tmp_path, suffix, behavior_probability="p")
        assert "column p holds 1.5 (1 row holds no probability" in message

    def test_log_probability_above_zero(self, tmp_path):
        message = refusal(walk(p=[-0.5] * 6 + [0.25] * 2), tmp_path, behavior_log_probability="p")
        assert "column p holds 0.25 (2 rows hold no logarithm of a probability" in message

    def test_densities_may_be_above_one(self, tmp_path):
        columns = walk(a=[0.5] * N, p=[1.5] * N)
        log = open_transitions(
            write(columns, tmp_path / "log.parquet"), mapping={**MAPPING, "behavior_probability": "p"}
        )
        np.testing.assert_allclose(log.behavior_log_probabilities, np.log(1.5))

    @pytest.mark.parametrize("column", ["x_2", "r", "a"])
    @pytest.mark.parametrize("value", [np.inf, -np.inf])
    def test_infinity_names_the_column(self, tmp_path, column, value):
        columns = walk(**{column: [0.5] * 7 + [value]})
        assert f"infinite ({column}: 1, of 8 rows)" in refusal(columns, tmp_path)

    def test_infinity_in_lists_and_in_text(self, tmp_path):
        lists = walk(x_1=None, x_2=None, x=[[1.0, np.inf]] * N)
        assert "infinite (x: 8, of 8 rows)" in refusal(lists, tmp_path, observations="x")
        assert "infinite (x_1: 1, of" in refusal(walk(x_1=["1e400", *"1234567"]), tmp_path, "csv")

    def test_one_is_said_in_the_singular(self, tmp_path):
        assert "1 row has the time of another" in refusal(walk(t=[0, 0, 1, 0, 0, 1, 2, 3]), tmp_path)
        path = write(walk(x_1=[None, *range(7)], done=[False] * N), tmp_path / "log.parquet")
        notes = " ".join(
            open_transitions(path, mapping={**MAPPING, "impute": {"x_1": "zero"}}).metadata.notes
        )
        assert "1 missing value in x_1 was replaced" in notes
        path = write(walk((3,), (False,)), tmp_path / "one.parquet")
        log = open_transitions(path, mapping=MAPPING)
        notes = " ".join(log.metadata.notes)
        assert "; 1 row was left out" in notes
        assert "1 episode that ends without a flag was marked as truncated" in notes
        assert "1 episode, " in repr(log)

    def test_an_action_is_no_essay(self, tmp_path):
        assert "or a text of more than 1000 bytes" in refusal(walk(a=["l"] * 7 + ["x" * 2000]), tmp_path)

    def test_info_gives_the_names_of_actions(self, tmp_path, capsys):
        path = write(walk(a=["left", "right"] * 4), tmp_path / "log.parquet")
        print_summary(summarise(open_transitions(path, mapping=MAPPING)))
        out = capsys.readouterr().out
        assert "action 0 (left)" in out
        assert "action 1 (right)" in out
