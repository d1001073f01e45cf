"""Rollouts of several processes have the rows of one."""

from pathlib import Path

import numpy as np
import pytest

from koffline.builders.resumable import PartsFolder
from koffline.builders.rollouts import (
    PolicyFile,
    RolloutPlayer,
    RolloutSettings,
    RolloutWork,
    build_rollouts,
    play_batch,
)
from koffline.builders.uniform import learn_grid_policy
from koffline.errors import PolicyError
from koffline.jobs import PassSettings
from koffline.policies import save_grid_policy

SETTINGS = RolloutSettings("CartPole-v1", 10, (1.0, 2.0), time_limit=12, num_envs=3, seed=4)


class Elsewhere(PassSettings):
    """The work of other processes, done in this one; asked: the numbers of the batches."""

    def map(self, call, items, *arguments, **settings):
        object.__setattr__(self, "asked", [])
        noted = (item for item in items if self.asked.append(item) is None)
        return PassSettings().map(call, noted, *arguments, **settings)


def lean_right(observations: np.ndarray) -> np.ndarray:
    return np.tile([0.2, 0.8], (len(observations), 1))


def test_rows_do_not_depend_on_who_plays() -> None:
    policies = ["uniform", lean_right]
    heard: list[int] = []
    here = build_rollouts(SETTINGS, policies)
    elsewhere = build_rollouts(SETTINGS, policies, heard.append, workers=2)
    assert elsewhere.sha256 == here.sha256
    assert elsewhere.metadata == here.metadata
    assert heard == [3, 6, 9, 10]


def test_a_cut_build_goes_on_elsewhere(tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path / "log.parts", SETTINGS, ["uniform", "first"])
    folder.open(resume=False, force=False)
    where = Elsewhere(workers=2)
    with RolloutPlayer(SETTINGS, ["uniform", lean_right], where) as player:
        batches = folder.batches(player)
        next(batches)
        batches.close()
        assert folder.kept == 1
        log = folder.build(player)
    assert where.asked == [1, 2, 3]
    assert log.sha256 == build_rollouts(SETTINGS, ["uniform", lean_right]).sha256


def test_policy_files_travel_with_their_content(tmp_path: Path) -> None:
    settings = RolloutSettings("koffline/PuddleWorld-v0", 4, (1.0, 1.0), num_envs=2, time_limit=9)
    path = tmp_path / "here" / "policy.npz"
    path.parent.mkdir()
    save_grid_policy(path, learn_grid_policy("puddle_world", 0.9, None))
    specs = [str(path), f"epsilon:0.3:epsilon:0.1:{path}"]
    here = build_rollouts(settings, specs)
    with RolloutPlayer(settings, specs, Elsewhere(workers=2)) as player:
        batches = player.play(range(2))
        path.unlink()  # as on a machine that does not see it
        played = list(batches)
    np.testing.assert_array_equal(
        np.concatenate([columns["observations"] for columns in played]), here.observations
    )
    work = RolloutWork(settings, (PolicyFile("", "policy.npz", b"nothing"), "uniform"))
    with pytest.raises(PolicyError, match=r"policy\.npz"):
        play_batch(work, 0)
