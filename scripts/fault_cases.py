"""The commands of the fault campaign, small enough for seconds, and how each is taken
up again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KOFFLINE = (sys.executable, "-m", "koffline")
# the same code, experiments of seconds
SHRUNK = (
    sys.executable,
    "-m",
    "tests.faults.shrunk_reproduce",
)
_LOG = str(ROOT / "datasets" / "cartpole.hdf5")
_POLICY = str(ROOT / "datasets" / "cartpole_policy.npz")
_QUICK = ("--gamma", "0.98", "--set", "steps=20", "--set", "resampled_replicas=2")


@dataclass(frozen=True)
class Case:
    """A command that is killed. words: its line, run in a folder of its own, with
    results in ``new``.

    again: the words for taking it up, given the folder. before: makes what ``--force``
    is to replace.
    names: regular expression of the results within the folder.
    """

    name: str
    words: tuple[str, ...]
    again: Callable[[Path], tuple[str, ...]] | None = None
    before: tuple[str, ...] | None = None
    names: str = "new"

    def resume_words(self, folder: Path) -> tuple[str, ...]:
        """The line that takes up what was killed; without a way to go on the same line
        again.
        """
        if self.again is None:
            return self.words
        return self.again(folder)


def all_cases() -> tuple[Case, ...]:
    """Every command that writes results."""
    return (*_evaluations(), *_training(), *_data(), *_experiments())


def _evaluations() -> tuple[Case, ...]:
    """With ``--force``: until the new results are whole, the old ones stay."""

    def case(name: str, *words: str) -> Case:
        line = (*KOFFLINE, name, _LOG, *words, *_QUICK, "--out", "new", "--force")
        return Case(name, line, before=(*line, "--seed", "1"))

    return (
        case("evaluate", "--policy", _POLICY),
        case("select", "--policies", _POLICY, "uniform"),
        case("diagnose", "--policy", _POLICY, "--model", "fqe"),
    )


def _training() -> tuple[Case, ...]:
    data = str(ROOT / "datasets" / "control" / "cartpole_medium.hdf5")
    sizes = (
        "train.n_steps=60",
        "train.n_steps_per_epoch=20",
        "evaluators.environment.episodes=1",
    )
    settings = [word for size in sizes for word in ("--set", size)]
    config = str(ROOT / "configs" / "kloss_dqn.yaml")
    train = (*KOFFLINE, "train", config, "--data", data, *settings, "--out", "new")
    sweep = (
        *KOFFLINE,
        "sweep",
        config,
        "--data",
        data,
        *settings,
        "--seeds",
        "2",
        "--metric",
        "environment",
        "--out",
        "new",
    )
    pendulum = str(ROOT / "configs" / "online" / "inverted_pendulum.yaml")
    small = ("steps=900", "evaluation_interval=300", "checkpoint_interval=300")
    online = (
        *KOFFLINE,
        "online",
        pendulum,
        *(w for s in small for w in ("--set", s)),
        "--seeds",
        "2",
    )

    def go_on(folder: Path) -> tuple[str, ...]:
        begun = (folder / "new" / "run.json").exists()
        return (*online, "--resume" if begun else "--out", "new")

    return (
        Case("train", train, again=lambda folder: (*train, "--resume")),
        Case("online", (*online, "--out", "new"), again=go_on),
        Case("sweep", sweep),
    )


def _data() -> tuple[Case, ...]:
    rollouts = (
        *KOFFLINE,
        "build",
        "rollouts",
        "--env",
        "CartPole-v1",
        "--policy",
        "uniform",
        "--episodes",
        "300",
        "--num-envs",
        "10",
        "--out",
        "new.hdf5",
    )
    convert = (*KOFFLINE, "data", "convert", _LOG)
    shards = (*convert, "new", "--shard-rows", "300", "--force")
    table = (*convert, "new.npz", "--force")
    return (
        Case(
            "build",
            rollouts,
            lambda folder: (*rollouts, "--force"),
            names=r"new\.hdf5$",
        ),
        Case(
            "convert",
            table,
            before=(*KOFFLINE, "data", "convert", _small(), "new.npz"),
            names="new",
        ),
        Case(
            "convert to shards",
            shards,
            before=(*KOFFLINE, "data", "convert", _small(), *shards[len(convert) :]),
        ),
    )


def _experiments() -> tuple[Case, ...]:
    words = (*SHRUNK, "reproduce", "figure-puddle", "--out", "new")
    return (Case("reproduce", words),)


def _small() -> str:
    return str(ROOT / "datasets" / "control" / "cartpole_random.hdf5")
