"""Small algorithms and logs for the tests of koffline.algos."""

import dataclasses
from typing import Any

import numpy as np
import torch

import koffline.algos as ours
from koffline import ColumnarReplayBuffer, Continuous, Discrete, Transitions
from koffline.data import import_d3rlpy

d3rlpy = import_d3rlpy()

COLUMNS = 4
ACTIONS = 3
EVALUATORS = ("KLossFQE", "DiscreteKLossFQE")
DISCRETE = (
    "KLossDQN",
    "KLossDiscreteSAC",
    "KLossDiscreteCQL",
    "DiscreteTrustPCL",
    "DiscreteKLossFQE",
)
COMPOSED = ("KLossIQL", "KLossAWAC", "KLossReBRAC", "KLossCalQL", "KLossBCQ")
CONTINUOUS = (
    "KLossSAC",
    "KLossTD3PlusBC",
    "KLossCQL",
    "TrustPCL",
    "KLossFQE",
    *COMPOSED,
)
ALL = DISCRETE + CONTINUOUS


def is_discrete(name: str) -> bool:
    return name in DISCRETE


def with_small_networks(config_class: Any, **settings: Any) -> Any:
    encoder = d3rlpy.models.VectorEncoderFactory([8, 8])
    encoders = {
        f.name: encoder
        for f in dataclasses.fields(config_class)
        if "encoder_factory" in f.name
    }
    return config_class(**{**encoders, "batch_size": 16, **settings})


def make(
    name: str, target: Any = None, build: bool = False, seed: int = 0, **settings: Any
) -> Any:
    """An algorithm by class name; an evaluator evaluates `target`, or a fresh
    stochastic policy.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name in EVALUATORS:
            policy = target if target is not None else make_target(is_discrete(name))
            algo = getattr(ours, name)(
                policy, with_small_networks(ours.KLossFQEConfig, **settings)
            )
        else:
            algo = with_small_networks(
                getattr(ours, f"{name}Config"), **settings
            ).create()
        if build:
            algo.create_impl((COLUMNS,), ACTIONS)
    return algo


def make_target(discrete: bool, **settings: Any) -> Any:
    config_class = (
        d3rlpy.algos.DiscreteSACConfig if discrete else d3rlpy.algos.SACConfig
    )
    algo = with_small_networks(config_class, **settings).create()
    algo.create_impl((COLUMNS,), ACTIONS)
    return algo


def make_log(
    discrete, rows=120, length=12, seed=0, columns=COLUMNS, k=ACTIONS
) -> Transitions:
    """Episodes that chain; every other one is cut by a time limit."""
    generator = np.random.default_rng(seed)
    observations = generator.normal(size=(rows, columns)).astype(np.float32)
    steps = np.arange(rows) % length
    is_last = steps == length - 1
    episode = np.arange(rows) // length
    actions = (
        generator.integers(0, k, rows)
        if discrete
        else generator.uniform(-1, 1, (rows, k))
    )
    return Transitions(
        observations=observations,
        actions=actions,
        rewards=generator.normal(size=rows),
        next_observations=np.where(
            is_last[:, None],
            generator.normal(size=(rows, columns)),
            np.roll(observations, -1, axis=0),
        ),
        terminated=is_last & (episode % 2 == 0),
        truncated=is_last & (episode % 2 == 1),
        action_space=Discrete(k) if discrete else Continuous(k, -1.0, 1.0),
        episode_ids=episode,
        steps=steps,
    )


def make_buffer(name: str) -> ColumnarReplayBuffer:
    return ColumnarReplayBuffer(make_log(is_discrete(name)), seed=0)


def observations(rows: int = 10) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(rows, COLUMNS)).astype(np.float32)


def some_actions(name: str) -> np.ndarray:
    generator = np.random.default_rng(6)
    if is_discrete(name):
        return generator.integers(0, ACTIONS, 10)
    return generator.uniform(-1, 1, (10, ACTIONS)).astype(np.float32)


def parameters(algo: Any) -> dict[str, torch.Tensor]:
    """Every number that is saved, copied."""
    states = {
        key: module.state_dict()
        for key, module in algo.impl.modules.get_torch_modules().items()
    }
    return {
        f"{key}.{name}": value.clone()
        for key, state in states.items()
        for name, value in state.items()
    }


def optimiser_states(algo: Any) -> dict[str, Any]:
    parts = algo.impl.modules.create_checkpointer("cpu").modules
    return {
        key: part.state_dict() for key, part in parts.items() if hasattr(part, "optim")
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(
            torch.nan_to_num(left[k].double()), torch.nan_to_num(right[k].double())
        )
        for k in left
    )


def scalers(discrete: bool) -> dict[str, Any]:
    """Scalers of every kind that the action space allows, not fitted yet."""
    by_name = {
        "observation_scaler": d3rlpy.preprocessing.StandardObservationScaler(),
        "reward_scaler": d3rlpy.preprocessing.StandardRewardScaler(),
    }
    return (
        by_name
        if discrete
        else {**by_name, "action_scaler": d3rlpy.preprocessing.MinMaxActionScaler()}
    )


def fit(algo: Any, buffer: Any, steps: int = 4, **options: Any) -> Any:
    """Train without files or progress."""
    silent = {
        "logger_adapter": d3rlpy.logging.NoopAdapterFactory(),
        "show_progress": False,
    }
    return algo.fit(
        buffer, n_steps=steps, **{"n_steps_per_epoch": steps, **silent, **options}
    )
