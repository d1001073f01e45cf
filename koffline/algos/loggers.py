"""d3rlpy's logging: loggers of a run trained epoch by epoch (files, TensorBoard, W&B), and silence."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from d3rlpy.logging import (
    LoggerAdapter,
    LoggerAdapterFactory,
    TensorboardAdapterFactory,
    WanDBAdapterFactory,
)
from d3rlpy.logging.file_adapter import default_json_encoder

from koffline.errors import ConfigError
from koffline.store.files import atomic_file

_EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_LOCK = threading.Lock()
_DEPTH = 0
_BEFORE: dict[str, Any] = {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """d3rlpy without its log lines, which go to stdout; only critical messages inside.

    It may be nested, and entered from several threads at once: the configuration found by the first to come
    in is what the last one to leave puts back.
    """
    global _DEPTH, _BEFORE
    with _LOCK:
        if _DEPTH == 0:
            _BEFORE = structlog.get_config()
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        _DEPTH += 1
    try:
        yield
    finally:
        with _LOCK:
            _DEPTH -= 1
            if _DEPTH == 0:
                structlog.configure(**_BEFORE)


class FileLogger(LoggerAdapter):
    """params.json and one CSV per metric, as d3rlpy's, but a folder may be continued."""

    def __init__(self, folder: Path, gradients: bool, algo: Any) -> None:
        self._folder = folder
        self._gradients = gradients
        self._algo = algo

    def write_params(self, params: dict[str, Any]) -> None:
        """params.json, whole or not at all."""
        text = json.dumps(params, default=default_json_encoder, indent=2)
        with atomic_file(self._folder / "params.json", force=True) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """One line "epoch,step,value"."""
        with (self._folder / f"{name}.csv").open("a", encoding="utf-8") as file:
            file.write(f"{epoch},{step},{float(value)}\n")

    def watch_model(self, epoch: int, step: int) -> None:
        """Extent of every gradient, in files with a header."""
        if not self._gradients:
            return
        for name, gradient in self._algo.impl.modules.get_gradients():
            numbers = (gradient.min(), gradient.max(), gradient.mean(), gradient.std())
            path = self._folder / f"{name}_grad.csv"
            header = "" if path.exists() else "epoch,step,min,max,mean,std\n"
            with path.open("a", encoding="utf-8") as file:
                file.write(header + ",".join(map(str, (epoch, step, *numbers))) + "\n")


class RunLogger(LoggerAdapter, LoggerAdapterFactory):
    """One for a whole run that is trained by one `fit` per epoch: counts on, and stays open in between."""

    def __init__(self, folder: Path, gradients: bool, others: Sequence[Any] = ()) -> None:
        self._folder = folder
        self._gradients = gradients
        self._others = others
        self._loggers: list[Any] = []
        self._before = (0, 0)
        self._has_params = False

    def create(self, algo: Any, experiment_name: str, n_steps_per_epoch: int) -> RunLogger:
        """Itself; the loggers behind it are made the first time."""
        if not self._loggers:
            made = [other.create(algo, experiment_name, n_steps_per_epoch) for other in self._others]
            self._loggers = [FileLogger(self._folder, self._gradients, algo), *made]
        return self

    def start_epoch(self, epochs: int, steps: int) -> None:
        """How many epochs and steps lie before the one that begins."""
        self._before = (epochs, steps)

    def write_params(self, params: dict[str, Any]) -> None:
        """Once in a run."""
        if not self._has_params:
            for logger in self._loggers:
                logger.write_params(params)
        self._has_params = True

    def before_write_metric(self, epoch: int, step: int) -> None:
        """To all."""
        for logger in self._loggers:
            logger.before_write_metric(*self._counted(epoch, step))

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """To all."""
        for logger in self._loggers:
            logger.write_metric(*self._counted(epoch, step), name, value)

    def after_write_metric(self, epoch: int, step: int) -> None:
        """To all."""
        for logger in self._loggers:
            logger.after_write_metric(*self._counted(epoch, step))

    def watch_model(self, epoch: int, step: int) -> None:
        """To all."""
        for logger in self._loggers:
            logger.watch_model(*self._counted(epoch, step))

    def close(self) -> None:
        """Nothing: an epoch ends, the run goes on."""

    def finish(self) -> None:
        """Close what TensorBoard and W&B hold open."""
        for logger in self._loggers:
            logger.close()

    def _counted(self, epoch: int, step: int) -> tuple[int, int]:
        return self._before[0] + epoch, self._before[1] + step


def make_logger(
    folder: Path,
    gradients: bool = True,
    tensorboard: bool = False,
    wandb: bool = False,
    wandb_project: str | None = None,
) -> RunLogger:
    """The loggers asked for. Raises ConfigError where an extra is missing."""
    others: list[Any] = []
    if tensorboard:
        _check_extra("tensorboard")
        others.append(TensorboardAdapterFactory(root_dir=str(folder / "tensorboard")))
    if wandb:
        _check_extra("wandb")
        others.append(WanDBAdapterFactory(project=wandb_project))
    return RunLogger(folder, gradients, others)


def _check_extra(name: str) -> None:
    if importlib.util.find_spec(_EXTRAS[name]) is None:
        raise ConfigError(
            f"logger.{name} needs the package {_EXTRAS[name]}; install it with pip install 'koffline[{name}]'"
        )
