"""Minari: every row aligned with the rollout that was recorded, which d3rlpy's own
reader does not manage.
"""

import json

import gymnasium
import h5py
import numpy as np
import pytest
from gymnasium import spaces
from minari.serialization import serialize_space

from koffline.data.sources import open_transitions
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import DataError
from tests.data.logs import assert_same_rows, roll_out

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
KIND = spaces.Dict({"x": BOX, "kind": spaces.Text(3)})
CAMERA = spaces.Dict({"camera": spaces.Box(0, 255, (32, 32, 3), np.uint8), "x": BOX})


def record(
    folder,
    rollout,
    observation_space=BOX,
    action_space=None,
    to_stored=lambda array: array,
):
    """Write the rollout with Minari's own storage, as its DataCollector would have: T +
    1 observations.
    """
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    if action_space is None:
        discrete = isinstance(rollout.action_space, Discrete)
        action_space = (
            spaces.Discrete(3) if discrete else spaces.Box(-1.0, 1.0, (2,), np.float64)
        )
    folder.mkdir()
    storage = MinariStorage.new(
        folder / "data", observation_space=observation_space, action_space=action_space
    )
    storage.update_metadata({"dataset_id": "walk/test-v0", "minari_version": "0.5.4"})
    for index in range(len(rollout.lengths)):
        seen, actions, rewards, following, ended, cut, *_ = map(
            np.stack, zip(*rollout.episode(index), strict=True)
        )
        seen = to_stored(np.concatenate([seen, following[-1:]]))
        flags = {"terminations": ended, "truncations": cut}
        storage.update_episodes(
            [
                EpisodeBuffer(
                    observations=seen, actions=actions, rewards=rewards, **flags
                )
            ]
        )
    return folder


def edit_metadata(folder, **changes):
    path = folder / "data" / "metadata.json"
    described = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps(
            {key: value for key, value in described.items() if value is not None}
        )
    )


class TestReading:
    @pytest.mark.parametrize("discrete", [True, False])
    def test_five_episodes_row_by_row(self, tmp_path, discrete):
        rollout = roll_out(discrete=discrete)
        log = open_transitions(record(tmp_path / "walk", rollout))
        assert_same_rows(log, rollout.transitions())
        np.testing.assert_array_equal(
            log.episode_ids, [row.episode for row in rollout.rows]
        )
        assert log.action_space == (Discrete(3) if discrete else Continuous(2, -1, 1))
        assert log.metadata.extra["dataset_id"] == "walk/test-v0"
        assert log.metadata.notes == ()

    def test_no_environment_is_made(self, tmp_path, monkeypatch):
        folder = record(tmp_path / "walk", roll_out())
        spec = {"id": "Absent-v0", "entry_point": "absent.module:Env"}
        edit_metadata(folder, env_spec=json.dumps(spec))
        monkeypatch.setattr(
            gymnasium,
            "make",
            lambda *args, **kwargs: pytest.fail("made an environment"),
        )
        assert open_transitions(folder).metadata.extra["environment"] == "Absent-v0"

    def test_discrete_actions_that_start_elsewhere(self, tmp_path):
        rollout = roll_out()
        rows = [row._replace(action=row.action + 5) for row in rollout.rows]
        moved = type(rollout)(rows, rollout.action_space, rollout.lengths)
        log = open_transitions(
            record(tmp_path / "walk", moved, action_space=spaces.Discrete(3, start=5))
        )
        np.testing.assert_array_equal(log.actions, rollout.transitions().actions)
        assert "counted from 0" in log.metadata.notes[0]

    @pytest.mark.parametrize("kind", [spaces.Dict, spaces.Tuple])
    def test_parts_are_joined_as_gymnasium_flattens_them(self, tmp_path, kind):
        low = spaces.Box(-9, 9, (1,), np.float32)
        high = spaces.Box(-9, 9, (2,), np.float32)
        named = kind is spaces.Dict
        space = (
            spaces.Dict({"observation": high, "goal": low})
            if named
            else spaces.Tuple([high, low])
        )

        def split(array):
            parts = array[..., :2], array[..., 2:]
            return (
                dict(zip(("observation", "goal"), parts, strict=True))
                if named
                else parts
            )

        rollout = roll_out()
        log = open_transitions(
            record(tmp_path / "walk", rollout, space, to_stored=split)
        )
        for i, row in enumerate(rollout.rows):
            flattened = spaces.flatten(space, split(row.observation))
            np.testing.assert_array_equal(log.observations[i], flattened)
            flattened = spaces.flatten(space, split(row.next_observation))
            np.testing.assert_array_equal(log.next_observations[i], flattened)
        order = "goal (1,), observation (2,)" if named else "0 (2,), 1 (1,)"
        assert order in log.metadata.notes[0]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"data_format": None}, "no Minari dataset"),
            ({"data_format": "../hdf5"}, "Minari format '../hdf5', known is hdf5"),
            (
                {"observation_space": serialize_space(CAMERA)},
                "JPEG; .* with jpeg_encoding=False",
            ),
            ({"action_space": None}, "stores no action_space"),
            ({"action_space": '{"type": "Graph"}'}, "action_space: it cannot be read"),
            (
                {"total_episodes": 10**15},
                "promises 1000000000000000 episodes, which it does not hold",
            ),
            ({"total_episodes": -1}, "promises -1 episodes"),
            ({"total_episodes": 0}, "has no steps"),
        ],
    )
    def test_metadata_that_is_refused(self, tmp_path, changes, words):
        folder = record(tmp_path / "walk", roll_out())
        edit_metadata(folder, **changes)
        with pytest.raises(DataError, match=words):
            open_transitions(folder)

    def test_parts_that_are_no_numbers_are_refused_with_the_remedy(self, tmp_path):
        def kinds(seen):
            return {"x": seen, "kind": ["ab"] * len(seen)}

        folder = record(tmp_path / "walk", roll_out(), KIND, to_stored=kinds)
        with pytest.raises(DataError, match=r"part kind is Text\(.*FlattenObservation"):
            open_transitions(folder)

    def test_missing_observations_are_noticed(self, tmp_path):
        folder = record(tmp_path / "walk", roll_out())
        with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
            kept = file["episode_2/observations"][:3]
            del file["episode_2/observations"]
            file["episode_2/observations"] = kept
        with pytest.raises(
            DataError, match="episode 2 has observations for 2 of 5 rewards"
        ):
            open_transitions(folder)
