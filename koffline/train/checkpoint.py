"""What a run needs to go on as if it had never stopped: weights, optimisers, counters, generators."""

from __future__ import annotations

import io
import json
import random
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline.checkpoints import cut_back, file_sizes, read_checkpoint, write_checkpoint
from koffline.errors import ConfigError
from koffline.train.prepare import Parts

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Progress:
    """How far a run has come. metrics: of the last epoch; seconds: of training, over all its processes."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] | None = None


def save_state(folder: Path, fingerprint: str, parts: Parts, progress: Progress) -> None:
    """Write the checkpoint; the one before stays until the new one is whole."""
    algo, model = parts.algo, io.BytesIO()
    algo.impl.save_model(model)
    state = {
        "fingerprint": fingerprint,
        "progress": json.dumps(astuple(progress)),
        "model": torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8),
        "grad_step": int(algo.grad_step),
        "with_gradient": [name for name, parameter in parameters_of(algo) if parameter.grad is not None],
        "random": _random_state(parts.draws),
        "sizes": file_sizes(folder, folder.glob("*.csv")),
    }
    write_checkpoint(folder / CHECKPOINT, state)


def restore_state(folder: Path, fingerprint: str, parts: Parts, first_epoch: int) -> Progress:
    """Put the checkpoint's state into algorithm, draws and generators, and cut files back to it.

    Without a checkpoint nothing but files of an unfinished first epoch, of `first_epoch` steps, is removed.
    Raises ConfigError, with everything left as it is, for a checkpoint that is damaged, of another run, or
    gone while later models are there.
    """
    algo, path = parts.algo, folder / CHECKPOINT
    try:
        state = read_checkpoint(path, fingerprint)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}: the run in {folder} cannot go on; its models and metrics stay "
            "as they are, train again into another --out"
        ) from None
    models = {model: _steps_of(model) for model in folder.glob("model_*.d3")}
    later = [model.name for model, steps in models.items() if state is None and steps > first_epoch]
    if later:
        raise ConfigError(
            f"{path} is gone, and with it the way to go on from {later[-1]}; nothing was "
            "changed: train again into another --out"
        )
    progress = Progress() if state is None else Progress(*json.loads(state["progress"]))
    cut_back(folder, list(folder.glob("*.csv")), {} if state is None else state["sizes"])
    half_written = (path for pattern in ("*.part", ".*.tmp") for path in folder.glob(pattern))
    for left in (*half_written, *(model for model, steps in models.items() if steps > progress.steps)):
        left.unlink()
    if state is None:
        return progress
    try:
        algo.impl.load_model(io.BytesIO(state["model"].numpy().tobytes()))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path} does not fit the algorithm ({type(error).__name__}); it was written by another "
            "version: start again in another folder"
        ) from None
    _share_names(algo)
    algo.set_grad_step(state["grad_step"])
    with_gradient = set(state["with_gradient"])
    for name, parameter in parameters_of(algo):
        # optimisers step parameters with a gradient of zero, and skip those without one
        parameter.grad = torch.zeros_like(parameter) if name in with_gradient else None
    _set_random_state(state["random"], parts.draws)
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


def _steps_of(model: Path) -> int:
    """Steps in the name of model_*.d3, 0 where there are none."""
    number = model.stem.removeprefix("model_")
    return int(number) if number.isdigit() else 0


def parameters_of(algo: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """All of an algorithm's weights and their names."""
    modules = algo.impl.modules.get_torch_modules()
    return [
        (f"{key}.{name}", parameter)
        for key, module in modules.items()
        for name, parameter in module.named_parameters()
    ]


def _random_state(draws: Any) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (d3rlpy draws from it)
    own = draws.bit_generator.state if isinstance(draws, np.random.Generator) else draws.state_dict()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), *rest]),
        "python": json.dumps(random.getstate()),
        "buffer": json.dumps(own),
    }


def _set_random_state(state: dict[str, Any], draws: Any) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    if isinstance(draws, np.random.Generator):
        draws.bit_generator.state = json.loads(state["buffer"])
    else:
        draws.load_state_dict(json.loads(state["buffer"]))
