"""d3rlpy's logging: loggers of a run trained epoch by epoch (files, TensorBoard, W&B), and silence."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from d3rlpy import logging as d3rlpy_logging
from d3rlpy.logging.file_adapter import default_json_encoder

from koffline.errors import ConfigError
from koffline.store.files import write_text


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """d3rlpy without its log lines, which go to stdout; only critical messages inside. It may be nested."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


class FileLogger(d3rlpy_logging.FileAdapter):
    """d3rlpy's params.json and one CSV per metric, in a folder that may be continued."""

    def __init__(self, algo: Any, folder: Path, gradients: bool) -> None:
        super().__init__(algo, str(folder))
        self._gradients = gradients

    def write_params(self, params: dict[str, Any]) -> None:
        """params.json, whole or not at all."""
        text = json.dumps(params, default=default_json_encoder, indent=2)
        write_text(Path(self.logdir, "params.json"), text)

    def watch_model(self, epoch: int, step: int) -> None:
        """Extent of every gradient; files that are there already have a header."""
        if self._gradients:
            self._is_model_watched = any(Path(self.logdir).glob("*_grad.csv"))
            super().watch_model(epoch, step)


class RunLogger(d3rlpy_logging.CombineAdapter, d3rlpy_logging.LoggerAdapterFactory):
    """One for a whole run that is trained by one `fit` per epoch: counts on, and stays open in between."""

    def __init__(self, folder: Path, gradients: bool, others: Sequence[Any]) -> None:
        self._adapters: Sequence[Any] = []
        self._folder, self._gradients, self._others = folder, gradients, others
        self._before, self._has_params = (0, 0), False

    def create(self, algo: Any, experiment_name: str, n_steps_per_epoch: int) -> RunLogger:
        """Itself; the loggers behind it are made the first time."""
        if not self._adapters:
            made = [other.create(algo, experiment_name, n_steps_per_epoch) for other in self._others]
            self._adapters = [FileLogger(algo, self._folder, self._gradients), *made]
        return self

    def start_epoch(self, epochs: int, steps: int) -> None:
        """How many epochs and steps lie before the one that begins."""
        self._before = (epochs, steps)

    def write_params(self, params: dict[str, Any]) -> None:
        """Once in a run."""
        if not self._has_params:
            super().write_params(params)
        self._has_params = True

    def before_write_metric(self, epoch: int, step: int) -> None:
        """To all."""
        super().before_write_metric(*self._counted(epoch, step))

    def write_metric(self, epoch: int, step: int, name: str, value: float) -> None:
        """To all."""
        super().write_metric(*self._counted(epoch, step), name, float(value))

    def after_write_metric(self, epoch: int, step: int) -> None:
        """To all."""
        super().after_write_metric(*self._counted(epoch, step))

    def watch_model(self, epoch: int, step: int) -> None:
        """To all."""
        super().watch_model(*self._counted(epoch, step))

    def close(self) -> None:
        """Nothing: an epoch ends, the run goes on."""

    def finish(self) -> None:
        """Close what TensorBoard and W&B hold open."""
        super().close()

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
    wanted = {"tensorboard": "tensorboardX"} if tensorboard else {}
    wanted |= {"wandb": "wandb"} if wandb else {}
    for name, package in wanted.items():
        if importlib.util.find_spec(package) is None:
            needs = f"logger.{name} needs the package {package}"
            raise ConfigError(f"{needs}; install it with pip install 'koffline[{name}]'")
    others: list[Any] = []
    if tensorboard:
        others.append(d3rlpy_logging.TensorboardAdapterFactory(root_dir=str(folder / "tensorboard")))
    if wandb:
        others.append(d3rlpy_logging.WanDBAdapterFactory(project=wandb_project))
    return RunLogger(folder, gradients, others)
