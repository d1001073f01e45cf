"""Ends and beginnings of episodes in tables, where users' exports mislead; what is
dependent or missing.
"""

import numpy as np
import pytest
import torch

from koffline.errors import PolicyError
from koffline.policies import DiscretePolicy
from koffline.policy_specs import as_policy
from tests.data.table_rows import read, refusal, shuffled, walk


@pytest.mark.parametrize("missing", [("a", "r"), ("r",)])
def test_a_flag_on_a_row_of_the_last_state_alone_ends_the_row_above(tmp_path, missing):
    table = walk((3, 3), (True, False))
    table |= {
        name: [*table[name][:2], None, *table[name][3:5], None] for name in missing
    }
    log = read(table, tmp_path, impute=dict.fromkeys(missing, "cut"))
    np.testing.assert_array_equal(log.terminated, [0, 1, 0, 0])
    np.testing.assert_array_equal(log.next_observations[:, 0], [0.5, 1, 2, 2.5])
    table = walk(x_1=[0.0, 0.5, None, 1.5, 2.0, 2.5, 3.0, 3.5])
    notes = " ".join(read(table, tmp_path, impute={"x_1": "cut"}).metadata.notes)
    assert "gaps: 1 row is flagged terminal among those left out; fill" in notes


def test_a_terminal_row_and_the_last_one_need_no_next_observation(tmp_path):
    following = {"n_1": [0.5, 1.0, None, None, 2.5, 3.0, 3.5, None], "n_2": [0.0] * 8}
    mapping = {"observations": ["x_1", "x_2"], "next_observations": ["n_1", "n_2"]}
    log = read(walk(**following), tmp_path, **mapping)
    np.testing.assert_array_equal(
        log.next_observations[:, 0], [0.5, 1.0, 1.0, 2.5, 3.0, 3.5]
    )
    np.testing.assert_array_equal(
        2 * log.terminated + log.truncated, [0, 0, 2, 0, 0, 1]
    )
    following["n_1"][4] = None
    assert "missing in 1 row whose episode goes on (n_1)" in refusal(
        walk(**following), tmp_path, **mapping
    )


def test_rows_that_are_all_done_where_they_are_cut_are_cut(tmp_path):
    table = walk((2,) * 5, (True,) * 5, cut=[row in (1, 3, 5) for row in range(10)])
    log = read(table, tmp_path, truncated="cut")
    np.testing.assert_array_equal(np.flatnonzero(log.terminated), [4, 6])
    assert "all 3 rows flagged cut are flagged done too" in " ".join(log.metadata.notes)
    # two may be chance: the world ended where recording stopped
    table["cut"][5] = False
    assert read(table, tmp_path, truncated="cut").terminated.sum() == 5


@pytest.mark.parametrize("first", [0, 20240101, 1.7e9])
def test_episodes_that_have_dates_are_in_their_order(tmp_path, first):
    table = walk(
        (2, 3, 2), (True,) * 3, t=[first + t for t in (20, 21, 0, 1, 2, 10, 11)]
    )
    log = read(table, tmp_path)
    np.testing.assert_array_equal(
        log.rewards, [3, 4, 5, 6, 7, 1, 2] if first else [1, 2, 3, 4, 5, 6, 7]
    )
    # rows 1 2 0 5 4 3 6
    mixed = read(shuffled(table, seed=4), tmp_path, "mixed.parquet")
    np.testing.assert_array_equal(
        mixed.rewards, [3, 4, 5, *([6, 7, 1, 2] if first else [1, 2, 6, 7])]
    )


def test_missing_beginnings_and_rows_of_one_user_are_said(tmp_path):
    notes = read(
        walk((2,) * 8, (True,) * 8, t=[0, 1] * 2 + [3, 4] * 6), tmp_path
    ).metadata.notes
    assert any(
        note.startswith("starts: 6 of 8 episodes begin after the first step")
        for note in notes
    )
    for ids, is_shared in (
        (np.repeat([1, 2], 8), True),
        (np.arange(16) % 3, False),
        (range(16), False),
    ):
        notes = " ".join(
            read(walk((2,) * 8, (True,) * 8, user_id=ids), tmp_path).metadata.notes
        )
        assert ("units: 8 episodes share 2 values of user_id" in notes) == is_shared


def test_codes_of_actions_are_what_a_policy_returns(tmp_path):
    log = read(walk(a=[1, 3, 3, 1, 1, 3, 1, 3]), tmp_path, action_names=[1, 3])
    arguments = (log.action_space, log.observation_shape, "mine", log.metadata.features)
    mine = as_policy(
        lambda states: torch.tensor(np.where(states[:, 0] > 1.2, 3, 1)), *arguments
    )
    sentence = (
        "whole numbers that mine returns were read as values of action_names (1, 3)"
    )
    assert mine.notes == (sentence, "array columns are read as: 1, 3")
    assert (
        "were read as positions, from 0, in"
        in as_policy(torch.nn.Identity(), *arguments).notes[0]
    )
    second = mine.probabilities(log.observations)
    np.testing.assert_array_equal(second[:, 1], log.observations[:, 0] > 1.2)
    with pytest.raises(
        PolicyError, match="is '0', no action of this log; its actions are 1, 3"
    ):
        as_policy(lambda states: np.zeros(len(states)), *arguments).probabilities(
            log.observations
        )
    with pytest.raises(PolicyError, match="the output is yes or no, for 3 actions"):
        DiscretePolicy(3, lambda states: states[:, 0] > 1.2).probabilities(
            log.observations
        )
