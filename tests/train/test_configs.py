"""The files in configs/: one per algorithm, all of them train."""

import math
from pathlib import Path

import pytest

from koffline.algos.options import algorithm_types
from koffline.algos.training import EVALUATORS
from koffline.train.config import load_config
from koffline.train.run import train

FOLDER = Path(__file__).parents[2] / "configs"
ALGORITHMS = sorted(FOLDER.glob("*.yaml"))
EXPERIMENTS = sorted((FOLDER / "experiments").glob("*.yaml"))
FEW_STEPS = ["train.n_steps=3", "train.n_steps_per_epoch=2"]
QUICK = ("kloss_sac", "trust_pcl")


def test_there_is_one_per_algorithm():
    assert [path.stem for path in ALGORITHMS] == sorted(algorithm_types())


@pytest.mark.parametrize("path", [*ALGORITHMS, *EXPERIMENTS], ids=lambda path: path.stem)
def test_it_loads(path):
    config = load_config(path)
    assert Path(config.data.source).is_file()
    assert path in EXPERIMENTS or config.algo.type == path.stem


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.slow)
        for path in (*ALGORITHMS, *EXPERIMENTS)
    ],
    ids=lambda path: path.stem,
)
def test_it_trains(path, tmp_path):
    config = load_config(path, FEW_STEPS)
    more = ["evaluators.environment.episodes=1"] if "environment" in config.evaluators else []
    if config.algo.type in EVALUATORS:
        policy = load_config(FOLDER / "dqn.yaml", [*FEW_STEPS, "evaluators={}"])
        more.append(f"algo.policy={train(policy, tmp_path / 'policy').model}")
    result = train(load_config(path, [*FEW_STEPS, *more]), tmp_path / "run")
    assert result.steps == 3
    assert all(math.isfinite(value) for value in result.metrics.values())
