import numpy as np
import pytest

from koffline.data.flat import write_npz
from koffline.data.sources import open_transitions
from koffline.data.transitions import Discrete
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out


def arrays_of(log, *names):
    return {name: getattr(log, name) for name in names}


def test_keeps_everything(tmp_path):
    log = roll_out(ends=("both", "neither", "truncated", "terminated", "neither")).transitions(
        behavior_log_probabilities=-np.arange(15.0), weights=np.arange(15.0)
    )
    write_npz(log, tmp_path / "log.npz")
    again = open_transitions(tmp_path / "log.npz")
    assert_same_rows(again, log)
    assert again.sha256 == log.sha256
    assert again.action_space == log.action_space


def test_plain_arrays_with_gymnasiums_names(tmp_path):
    rollout = roll_out()
    log = rollout.transitions()
    named = arrays_of(log, "observations", "actions", "rewards", "next_observations")
    np.savez(tmp_path / "log.npz", **named, terminations=log.terminated, truncations=log.truncated)
    assert_same_rows(open_transitions(tmp_path / "log.npz", Discrete(3)), log)


def test_ids_without_next_observations(tmp_path):
    log = roll_out(("terminated", "truncated", "neither"), (2, 3, 2)).transitions()
    named = arrays_of(log, "observations", "actions", "rewards", "terminated", "truncated", "episode_ids")
    np.savez(tmp_path / "log.npz", **named)
    again = open_transitions(tmp_path / "log.npz", Discrete(3))
    np.testing.assert_array_equal(again.rewards, log.rewards[[0, 1, 2, 3, 5]])
    np.testing.assert_array_equal(again.next_observations[[0, 2, 3, 4]], log.next_observations[[0, 2, 3, 5]])
    np.testing.assert_array_equal(again.truncated, [False, False, False, True, False])


def test_steps_alone_mark_episodes(tmp_path):
    log = roll_out(("truncated", "truncated"), (3, 2)).transitions()
    named = arrays_of(log, "observations", "actions", "rewards", "terminated", "truncated", "steps")
    np.savez(tmp_path / "log.npz", **named)
    np.testing.assert_array_equal(open_transitions(tmp_path / "log.npz", Discrete(3)).episode_lengths, [2, 1])


def test_pickled_objects_are_refused(tmp_path):
    log = roll_out().transitions()
    named = arrays_of(log, "observations", "actions", "rewards", "terminated")
    named["rewards"] = named["rewards"].astype(object)
    np.savez(tmp_path / "log.npz", **named)
    with pytest.raises(DataError, match=r"rewards has dtype object, which koffline never loads"):
        open_transitions(tmp_path / "log.npz")


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "log.npz", observations=np.zeros((2, 1)), actions=np.zeros(2))
    with pytest.raises(DataError, match="lacks rewards, terminals: found keys actions, observations"):
        open_transitions(tmp_path / "log.npz")
