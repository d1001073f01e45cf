"""Builds that are cut: the parts that stay, what a second run makes of them; the entries of what is built."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner

from koffline.builders.resumable import PartsFolder, add_to_manifest, policy_digests, read_manifest
from koffline.builders.rollouts import RolloutPlayer, RolloutSettings, build_rollouts
from koffline.builders.uniform import build_chain
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


LOG = build_chain(5, np.random.default_rng(0))


def test_entries_are_added_or_replaced_and_others_stay(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text('{"mine": {"anything": [1]}}')
    data = tmp_path / "deep" / "log.hdf5"
    data.parent.mkdir()
    data.write_bytes(b"bytes")
    for seed in (1, 2):
        add_to_manifest(path, data, LOG, "koffline build …", seed)
    entries = json.loads(path.read_text())
    assert set(entries) == {"mine", "deep/log.hdf5"}
    entry = entries["deep/log.hdf5"]
    assert (entry["seed"], entry["rows"], entry["episodes"]) == (2, 5, 0)
    assert entry["content_sha256"] == LOG.sha256
    assert entry["files"] == {"log.hdf5": {"sha256": hashlib.sha256(b"bytes").hexdigest()}}
    assert set(entry["made_with"]) == {"koffline", "numpy", "h5py", "gymnasium"}
    add_to_manifest(path, data.parent, LOG, "koffline build …", 0)
    assert "files" not in read_manifest(path)["deep"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["deep", "manifest.json"]


def test_builds_that_end_together_lose_no_entry(tmp_path):
    path = tmp_path / "manifest.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_to_manifest(path, tmp_path / f"{i}.hdf5", LOG, "", i), range(24)))
    assert {entry["seed"] for entry in read_manifest(path).values()} == set(range(24))


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{", "\xff"])
def test_a_broken_manifest_is_one_line(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="is not a manifest") as caught:
        add_to_manifest(path, tmp_path / "x", LOG, "", 0)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content.encode("latin-1")
    assert read_manifest(tmp_path / "none.json") == {}
