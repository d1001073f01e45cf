"""Policies in Python: any callable, a torch module, and `package.module:name`, which runs the user's code."""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from koffline.data.transitions import ActionSpace, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import (
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    checked_actions,
    chunk_rows_for,
    one_line,
)
from koffline.untrusted.limits import check_code_allowed

_MEAN_DRAWS = 64
_LOG = logging.getLogger(__name__)
_SAID: set[str] = set()


def say_it_runs_code(name: str, how: str) -> None:
    """A warning in the log, which Python writes to stderr unless the program decides otherwise.

    Once per name and process; worker processes stay silent, their parent has said it.
    Raises ConfigError in a repetition that may not run code.
    """
    check_code_allowed(name, how)
    if name in _SAID or multiprocessing.parent_process() is not None:
        return
    _SAID.add(name)
    _LOG.warning("%s %s; load it only if you trust its author", name, how)


def import_object(spec: str) -> Any:
    """The object that `package.module:name` names; this runs the module, as an import in Python does.

    The current directory is searched first, as with `python -m`. Raises PolicyError when the module or the
    name is missing or the module fails.
    """
    module_name, _, attribute = spec.partition(":")
    say_it_runs_code(spec, f"runs the Python module {module_name}")
    try:
        with _current_directory_importable():
            target = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if missing and module_name.endswith(".py"):
            remedy = f"write {module_name[:-3]}:{attribute}, without .py"
        elif missing:
            remedy = f"install it or run from the folder that holds it ({os.getcwd()} was searched)"
        else:
            remedy = "mend the module: it must be importable on its own"
        raise PolicyError(f"{spec}: importing {module_name} failed ({one_line(error)}); {remedy}") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if name[0] != "_"]
            public = [name for name in names if callable(getattr(target, name, None))]
            found = ", ".join(public[:8]) or "nothing callable"
            raise PolicyError(f"{spec}: {module_name} has no '{part}'; it has {found}")
        target = getattr(target, part)
    return target


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    directory = os.getcwd()
    sys.path.insert(0, directory)
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        yield
    finally:
        # Only our entry goes: the module may have added its own.
        if directory in sys.path:
            sys.path.remove(directory)


def callable_policy(
    function: Callable[..., Any], name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """A policy from a function of a batch of observations.

    Discrete: it returns probabilities (N, n) or greedy action indices (N,). Continuous: it returns actions
    (N, k); when it has a parameter named `generator` it is stochastic and is called with a numpy Generator,
    and its mean is the average of 64 draws with a fixed seed; an attribute `log_density` of such a function,
    (observations, actions) -> (N,), makes importance ratios possible.
    """
    shape = tuple(observation_shape)
    rows = chunk_rows_for(shape)
    if isinstance(action_space, Discrete):
        return DiscretePolicy(action_space.n, function, name, shape, rows)
    try:
        takes_generator = "generator" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables in C have no signature
        takes_generator = False
    if not takes_generator:
        return ContinuousPolicy(action_space.k, function, None, name, shape, rows)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> Any:
        return function(observations, generator=generator)

    def mean(observations: np.ndarray) -> np.ndarray:
        generator = np.random.default_rng(0)
        total = np.zeros((len(observations), action_space.k))
        for _ in range(_MEAN_DRAWS):
            total += checked_actions(sample(observations, generator), len(total), action_space.k, name)
        return total / _MEAN_DRAWS

    density = getattr(function, "log_density", None)
    return ContinuousPolicy(action_space.k, mean, sample, name, shape, rows, density)


class ModuleFunction:
    """Calls a torch module without gradients, in evaluation mode, on its own device, in its own float type.

    Columns of whole numbers (int64: discrete actions) stay such.
    """

    def __init__(self, module: Any) -> None:
        import torch

        sample = next(module.parameters(), None)
        self._module = module
        self._dtype = sample.dtype if sample is not None and sample.is_floating_point() else torch.float32
        self._device = torch.device("cpu") if sample is None else sample.device

    def __call__(self, *columns: np.ndarray) -> Any:
        """What the module gives for columns of rows."""
        import torch

        # Copies: the log's arrays are read-only, and the module might write into its input.
        types = [torch.int64 if column.dtype == np.int64 else self._dtype for column in columns]
        batch = [torch.tensor(c, dtype=t, device=self._device) for c, t in zip(columns, types, strict=True)]
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                return self._module(*batch)
        finally:
            self._module.train(was_training)
