"""d3rlpy's ReplayBuffer dumps, in both directions, checked with d3rlpy itself."""

import h5py
import numpy as np
import pytest

from koffline.data import import_d3rlpy
from koffline.data.d3rlpy_dump import write_d3rlpy_dump
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out

d3rlpy = import_d3rlpy()
ENDS = ("truncated", "terminated", "truncated", "terminated", "neither")


def load(path):
    with path.open("rb") as file:
        return d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())


def dump(buffer, path):
    with path.open("w+b") as file:
        buffer.dump(file)
    return path


def recorded(rollout):
    """What a d3rlpy user does: episodes as recorded, one observation per step."""
    for index in range(len(rollout.lengths)):
        rows = rollout.episode(index)
        yield d3rlpy.dataset.Episode(
            np.stack([row.observation for row in rows]),
            np.stack([row.action for row in rows]).reshape(len(rows), -1),
            np.array([[row.reward] for row in rows], dtype=np.float32),
            rows[-1].terminated,
        )


def assert_seen(buffer, row, expected):
    """A transition as d3rlpy's own picker gives it; ``expected`` has the fields of a
    row.
    """
    seen = buffer.transition_picker(*buffer.buffer[row])
    np.testing.assert_array_equal(seen.observation, expected.observation)
    np.testing.assert_array_equal(
        seen.action.reshape(np.shape(expected.action)), expected.action
    )
    assert np.float32(seen.reward[0]) == np.float32(expected.reward)
    assert seen.terminal == expected.terminated
    if not expected.terminated:
        np.testing.assert_array_equal(seen.next_observation, expected.next_observation)


@pytest.mark.parametrize("discrete", [True, False])
def test_dumps_of_d3rlpy_row_by_row(tmp_path, discrete):
    rollout = roll_out(ENDS, discrete=discrete)
    buffer = d3rlpy.dataset.create_infinite_replay_buffer(list(recorded(rollout)))
    log = open_transitions(dump(buffer, tmp_path / "buffer.h5"))
    kept = [
        row
        for row in rollout.rows
        if row.terminated or row.step < rollout.lengths[row.episode] - 1
    ]
    assert len(log) == len(kept) == buffer.transition_count == 12
    for i, row in enumerate(kept):
        assert_seen(buffer, i, row)
        np.testing.assert_array_equal(log.observations[i], row.observation)
        np.testing.assert_array_equal(log.actions[i], row.action)
        expected = row.observation if row.terminated else row.next_observation
        np.testing.assert_array_equal(log.next_observations[i], expected)
        assert (log.rewards[i], log.terminated[i]) == (
            np.float32(row.reward),
            row.terminated,
        )
        assert (log.episode_ids[i], log.steps[i]) == (row.episode, row.step)
    np.testing.assert_array_equal(np.flatnonzero(log.truncated), [2, 9, 11])
    for words in ("3 rows were left out", "assumed"):
        assert any(words in note for note in log.metadata.notes)
    assert log.action_space == (Discrete(3) if discrete else Continuous(2))


@pytest.mark.parametrize("discrete", [True, False])
def test_d3rlpy_reads_ours_without_losing_a_row(tmp_path, discrete):
    rollout = roll_out(ENDS, discrete=discrete)
    log = rollout.transitions(metadata=Metadata(gamma=0.9), weights=np.ones(15))
    write_d3rlpy_dump(log, tmp_path / "buffer.h5")
    ours = open_transitions(tmp_path / "buffer.h5")
    assert (ours.action_space, ours.metadata.gamma, ours.weights) == (
        log.action_space,
        0.9,
        None,
    )
    assert ours.metadata.notes == (
        "weights were left out: a d3rlpy dump has no place for them",
    )
    buffer = load(tmp_path / "buffer.h5")
    assert buffer.transition_count == len(rollout.rows)
    for i, row in enumerate(rollout.rows):
        assert_seen(buffer, i, row)
    np.testing.assert_allclose(
        [e.compute_return() for e in buffer.episodes], log.returns(), rtol=1e-6
    )
    again = open_transitions(dump(buffer, tmp_path / "theirs.h5"), log.action_space)
    # d3rlpy has no word for an episode that just stops
    cut = log.replace(truncated=np.append(log.truncated[:-1], True))
    for read_log in (ours, again):
        assert_same_rows(read_log, cut, terminal_next=False)


@pytest.mark.parametrize(
    ("lacking", "changes", "words"),
    [
        (
            "actions_1",
            {},
            (
                "truncated or corrupt d3rlpy dump file .*actions_1.*; copy or export it"
                " again"
            ),
        ),
        (
            "observations_1",
            {"observations_1_0": np.zeros((3, 3))},
            "tuple observations; flatten",
        ),
        (
            "rewards_1",
            {"rewards_1": np.zeros((3, 2))},
            "episode 1 have 2 numbers per step",
        ),
        ("num_episodes", {"num_episodes": 10**9}, "promises 1000000000 episodes"),
    ],
)
def test_damage_is_one_line(tmp_path, lacking, changes, words):
    path = tmp_path / "buffer.h5"
    write_d3rlpy_dump(roll_out().transitions(), path)
    with h5py.File(path, "r+") as file:
        del file[lacking]
        for name, array in changes.items():
            file[name] = array
    with pytest.raises(DataError, match=words):
        open_transitions(path)
