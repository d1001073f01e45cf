"""From what a user names or holds to a policy: `load_policy` for specs, `as_policy` for anything."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from koffline.data.transitions import ActionSpace
from koffline.errors import PolicyError
from koffline.policies.base import (
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_fits,
    check_output_shape,
    refuse,
)
from koffline.policies.distributions import epsilon_policy, uniform_policy
from koffline.policies.files import ACCEPTED, detect, load_onnx, read_d3, read_torchscript
from koffline.policies.policy_file import load_policy_file
from koffline.policies.python_policy import ModuleFunction, callable_policy, import_object

_MODULE_SPEC = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")
_EPSILON = "epsilon:"
_MOST_LAYERS = 3  # epsilon:0.1:epsilon:0.1:uniform has two; more say nothing that one does not


def load_policy(spec: str | Path, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """The policy that a spec names.

    spec: a file (d3rlpy .d3, TorchScript, ONNX, koffline .npz, told apart by content), `package.module:name`
    (runs that module), `uniform`, or `epsilon:0.1:<spec>`. A file whose name is one of these words is given
    as a path, `./uniform`. No code inside a .d3, ONNX or .npz file can run; a TorchScript file runs no
    Python, but is a program. Loading one, or a Python module, is said once by a warning in the log, which
    goes to stderr by default (logger koffline.policies.python_policy).

    Raises PolicyError for anything missing, corrupt, unsafe or not fitting the log's action space and
    observations.
    """
    if isinstance(spec, str):
        if spec == "uniform":
            return uniform_policy(action_space, observation_shape)
        if spec.startswith(_EPSILON):
            return _load_epsilon(spec, action_space, observation_shape)
    path = Path(os.path.expanduser(spec))  # Path's own raises where there is no such user
    if path.is_file():
        return _load_file(path, action_space, observation_shape)
    if spec and path.is_dir():  # Path("") is the current folder
        raise PolicyError(f"{spec}: this is a folder; a policy is {ACCEPTED}")
    if isinstance(spec, str) and _MODULE_SPEC.fullmatch(spec):
        return as_policy(import_object(spec), action_space, observation_shape, name=spec)
    hint = "did you mean 'uniform'? " if get_close_matches(str(spec), ["uniform"], 1) else ""
    raise PolicyError(f"{str(spec)!r}: there is no such file; {hint}a policy is {ACCEPTED}")


def as_policy(
    policy: Any, action_space: ActionSpace, observation_shape: Sequence[int], name: str | None = None
) -> Policy:
    """A policy from a spec, a Policy, a d3rlpy algorithm, a torch module or any callable.

    A callable maps a batch of observations (N, ...) to probabilities (N, n) or action indices (N,), for a
    continuous space to actions (N, k); with a parameter named `generator` it is a stochastic continuous
    policy. A torch module gets a float tensor, without gradients, in evaluation mode.

    Raises PolicyError when it is none of these or does not fit the log.
    """
    if isinstance(policy, (str, Path)):
        return load_policy(policy, action_space, observation_shape)
    if isinstance(policy, (DiscretePolicy, ContinuousPolicy)):
        return check_fits(policy, action_space, observation_shape)
    name = str(name or getattr(policy, "__name__", type(policy).__name__))
    kind, function = type(policy).__name__, "a function of a batch of observations"
    wrong = {
        f"this is a class; give an instance of it or {function}": isinstance(policy, type),
        f"a {kind} is not a policy; give {ACCEPTED}, or {function}": not callable(policy),
    }
    if _is_instance_of_loaded("d3rlpy.base", "LearnableBase", policy):
        from koffline.algos.d3_policy import policy_from_algo

        return policy_from_algo(policy, name, action_space, observation_shape)
    refuse(wrong, name)
    if _is_instance_of_loaded("torch.nn", "Module", policy):
        policy = ModuleFunction(policy)
    return callable_policy(policy, name, action_space, observation_shape)


def _is_instance_of_loaded(module: str, name: str, value: Any) -> bool:
    """isinstance against a class of a heavy library, without importing it: no import, no instance."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _load_epsilon(spec: str, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    layers = spec.count(_EPSILON)
    number, separator, base = spec[len(_EPSILON) :].partition(":")
    try:
        epsilon = float(number)
    except ValueError:
        epsilon = float("nan")
    wrong = {
        f"names {layers} layers of epsilon; give at most {_MOST_LAYERS}, or one of the whole probability": (
            layers > _MOST_LAYERS
        ),
        "write epsilon:<probability in [0, 1]>:<policy>, for instance epsilon:0.1:uniform": (
            not (separator and base and 0.0 <= epsilon <= 1.0)
        ),
    }
    refuse(wrong, spec[:80])
    return epsilon_policy(epsilon, load_policy(base, action_space, observation_shape), action_space)


def _load_file(path: Path, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    kind = detect(path)
    if kind == "d3":
        file = read_d3(path)
        from koffline.algos.d3_policy import policy_from_d3  # after the checks: d3rlpy takes seconds to load

        return policy_from_d3(file, action_space, observation_shape)
    if kind == "npz":
        return load_policy_file(path, action_space, observation_shape)
    is_onnx = kind == "onnx"
    function = load_onnx(path, observation_shape) if is_onnx else ModuleFunction(read_torchscript(path))
    policy = callable_policy(function, str(path), action_space, observation_shape)
    return check_output_shape(policy, observation_shape)
