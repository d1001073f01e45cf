"""A training run: any d3rlpy algorithm over a log, epoch by epoch, each ending in a checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.algos.loggers import make_logger
from koffline.errors import ConfigError, KofflineError
from koffline.progress import progress_bar
from koffline.store.files import atomic_file
from koffline.store.run_folders import open_run, read_record, warn_of_versions, write_record
from koffline.store.run_record import now
from koffline.train.checkpoint import Progress, parameters_of, restore_state, save_state
from koffline.train.config import TrainConfig
from koffline.train.prepare import Parts, identity_of, prepared

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


def _run(config: TrainConfig, folder: Path, parts: Parts, show_progress: bool) -> TrainResult:
    fingerprint = json.dumps(identity_of(parts.record), sort_keys=True)
    algo, total = parts.algo, config.train.n_steps
    record = read_record(folder) or {}
    if record.get("diverged"):
        raise DivergedError(record["diverged"])
    warn_of_versions(folder, parts.record)
    first_epoch = 0 if record.get("finished") else min(config.train.n_steps_per_epoch, total)
    progress = restore_state(folder, fingerprint, parts, first_epoch)
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
            save_state(folder, fingerprint, parts, progress)
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
        if not all(bool(p.isfinite().all()) for _, p in parameters_of(parts.algo)):
            raise _diverged(progress.steps + steps)
    seconds = progress.seconds + time.perf_counter() - started
    return Progress(progress.epochs + 1, progress.steps + steps, seconds, numbers)


@contextlib.contextmanager
def _divergence(algo: Any, steps: int) -> Iterator[None]:
    """torch's errors about values that are no numbers in one line; others, which are faults, as they are."""
    try:
        yield
    except KofflineError:
        raise
    except (ValueError, RuntimeError) as error:
        bounded = all((p.abs() < _HUGE).all() for _, p in parameters_of(algo))
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
