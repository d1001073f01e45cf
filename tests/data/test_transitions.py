import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.data.transitions import Continuous, Discrete, Metadata, Transitions, order_rows
from koffline.errors import DataError
from tests.data.logs import roll_out, transitions


def small(**changes) -> Transitions:
    columns = {
        "observations": np.arange(12.0, dtype=np.float32).reshape(4, 3),
        "actions": np.array([0, 1, 1, 0]),
        "rewards": np.array([1.0, 2.0, 3.0, 4.0]),
        "next_observations": np.arange(12.0, dtype=np.float32).reshape(4, 3) + 3,
        "terminated": np.array([False, True, False, False]),
        "truncated": np.array([False, False, False, True]),
        "action_space": Discrete(2),
    }
    return Transitions(**{**columns, **changes})


class TestConstruction:
    def test_fitting_arrays_are_adopted_and_the_callers_stay_writable(self):
        observations = np.zeros((4, 3), dtype=np.float32)
        actions, rewards, flags = np.zeros((4, 2)), np.zeros(4, dtype=np.float32), np.zeros(4, dtype=bool)
        ids = np.zeros(4, dtype=np.int64)
        log = Transitions(
            observations, actions, rewards, observations, flags, flags, Continuous(2), episode_ids=ids
        )
        given_and_kept = [
            (observations, log.observations),
            (actions, log.actions),
            (rewards, log.rewards),
            (flags, log.terminated),
            (ids, log.episode_ids),
        ]
        for given_array, kept in given_and_kept:
            assert np.shares_memory(given_array, kept)
            assert given_array.flags.writeable
            assert not kept.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            log.rewards[0] = 1.0

    def test_lists_and_other_dtypes_are_cast_exactly(self):
        log = small(
            observations=[[1, 2], [3, 4], [5, 6], [2**24 + 1, 8]],
            next_observations=np.ones((4, 2), dtype=np.float16),
            actions=np.array([0.0, 1.0, 1.0, 0.0], dtype=np.float32),
            rewards=np.array([1, 2, 3, 4], dtype=">i4"),
            terminated=np.array([0, 1, 0, 0], dtype=np.uint8),
            truncated=[0.0, 0.0, 0.0, 1.0],
        )
        assert log.observations.dtype == np.float64  # 2^24 + 1 is not exact in float32
        assert log.observations[3, 0] == 2**24 + 1
        assert log.next_observations.dtype == np.float32
        assert log.actions.dtype == np.int64
        assert log.rewards.dtype.isnative
        np.testing.assert_array_equal(log.rewards, [1, 2, 3, 4])
        assert log.terminated.dtype == log.truncated.dtype == np.bool_

    def test_images_stay_bytes(self):
        images = np.zeros((4, 8, 8, 3), dtype=np.uint8)
        log = small(observations=images, next_observations=images)
        assert log.observations.dtype == np.uint8
        assert log.observation_shape == (8, 8, 3)

    def test_a_row_may_be_terminated_and_truncated(self):
        log = small(terminated=[0, 0, 0, 1], episode_ids=[5, 5, 5, 5])
        assert log.terminated[3]
        assert log.truncated[3]

    def test_prints_usefully(self):
        assert repr(small()) == "Transitions(4 rows, no episodes, observations (3,) float32, Discrete(2))"
        assert "2 episodes" in repr(small(episode_ids=[0, 0, 1, 1]))

    def test_survives_copy_and_pickle(self):
        log = small(episode_ids=[0, 0, 1, 1])
        for again in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
            assert again.sha256 == log.sha256
            assert again.action_space == log.action_space

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rewards": [1.0, 2.0, 3.0]}, "rewards has 3 rows, observations 4; re-export"),
            ({"weights": [1.0]}, "weights has 1 rows, observations 4"),
            ({"rewards": [1.0, np.nan, np.inf, 0.0]}, "rewards holds nan in row 1; drop or mend"),
            ({"rewards": [[1.0], [2.0], [3.0], [4.0]]}, r"rewards.reshape\(-1\)"),
            ({"rewards": 1.0}, "rewards is a single value"),
            ({"rewards": ["a", "b", "c", "d"]}, "rewards has dtype <U1; give numbers"),
            ({"rewards": [[1.0], [2.0, 3.0], [1.0], [1.0]]}, "rewards is not a rectangular array"),
            ({"rewards": [1.0, None, 1.0, 1.0]}, "rewards has dtype object"),
            ({"observations": np.zeros(4)}, r"observations.reshape\(-1, 1\)"),
            ({"observations": np.zeros((4, 0)), "next_observations": np.zeros((4, 0))}, "no number in a row"),
            ({"observations": np.full((4, 3), np.inf)}, r"observations holds inf in row 0 at \[0\]"),
            ({"observations": np.zeros((4, 3), dtype=complex)}, "complex128; give numbers"),
            ({"next_observations": np.zeros((4, 2))}, r"next_observations has shape \(4, 2\)"),
            ({"terminated": [0, 2, 0, 0]}, "terminated holds 2 in row 1; give True or False"),
            ({"truncated": [0, 0, np.nan, 0]}, "truncated holds nan in row 2"),
            ({"actions": [0, 1, 2, 0]}, r"action 2 in row 2 is outside 0 … 1; declare Discrete\(3\)"),
            (
                {"actions": [0, -1, 1, 0]},
                "action -1 in row 1 is outside 0 … 1; declare actions counted from 0",
            ),
            ({"actions": [0.0, 0.5, 1.0, 0.0]}, "actions holds 0.5 in row 1; give whole numbers"),
            ({"actions": [[0], [1], [1], [0]]}, r"actions.reshape\(-1\)"),
            ({"actions": np.zeros(4), "action_space": Continuous(1)}, r"actions.reshape\(-1, 1\)"),
            (
                {"actions": np.zeros((4, 3)), "action_space": Continuous(2)},
                r"declare Continuous\(3, low, high\)",
            ),
            ({"actions": np.zeros(4), "action_space": Continuous(2)}, "give 2 numbers per row"),
            (
                {"actions": [[0, 0], [0, 0], [0, 1.5], [0, 0]], "action_space": Continuous(2, -1, 1)},
                "action 1.5 in row 2, dimension 1, is outside -1 … 1; declare wider bounds or clip",
            ),
            (
                {"actions": np.full((4, 1), np.nan), "action_space": Continuous(1)},
                "actions holds nan in row 0",
            ),
            ({"action_space": None}, r"declare koffline.Discrete\(n\)"),
            ({"action_space": 2}, "action_space is 2"),
            ({"weights": [1.0, -1.0, 1.0, 1.0]}, "weights holds -1 in row 1; give weights of at least 0"),
            ({"weights": [0.0] * 4}, "weights are all 0"),
            (
                {"behavior_log_probabilities": [-1, -1, 0.5, -1]},
                "behavior_log_probabilities holds 0.5 in row 2, a probability above 1",
            ),
            (
                {"behavior_log_probabilities": [-1, -np.inf, -1, -1]},
                "behavior_log_probabilities holds -inf in row 1",
            ),
            (
                {"episode_ids": [0, 1, 0, 0]},
                "row 2 returns to episode 0 after another episode; gather .*order_rows",
            ),
            (
                {"episode_ids": [0, 0, 1, 1], "steps": [0, 1, 0, 2]},
                "row 3 of episode 1 has step 2, expected 1",
            ),
            ({"steps": [1, 2, 0, 1]}, "row 0 .* has step 1, expected 0"),
            ({"episode_ids": [0, 0.5, 1, 1]}, "episode_ids holds 0.5 in row 1"),
            ({"episode_ids": [0, 0, 0, 0]}, "row 1 is terminated but its episode 0 goes on in row 2"),
            (
                {"episode_ids": [7] * 4, "terminated": [0] * 4, "truncated": [1, 0, 0, 0]},
                "row 0 is truncated but its episode 7 goes on in row 1; give the rows after it another",
            ),
        ],
    )
    def test_each_failure_is_one_line_with_its_remedy(self, changes, words):
        with pytest.raises(DataError, match=words) as error:
            small(**changes)
        assert "\n" not in str(error.value)

    def test_empty_data(self):
        with pytest.raises(DataError, match="no rows"):
            small(
                **{
                    name: getattr(small(), name)[:0]
                    for name in (
                        "observations",
                        "actions",
                        "rewards",
                        "next_observations",
                        "terminated",
                        "truncated",
                    )
                }
            )

    def test_the_offending_row_is_named_in_a_late_block(self):
        n = 70_000
        observations = np.zeros((n, 2), dtype=np.float32)
        actions = np.zeros((n, 1), dtype=np.float32)
        flags = np.zeros(n, dtype=bool)
        fine = observations.copy()
        observations[69_000, 1] = np.nan
        with pytest.raises(DataError, match=r"row 69000 at \[1\]"):
            Transitions(observations, actions, np.zeros(n), fine, flags, flags, Continuous(1))
        actions[69_500] = 3.0
        with pytest.raises(DataError, match="row 69500"):
            Transitions(fine, actions, np.zeros(n), fine, flags, flags, Continuous(1, -1, 1))

    def test_bounds_allow_for_rounding_only(self):
        actions = np.full((4, 1), np.float32(1.0) + np.float32(1e-6))
        assert len(small(actions=actions, action_space=Continuous(1, -1, 1))) == 4
        with pytest.raises(DataError, match="outside"):
            small(actions=actions + 1e-4, action_space=Continuous(1, -1, 1))


