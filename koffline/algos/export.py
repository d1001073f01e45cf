"""Greedy policies as files that need neither d3rlpy nor koffline: TorchScript (.pt) and ONNX (.onnx).

d3rlpy 2.8.1's own export fails for ONNX with torch 2.13, exports a batch of exactly one row, and afterwards
leaves all networks with gradients on, target networks too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from koffline.algos.loggers import quiet
from koffline.errors import ConfigError, PolicyError
from koffline.store.files import atomic_file

_OPSET = 17
_EXAMPLE_ROWS = 2  # with one row, sizes that are the batch's are easily taken for constants


def export_policy(algo: Any, path: str | Path) -> None:
    """Write what ``algo.predict`` does, scalers included, for any batch size; the file appears whole.

    Observations go in as floats in the units of the log, a tensor (N, …), or one per part; actions come out,
    (N,) int64 or (N, k) float32. Algorithms whose predict draws candidates (BCQ, BEAR, CRR) draw in the file
    too. The algorithm is left as it was, and an existing file is replaced.
    Raises PolicyError for an algorithm without networks or with another kind of policy, ConfigError for
    another ending than .pt and .onnx and for a missing `onnx` package.
    """
    path = Path(path)
    if path.suffix not in (".pt", ".onnx"):
        raise ConfigError(f"{path}: the ending says the format; give .pt (TorchScript) or .onnx")
    check_acts(algo, str(path))
    if path.suffix == ".onnx" and importlib.util.find_spec("onnx") is None:
        raise ConfigError(f"{path}: writing ONNX needs the package onnx; pip install 'koffline[onnx]'")
    with atomic_file(path, force=True) as temporary, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on tracing, and on both formats' age
        with torch.random.fork_rng(devices=[]), _batch_size_in_the_trace():
            _write(_copy_on_cpu(algo), temporary, is_onnx=path.suffix == ".onnx")


def check_acts(algo: Any, name: str) -> None:
    """Raise PolicyError for an algorithm without networks, without ranges to scale by, or of another kind."""
    kind = type(algo).__name__
    if not hasattr(algo, "predict") or not hasattr(algo, "sample_action"):
        raise PolicyError(
            f"{name}: a {kind} does not act on one observation; give a Q-learning algorithm of d3rlpy"
        )
    if algo.impl is None:
        raise PolicyError(f"{name}: the {kind} has no networks yet; fit it or load its weights first")
    for scaler in (algo.observation_scaler, algo.action_scaler):
        if scaler is not None and not scaler.built:
            raise PolicyError(f"{name}: its {type(scaler).__name__} holds no ranges; fit the model first")


def _copy_on_cpu(algo: Any) -> Any:
    """So that the file runs anywhere, and the algorithm keeps its modes; a trace holds no gradients."""
    copy = dataclasses.replace(algo.config, compile_graph=False).create("cpu")
    copy.create_impl(algo.observation_shape, algo.action_size)
    sources = algo.impl.modules.create_checkpointer("cpu").modules
    for name, module in copy.impl.modules.get_torch_modules().items():
        module.load_state_dict(sources[name].state_dict())
        module.requires_grad_(False)
    return copy


def _write(algo: Any, path: Path, is_onnx: bool) -> None:
    shape = algo.observation_shape
    shapes = tuple(shape) if isinstance(shape[0], (tuple, list)) else (shape,)
    examples = tuple(torch.rand(_EXAMPLE_ROWS, *sides) for sides in shapes)

    def act(*observations: torch.Tensor) -> torch.Tensor:
        seen: Any = [observation.float() for observation in observations]
        seen = seen[0] if len(seen) == 1 else seen
        if algo.observation_scaler is not None:
            seen = algo.observation_scaler.transform(seen)
        action = algo.impl.predict_best_action(seen)
        return action if algo.action_scaler is None else algo.action_scaler.reverse_transform(action)

    script = torch.jit.trace(act, examples, check_trace=False)
    if not is_onnx:
        script.save(str(path))
        return
    names = [f"input_{i}" for i in range(len(examples))]
    torch.onnx.export(
        script,
        examples,
        str(path),
        input_names=names,
        output_names=["output_0"],
        dynamic_axes={name: {0: "batch"} for name in (*names, "output_0")},
        opset_version=_OPSET,
        dynamo=False,
    )


@contextlib.contextmanager
def _batch_size_in_the_trace() -> Iterator[None]:
    """Implicit quantile networks ask d3rlpy's get_batch_size, whose int() would be a constant of the file."""
    from d3rlpy.models.torch.q_functions import iqn_q_function

    replaced: Any = iqn_q_function
    original = replaced.get_batch_size
    replaced.get_batch_size = lambda x: (x if hasattr(x, "shape") else x[0]).shape[0]
    try:
        yield
    finally:
        replaced.get_batch_size = original
