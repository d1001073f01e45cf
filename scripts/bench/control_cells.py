"""Cells of the control benchmark: one algorithm with one seed on one log, trained,
evaluated, written.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import koffline
from koffline.builders.control import bundled_policy
from koffline.builders.control_learning import policy_returns
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError
from koffline.store.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "datasets" / "control"
# d3rlpy's defaults of these are for millions of steps on images.
DISCRETE_DEFAULTS = {"learning_rate": 5e-4, "target_update_interval": 200}
REFERENCE_SEED = 11
EVALUATION_SEED = 12


@dataclass(frozen=True)
class CellSettings:
    """One algorithm with one seed on one log; ``assignments`` are (field, value) of its
    configuration.
    """

    log: str
    algo: str
    seed: int
    steps: int
    evaluate_every: int
    episodes: int
    hidden: tuple[int, ...]
    batch_size: int
    assignments: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"

    @property
    def log_path(self) -> Path:
        """The log's file."""
        path = Path(self.log)
        if path.suffix:
            return path
        return LOGS / f"{self.log}.hdf5"


def make_algo(settings: CellSettings, log: Transitions) -> Any:
    """The d3rlpy algorithm of a cell, not yet built.

    Raises ConfigError for unknown types and fields.
    """
    from koffline.data import import_d3rlpy

    import_d3rlpy()
    from d3rlpy.base import LearnableConfig
    from d3rlpy.models import VectorEncoderFactory
    from d3rlpy.preprocessing import (
        MinMaxActionScaler,
        MultiplyRewardScaler,
        StandardObservationScaler,
    )
    from d3rlpy.serializable_config import CONFIG_STORAGE

    import koffline.algos  # noqa: F401  (registers ours)

    types = CONFIG_STORAGE[LearnableConfig].config_list
    if settings.algo not in types:
        raise ConfigError(
            f"there is no algorithm '{settings.algo}'; there are"
            f" {', '.join(sorted(types))}"
        )
    config_type = types[settings.algo]
    fields = config_type.__dataclass_fields__
    values: dict[str, Any] = {
        name: VectorEncoderFactory(hidden_units=list(settings.hidden))
        for name in fields
        if name.endswith("encoder_factory")
    }
    mean = log.observations.mean(axis=0)
    deviation = log.observations.std(axis=0)
    scaler = StandardObservationScaler(mean=mean.tolist(), std=deviation.tolist())
    values |= {"batch_size": settings.batch_size, "observation_scaler": scaler}
    values["gamma"] = log.metadata.gamma or 0.99
    spread = float(log.rewards.std())
    if spread > 0.0:  # learning rates and penalties are meant for rewards of about 1
        values["reward_scaler"] = MultiplyRewardScaler(1.0 / spread)
    space = log.action_space
    if isinstance(space, Discrete):
        values |= {
            name: value for name, value in DISCRETE_DEFAULTS.items() if name in fields
        }
    else:
        low, high = (
            np.broadcast_to(side, space.k).astype(float).tolist()
            for side in (space.low, space.high)
        )
        values["action_scaler"] = MinMaxActionScaler(minimum=low, maximum=high)
    for name, value in settings.assignments:
        if name not in fields:
            raise ConfigError(
                f"{settings.algo} has no field '{name}'; it has"
                f" {', '.join(sorted(fields))}"
            )
        values[name] = value
    return config_type(**values).create(device=settings.device)


def write_cell(path: Path, settings: CellSettings) -> None:
    """Train, evaluate, write."""
    from koffline.data import import_d3rlpy, quiet
    from koffline.data.replay import ColumnarReplayBuffer
    from koffline.fitting import threads

    d3rlpy = import_d3rlpy()
    log = koffline.open_transitions(settings.log_path)
    env = str(log.metadata.extra["task"])
    with threads(1), quiet():
        d3rlpy.seed(settings.seed)
        algo = make_algo(settings, log)
        curve: list[dict[str, float]] = []

        def evaluate(algo: Any, epoch: int, step: int) -> None:
            del epoch
            returns = policy_returns(
                env, greedy(algo), settings.episodes, EVALUATION_SEED + settings.seed
            )
            curve.append(
                {
                    "step": step,
                    "return": float(returns.mean()),
                    "std": float(returns.std()),
                }
            )

        started = time.perf_counter()
        history = algo.fit(
            ColumnarReplayBuffer(log, settings.seed),
            n_steps=settings.steps,
            n_steps_per_epoch=settings.evaluate_every,
            logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
            show_progress=False,
            epoch_callback=evaluate,
        )
    result = {
        "name": path.stem,
        "log": settings.log,
        "env": env,
        "algo": settings.algo,
        "seed": settings.seed,
        "assignments": dict(settings.assignments),
        "steps": [point["step"] for point in curve],
        "returns": [point["return"] for point in curve],
        "deviations": [point["std"] for point in curve],
        "metrics": {
            name: [float(metrics[name]) for _, metrics in history]
            for name in history[-1][1]
        },
        "config": json.loads(algo.config.serialize()),
        "seconds": time.perf_counter() - started,
    }
    _write(path, result)


def greedy(algo: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The algorithm's best action, inside the box; a network that is not finite any
    more does not move.
    """

    def actions(observations: np.ndarray) -> np.ndarray:
        chosen = algo.predict(observations.astype(np.float32))
        if np.issubdtype(chosen.dtype, np.floating):
            return np.nan_to_num(chosen)
        return chosen

    return actions


def write_reference(path: Path, env: str) -> None:
    """Mean returns of uniform actions and of the expert without noise, 100 episodes
    each.
    """
    policies = {"random": "uniform", "expert": str(bundled_policy(env, "expert"))}
    returns = {
        name: policy_returns(env, policy, 100, REFERENCE_SEED)
        for name, policy in policies.items()
    }
    _write(
        path,
        {
            "name": path.stem,
            **{name: float(value.mean()) for name, value in returns.items()},
        },
    )


def cell_path(settings: CellSettings, folder: Path) -> Path:
    """The cell's file: log, algorithm, seed and a digest of all settings, the rows and
    the configuration.
    """
    log = koffline.open_transitions(settings.log_path)
    config = make_algo(settings, log).config.serialize()
    digest = hashlib.sha256(repr((settings, log.sha256, config)).encode()).hexdigest()[
        :12
    ]
    return (
        folder
        / f"{settings.log_path.stem}-{settings.algo}-{settings.seed}-{digest}.json"
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


def is_whole(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["name"] == path.stem)
    except (OSError, ValueError, KeyError, TypeError):
        return False
