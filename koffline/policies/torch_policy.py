"""Policies that are torch modules: a TorchScript file, or a module of the user's.

torch.jit.load runs no Python from the file (d3rlpy's save_policy("policy.pt") writes such files). The file
is still a program in torch's own instruction set, which can for instance write files: load only files you
trust.
"""

from __future__ import annotations

import copyreg
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline.errors import PolicyError
from koffline.policies.outputs import last_line, one_line
from koffline.policies.python_policy import say_it_runs_code


def read_torchscript(path: Path) -> torch.nn.Module:
    """The module of a TorchScript file, on the CPU. Raises PolicyError for a corrupt file."""
    say_it_runs_code(str(path), "is a TorchScript program, which can read and write files")
    try:
        with _no_deprecation():
            return torch.jit.load(str(path), map_location="cpu")
    except Exception as error:
        raise PolicyError(
            f"{path}: the TorchScript file cannot be read ({one_line(error)}); export it again"
        ) from error


@contextmanager
def _no_deprecation() -> Iterator[None]:
    """Deprecated in favour of torch.export, but the files are there and d3rlpy writes no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        yield


def _pack(module: torch.jit.ScriptModule) -> tuple[Callable[..., Any], tuple[bytes]]:
    """How a loaded module travels to other processes: as the content of a file."""
    file = io.BytesIO()
    with _no_deprecation():
        torch.jit.save(module, file)
    return _unpack, (file.getvalue(),)


def _unpack(content: bytes) -> torch.nn.Module:
    with _no_deprecation():
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


copyreg.pickle(torch.jit.RecursiveScriptModule, _pack)


class ModuleFunction:
    """Calls a module without gradients, in evaluation mode, on its own device and in its own float type.

    Columns of whole numbers (int64: discrete actions) stay such.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        sample = next(module.parameters(), None)
        self._module = module
        self._dtype = sample.dtype if sample is not None and sample.is_floating_point() else torch.float32
        self._device = torch.device("cpu") if sample is None else sample.device

    def __call__(self, *columns: np.ndarray) -> Any:
        """What the module gives for columns of rows."""
        # Copies: the log's arrays are read-only, and the module might write into its input.
        types = [torch.int64 if column.dtype == np.int64 else self._dtype for column in columns]
        batch = [
            torch.tensor(column, dtype=kind, device=self._device)
            for column, kind in zip(columns, types, strict=True)
        ]
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                return self._module(*batch)
        except RuntimeError as error:
            first = next((weights for weights in self._module.parameters() if weights.ndim == 2), None)
            if first is None or len(batch) > 1 or batch[0].ndim != 2 or first.shape[1] == batch[0].shape[1]:
                raise
            taken, given = f"(N, {first.shape[1]})", f"(N, {batch[0].shape[1]})"
            raise ValueError(
                f"its first layer takes {taken}, received {given}: {last_line(error)}"
            ) from error
        finally:
            self._module.train(was_training)
