"""d3rlpy's ReplayBuffer dumps, in both directions, checked with d3rlpy itself."""

import h5py
import numpy as np
import pytest

from koffline.data.d3rlpy_dump import write_d3rlpy_dump
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out

ENDS = ("truncated", "terminated", "truncated", "terminated", "neither")
LENGTHS = (4, 3, 5, 1, 2)


@pytest.fixture(scope="module")
def d3rlpy():
    return import_d3rlpy()


def dump_with_d3rlpy(d3rlpy, rollout, path):
    """What a d3rlpy user does: episodes as recorded, one observation per step."""
    episodes = []
    for index in range(len(rollout.lengths)):
        rows = rollout.episode(index)
        actions = np.stack([row.action for row in rows])
        episodes.append(
            d3rlpy.dataset.Episode(
                np.stack([row.observation for row in rows]),
                actions.reshape(len(rows), -1),
                np.array([[row.reward] for row in rows], dtype=np.float32),
                rows[-1].terminated,
            )
        )
    discrete = isinstance(rollout.action_space, Discrete)
    buffer = d3rlpy.dataset.ReplayBuffer(
        d3rlpy.dataset.InfiniteBuffer(),
        episodes=episodes,
        action_space=d3rlpy.ActionSpace.DISCRETE if discrete else d3rlpy.ActionSpace.CONTINUOUS,
        action_size=3 if discrete else 2,
    )
    with path.open("w+b") as file:
        buffer.dump(file)
    return path


@pytest.mark.parametrize("discrete", [True, False])
def test_dumps_of_d3rlpy_row_by_row(d3rlpy, tmp_path, discrete):
    rollout = roll_out(ENDS, LENGTHS, discrete=discrete)
    path = dump_with_d3rlpy(d3rlpy, rollout, tmp_path / "buffer.h5")
    log = open_transitions(path)
    kept = [row for row in rollout.rows if row.terminated or row.step < LENGTHS[row.episode] - 1]
    assert len(log) == len(kept) == 12
    for i, row in enumerate(kept):
        np.testing.assert_array_equal(log.observations[i], row.observation)
        np.testing.assert_array_equal(log.actions[i], row.action)
        assert log.rewards[i] == np.float32(row.reward)
        expected = row.observation if row.terminated else row.next_observation
        np.testing.assert_array_equal(log.next_observations[i], expected)
        assert log.terminated[i] == row.terminated
        assert log.episode_ids[i] == row.episode
        assert log.steps[i] == row.step
    np.testing.assert_array_equal(np.flatnonzero(log.truncated), [2, 9, 11])
    assert any("3 rows were left out" in note for note in log.metadata.notes)
    assert any("assumed" in note for note in log.metadata.notes)
    assert log.action_space == (Discrete(3) if discrete else Continuous(2))


