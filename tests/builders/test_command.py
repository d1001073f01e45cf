import json
import sys

import numpy as np
import pytest

import koffline
from tests.refusals import assert_refused, succeed

UNIFORM = (
    "uniform",
    "--env",
    "koffline/PuddleWorld-v0",
    "--n",
    "30",
    "--policy",
    "uniform",
)
ROLLOUTS = (
    "rollouts",
    "--env",
    "CartPole-v1",
    "--policy",
    "uniform",
    "--episodes",
    "5",
    "--time-limit",
    "8",
)


def test_uniform_writes_a_log_and_its_entry(run, tmp_path):
    for name in ("a.hdf5", "b.hdf5"):
        assert run(*UNIFORM, "--out", name).exit_code == 0
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    log = koffline.open_transitions(tmp_path / "a.hdf5")
    assert (len(log), log.has_episodes, log.metadata.gamma) == (30, False, 0.98)
    entries = json.loads((tmp_path / "manifest.json").read_text())
    assert set(entries) == {"a.hdf5", "b.hdf5"}
    assert entries["a.hdf5"]["content_sha256"] == log.sha256
    assert entries["a.hdf5"]["seed"] == 0
    assert set(entries["a.hdf5"]["files"]) == {"a.hdf5"}


def test_formats_agree(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for target in ("log.hdf5", "log.npz", "minari:pole/mixed-v0"):
        done = run(*ROLLOUTS, "--out", target)
        assert done.exit_code == 0, done.output
    logs = [
        koffline.open_transitions(target)
        for target in ("log.hdf5", "log.npz", "minari:pole/mixed-v0")
    ]
    assert len({log.sha256 for log in logs[:2]}) == 1
    np.testing.assert_array_equal(logs[0].observations, logs[2].observations)
    np.testing.assert_array_equal(logs[0].truncated, logs[2].truncated)
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("build", [UNIFORM, (*ROLLOUTS, "--num-envs", "2")])
def test_shards_hold_the_same_rows(run, tmp_path, build):
    assert run(*build, "--out", "a.hdf5").exit_code == 0
    succeed("build", *build, "--out", "shards", "--shard-rows", "11")
    lazy = koffline.open_transitions("shards", lazy=True)
    assert lazy.sha256 == koffline.open_transitions("a.hdf5").sha256
    assert len(lazy.shards) > 1
    assert max(shard.rows for shard in lazy.shards) <= 11
    assert lazy.metadata.extra == koffline.open_transitions("a.hdf5").metadata.extra
    entries = json.loads((tmp_path / "manifest.json").read_text())
    assert entries["shards"]["content_sha256"] == entries["a.hdf5"]["content_sha256"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.hdf5",
        "shards",
        "manifest.json",
    }
    assert run(*build, "--out", "shards", "--shard-rows", "11").exit_code == 2
    assert (
        run(*build, "--out", "shards", "--shard-rows", "99", "--force").exit_code == 0
    )
    assert len(koffline.open_transitions("shards", lazy=True).shards) == 1


# Arguments without --out, and words of the line.
BAD = [
    (
        ("uniform", "--env", "CartPole-v1", *UNIFORM[3:]),
        "Car-v0 (any environment: koffline build rollouts",
    ),
    (UNIFORM[:5], "--policy"),
    ((*UNIFORM, "--out", "nowhere/x.hdf5"), "does not exist"),
    ((*UNIFORM, "--out", "there.hdf5"), "exists"),
    (
        (*ROLLOUTS, "--format", "npz", "--out", "broken", "--force"),
        "is a folder; give a file name",
    ),
    (
        (*ROLLOUTS, "--format", "npz", "--out", "manifest.json"),
        "is the name of the manifest beside it",
    ),
    ((*UNIFORM, "--out", "broken/x.hdf5"), "is not a manifest"),
    ((*UNIFORM[:4], "10000000000000", *UNIFORM[5:]), "not enough memory"),
    ((*ROLLOUTS[:6], "0"), "episodes"),
    ((*ROLLOUTS, "--policy", "uniform", "--weight", "1"), "2 policies"),
    ((*ROLLOUTS, "--weight", "-1"), "weights"),
    ((*ROLLOUTS, "--num-envs", "0"), "num_envs is 0"),
    ((*UNIFORM, "--out", "x", "--shard-rows", "5", "--format", "npz"), "choose one"),
    ((*ROLLOUTS, "--out", "minari:group/log-v0", "--shard-rows", "5"), "choose one"),
    (
        (*ROLLOUTS, "--out", "there.hdf5", "--shard-rows", "5", "--force"),
        "is a file; name a folder",
    ),
    ((*ROLLOUTS, "--seed", "-1"), "seed"),
    ((*ROLLOUTS[:4], "unfit:late", *ROLLOUTS[5:]), "too far"),
    ((*ROLLOUTS[:4], "unfit:three", *ROLLOUTS[5:]), "shape (5, 3)"),
    ((*ROLLOUTS, "--out", "minari:no good"), "no good"),
    (
        ("uniform", "--env", "chain", "--n", "3", "--policy", "uniform"),
        "the chain has no actions",
    ),
    (("policy", "--env", "cart_pole", "--out", "there.hdf5"), "exists"),
    (("policy", "--env", "CartPole-v1", "--out", "x.npz"), "CartPole-v1"),
    *(
        (("rollouts", "--env", f"koffline-tests/{env}-v0", *ROLLOUTS[3:]), words)
        for env, words in (
            ("Fails-step", "step (KeyError"),
            ("Fails-nan", "a reward that is not a finite number"),
            ("Fails-infinite", "gave an observation"),
            ("Fails-reset", "100% broken"),
            ("Fails-shape", "failed in step"),
            ("TwoActions", "actions of MultiDiscrete"),
        )
    ),
]

UNFIT = """
import numpy as np

def three(observations):
    return np.full((len(observations), 3), 1 / 3)

def late(observations):
    if np.abs(observations).max() > 0.05:
        raise ValueError("too far")
    return np.full((len(observations), 2), 0.5)
"""


@pytest.mark.parametrize(("arguments", "words"), BAD)
# Gymnasium's own, of the reward that is no number
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_input_is_one_line_and_leaves_nothing(
    run, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "unfit.py").write_text(UNFIT)
    monkeypatch.delitem(sys.modules, "unfit", raising=False)
    (tmp_path / "there.hdf5").write_bytes(b"mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    assert_refused(
        run(*arguments, *(() if "--out" in arguments else ("--out", "x.hdf5"))), words
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.hdf5").read_bytes() == b"mine"
