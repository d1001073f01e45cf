"""The log of a training run: in memory, or on disk with a sample of it in memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.algos import from_config
from koffline.data import remote
from koffline.data.disk.batches import BlockSampler
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.opening import is_shard_folder
from koffline.data.disk.samples import Part, sample_units, split_log
from koffline.data.sources import open_transitions
from koffline.data.spaces import Bounds, Discrete, SpaceRequest
from koffline.data.statistics import LogStatistics, statistics_of
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.ope.stream_settings import DEFAULT_MEMORY, parse_memory
from koffline.train.config import DataSettings

# Shares of the memory limit: the libraries take some hundred megabytes beside them.
_POOL_SHARE, _SAMPLE_SHARE = 0.5, 0.05
_SAMPLE_ROWS = 20_000
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainData:
    """What a run is trained and evaluated on.

    rows, held_out: the two parts of a log in memory; of a log on disk, whole episodes of either part.
    train_rows, held_out_rows: how many rows the parts have. statistics: of a log on disk, what is trained on.
    """

    log: Transitions | LazyTransitions
    rows: Transitions
    held_out: Transitions | None
    train_rows: int
    held_out_rows: int
    statistics: LogStatistics | None = None


def open_data(settings: DataSettings) -> TrainData:
    """The log of a config. Raises DataError and ConfigError."""
    asked = Bounds(*settings.continuous) if settings.continuous is not None else None
    space = Discrete(settings.discrete) if settings.discrete else asked
    if _stays_on_disk(settings, space):
        return _lazy_data(open_transitions(settings.source, space, lazy=True), settings)
    whole = open_transitions(settings.source, space)
    rows, held_out = split_log(whole, settings.split.held_out, settings.split.seed)
    return TrainData(whole, rows, held_out, len(rows), 0 if held_out is None else len(held_out))


def make_buffer(algo: Any, data: TrainData, settings: DataSettings, seed: int, kind: str) -> tuple[Any, Any]:
    """The replay buffer of a run, and what its draws depend on. Raises ConfigError, DataError."""
    if isinstance(data.log, Transitions):
        generator = np.random.default_rng([seed, 1])
        return from_config.make_buffer(algo, data.rows, generator), generator
    assert data.statistics is not None
    from_config.check_single_rows(algo, kind)
    part = _parts(settings)[0]
    pool = int(_POOL_SHARE * parse_memory(settings.memory or DEFAULT_MEMORY))
    sampler = BlockSampler(data.log, seed, memory=pool, part=part, next_actions=True)
    buffer = from_config.LazyReplayBuffer(sampler, data.rows, data.statistics)
    return buffer, buffer


def _stays_on_disk(settings: DataSettings, space: SpaceRequest | None) -> bool:
    """As asked; unasked, a folder of shards that would not fit the memory."""
    if settings.lazy is not None:
        return settings.lazy
    if settings.source.startswith("minari:") or not is_shard_folder(settings.source):
        return False
    log = open_transitions(settings.source, space, lazy=True)
    memory, size = settings.memory or DEFAULT_MEMORY, len(log) * log.row_bytes
    is_large = size > parse_memory(memory)
    if is_large:
        _LOG.warning(
            "the log would take %.3g GB of memory, more than data.memory (%s): its rows stay on disk",
            size / 1e9,
            memory,
        )
    return is_large


def _parts(settings: DataSettings) -> tuple[Part | None, Part | None]:
    """What is trained on, and what is held out."""
    share, seed = settings.split.held_out, settings.split.seed
    return (Part(share, seed, False), Part(share, seed, True)) if share else (None, None)


def _lazy_data(log: LazyTransitions, settings: DataSettings) -> TrainData:
    if "weights" in log.columns:
        raise ConfigError(
            "data.lazy: rows on disk are drawn equally often, but the log has weights; "
            "load it (data.lazy: false)"
        )
    far = next((shard.name for shard in log.shards if remote.is_url(shard.name)), None)
    if far is not None:
        raise ConfigError(
            f"data.lazy: mini-batches visit the shards in random order, and {far} is not on this machine; "
            "copy the folder to its disk"
        )
    memory = parse_memory(settings.memory or DEFAULT_MEMORY)
    count = min(_SAMPLE_ROWS, max(1, int(_SAMPLE_SHARE * memory) // log.row_bytes))
    kept, out = _parts(settings)
    rows = sample_units(log, count, settings.split.seed, kept).transitions
    held_out = None if out is None else sample_units(log, count, settings.split.seed, out).transitions
    statistics = statistics_of(log, kept)
    return TrainData(log, rows, held_out, statistics.rows, len(log) - statistics.rows, statistics)
