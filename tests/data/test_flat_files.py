"""Flat files of others (D4RL's keys), with and without what they may lack; as shards
the same log.
"""

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Continuous
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, d4rl_arrays, roll_out, write_arrays
from tests.refusals import succeed

LENGTHS = (4, 3, 5, 1, 2)
ROWS = 15


def d4rl(**changes):
    return d4rl_arrays(roll_out(), **changes)


def opened(tmp_path, arrays, space=None):
    return open_transitions(write_arrays(tmp_path / "log.hdf5", arrays), space)


def noted(log, words):
    return any(words in note for note in log.metadata.notes)


class TestNextObservations:
    def test_where_they_are_given_every_row_is_kept(self, tmp_path):
        rollout = roll_out(discrete=False)
        log = opened(tmp_path, d4rl_arrays(rollout), Continuous(2, -1, 1))
        assert_same_rows(
            log,
            rollout.transitions(
                rewards=rollout.transitions().rewards.astype(np.float32)
            ),
        )
        assert log.action_space == Continuous(2, -1, 1)
        assert log.metadata.notes == ()

    def test_else_they_follow_inside_episodes_only(self, tmp_path):
        rollout = roll_out(discrete=False)
        log = opened(
            tmp_path, d4rl_arrays(rollout, next_observations=None), Continuous(2, -1, 1)
        )
        # episodes 1, 2, 4 end by timeout: their last rows have no next observation in
        # the file
        kept = [row for row in rollout.rows if row.terminated or not row.truncated]
        assert len(log) == 15 - 3
        for i, row in enumerate(kept):
            np.testing.assert_array_equal(log.observations[i], row.observation)
            seen = log.rewards[i], log.terminated[i], log.steps[i]
            assert seen == (np.float32(row.reward), row.terminated, row.step)
            following = row.observation if row.terminated else row.next_observation
            np.testing.assert_array_equal(log.next_observations[i], following)
        np.testing.assert_array_equal(log.episode_lengths, [4, 2, 4, 1, 1])
        # the row above a row left out is now the one where the recording stopped
        np.testing.assert_array_equal(np.flatnonzero(log.truncated), [5, 9, 11])
        assert noted(log, "3 rows were left out")


class TestEpisodes:
    def test_cuts_show_in_next_observations_where_timeouts_are_missing(self, tmp_path):
        log = opened(tmp_path, d4rl(timeouts=None))
        # the file's end shows nothing
        np.testing.assert_array_equal(np.flatnonzero(log.truncated), [6, 11])
        np.testing.assert_array_equal(log.episode_lengths, LENGTHS)
        assert noted(log, "2 rows were marked as truncated")

    def test_without_both_the_doubt_is_put_on_record(self, tmp_path):
        rollout = roll_out(("terminated", "terminated"), (3, 2))
        log = opened(
            tmp_path, d4rl_arrays(rollout, next_observations=None, timeouts=None)
        )
        np.testing.assert_array_equal(log.episode_lengths, [3, 2])
        assert noted(log, "episodes were taken to end at terminals only")

    @pytest.mark.parametrize("timeouts", [None, np.zeros(100, dtype=bool)])
    def test_shuffled_rows_are_not_taken_for_episodes(self, tmp_path, timeouts):
        shuffle = np.random.default_rng(0).permutation(100)
        arrays = d4rl_arrays(roll_out(("terminated",) * 20, (5,) * 20), timeouts=None)
        arrays = {key: array[shuffle] for key, array in arrays.items()}
        log = opened(
            tmp_path, arrays if timeouts is None else arrays | {"timeouts": timeouts}
        )
        assert not log.has_episodes
        assert noted(log, "rows stand alone")
        np.testing.assert_array_equal(
            log.next_observations, arrays["next_observations"]
        )

    def test_interleaved_ones_are_put_in_order(self, tmp_path):
        log = roll_out().transitions()
        shuffle = np.random.default_rng(0).permutation(15)
        arrays = d4rl(episode_ids=log.episode_ids, steps=log.steps)
        shuffled = opened(
            tmp_path, {key: array[shuffle] for key, array in arrays.items()}
        )
        assert noted(shuffled, "put in order")
        for episode in range(5):
            mine = shuffled.episode_ids == episode
            theirs = log.episode_ids == episode
            np.testing.assert_array_equal(
                shuffled.next_observations[mine], log.next_observations[theirs]
            )


LOG = roll_out().transitions()
ENDS = LOG.terminated | LOG.truncated


@pytest.mark.parametrize(
    "changes",
    [
        {
            "terminals": LOG.terminated.astype(np.float32),
            "rewards": LOG.rewards.astype(">f4").reshape(-1, 1),
        },
        {"episode_ids": LOG.episode_ids + 7, "steps": LOG.steps},
        {"timeouts": None, "episode_terminals": ENDS.astype(np.float32)},  # d3rlpy 1
        {"infos/action_log_probs": -np.ones(ROWS)},
        {"infos/action_log_probs": np.full(ROWS, np.nan)},
    ],
)
def test_the_same_rows_in_other_words(tmp_path, changes):
    path = write_arrays(tmp_path / "log.hdf5", d4rl(**changes))
    log = open_transitions(path)
    assert_same_rows(log, LOG.replace(rewards=LOG.rewards.astype(np.float32)))
    densities = changes.get("infos/action_log_probs", np.full(ROWS, np.nan))
    assert (log.behavior_log_probabilities is not None) == np.isfinite(densities).all()
    left_out = "infos/action_log_probs" in changes and np.isnan(densities).all()
    assert noted(log, "infos/action_log_probs was left out") == left_out