class TestSpaces:
    def test_bounds_become_tuples_of_floats(self):
        space = Continuous(2, -1, np.array([1.0, 2.0]))
        assert space == Continuous(2, (-1.0, -1.0), [1, 2])
        assert hash(space) == hash(Continuous(2, -1.0, (1.0, 2.0)))
        assert space.low == (-1.0, -1.0)
        assert Continuous(1).low == (-math.inf,)
        assert str(Continuous(3, -1, 1)) == "Continuous(3, -1 … 1)"
        assert str(space) == "Continuous(2, -1 … 1, -1 … 2)"

    def test_numpy_integers_are_integers(self):
        assert Discrete(np.int64(4)).n == 4
        assert type(Discrete(np.int64(4)).n) is int

    @pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", None])
    def test_discrete_needs_a_count(self, n):
        with pytest.raises(DataError, match="at least 1"):
            Discrete(n)

    @pytest.mark.parametrize(
        "arguments", [(0,), (2, 1.0, 0.0), (2, [0.0, 0.0, 0.0]), (1, math.nan), (1, "a"), (2, None)]
    )
    def test_continuous_needs_proper_bounds(self, arguments):
        with pytest.raises(DataError):
            Continuous(*arguments)

    @pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, math.nan])
    def test_gamma_hint_is_a_discount(self, gamma):
        with pytest.raises(DataError, match="gamma"):
            Metadata(gamma=gamma)


