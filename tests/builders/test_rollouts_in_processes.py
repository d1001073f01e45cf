"""Rollouts of several processes have the rows of one."""

from pathlib import Path

import numpy as np

from koffline.builders.resumable import PartsFolder
from koffline.builders.rollouts import RolloutPlayer, RolloutSettings, build_rollouts
from koffline.jobs import PassSettings

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