def test_numbers_and_pictures_keep_their_kind(tmp_path):
    flat = d4rl(observations=np.arange(15), next_observations=np.arange(1, 16))
    log = opened(tmp_path, flat)
    assert (log.observation_shape, log.observations.dtype) == ((1,), np.float32)
    pictures = opened(tmp_path, d4rl_arrays(roll_out(shape=(2, 2), dtype=np.uint8)))
    assert (pictures.observation_shape, pictures.observations.dtype) == (
        (2, 2),
        np.uint8,
    )


def test_the_refusal_to_read_from_disk_names_the_command_that_helps(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    expected = opened(tmp_path, d4rl(timeouts=None))
    with pytest.raises(
        DataError, match=r"log.hdf5 is no folder .*: (koffline data convert .*)"
    ) as error:
        open_transitions("log.hdf5", lazy=True)
    succeed("data", *str(error.value).partition("koffline data ")[2].split())
    assert_same_rows(open_transitions("shards"), expected)


class TestBothFlags:
    """Rows flagged done and cut follow one rule in files and in tables."""

    @staticmethod
    def arrays(both, cut_alone=(), ends=(4, 9, 14, 19, 24)):
        """Five episodes of five rows; ``both``: episodes whose last row has both
        flags.
        """
        states = np.arange(25.0)
        terminals = np.zeros(25)
        timeouts = np.zeros(25)
        terminals[list(ends)] = 1
        timeouts[[ends[i] for i in (*both, *cut_alone)]] = 1
        terminals[[ends[i] for i in cut_alone]] = 0
        return {
            "observations": states,
            "next_observations": states + 1,
            "actions": np.arange(25) % 2,
            "rewards": states,
            "terminals": terminals,
            "timeouts": timeouts,
        }

    @pytest.mark.parametrize(
        ("both", "cut_alone", "terminated"),
        [
            ((), (), [0, 1, 2, 3, 4]),
            ((0, 1, 2), (), [3, 4]),  # natural ends and limits mixed
            ((0, 1, 2, 3, 4), (), []),  # every end is a limit
            ((0, 1), (), [0, 1, 2, 3, 4]),  # two may be chance
            # some cuts are not terminal: the flag means what it says
            (
                (0, 1, 2),
                (3,),
                [0, 1, 2, 4],
            ),
        ],
    )
    @pytest.mark.parametrize("kind", ["npz", "hdf5", "table"])
    def test_one_rule_for_files_and_tables(
        self, tmp_path, both, cut_alone, terminated, kind
    ):
        arrays = self.arrays(both, cut_alone)
        if kind == "table":
            path = tmp_path / "log.parquet"
            mapping = {
                "observations": "observations",
                "next_observations": "next_observations",
                "action": "actions",
                "reward": "rewards",
                "terminal": "terminals",
                "truncated": "timeouts",
            }
            pl.DataFrame(arrays).write_parquet(path)
            log = open_transitions(path, mapping=mapping)
        elif kind == "npz":
            np.savez(tmp_path / "log.npz", **arrays)
            log = open_transitions(tmp_path / "log.npz")
        else:
            log = opened(tmp_path, arrays)
        np.testing.assert_array_equal(
            np.flatnonzero(log.terminated), 5 * np.array(terminated, int) + 4
        )
        assert log.n_episodes == 5
        assert noted(log, "they were taken to be cut") == (
            len(terminated) < 5 and not cut_alone
        )

    @pytest.mark.parametrize("kind", ["npz", "hdf5"])
    @pytest.mark.parametrize(
        ("ended", "terminated"),
        [
            ([4, 14], [4, 14]),
            ([4, 9, 14, 19, 24], [4, 9, 14, 19, 24]),
            ([], []),
            # masks that are 0 inside episodes say something else
            ([3], [4, 9, 14, 19, 24]),
        ],
    )
    def test_masks_beside_terminals_say_which_ends_are_cuts(
        self, tmp_path, kind, ended, terminated
    ):
        masks = np.ones((25, 1), np.float32)
        masks[ended] = 0
        arrays = {**self.arrays(()), "masks": masks}
        del arrays["timeouts"]
        if kind == "npz":
            np.savez(tmp_path / "log.npz", **arrays)
        log = (
            open_transitions(tmp_path / "log.npz")
            if kind == "npz"
            else opened(tmp_path, arrays)
        )
        np.testing.assert_array_equal(np.flatnonzero(log.terminated), terminated)
        np.testing.assert_array_equal(log.episode_lengths, [5] * 5)
        assert noted(log, "have masks 1: they were taken to be cut") == (
            len(terminated) < 5
        )

    def test_our_own_files_keep_their_flags(self, tmp_path):
        """A log may hold rows that ended in the step in which recording stopped."""
        cut = LOG.replace(truncated=LOG.terminated | LOG.truncated)
        write_transitions(cut, tmp_path / "mine.npz")
        again = open_transitions(tmp_path / "mine.npz")
        np.testing.assert_array_equal(again.terminated, LOG.terminated)
