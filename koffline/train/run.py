"""A training run: any d3rlpy algorithm on a log, in epochs that each end with a
checkpoint.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch

from koffline.algos.training import (
    Algorithm,
    RunLogger,
    random_state,
    set_random_state,
)
from koffline.checkpoints import read_checkpoint, write_checkpoint
from koffline.errors import ConfigError, KofflineError
from koffline.progress import Tell, progress_bar
from koffline.store import open_run, write_record
from koffline.store.files import atomic_file
from koffline.store.run_record import now
from koffline.train.config import TrainConfig
from koffline.train.prepare import Parts, identity_of, prepared

CHECKPOINT = "checkpoint.pt"
_HUGE = 1e12  # largest weight: products with larger ones soon overflow


class DivergedError(ConfigError):
    """Raised if the networks or losses of a run are no longer finite."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run. metrics: of the last epoch; seconds: training time of all its
    processes.
    """

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainResult(Progress):
    """Result of a run. out: its folder; model: the last .d3 file."""

    out: Path
    model: Path


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    show_progress: bool = False,
) -> TrainResult:
    """Train as the config says and write a d3rlpy run folder to `out`.

    out: gets params.json, a CSV per metric, model_*.d3, config.yaml (with all
    defaults), run.json (data digest, versions, seed, result) and checkpoint.pt. With
    `resume` a killed run continues after its last complete epoch and gives the same
    numbers as an uninterrupted run; a finished run is only reported, and a missing
    folder is started. The global random generators are left unchanged. Raises
    KofflineError in one line.
    """
    folder = Path(out)
    total = config.train.n_steps
    with (
        prepared(config, device) as parts,
        open_run(folder, parts.record, identity_of, resume) as record,
    ):
        if record.get("diverged"):
            raise DivergedError(record["diverged"])
        fingerprint = json.dumps(identity_of(parts.record), sort_keys=True)
        progress = restore_state(folder, fingerprint, parts)
        _keep_model(config, folder, parts.algo, progress)
        with progress_bar(f"training {config.algo.type}", total, show_progress) as show:
            while progress.steps < total:
                try:
                    progress = _train_epoch(config, folder, parts, progress, show)
                except DivergedError as error:  # the same run would diverge again
                    write_record(folder, {**record, "diverged": str(error)})
                    raise
                save_state(folder, fingerprint, parts, progress)
                _keep_model(config, folder, parts.algo, progress)
        model = folder / f"model_{progress.steps}.d3"
        if not record.get("finished"):
            known: dict[str, float | None] = dict(progress.metrics)
            for key, value in progress.metrics.items():
                if not math.isfinite(value):
                    known[key] = None
            outcome = {
                "steps": progress.steps,
                "seconds": progress.seconds,
                "metrics": known,
            }
            write_record(
                folder, {**record, "finished": now(), **outcome, "model": model.name}
            )
        return TrainResult(**vars(progress), out=folder, model=model)


def _train_epoch(
    config: TrainConfig, folder: Path, parts: Parts, progress: Progress, show: Tell
) -> Progress:
    """Train one epoch by one call of `fit`; d3rlpy's own loop would skip an incomplete
    last epoch.

    folder: gets the metrics. progress: before the epoch; the result is after it. Raises
    DivergedError for values that are not finite.
    """
    steps = min(config.train.n_steps_per_epoch, config.train.n_steps - progress.steps)
    started = time.perf_counter()
    algo = parts.algo
    before = progress.epochs, progress.steps
    networks = ["the networks' values are"]
    try:
        ((_, metrics),) = algo.fit(
            parts.buffer,
            n_steps=steps,
            n_steps_per_epoch=steps,
            experiment_name=folder.resolve().name,
            with_timestamp=False,
            logger_adapter=RunLogger(algo, folder, config.logger.gradients, before),
            show_progress=False,
            # never reached: `fit` sees epoch 1 only; the run saves models
            save_interval=2,
            evaluators=parts.evaluators,
            callback=lambda _, __, step: show(progress.steps + step),
        )
        losses = [
            name
            for name in metrics
            if name.endswith("loss") and name not in parts.evaluators
        ]
        wrong = [
            f"the epoch's mean {name} is"
            for name in losses
            if not math.isfinite(metrics[name])
        ]
        if not all(bool(p.isfinite().all()) for _, p in parameters_of(algo)):
            wrong = networks
    except (KofflineError, ValueError, RuntimeError) as error:
        # of an environment, or torch's about NaN
        is_ours = isinstance(error, KofflineError)
        bounded = all((p.abs() < _HUGE).all() for _, p in parameters_of(algo))
        if bounded and (is_ours or not re.search(r"\b(nan|inf)\b", str(error))):
            raise
        wrong = networks
    if wrong:
        raise DivergedError(
            f"training diverged after step {progress.steps}: {wrong[0]} not finite;"
            " lower the learning rates, clip gradients"
            " (…_optim_factory.params.clip_grad_norm) or scale the rewards"
        )
    numbers = {name: float(value) for name, value in metrics.items()}
    seconds = progress.seconds + time.perf_counter() - started
    return Progress(progress.epochs + 1, progress.steps + steps, seconds, numbers)


def _keep_model(
    config: TrainConfig, folder: Path, algo: Algorithm, progress: Progress
) -> None:
    """Save the model of a checkpointed epoch if it is due and not saved yet."""
    path = folder / f"model_{progress.steps}.d3"
    is_last = progress.steps == config.train.n_steps
    is_due = is_last or progress.epochs % config.train.save_interval == 0
    if progress.epochs and is_due and not path.exists():
        with atomic_file(path, force=True) as temporary:
            algo.save(str(temporary))


def save_state(
    folder: Path, fingerprint: str, parts: Parts, progress: Progress
) -> None:
    """Write the checkpoint; the previous one stays until the new one is complete.

    fingerprint: of settings and digests, which `restore_state` compares.
    """
    algo = parts.algo
    model = io.BytesIO()
    algo.impl.save_model(model)
    state = {
        "fingerprint": fingerprint,
        "progress": json.dumps(astuple(progress)),
        "model": torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8),
        "grad_step": int(algo.grad_step),
        "gradients": {
            name: parameter.grad
            for name, parameter in parameters_of(algo)
            if parameter.grad is not None
        },
        "random": {**random_state(), "buffer": json.dumps(parts.buffer.state_dict())},
        "sizes": {path.name: path.stat().st_size for path in folder.glob("*.csv")},
    }
    write_checkpoint(folder / CHECKPOINT, state)
    model.seek(0)
    # as `restore_state` does: a killed run ends with the same bytes as any other
    algo.impl.load_model(model)


def restore_state(folder: Path, fingerprint: str, parts: Parts) -> Progress:
    """Restore algorithm, draws and generators from the checkpoint, and cut log files
    back to it.

    Raises ConfigError, and changes nothing, if the checkpoint is damaged, belongs to
    another run, or is missing although there are models.
    """
    algo = parts.algo
    path = folder / CHECKPOINT
    try:
        state = read_checkpoint(path, fingerprint)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}: the run in {folder} cannot go on; its"
            " models and metrics stay as they are, train again into another --out"
        ) from None
    if state is None and any(folder.glob("model_*.d3")):
        raise ConfigError(
            f"{path} is gone, and the run cannot go on; train again into another --out"
        )
    if state is None:
        _cut_back(folder, {})
        return Progress()
    _cut_back(folder, state["sizes"])
    try:
        algo.impl.load_model(io.BytesIO(state["model"].numpy().tobytes()))
        gradients = state["gradients"]
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path} is of another version ({type(error).__name__}); train elsewhere"
        ) from None
    algo.set_grad_step(state["grad_step"])
    # some accumulate gradients; optimisers skip None
    for name, parameter in parameters_of(algo):
        if name in gradients:
            parameter.grad = gradients[name].to(parameter)
        else:
            parameter.grad = None
    set_random_state(state["random"])
    parts.buffer.load_state_dict(json.loads(state["random"]["buffer"]))
    return Progress(*json.loads(state["progress"]))


def parameters_of(algo: Algorithm) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and weights of all of an algorithm's parameters."""
    modules = torch.nn.ModuleDict(algo.impl.modules.get_torch_modules())
    return list(modules.named_parameters(remove_duplicate=False))


def _cut_back(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut log files back to their ``sizes`` at a checkpoint.

    Raises ConfigError for a shorter file.
    """
    lengths = {path: path.stat().st_size for path in folder.glob("*.csv")}
    for path, size in lengths.items():
        if size < sizes.get(path.name, 0):
            raise ConfigError(
                f"{path} is shorter than its checkpoint says: it was edited; train"
                " elsewhere"
            )
    for path in lengths:
        if path.name in sizes:
            os.truncate(path, sizes[path.name])
        else:
            path.unlink()
