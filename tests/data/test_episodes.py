"""Episodes of a log: where they begin, their returns, and selecting among them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.errors import DataError
from tests.data.logs import drawn_logs, roll_out


class TestEpisodes:
    @given(drawn_logs(episodes=True), st.floats(0, 1))
    def test_returns_to_go_against_a_loop(self, drawn, gamma):
        log = drawn.log()
        expected = np.zeros(len(log))
        for start, length in zip(log.episode_starts, log.episode_lengths, strict=True):
            for i in range(length):
                expected[start + i] = sum(gamma ** (t - i) * log.rewards[start + t] for t in range(i, length))
        np.testing.assert_allclose(log.returns_to_go(gamma), expected, rtol=1e-12, atol=1e-12)


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
        np.testing.assert_array_equal(log.select_episodes(mask).rewards, log.rewards[[4, 5, 6, 13, 14]])

    @pytest.mark.parametrize("rows", [[], [15], [-1], [0.5], np.zeros(15, dtype=bool), [[0]]])
    def test_selections_must_fit(self, rows):
        with pytest.raises(DataError, match="selection"):
            roll_out().transitions().select(rows)
