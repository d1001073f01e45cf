"""The record: what it adopts and refuses, its digest, returns, and what is selected
from it.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.data.transitions import (
    REQUIRED_COLUMNS,
    Continuous,
    Discrete,
    Metadata,
    Transitions,
)
from koffline.errors import DataError
from tests.data.logs import drawn_logs, roll_out, small
from tests.refusals import one_line


class TestConstruction:
    def test_fitting_arrays_are_adopted_and_the_callers_stay_writable(self):
        observations = np.zeros((4, 3), dtype=np.float32)
        actions = np.zeros((4, 2))
        rewards = np.zeros(4, dtype=np.float32)
        flags = np.zeros(4, dtype=bool)
        ids = np.zeros(4, dtype=np.int64)
        log = Transitions(
            observations,
            actions,
            rewards,
            observations,
            flags,
            flags,
            Continuous(2),
            episode_ids=ids,
        )
        columns = (observations, actions, rewards, flags, ids)
        adopted = (
            log.observations,
            log.actions,
            log.rewards,
            log.terminated,
            log.episode_ids,
        )
        for given_array, kept in zip(columns, adopted, strict=True):
            assert np.shares_memory(given_array, kept)
            assert given_array.flags.writeable
            assert not kept.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            log.rewards[0] = 1.0

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {name: getattr(small(), name)[:0] for name in REQUIRED_COLUMNS},
                "no rows",
            ),
            (
                {"rewards": [1.0, 2.0, 3.0]},
                "rewards has 3 rows, observations 4; re-export",
            ),
            (
                {"rewards": [1.0, np.nan, np.inf, 0.0]},
                "rewards holds nan in row 1, no finite number",
            ),
            ({"rewards": ["a", "b", "c", "d"]}, "rewards has dtype <U1; give numbers"),
            ({"observations": np.zeros(4)}, r"observations.reshape\(-1, 1\)"),
            (
                {"observations": np.full((4, 3), np.inf)},
                r"observations holds inf in row 0 at \[0\]",
            ),
            (
                {"next_observations": np.zeros((4, 2))},
                r"next_observations has shape \(4, 2\)",
            ),
            (
                {"terminated": [0, 2, 0, 0]},
                "terminated holds 2 in row 1, neither true nor false",
            ),
            (
                {"actions": [0, 1, 2, 0]},
                r"holds 2 in row 2, outside Discrete\(2\); declare the space",
            ),
            (
                {"actions": [0, -1, 1, 0]},
                r"actions holds -1 in row 1, outside Discrete\(2\)",
            ),
            (
                {"actions": [0.0, 0.5, 1.0, 0.0]},
                "actions holds 0.5 in row 1, no whole number",
            ),
            (
                {"actions": np.zeros(4), "action_space": Continuous(1)},
                r"actions.reshape\(-1, 1\)",
            ),
            (
                {
                    "actions": [[0, 0], [0, 0], [0, 1.5], [0, 0]],
                    "action_space": Continuous(2, -1, 1),
                },
                r"1.5 in row 2 at \[1\], outside",
            ),
            ({"action_space": None}, r"declare koffline.Discrete\(n\)"),
            (
                {"weights": [1.0, -1.0, 1.0, 1.0]},
                "weights holds -1 in row 1, negative; give",
            ),
            ({"weights": [0.0] * 4}, "weights are all 0"),
            (
                {"behavior_log_probabilities": [-1, -1, 0.5, -1]},
                "0.5 in row 2, a probability above 1",
            ),
            ({"episode_ids": [0, 1, 0, 0]}, "row 2 returns to episode 0 .*order_rows"),
            (
                {"episode_ids": [0, 0, 1, 1], "steps": [0, 1, 0, 2]},
                "row 3 has step 2, expected 1",
            ),
            (
                {"episode_ids": [0, 0, 0, 0]},
                "row 1 is terminated but its episode goes on in row 2",
            ),
        ],
    )
    def test_each_failure_is_one_line_with_its_remedy(self, changes, words):
        with one_line(DataError, match=words):
            small(**changes)

    def test_bounds_allow_for_rounding_only(self):
        actions = np.full((4, 1), np.float32(1.0) + np.float32(1e-6))
        assert len(small(actions=actions, action_space=Continuous(1, -1, 1))) == 4
        with pytest.raises(DataError, match="outside"):
            small(actions=actions + 1e-4, action_space=Continuous(1, -1, 1))


class TestDigest:
    def test_follows_values_not_storage(self):
        log = small(episode_ids=[0, 0, 1, 1])
        wide = small(
            observations=log.observations.astype(np.float64),
            next_observations=np.asfortranarray(log.next_observations),
            rewards=log.rewards.astype(np.float32),
            episode_ids=[7, 7, 3, 3],
            action_space=Discrete(5),
            metadata=Metadata(source="elsewhere"),
        )
        assert wide.sha256 == log.sha256
        assert len(log.sha256) == 64

    @pytest.mark.parametrize(
        "changes",
        [
            {"rewards": [1.0, 2.0, 3.0, 4.5]},
            {"actions": [0, 1, 1, 1]},
            {"terminated": [True, True, False, False]},
            {"truncated": [False] * 4},
            {"episode_ids": [0, 0, 1, 1]},
            {"steps": [0, 0, 0, 0]},
            {"weights": [1.0] * 4},
            {"behavior_log_probabilities": [0.0] * 4},
        ],
    )
    def test_changes_with_the_rows(self, changes):
        assert small(**changes).sha256 != small().sha256


@given(drawn_logs(episodes=True), st.floats(0, 1))
def test_returns_to_go_against_a_loop(drawn, gamma):
    log = drawn.log()
    expected = np.zeros(len(log))
    for start, length in zip(log.episode_starts, log.episode_lengths, strict=True):
        for i in range(length):
            expected[start + i] = sum(
                gamma ** (t - i) * log.rewards[start + t] for t in range(i, length)
            )
    np.testing.assert_allclose(
        log.returns_to_go(gamma), expected, rtol=1e-12, atol=1e-12
    )


class TestSelection:
    def test_broken_episodes_become_single_rows(self):
        log = roll_out().transitions()
        assert not log.select([1, 2]).has_episodes
        assert not log.select([0, 1, 0, 1]).has_episodes
        assert log.select([0, 1]).has_episodes

    def test_episodes_may_repeat(self):
        log = roll_out().transitions(weights=np.arange(15.0))
        again = log.select_episodes([1, 1, 4])
        np.testing.assert_array_equal(again.episode_ids, [0, 0, 0, 1, 1, 1, 2, 2])
        np.testing.assert_array_equal(again.steps, [0, 1, 2, 0, 1, 2, 0, 1])
        np.testing.assert_array_equal(again.weights, [4, 5, 6, 4, 5, 6, 13, 14])
        assert not again.rewards.flags.writeable
        mask = np.array([False, True, False, False, True])
        np.testing.assert_array_equal(
            log.select_episodes(mask).rewards, log.rewards[[4, 5, 6, 13, 14]]
        )

    @pytest.mark.parametrize(
        "rows", [[], [15], [-1], [0.5], np.zeros(15, dtype=bool), [[0]]]
    )
    def test_selections_must_fit(self, rows):
        with pytest.raises(DataError, match="selection"):
            roll_out().transitions().select(rows)
