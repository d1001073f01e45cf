"""Parts of a training run: log, algorithm, buffer and evaluators, checked against each
other.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from koffline.algos import training
from koffline.algos.paths import PathReplayBuffer
from koffline.algos.training import Algorithm, LogEvaluator, own_randomness
from koffline.data import quiet, remote
from koffline.data.disk.block_sampler import BlockSampler
from koffline.data.disk.log import AnyLog, LazyTransitions
from koffline.data.kinds import is_shard_folder
from koffline.data.late_ends import stop_shares
from koffline.data.replay import ColumnarReplayBuffer, LazyReplayBuffer
from koffline.data.sources import open_transitions
from koffline.data.spaces import requested_space
from koffline.data.splitting import split_log, split_shards
from koffline.data.statistics import LogTally, statistics_of
from koffline.data.transitions import Transitions
from koffline.data.units import sample_units
from koffline.envs.make import Copies
from koffline.errors import ConfigError
from koffline.fitting import threads
from koffline.json_types import JsonObject
from koffline.ope.stream_settings import DEFAULT_MEMORY, parse_memory
from koffline.ope.value_functions import counted_rows
from koffline.policies.base import check_spaces
from koffline.store import Record
from koffline.store.files import digest_of
from koffline.store.run_record import start_run, versions
from koffline.train.config import FILES, DataSettings, EnvironmentSettings, TrainConfig

# Shares of the memory limit: the libraries take some hundred megabytes beside them.
_POOL_SHARE = 0.5
_SAMPLE_SHARE = 0.05
_SAMPLE_ROWS = 20_000
_FINGERPRINTS = 1024
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainData:
    """Data of a run for training and evaluation.

    rows, held_out: the two parts of a log in memory; for a log on disk, samples of
    whole episodes from them. statistics: for a log on disk, those of the training part.
    """

    log: AnyLog
    rows: Transitions
    held_out: Transitions | None
    statistics: LogTally | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of a run. record: run.json at the start of the run."""

    algo: Algorithm
    buffer: ColumnarReplayBuffer
    evaluators: dict[str, LogEvaluator | EnvironmentEvaluator]
    record: JsonObject


def open_data(settings: DataSettings) -> TrainData:
    """Open and split the log of a config. Raises DataError and ConfigError."""
    space = requested_space(settings.discrete, settings.continuous)
    if settings.lazy or (settings.lazy is None and is_shard_folder(settings.source)):
        on_disk = open_transitions(settings.source, space, lazy=True)
        is_large = len(on_disk) * on_disk.row_bytes > parse_memory(
            settings.memory or DEFAULT_MEMORY
        )
        if settings.lazy is None and is_large:
            _LOG.warning(
                "the log would take more memory than data.memory: its rows stay on disk"
            )
        if settings.lazy or is_large:
            return _lazy_data(on_disk, settings)
    whole = open_transitions(settings.source, space)
    rows, held_out = split_log(whole, settings.split.held_out, settings.split.seed)
    return TrainData(whole, rows, held_out)


