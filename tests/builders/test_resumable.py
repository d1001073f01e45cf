"""Builds that are cut: the parts that stay, and what a second run makes of them."""

import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from koffline.builders.resumable import PartsFolder, policy_digests
from koffline.builders.rollouts import RolloutPlayer, RolloutSettings, build_rollouts
from koffline.cli import cli
from koffline.errors import DataError

SETTINGS = RolloutSettings("CartPole-v1", 10, time_limit=12, num_envs=3)


@pytest.fixture
def cut(tmp_path, monkeypatch):
    """A build cut in its third batch of four; the batches that were played are listed."""
    folder = PartsFolder(tmp_path / "log.parts", SETTINGS, ["uniform"])
    folder.open(resume=False, force=False)
    real, calls = RolloutPlayer.play_batch, []

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(RolloutPlayer, "play_batch", interrupted)
    with RolloutPlayer(SETTINGS, ["uniform"]) as player, pytest.raises(KeyboardInterrupt):
        folder.build(player)
    assert folder.kept == 2
    return folder, calls


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_part_that_is_not_whole_is_played_again(cut, damage):
    folder, calls = cut
    part = folder.folder / "part-000001.npz"
    part.write_bytes(damage(part.read_bytes()))
    folder.open(resume=True, force=False)
    with RolloutPlayer(SETTINGS, ["uniform"]) as player:
        log = folder.build(player)
    assert calls == [0, 1, 2, 1, 2, 3]
    assert log.sha256 == build_rollouts(SETTINGS, ["uniform"]).sha256


def test_it_is_not_continued_by_accident_nor_with_other_settings(cut, tmp_path):
    folder, _ = cut
    with pytest.raises(DataError, match="--resume"):
        folder.open(resume=False, force=False)
    others = (
        PartsFolder(folder.folder, RolloutSettings("CartPole-v1", 11), ["uniform"]),
        PartsFolder(folder.folder, SETTINGS, ["epsilon:0.1:uniform"]),
    )
    for other in others:
        with pytest.raises(DataError, match="other settings"):
            other.open(resume=True, force=False)
    (folder.folder / "run.json").write_text("{")
    with pytest.raises(DataError, match="other settings"):
        folder.open(resume=True, force=False)
    folder.open(resume=False, force=True)
    assert folder.kept == 0


def test_a_policy_file_that_changed_is_another_policy(tmp_path):
    path = tmp_path / "p.npz"
    seen = set()
    for content in (b"one", b"two"):
        path.write_bytes(content)
        seen.update(policy_digests([str(path), f"epsilon:0.1:{path}", f"epsilon:0.1:epsilon:0.2:{path}"]))
    assert len(seen) == 6
    assert policy_digests(["uniform", "epsilon:0.1:uniform"]) == ["uniform", "epsilon:0.1:uniform"]


MORTAL = """
import os
import numpy as np

calls = 0

def policy(observations):
    global calls
    calls += 1
    if calls == 50 and "KILL" in os.environ:
        os.kill(os.getpid(), int(os.environ["KILL"]))
    return np.full((len(observations), 2), 0.5)
"""


def test_a_killed_command_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    """A child kills itself within a batch; this process goes on."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = (
        "build rollouts --env CartPole-v1 --policy mortal:policy --episodes 10 --num-envs 2 --time-limit 20"
    )
    arguments = [*common.split(), "--out", "a.hdf5"]
    killed = subprocess.run(
        [sys.executable, "-m", "koffline", *arguments], env=os.environ | {"KILL": "9"}, capture_output=True
    )
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, b"")
    assert not (tmp_path / "a.hdf5").exists()
    assert 1 <= len(list((tmp_path / "a.hdf5.parts").glob("part-*.npz"))) < 5
    refused = CliRunner().invoke(cli, arguments)
    assert (refused.exit_code, "--resume" in refused.stderr) == (2, True)
    for more in (["--resume"], ["--out", "b.hdf5"]):
        done = CliRunner().invoke(cli, [*arguments, *more])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


def test_a_build_killed_while_its_parts_were_removed_can_be_resumed(tmp_path, monkeypatch):
    parts = PartsFolder(tmp_path / "a.hdf5.parts", "settings", [])
    parts.open(resume=False, force=False)
    for number in range(3):
        (parts.folder / f"part-{number:06d}.npz").touch()
    monkeypatch.setattr("koffline.builders.resumable.shutil.rmtree", lambda *_, **__: None)
    parts.remove()
    assert [path.name for path in parts.folder.iterdir()] == ["run.json"]
    parts.open(resume=True, force=False)