def test_the_same_transitions_as_d3rlpy_itself_sees(d3rlpy, tmp_path):
    path = dump_with_d3rlpy(d3rlpy, roll_out(ENDS, LENGTHS), tmp_path / "buffer.h5")
    log = open_transitions(path, Discrete(3))
    with path.open("rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    assert buffer.transition_count == len(log)
    for row in range(len(log)):
        seen = buffer.transition_picker(*buffer.buffer[row])
        np.testing.assert_array_equal(log.observations[row], seen.observation)
        np.testing.assert_array_equal(log.actions[row], seen.action[0])
        assert log.rewards[row] == seen.reward[0]
        assert log.terminated[row] == bool(seen.terminal)
        if not seen.terminal:
            np.testing.assert_array_equal(log.next_observations[row], seen.next_observation)


@pytest.mark.parametrize("discrete", [True, False])
def test_d3rlpy_reads_ours_without_losing_a_row(d3rlpy, tmp_path, discrete):
    rollout = roll_out(ENDS, LENGTHS, discrete=discrete)
    write_d3rlpy_dump(rollout.transitions(), tmp_path / "buffer.h5")
    with (tmp_path / "buffer.h5").open("rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    assert buffer.transition_count == len(rollout.rows)
    for i, row in enumerate(rollout.rows):
        seen = buffer.transition_picker(*buffer.buffer[i])
        np.testing.assert_array_equal(seen.observation, row.observation)
        np.testing.assert_array_equal(seen.action.reshape(np.shape(row.action)), row.action)
        assert seen.reward[0] == row.reward
        assert seen.terminal == row.terminated
        if not row.terminated:
            np.testing.assert_array_equal(seen.next_observation, row.next_observation)
    for index, episode in enumerate(buffer.episodes):
        assert episode.compute_return() == pytest.approx(sum(row.reward for row in rollout.episode(index)))


def test_everything_comes_back(tmp_path):
    log = roll_out(("both", "neither", "truncated", "terminated", "neither")).transitions(
        weights=np.arange(15.0), behavior_log_probabilities=-np.arange(15.0)
    )
    write_d3rlpy_dump(log, tmp_path / "buffer.h5")
    again = open_transitions(tmp_path / "buffer.h5")
    assert_same_rows(again, log)
    assert again.sha256 == log.sha256
    assert again.action_space == log.action_space
    assert again.metadata.notes == ()


def test_single_rows_become_episodes_for_d3rlpy_and_rows_again_for_us(d3rlpy, tmp_path):
    log = roll_out(ENDS, LENGTHS).transitions(episode_ids=None, steps=None)
    write_d3rlpy_dump(log, tmp_path / "buffer.h5")
    with (tmp_path / "buffer.h5").open("rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    assert buffer.transition_count == buffer.size() == 15
    again = open_transitions(tmp_path / "buffer.h5")
    assert not again.has_episodes
    assert again.sha256 == log.sha256


def test_dumped_again_by_d3rlpy_the_rows_are_still_there(d3rlpy, tmp_path):
    log = roll_out(ENDS, LENGTHS).transitions()
    write_d3rlpy_dump(log, tmp_path / "ours.h5")
    with (tmp_path / "ours.h5").open("rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    with (tmp_path / "theirs.h5").open("w+b") as file:
        buffer.dump(file)
    again = open_transitions(tmp_path / "theirs.h5", Discrete(3))
    assert_same_rows(
        again, log.replace(truncated=[*log.truncated[:-1], True]), terminal_next=False
    )  # d3rlpy has no word for an episode that just stops


def test_old_versions_and_missing_columns(tmp_path):
    path = tmp_path / "buffer.h5"
    write_d3rlpy_dump(roll_out().transitions(), path)
    with h5py.File(path, "r+") as file:
        del file["version"]
        file["version"] = "2.0"
    with pytest.raises(DataError, match=r"d3rlpy dump of version 2.0, known is 2.1"):
        open_transitions(path)
    with h5py.File(path, "r+") as file:
        del file["version"], file["columns"]
        file["version"] = "2.1"
        file["columns"] = ["observations", "actions"]
    with pytest.raises(DataError, match="lacks rewards, terminated: found columns observations, actions"):
        open_transitions(path)


def test_tuple_observations_are_refused_with_the_remedy(tmp_path):
    path = tmp_path / "buffer.h5"
    write_d3rlpy_dump(roll_out().transitions(), path)
    with h5py.File(path, "r+") as file:
        file["observations_1_0"] = file["observations_1"][()]
        del file["observations_1"]
    with pytest.raises(DataError, match="tuple observations; flatten"):
        open_transitions(path)


def test_a_missing_episode_is_noticed(tmp_path):
    path = tmp_path / "buffer.h5"
    write_d3rlpy_dump(roll_out().transitions(), path)
    with h5py.File(path, "r+") as file:
        del file["rewards_3"]
    with pytest.raises(DataError, match="truncated or corrupt d3rlpy dump"):
        open_transitions(path)


def test_columns_beside_the_dump_must_fit(tmp_path):
    path = tmp_path / "buffer.h5"
    write_d3rlpy_dump(roll_out().transitions(), path)
    with h5py.File(path, "r+") as file:
        del file["koffline_columns/truncated"]
        file["koffline_columns/truncated"] = np.zeros(3, dtype=bool)
    with pytest.raises(DataError, match="does not fit the episodes"):
        open_transitions(path)


def test_observations_that_do_not_chain_are_refused(tmp_path):
    log = roll_out().transitions()
    following = log.next_observations.copy()
    following[0] += 1
    with pytest.raises(DataError, match="next observation of row 0"):
        write_d3rlpy_dump(log.replace(next_observations=following), tmp_path / "buffer.h5")
    assert list(tmp_path.iterdir()) == []