def _lazy_data(log: LazyTransitions, settings: DataSettings) -> TrainData:
    if "weights" in log.columns:
        raise ConfigError(
            "data.lazy: rows are drawn equally often, but the log has weights; set it"
            " to false"
        )
    if any(remote.is_url(shard.name) for shard in log.shards):
        raise ConfigError(
            "data.lazy: shards are visited in random order, these are far; copy them to"
            " a disk"
        )
    memory = parse_memory(settings.memory or DEFAULT_MEMORY)
    count = min(_SAMPLE_ROWS, max(1, int(_SAMPLE_SHARE * memory) // log.row_bytes))
    kept, out = split_shards(log, settings.split.held_out, settings.split.seed)
    rows = sample_units(log, count, settings.split.seed, kept).transitions
    if out is None:
        held_out = None
    else:
        held_out = sample_units(log, count, settings.split.seed, out).transitions
    if stop_shares(rows) is not None:
        _LOG.warning(
            "recording stopped here and there, so that ends are too frequent; see"
            " data.lazy: false"
        )
    return TrainData(log, rows, held_out, statistics_of(log, kept))


@contextlib.contextmanager
def prepared(
    config: TrainConfig, device: str, data: TrainData | None = None
) -> Iterator[Parts]:
    """Make the parts of a run, with threads and random generators set by the config;
    writes nothing.

    data: the config's log, if it is open already. Raises KofflineError for parts that
    do not fit together.
    """
    kind = config.algo.type
    with contextlib.ExitStack() as stack, quiet(), warnings.catch_warnings():
        # Warnings of the libraries behind d3rlpy and Gymnasium;
        # overflows are reported as divergence.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        named = r"(dataclasses_json|gymnasium|torch)\b"
        warnings.filterwarnings("ignore", category=UserWarning, module=named)
        stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        stack.enter_context(threads(config.train.threads))
        stack.enter_context(own_randomness(config.train.seed))
        if data is None:
            data = open_data(config.data)
        algo = training.make_algorithm(
            kind, config.algo.params, device, config.algo.policy
        )
        buffer = _make_buffer(algo, config, data)
        training.build_networks(algo, buffer, kind)
        if training.actions_out_of_reach(algo, buffer):
            _LOG.warning(
                "logged actions leave [-1, 1], where the policy acts; set"
                " algo.params.action_scaler to min_max"
            )
        evaluators = _make_evaluators(config, data)
        for evaluator in evaluators.values():
            if isinstance(evaluator, LogEvaluator):
                evaluator.try_out(algo)
            else:
                stack.callback(evaluator.close)
        yield Parts(algo, buffer, evaluators, _record(config, data, device))


def _make_buffer(
    algo: Algorithm, config: TrainConfig, data: TrainData
) -> ColumnarReplayBuffer:
    """The log as the algorithm samples it: rows, or paths for Trust-PCL.

    Raises DataError for paths of a log without episodes, and ConfigError if the log is
    on disk, which provides single rows only, and the algorithm needs more.
    """
    path_length = getattr(algo.config, "path_length", 1)
    if isinstance(data.log, Transitions):
        generator = np.random.default_rng([config.train.seed, 1])
        if path_length > 1:
            return PathReplayBuffer(data.rows, path_length, generator)
        return ColumnarReplayBuffer(data.rows, generator)
    assert data.statistics is not None
    needed = ""
    if algo.need_returns_to_go:
        needed = "returns to the end of an episode"
    elif path_length > 1:
        needed = "paths (path_length above 1)"
    if needed:
        raise ConfigError(
            f"{config.algo.type} learns from {needed}, this log stays on disk; load it"
            " (data.lazy: false)"
        )
    pool = data.log.block_rows_for(
        int(_POOL_SHARE * parse_memory(config.data.memory or DEFAULT_MEMORY))
    )
    part, _ = split_shards(data.log, config.data.split.held_out, config.data.split.seed)
    sampler = BlockSampler(data.log, config.train.seed, pool_rows=pool, part=part)
    return LazyReplayBuffer(sampler, data.rows, data.statistics)


def _make_evaluators(
    config: TrainConfig, data: TrainData
) -> dict[str, LogEvaluator | EnvironmentEvaluator]:
    """The config's evaluators by name: of the log, or environments."""
    evaluators: dict[str, LogEvaluator | EnvironmentEvaluator] = {}
    for name, settings in config.evaluators.items():
        if isinstance(settings, EnvironmentSettings):
            evaluators[name] = EnvironmentEvaluator(
                settings.env, data.rows, settings.episodes, settings.seed
            )
            continue
        part = data.rows
        if settings.part != "train" and data.held_out is not None:
            part = data.held_out
        options = settings.model_dump(exclude={"type", "part"})
        evaluators[name] = LogEvaluator(settings.type, part, name, **options)
    return evaluators


def _record(config: TrainConfig, data: TrainData, device: str) -> JsonObject:
    """Content of run.json at the start of a training: settings, digests, counts of rows
    and their fingerprints.
    """
    digests = {"data": data.log.sha256}  # digest of the rows, independent of the format
    if config.algo.policy is not None:
        digests["policy"] = digest_of(Path(config.algo.policy))
    rows = len(data.log)
    trained = len(data.rows)
    held_out = len(data.held_out or ())
    if data.statistics is not None:
        trained = data.statistics.rows
        held_out = rows - data.statistics.rows
    counts = {"rows": rows, "train_rows": trained, "held_out_rows": held_out}
    # data.rows of a log on disk are only a sample of the training rows
    is_lazy = isinstance(data.log, LazyTransitions)
    fingerprints = np.sort(counted_rows(data.rows))[:_FINGERPRINTS]
    if is_lazy:
        fingerprints = fingerprints[:0]
    source = {
        "source": config.data.source,
        **counts,
        "lazy": is_lazy,
        "fingerprints": fingerprints.astype("<u8").tobytes().hex(),
    }
    return start_run(
        "train",
        config.files(),
        config=config.resolved(),
        versions=versions(),
        data=source,
        digests=digests,
        seed=config.train.seed,
        device=device,
    )


def identity_of(record: Record) -> JsonObject:
    """Flat mapping that identifies a run: settings, without file paths and loggers, and
    digests.
    """
    settings = _flat(
        {name: part for name, part in record["config"].items() if name != "logger"}, ""
    )
    digests = {
        f"the digest of the {name}": digest
        for name, digest in record.get("digests", {}).items()
    }
    return {
        name: value for name, value in settings.items() if name not in FILES
    } | digests


def _flat(value: object, path: str) -> JsonObject:
    """The leaves of nested mappings, by their dotted paths below ``path``."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    parts = (_flat(part, f"{path}.{name}".lstrip(".")) for name, part in value.items())
    return {name: part for flat in parts for name, part in flat.items()}


class EnvironmentEvaluator:
    """Mean return of greedy episodes, always from the same starts, played in parallel.

    Raises ConfigError if the environment's spaces are not the log's.
    """

    def __init__(
        self, identifier: str, log: Transitions, episodes: int, seed: int
    ) -> None:
        self._copies = Copies(identifier)
        self._seeds = range(seed, seed + episodes)
        self.close = self._copies.close
        check_spaces(
            identifier,
            (self._copies.action_space, self._copies.observation_shape),
            (log.action_space, log.observation_shape),
            words=(
                "it has",
                "name the one that the log is from, or none (evaluators={})",
            ),
            kind=ConfigError,
        )

    def __call__(
        self, algo: Algorithm, dataset: ColumnarReplayBuffer | None = None
    ) -> float:
        """Mean undiscounted return; ``dataset``, which d3rlpy gives, is not used.

        Raises ConfigError if the environment fails.
        """
        space = self._copies.action_space
        returns = np.zeros(len(self._seeds))
        with own_randomness(self._seeds.start):
            observations = self._copies.reset(self._seeds)
            running = np.arange(len(returns))
            while len(running):
                actions = space.clip(np.array(algo.predict(observations)))
                step = self._copies.step(running.tolist(), actions)
                returns[running] += step.rewards
                goes_on = ~(step.terminated | step.truncated)
                running = running[goes_on]
                observations = step.observations[goes_on]
        return float(np.mean(returns))
