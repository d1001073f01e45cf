"""A killed online run that goes on equals one that was never killed; checkpoints that
cannot be used.
"""

import errno
import os

import pytest
import torch
import yaml

from koffline.checkpoints import checkpoints
from koffline.errors import ConfigError
from koffline.online.lockstep import LockStep
from koffline.online.run import train
from tests.interrupts import Hit, contents_of, hit_at
from tests.online.small_online import check_equal, small
from tests.refusals import one_line


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two seeds, never interrupted."""
    return train(small(), tmp_path_factory.mktemp("whole") / "run", 2).out


@pytest.mark.parametrize(
    "also_after", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_hit_at_every_write(also_after, tmp_path, monkeypatch):
    config = small(
        steps=40, learning_starts=2, evaluation_interval=20, checkpoint_interval=20
    )
    reference = train(config, tmp_path / "whole", 1).out
    for number in range(1, 60):
        folder = tmp_path / f"hit_{number}"
        try:
            with hit_at(monkeypatch, None, number, also_after):
                train(config, folder, 1)
        except Hit:
            train(config, seed_count=1, resume=folder)
            check_equal(reference, folder)
        else:
            break
    # Record, config, 2 evaluations with their logs, 2 checkpoints and models, replay,
    # result, summary, figure
    assert number >= 14


def hit_run(folder, monkeypatch, **changes):
    """The same without a process of its own."""
    iterate = LockStep.iterate

    def hit(self):
        if self.steps == 250:
            raise Hit
        iterate(self)

    with monkeypatch.context() as patch:
        patch.setattr(LockStep, "iterate", hit)
        with pytest.raises(Hit):
            train(small(**changes), folder / "killed", 2)
    return folder / "killed"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "Pendulum-v1", "critic": "td0", "num_envs": 2, "capacity": 300},
        {"critic": "rg", "checkpoint_interval": 50, "evaluation_interval": 300},
        {"critic": "fvi", "entropy_coef": 0.1, "entropy_decay": 0.1},
        {"critic": "td0", "exploration": 0.5},
    ],
    ids=["continuous", "residual", "fitted", "exploring"],
)
def test_every_kind_goes_on_to_the_bit(changes, tmp_path, monkeypatch):
    killed = hit_run(tmp_path, monkeypatch, **changes)
    train(resume=killed)
    check_equal(train(small(**changes), tmp_path / "whole", 2).out, killed)


def test_a_finished_run_is_reported_and_not_touched(tmp_path):
    first = train(small(), tmp_path / "run", 1)
    before = contents_of(first.out)
    assert train(None, resume=first.out) == first
    assert contents_of(first.out) == before


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"gamma": 0.9}, {}, "another config: gamma is 0.995 there and 0.9 here"),
        ({}, {"seed_count": 3}, "has the seeds 0, 1, not those that were asked for"),
        ({}, {"seed": 7}, "has the seeds 0, 1, not those that were asked for"),
        ({}, {"out": "elsewhere"}, "a run goes on in its own folder"),
    ],
)
def test_another_run_is_refused(changes, options, message, whole):
    before = contents_of(whole)
    with one_line(ConfigError, message):
        train(small(**changes), resume=whole, **options)
    assert contents_of(whole) == before


@pytest.mark.parametrize("damage", ["cut", "junk"])
def test_damaged_checkpoints(damage, tmp_path, caplog, monkeypatch):
    """The older one takes over; without any the run cannot go on, and nothing is
    touched.
    """
    killed = hit_run(tmp_path, monkeypatch, checkpoint_interval=100)
    older, newer = checkpoints(killed / "checkpoints" / "seeds_0-1")
    kept = older.read_bytes()
    for path in (older, newer):
        path.write_bytes({"cut": path.read_bytes()[:-1000], "junk": b"junk"}[damage])
    before = contents_of(killed)
    with pytest.raises(
        ConfigError,
        match="is damaged and no older one can be read; the run cannot go on",
    ):
        train(resume=killed)
    assert contents_of(killed) == before
    older.write_bytes(kept)
    train(resume=killed)
    assert f"checkpoint {newer} is damaged; going on from the one before" in caplog.text
    check_equal(
        train(small(checkpoint_interval=100), tmp_path / "whole", 2).out, killed
    )


def test_a_full_disk_at_a_checkpoint(whole, tmp_path, monkeypatch):
    write = torch.save

    def full(state, file):
        if isinstance(state, dict) and state.get("stack", {}).get("steps") == 300:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(state, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        written = "step_000000300.pt cannot be written (No space left on device)"
        with one_line(
            ConfigError,
            written,
            "150.pt before it is intact: free the disk, then --resume",
        ):
            train(small(), tmp_path / "run", 2)
    kept = [
        path.name for path in (tmp_path / "run").rglob("*.p*") if "step" in path.name
    ]
    assert kept == ["step_000000150.pt"]
    train(resume=tmp_path / "run")
    check_equal(whole, tmp_path / "run")


INTERRUPTED = """
import os, signal
from koffline.online.lockstep import LockStep
iterate = LockStep.iterate
def interrupted(self):
    if self.steps == 220:
        os.kill(os.getpid(), signal.SIGINT)
    iterate(self)
LockStep.iterate = interrupted
"""


def test_ctrl_c_says_how_to_go_on(whole, tmp_path, forked_commands):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small()))
    out = str(tmp_path / "run")
    words = ["online", "small.yaml", "--out", out, "--seeds", "2", "--quiet"]
    commands = forked_commands({"LC_ALL": "C.UTF-8"})
    done = commands.run(words, tmp_path, before=INTERRUPTED)
    assert done.returncode == 130
    assert (
        done.stderr.decode().strip()
        == f"interrupted; go on with koffline online --resume {tmp_path / 'run'}"
    )
    newest_one = checkpoints(tmp_path / "run" / "checkpoints" / "seeds_0-1")[-1]
    assert newest_one.name == "step_000000150.pt"
    train(resume=tmp_path / "run")
    check_equal(whole, tmp_path / "run")
