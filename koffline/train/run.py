"""A training run: any d3rlpy algorithm over a log, epoch by epoch, each ending in a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.disk.log import LazyTransitions
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, KofflineError
from koffline.fitting import threads
from koffline.progress import progress_bar
from koffline.store.files import atomic_file
from koffline.store.run_folders import open_run, read_record, warn_of_versions, write_record
from koffline.store.run_record import describe_call, now, versions
from koffline.train.checkpoint import Progress, restore_state, save_state
from koffline.train.config import EnvironmentSettings, TrainConfig

if TYPE_CHECKING:
    from koffline.train.data import TrainData

_PACKAGES = ("python", "koffline", "d3rlpy", "torch", "numpy", "gymnasium")
_HUGE = 1e12  # of a weight; what it multiplies soon overflows
_LOG = logging.getLogger(__name__)


class DivergedError(ConfigError):
    """A run whose networks stopped being finite."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run. steps: gradient steps; metrics: of the last epoch; model: the last .d3 file."""

    out: Path
    steps: int
    metrics: dict[str, float]
    model: Path
    seconds: float


@dataclass(frozen=True, eq=False)
class Parts:
    """Everything a run is made of, checked against each other; record: run.json as the run begins."""

    algo: Any
    buffer: Any
    draws: Any
    evaluators: dict[str, Any]
    record: dict[str, Any]


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    show_progress: bool = False,
) -> TrainResult:
    """Train what the config says and leave a d3rlpy run directory in `out`.

    out: gets params.json, a CSV per metric, model_*.d3, config.yaml (every default filled in), run.json (data
    digest, versions, seed, result) and checkpoint.pt. With `resume` a killed run goes on where its last epoch
    ended and gives the same numbers as one that was never killed; a finished one is only reported, a missing
    folder begun. Global random generators are left as they were. Raises KofflineError in one line.
    """
    folder = Path(out)
    with prepared(config, device) as parts, open_run(folder, parts.record, identity_of, resume):
        return _run(config, folder, parts, show_progress)


@contextlib.contextmanager
def prepared(config: TrainConfig, device: str, data: TrainData | None = None) -> Iterator[Parts]:
    """Everything a run is made of, with threads and random generators as the config says; writes nothing.

    data: the log of the config, where it has been opened already. Raises KofflineError for what does not fit.
    """
    from koffline.algos.evaluators import own_randomness
    from koffline.algos.loggers import quiet
    from koffline.train.data import open_data

    with quiet(), threads(config.train.threads), own_randomness(config.train.seed), _d3rlpy_warnings():
        parts = _prepare(config, device, open_data(config.data) if data is None else data)
        try:
            yield parts
        finally:
            for part in (parts.buffer, *parts.evaluators.values()):
                getattr(part, "close", lambda: None)()


def _prepare(config: TrainConfig, device: str, data: TrainData) -> Parts:
    from koffline.algos import from_config
    from koffline.algos.loggers import make_logger
    from koffline.train.data import make_buffer

    rows = data.rows
    kind = config.algo.type
    algo = from_config.make_algorithm(kind, config.algo.params, device, config.algo.policy)
    from_config.check_actions(algo, rows, kind)
    buffer, draws = make_buffer(algo, data, config.data, config.train.seed, kind)
    from_config.build_networks(algo, buffer, kind)
    if from_config.actions_out_of_reach(algo, buffer):
        _LOG.warning(
            "logged actions leave [-1, 1], where the policy acts; set algo.params.action_scaler to min_max"
        )
    evaluators = _make_evaluators(config, rows, data.held_out)
    for evaluator in evaluators.values():
        evaluator.try_out(algo)
    make_logger(Path(), **config.logger.model_dump())  # raises ConfigError where its package is missing
    return Parts(algo, buffer, draws, evaluators, _record(config, data, device))


def _make_evaluators(config: TrainConfig, rows: Transitions, held_out: Transitions | None) -> dict[str, Any]:
    from koffline.algos.evaluators import EnvironmentEvaluator, LogEvaluator

    made: dict[str, Any] = {}
    for name, settings in config.evaluators.items():
        if isinstance(settings, EnvironmentSettings):
            made[name] = EnvironmentEvaluator(
                settings.env, rows, settings.episodes, settings.seed, settings.epsilon
            )
            continue
        part = rows if settings.part == "train" or held_out is None else held_out
        options = settings.model_dump(exclude={"type", "part"})
        made[name] = LogEvaluator(settings.type, part, name, **options)
    return made


