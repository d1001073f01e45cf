"""Policies that are torch modules: a TorchScript file, or a module of the user's.

torch.jit.load runs no Python from the file (d3rlpy's save_policy("policy.pt") writes such files). The file
is still a program in torch's own instruction set, which can for instance write files: load only files you
trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline.errors import PolicyError
from koffline.policies.outputs import one_line


def load_torchscript(path: Path) -> Callable[[np.ndarray], Any]:
    """A function from observations to the module's output. Raises PolicyError for a corrupt file."""
    try:
        with warnings.catch_warnings():
            # Deprecated in favour of torch.export, but the files are there and d3rlpy writes no other.
            warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
            module = torch.jit.load(str(path), map_location="cpu")
    except Exception as error:
        raise PolicyError(
            f"{path}: the TorchScript file cannot be read ({one_line(error)}); export it again"
        ) from error
    return module_function(module)


def module_function(module: torch.nn.Module) -> Callable[[np.ndarray], torch.Tensor]:
    """Call the module without gradients, in evaluation mode, on its own device and in its own float type."""
    sample = next(module.parameters(), None)
    dtype = sample.dtype if sample is not None and sample.is_floating_point() else torch.float32
    device = torch.device("cpu") if sample is None else sample.device

    def function(observations: np.ndarray) -> torch.Tensor:
        # A copy: the log's arrays are read-only, and the module might write into its input.
        batch = torch.tensor(observations, dtype=dtype, device=device)
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                return module(batch)
        finally:
            module.train(was_training)

    return function
