"""What a run needs to go on as if it had never stopped: weights, optimisers, counters, generators."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from koffline.checkpoints import read_checkpoint, write_checkpoint
from koffline.errors import ConfigError

NAME = "checkpoint.pt"


class Draws(Protocol):
    """What mini-batches are drawn by: its state is plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Where the draws are."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class GeneratorDraws:
    """Draws from a log in memory depend on a generator alone."""

    generator: np.random.Generator

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return dict(self.generator.bit_generator.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        self.generator.bit_generator.state = state


@dataclass(frozen=True)
class Progress:
    """How far a run has come. metrics: of the last epoch; seconds: of training, over all its processes."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] | None = None


def save_state(folder: Path, fingerprint: str, progress: Progress, algo: Any, draws: Draws) -> None:
    """Write the checkpoint; the one before stays until the new one is whole."""
    model = io.BytesIO()
    algo.impl.save_model(model)
    state = {
        "fingerprint": fingerprint,
        "progress": json.dumps([progress.epochs, progress.steps, progress.seconds, progress.metrics]),
        "model": torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8),
        "grad_step": int(algo.grad_step),
        "with_gradient": [name for name, parameter in _parameters(algo) if parameter.grad is not None],
        "random": _random_state(draws),
        "sizes": {path.name: path.stat().st_size for path in folder.glob("*.csv")},
    }
    write_checkpoint(folder / NAME, state)


def restore_state(folder: Path, fingerprint: str, algo: Any, draws: Draws, first_epoch: int) -> Progress:
    """Put the checkpoint's state into `algo` (with networks), draws and generators, and cut files back to it.

    Without a checkpoint nothing but files of an unfinished first epoch, of `first_epoch` steps, is removed.
    Raises ConfigError, with everything left as it is, for a checkpoint that is damaged, of another run, or
    gone while later models are there.
    """
    state = _read(folder, fingerprint)
    if state is None:
        later = [path.name for path in folder.glob("model_*.d3") if _steps_of(path) > first_epoch]
        if later:
            raise ConfigError(
                f"{folder / NAME} is gone, and with it the way to go on from {later[-1]}; nothing was "
                "changed: train again into another --out"
            )
    progress = Progress() if state is None else Progress(*json.loads(state["progress"]))
    _cut_back(folder, {} if state is None else state["sizes"], progress.steps)
    if state is None:
        return progress
    try:
        algo.impl.load_model(io.BytesIO(state["model"].numpy().tobytes()))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{folder / NAME} does not fit the algorithm ({type(error).__name__}); it was written by another "
            "version: start again in another folder"
        ) from None
    _share_names(algo)
    algo.set_grad_step(state["grad_step"])
    with_gradient = set(state["with_gradient"])
    for name, parameter in _parameters(algo):
        # optimisers step parameters with a gradient of zero, and skip those without one
        parameter.grad = torch.zeros_like(parameter) if name in with_gradient else None
    _set_random_state(state["random"], draws)
    return progress


def _share_names(algo: Any) -> None:
    """Let optimisers name their parts by the one string of each name, as they do before any checkpoint.

    pickle writes a string that it has met by reference: equal models would otherwise differ in their bytes.
    """
    for part in vars(algo.impl.modules).values():
        optimiser = getattr(part, "optim", None)
        if isinstance(optimiser, torch.optim.Optimizer):
            for parameter, held in optimiser.state.items():
                optimiser.state[parameter] = {sys.intern(name): value for name, value in held.items()}
            for group in optimiser.param_groups:
                named = {sys.intern(name): value for name, value in group.items()}
                group.clear()
                group.update(named)


def _read(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    """The checkpoint, or None; one that cannot be used ends in a line that deletes nothing."""
    try:
        return read_checkpoint(folder / NAME, fingerprint)
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(
            f"{reason}: the run in {folder} cannot go on; its models and metrics stay as they are, train "
            "again into another --out"
        ) from None


def _steps_of(model: Path) -> int:
    """Steps in the name of model_*.d3, 0 where there are none."""
    number = model.stem.removeprefix("model_")
    return int(number) if number.isdigit() else 0


def _parameters(algo: Any) -> list[tuple[str, torch.nn.Parameter]]:
    modules = algo.impl.modules.get_torch_modules()
    return [
        (f"{key}.{name}", parameter)
        for key, module in modules.items()
        for name, parameter in module.named_parameters()
    ]


def _random_state(draws: Draws) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (d3rlpy draws from it)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), *rest]),
        "python": json.dumps(random.getstate()),
        "buffer": json.dumps(draws.state_dict()),
    }


def _set_random_state(state: dict[str, Any], draws: Draws) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    draws.load_state_dict(json.loads(state["buffer"]))


def _cut_back(folder: Path, sizes: dict[str, int], steps: int) -> None:
    for path in folder.glob("*.csv"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size < sizes[path.name]:
            raise ConfigError(
                f"{path} is shorter than its checkpoint says: it was edited; start again elsewhere"
            )
        elif path.stat().st_size > sizes[path.name]:
            with path.open("r+b") as file:
                file.truncate(sizes[path.name])
    for path in folder.glob("model_*.d3"):
        if _steps_of(path) > steps:
            path.unlink()
    for pattern in ("*.part", ".*.tmp"):  # half-written files of a killed process
        for path in folder.glob(pattern):
            path.unlink()