class TestEpisodes:
    def test_starts_lengths_and_initial_observations(self):
        rollout = roll_out(lengths=(4, 3, 5, 1, 2))
        log = rollout.transitions()
        assert log.n_episodes == 5
        np.testing.assert_array_equal(log.episode_starts, [0, 4, 7, 12, 13])
        np.testing.assert_array_equal(log.episode_lengths, [4, 3, 5, 1, 2])
        np.testing.assert_array_equal(log.episode_ends, [3, 6, 11, 12, 14])
        first = np.stack([row.observation for row in rollout.rows if row.step == 0])
        np.testing.assert_array_equal(log.initial_observations(), first)

    def test_without_episodes_every_row_is_initial(self):
        log = small()
        assert not log.has_episodes
        assert log.n_episodes == 0
        assert len(log.episode_starts) == len(log.episode_lengths) == 0
        np.testing.assert_array_equal(log.initial_observations(), log.observations)
        with pytest.raises(DataError, match="need episodes"):
            log.returns()

    def test_steps_and_ids_follow_from_each_other(self):
        np.testing.assert_array_equal(small(episode_ids=[9, 9, 2, 2]).steps, [0, 1, 0, 1])
        np.testing.assert_array_equal(small(steps=[0, 1, 0, 1]).episode_ids, [0, 0, 1, 1])

    def test_returns_by_hand(self):
        log = small(episode_ids=[0, 0, 1, 1])
        np.testing.assert_allclose(log.returns(), [3.0, 7.0])
        np.testing.assert_allclose(log.returns(0.5), [2.0, 5.0])
        np.testing.assert_allclose(log.returns_to_go(0.5), [2.0, 2.0, 5.0, 4.0])

    @given(transitions(), st.floats(0, 1))
    def test_returns_to_go_against_a_loop(self, log, gamma):
        if not log.has_episodes:
            return
        expected = np.zeros(len(log))
        for start, length in zip(log.episode_starts, log.episode_lengths, strict=True):
            for i in range(length):
                expected[start + i] = sum(gamma ** (t - i) * log.rewards[start + t] for t in range(i, length))
        np.testing.assert_allclose(log.returns_to_go(gamma), expected, rtol=1e-12, atol=1e-12)

    def test_order_rows_gathers_interleaved_episodes(self):
        ids, steps = np.array([5, 2, 5, 2, 5]), np.array([0, 1, 2, 0, 1])
        order = order_rows(ids, steps)
        np.testing.assert_array_equal(order, [0, 4, 2, 3, 1])
        np.testing.assert_array_equal(order_rows(ids), [0, 2, 4, 1, 3])

    @given(transitions(), st.randoms(use_true_random=False))
    def test_any_shuffle_can_be_undone(self, log, random):
        if not log.has_episodes:
            return
        shuffled = list(range(len(log)))
        random.shuffle(shuffled)
        order = order_rows(log.episode_ids[shuffled], log.steps[shuffled])
        rows = np.array(shuffled)[order]
        assert log.select(rows).has_episodes
        first = [int(log.episode_ids[row]) for row in shuffled]
        assert list(log.episode_ids[rows][log.steps[rows] == 0]) == list(dict.fromkeys(first))


class TestSelection:
    def test_whole_episodes_stay_episodes(self):
        log = roll_out().transitions()
        chosen = log.select(log.episode_ids >= 2)
        assert chosen.n_episodes == 3
        np.testing.assert_array_equal(chosen.observations, log.observations[7:])

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

    def test_a_selection_keeps_some_weight(self):
        log = small(weights=[0.0, 1.0, 1.0, 1.0])
        with pytest.raises(DataError, match="weights are all 0"):
            log.select([0])

    def test_replace_validates_and_metadata_does_not_copy(self):
        log = small()
        with pytest.raises(DataError):
            log.replace(rewards=[np.nan] * 4)
        renamed = log.with_metadata(Metadata(source="here"))
        assert renamed.metadata.source == "here"
        assert log.metadata.source is None
        assert renamed.observations is log.observations


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
            {
                "observations": np.arange(12.0).reshape(4, 1, 3),
                "next_observations": np.arange(12.0).reshape(4, 1, 3) + 3,
            },
        ],
    )
    def test_changes_with_the_rows(self, changes):
        assert small(**changes).sha256 != small().sha256