def _record(config: TrainConfig, data: TrainData, device: str) -> dict[str, Any]:
    digests = {"data": data.log.sha256}  # of the rows, whatever their format
    if config.algo.policy is not None:
        digests["policy"] = hashlib.sha256(Path(config.algo.policy).read_bytes()).hexdigest()
    return {
        "format": 1,
        "config": config.resolved(),
        "data": {
            "source": config.data.source,
            "rows": len(data.log),
            "train_rows": data.train_rows,
            "held_out_rows": data.held_out_rows,
            "lazy": isinstance(data.log, LazyTransitions),
        },
        "digests": digests,
        "seed": config.train.seed,
        "device": device,
        "versions": {name: version for name, version in versions().items() if name in _PACKAGES},
        "call": describe_call("train", config.files()),
        "started": now(),
        "finished": None,
    }


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the same one, flat: all settings but where files lie and who is told, and digests."""
    config = record["config"]
    kept = {name: section for name, section in config.items() if name != "logger"}
    kept["data"] = {name: value for name, value in config["data"].items() if name != "source"}
    kept["algo"] = {name: value for name, value in config["algo"].items() if name != "policy"}
    digests = {f"the digest of the {name}": digest for name, digest in record.get("digests", {}).items()}
    return {**_flat(kept, ""), **digests}


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    parts = (_flat(part, f"{path}.{name}".lstrip(".")) for name, part in value.items())
    return {name: part for flat in parts for name, part in flat.items()}


def _run(config: TrainConfig, folder: Path, parts: Parts, show_progress: bool) -> TrainResult:
    from koffline.algos.loggers import make_logger

    fingerprint = json.dumps(identity_of(parts.record), sort_keys=True)
    algo, total = parts.algo, config.train.n_steps
    record = read_record(folder) or {}
    if record.get("diverged"):
        raise DivergedError(record["diverged"])
    warn_of_versions(folder, parts.record)
    first_epoch = 0 if record.get("finished") else min(config.train.n_steps_per_epoch, total)
    progress = restore_state(folder, fingerprint, algo, parts.draws, first_epoch)
    logger = make_logger(folder, **config.logger.model_dump())
    with progress_bar(f"training {config.algo.type}", total, show_progress) as show:
        while progress.steps < total:
            try:
                progress = _train_epoch(config, folder, parts, logger, progress, show)
            except DivergedError as error:  # the same run would diverge again
                write_record(folder, {**record, "diverged": str(error)})
                raise
            if progress.epochs % config.train.save_interval == 0 or progress.steps == total:
                _save_model(algo, folder / f"model_{progress.steps}.d3")
            save_state(folder, fingerprint, progress, algo, parts.draws)
    logger.finish()
    metrics, model = progress.metrics or {}, folder / f"model_{progress.steps}.d3"
    if not model.exists():  # removed by hand after the run
        _save_model(algo, model)
    if not record.get("finished"):
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        outcome = {
            "steps": progress.steps,
            "seconds": progress.seconds,
            "metrics": known,
            "model": model.name,
        }
        write_record(folder, {**record, "finished": now(), **outcome})
    return TrainResult(folder, progress.steps, metrics, model, progress.seconds)


def _train_epoch(
    config: TrainConfig,
    folder: Path,
    parts: Parts,
    logger: Any,
    progress: Progress,
    show: Callable[[int], None],
) -> Progress:
    """One `fit`; d3rlpy's own loop would leave out the steps of an epoch that is not full."""
    steps = min(config.train.n_steps_per_epoch, config.train.n_steps - progress.steps)
    logger.start_epoch(progress.epochs, progress.steps)
    started = time.perf_counter()
    with _divergence(parts.algo, progress.steps):
        ((_, metrics),) = parts.algo.fit(
            parts.buffer,
            n_steps=steps,
            n_steps_per_epoch=steps,
            experiment_name=folder.resolve().name,
            with_timestamp=False,
            logger_adapter=logger,
            show_progress=False,
            save_interval=2,  # never: epoch 1 is the only one that `fit` sees, models are saved by the run
            evaluators=parts.evaluators,
            callback=lambda _, __, step: show(progress.steps + step),
        )
    numbers = {name: float(value) for name, value in metrics.items()}
    bad = [name for name in numbers if not math.isfinite(numbers[name]) and name not in parts.evaluators]
    if bad:
        _LOG.warning("%s is not finite after step %d", ", ".join(bad), progress.steps + steps)
        if not all(bool(p.isfinite().all()) for p in _parameters(parts.algo)):
            raise _diverged(progress.steps + steps)
    seconds = progress.seconds + time.perf_counter() - started
    return Progress(progress.epochs + 1, progress.steps + steps, seconds, numbers)


def _parameters(algo: Any) -> list[Any]:
    return [p for module in algo.impl.modules.get_torch_modules().values() for p in module.parameters()]


@contextlib.contextmanager
def _divergence(algo: Any, steps: int) -> Iterator[None]:
    """torch's errors about values that are no numbers in one line; others, which are faults, as they are."""
    try:
        yield
    except KofflineError:
        raise
    except (ValueError, RuntimeError) as error:
        bounded = all((p.abs() < _HUGE).all() for p in _parameters(algo))
        if bounded and not re.search(r"\b(nan|inf)\b", str(error)):
            raise
        raise _diverged(steps) from error


def _diverged(steps: int) -> DivergedError:
    return DivergedError(
        f"training diverged after step {steps}: the networks' values are not finite; lower the "
        "learning rates, clip gradients (…_optim_factory.params.clip_grad_norm) or scale the rewards"
    )


def _save_model(algo: Any, path: Path) -> None:
    with atomic_file(path, force=True) as temporary:
        algo.save(str(temporary))


@contextlib.contextmanager
def _d3rlpy_warnings() -> Iterator[None]:
    """Remarks of d3rlpy's and Gymnasium's own dependencies are not the user's; numbers that overflow show."""
    with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings(
            "ignore", category=UserWarning, module=r"(dataclasses_json|gymnasium|torch)\b"
        )
        yield
