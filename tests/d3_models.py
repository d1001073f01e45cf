"""Small d3rlpy models for the tests of policies."""

import json
import pickle
from pathlib import Path

import numpy as np
import torch

from koffline.data.transitions import Continuous
from tests.algos.makers import d3rlpy, with_small_networks

BOX = Continuous(2, low=(-2.0, 0.0), high=(3.0, 1.0))
SHAPE = (4,)
# d3rlpy's algorithms by what their predict does.
DISCRETE = [
    "DQN",
    "DoubleDQN",
    "NFQ",
    "DiscreteCQL",
    "DiscreteBC",
    "DiscreteBCQ",
    "DiscreteSAC",
]
DETERMINISTIC = [
    "DDPG",
    "TD3",
    "TD3PlusBC",
    "ReBRAC",
    "PRDC",
    "PLAS",
    "PLASWithPerturbation",
    "BC",
]
STOCHASTIC = ["SAC", "CQL", "CalQL", "AWAC", "IQL"]
PREDICT_DRAWS = ["BCQ", "BEAR", "CRR"]


def raw_observations(n: int = 64) -> np.ndarray:
    """Far from standardised, so that a forgotten scaler shows."""
    observations = (
        np.random.default_rng(0).normal(20.0, 8.0, size=(n, 4)).astype(np.float32)
    )
    observations.flags.writeable = False
    return observations


def build(algorithm: str, action_size: int, **settings):
    algo = with_small_networks(
        getattr(d3rlpy.algos, f"{algorithm}Config"), **settings
    ).create()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        algo.create_impl(SHAPE, action_size)
    return algo


def standard_scaler():
    observations = raw_observations()
    return d3rlpy.preprocessing.StandardObservationScaler(
        mean=observations.mean(0), std=observations.std(0)
    )


def minmax_scaler():
    seen = raw_observations()
    return d3rlpy.preprocessing.MinMaxObservationScaler(
        minimum=seen.min(0), maximum=seen.max(0)
    )


def action_scaler():
    return d3rlpy.preprocessing.MinMaxActionScaler(
        minimum=np.array(BOX.low), maximum=np.array(BOX.high)
    )


def saved(algo, folder: Path) -> str:
    path = str(folder / "model.bin")  # the name plays no part
    algo.save(path)
    return path


def rewritten(source: Path, target: Path, **changes) -> Path:
    """A copy of a .d3 file with other parts."""
    target.write_bytes(pickle.dumps(pickle.loads(source.read_bytes()) | changes))
    return target


def rewritten_config(source: Path, target: Path, **changes) -> Path:
    """A copy with another type, other parameters or other fields beside them."""
    config = json.loads(pickle.loads(source.read_bytes())["config"])
    config["config"]["type"] = changes.pop("type", config["config"]["type"])
    config["config"]["params"] |= changes.pop("params", {})
    return rewritten(source, target, config=json.dumps({**config, **changes}))
