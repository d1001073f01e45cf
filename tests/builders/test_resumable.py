"""Builds that are cut: the parts that stay, what a second run makes of them; the
entries of what is built.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.builders import add_to_manifest, read_manifest
from koffline.builders.rollouts import RolloutPlayer
from koffline.builders.uniform import build_chain
from tests.refusals import assert_refused, run_cli

MORTAL = """
import os
import shutil
import numpy as np

calls = 0

def policy(observations):
    global calls
    calls += 1
    if calls == 50 and "KILL" in os.environ:
        os.kill(os.getpid(), int(os.environ["KILL"]))
    return np.full((len(observations), 2), 0.5)
"""

POLICIES = Path(__file__).parents[2] / "datasets" / "policies"
BUILD = (
    "rollouts --env CartPole-v1 --policy mortal:policy --policy epsilon:0.1:p.npz"
    " --episodes 10 --num-envs 2 --time-limit 20"
)
TARGETS = {"a.hdf5": [], "shards": ["--shard-rows", "60"]}


def build(target, *options):
    return run_cli("build", *BUILD.split(), "--out", target, *TARGETS[target], *options)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder of builds whose process killed itself within a batch."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "mortal.py").write_text(MORTAL)
    shutil.copy(POLICIES / "cartpole_medium.npz", folder / "p.npz")
    for target, shards in TARGETS.items():
        words = [
            sys.executable,
            "-m",
            "koffline",
            "build",
            *BUILD.split(),
            "--out",
            target,
            *shards,
        ]
        done = subprocess.run(words, env=os.environ | {"KILL": "9"}, cwd=folder)
        assert done.returncode == -signal.SIGKILL
        assert not (folder / target).exists()
        assert 2 <= len(list((folder / f"{target}.parts").glob("part-*.npz"))) < 5
    return folder


@pytest.fixture
def place(killed, tmp_path, monkeypatch):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "damage", [None, lambda data: data[:100], lambda data: b"x" + data[1:]]
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_killed_build_resumes_to_the_same_rows(place, monkeypatch, target, damage):
    """A part that is whole is not played again, one that is not is."""
    (part,) = (place / f"{target}.parts").glob("part-*-000001.npz")
    if damage:
        part.write_bytes(damage(part.read_bytes()))
    real = RolloutPlayer.play_batch
    played = []
    monkeypatch.setattr(
        RolloutPlayer, "play_batch", lambda self, i: played.append(i) or real(self, i)
    )
    assert build(target).exit_code == 0
    assert (0 in played, 1 in played, 4 in played) == (False, damage is not None, True)
    again = koffline.open_transitions(target).sha256
    assert not list(place.glob(f"{target}.parts"))
    assert build(target, "--force").exit_code == 0
    assert koffline.open_transitions(target).sha256 == again


@pytest.mark.parametrize("change", ["settings", "file", "module"])
def test_other_settings_or_policies_are_another_build(place, monkeypatch, change):
    """Its batches are all played; those that were kept go with the folder at the
    end.
    """
    real = RolloutPlayer.play_batch
    played = []
    monkeypatch.setattr(
        RolloutPlayer, "play_batch", lambda self, i: played.append(i) or real(self, i)
    )
    if change == "file":
        shutil.copy(POLICIES / "cartpole_expert.npz", "p.npz")
    if change == "module":
        Path("mortal.py").write_text(MORTAL + "\n")
    assert (
        build("a.hdf5", *(["--seed", "1"] if change == "settings" else [])).exit_code
        == 0
    )
    assert played == [0, 1, 2, 3, 4]
    assert not Path("a.hdf5.parts").exists()


def test_what_is_no_part_stays(place):
    Path("a.hdf5.parts/mine.txt").touch()
    assert build("a.hdf5").exit_code == 0
    assert [path.name for path in Path("a.hdf5.parts").iterdir()] == ["mine.txt"]
    Path("b.hdf5.parts").touch()
    assert_refused(
        build("a.hdf5", "--out", "b.hdf5"), "b.hdf5.parts is no unfinished build"
    )


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
    assert entries["deep/log.hdf5"]["seed"] == 2
    assert entries["deep/log.hdf5"]["files"] == {
        "log.hdf5": {"sha256": hashlib.sha256(b"bytes").hexdigest()}
    }


def test_builds_that_end_together_lose_no_entry(tmp_path):
    path = tmp_path / "manifest.json"
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda i: add_to_manifest(path, tmp_path / f"{i}.hdf5", LOG, "", i),
                range(24),
            )
        )
    assert {entry["seed"] for entry in read_manifest(path).values()} == set(range(24))
