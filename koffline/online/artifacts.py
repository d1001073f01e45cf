"""What a stack leaves besides numbers: each seed's policy as .d3 and its replay as a log."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import DataError
from koffline.online.config import OnlineConfig
from koffline.online.lockstep import LockStep

MODEL, REPLAY, MINARI = "model.d3", "replay.hdf5", "minari"
_LOG = logging.getLogger(__name__)


def save_model(stack: LockStep, place: int, config: OnlineConfig, folder: Path) -> None:
    """The policy of run number ``place`` as model.d3, over an older one, where it is finite."""
    from koffline.algos.online_model import save_model as write

    agent = stack.agent(place)
    if is_finite(agent):
        write(agent, config, folder / MODEL)


def save_replay(stack: LockStep, place: int, config: OnlineConfig, folder: Path, minari: bool) -> None:
    """The replay of run number ``place`` as replay.hdf5 and, on request, as a Minari dataset in a folder."""
    from koffline.data.sources import write_transitions
    from koffline.online.replay_log import replay_transitions

    space = stack.agent(place).shape.action_space
    try:
        log = replay_transitions(stack.replay, place, space).transitions
    except DataError as error:
        _LOG.warning("no log of the replay in %s: %s", folder, error)
        return
    hint = config.gamma if 0.0 < config.gamma < 1.0 else None
    log = dataclasses.replace(log, metadata=dataclasses.replace(log.metadata, gamma=hint))
    write_transitions(log, folder / REPLAY, force=True)
    if minari:
        write_transitions(log, folder / MINARI, "minari", force=True)


def is_finite(agent: Any) -> bool:
    """Whether all weights of policy and value are finite."""
    arrays = [part for layers in (agent.policy, agent.value) for layer in layers for part in layer]
    if agent.log_std is not None:
        arrays.append(agent.log_std)
    return all(bool(np.isfinite(array).all()) for array in arrays)
