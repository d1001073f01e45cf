"""Loading of .d3 models, d3rlpy's or ours, and export of greedy policies for use
without d3rlpy.

Code in a loaded file cannot run. Exports are TorchScript (.pt) and ONNX (.onnx). d3rlpy
2.8.1's own export fails for ONNX with torch 2.13, exports a batch of exactly one row,
and leaves gradients on in all networks, also in target networks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import d3rlpy
import torch
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.base import LearnableBase, LearnableConfig, LearnableConfigWithShape
from d3rlpy.models.torch.q_functions import iqn_q_function as iqn
from d3rlpy.serializable_config import CONFIG_STORAGE
from d3rlpy.types import TorchObservation
from torch import nn

from koffline.data import quiet
from koffline.errors import (
    ConfigError,
    KofflineError,
    PolicyError,
    install_command,
    nearest_name,
)
from koffline.policies.files import D3File, detect, read_d3
from koffline.store.files import atomic_file
from koffline.untrusted.limits import one_line

_LOG = logging.getLogger(__name__)
# Allowance for target networks and other parameters that an
# algorithm builds but does not save.
_COPIES = 8
_SLACK_NUMBERS = 1_000_000
_SLACK_TENSORS = 500
_OPSET = 17
# an encoder, a scaler, … in a configuration
_PART = r'"(\w+)":\s*{"type":\s*"([^"]*)",\s*"params"'
_IMPORT_IT = "import the module that registers it, or export the policy as TorchScript"
_EXAMPLE_ROWS = 2  # in a trace of one row the batch size easily becomes a constant
_COMPARED = 8  # further calls that tell whether a policy draws


def load(path: str | Path, device: str | int | bool = "cpu") -> LearnableBase:
    """Load the algorithm saved in a .d3 file, like ``d3rlpy.load_learnable`` but
    without unpickling.

    Weights, scalers and the optimisers' states are restored; ``fit`` continues where
    the model was saved. The algorithms of d3rlpy and koffline are known, those of other
    packages once these are imported. Torch's random generator is left unchanged.
    device: "cpu", "cuda" or "cuda:1"; True and whole numbers as in d3rlpy. Raises
    PolicyError for a file that is no model, contains code, is corrupt or of an unknown
    type, and ConfigError for a missing device.
    """
    path = Path(path)
    kind = detect(path)
    if kind != "d3":
        raise PolicyError(
            f"{path!s}: this is a policy of kind {kind}, without critic or optimisers;"
            " koffline.load_policy reads it"
        )
    device = device_name(device)
    file = read_d3(path)
    if file.version != d3rlpy.__version__:
        _LOG.warning(
            "%s was written by d3rlpy %s, %s is installed",
            path,
            file.version,
            d3rlpy.__version__,
        )
    with quiet():
        algo = algo_of(file, device)
    modules = algo.impl.modules.get_torch_modules().values()
    if not all(
        bool(p.isfinite().all()) for module in modules for p in module.parameters()
    ):
        _LOG.warning(
            "%s holds weights that are not finite: its training diverged", path
        )
    return algo


def algo_of(file: D3File, device: str = "cpu") -> LearnableBase:
    """Rebuild the algorithm of a file, with the states of its optimisers.

    Raises PolicyError if the configuration cannot be built or the weights do not fit
    it.
    """
    if file.algorithm == "fqe":
        raise PolicyError(
            f"{file.name}: d3rlpy's FQE does not save the policy it evaluates, so that"
            " it cannot be rebuilt; use koffline.algos.KLossFQE, which does"
        )
    known = CONFIG_STORAGE[LearnableConfig].config_list
    if file.algorithm not in known:
        raise PolicyError(
            f"{file.name}: the algorithm '{file.algorithm}' is unknown;"
            f" {nearest_name(file.algorithm, sorted(known))}; {_IMPORT_IT}"
        )
    kinds = {
        kind for registry in CONFIG_STORAGE.values() for kind in registry.config_list
    } | {"none"}
    for name, kind in re.findall(_PART, file.config):
        if kind not in kinds:
            raise PolicyError(
                f"{file.name}: its {name} '{kind}' is unknown; {_IMPORT_IT}"
            )
    doing = f"d3rlpy cannot rebuild the {file.algorithm} networks"
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the JSON reader warns of optional fields
            with _no_more_parameters_than(file.states):
                algo = LearnableConfigWithShape.deserialize(file.config).create(
                    device=device
                )
            doing = (
                f"the weights do not fit the {file.algorithm} networks of the"
                " configuration"
            )
            saved = algo.impl.modules.create_checkpointer(device).modules
            for key, part in saved.items():
                part.load_state_dict(file.states[key])
    except Exception as error:
        # a configuration of another version or a damaged one fails in any way
        if isinstance(error, KofflineError):
            reason = str(error)
        else:
            reason = one_line(error)
        version = f"the file was written by d3rlpy {file.version}"
        raise PolicyError(
            f"{file.name}: {doing} ({reason}); {version}: save it again"
        ) from error
    return algo


def device_name(device: str | int | bool) -> str:
    """The device as d3rlpy writes it: "cpu" or "cuda:<number>". Raises ConfigError."""
    if device is False:
        device = "cpu"
    elif device is True:
        device = "cuda:0"
    elif not isinstance(device, str):
        device = f"cuda:{int(device)}"
    there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    known = {"cpu": "cpu", "cpu:0": "cpu", **{name: name for name in there}}
    if there:
        known["cuda"] = "cuda:0"
    if device not in known:
        choices = " or ".join(there) or "no CUDA device was found"
        raise ConfigError(
            f"device is {device!r}, which is not there; give cpu ({choices})"
        )
    return known[device]


@contextlib.contextmanager
def _no_more_parameters_than(
    states: Mapping[str, Mapping[str, object]],
) -> Iterator[None]:
    """Count parameters made in the context; PolicyError once there are more than the
    saved ones explain.

    states: by the module's name, its state: tensors, and what optimisers keep besides.

    A configuration may ask for layers of any width. It is refused while the layers are
    made, before they fill the memory.
    """
    # without the optimisers'
    arrays = (array for state in states.values() for array in state.values())
    sizes = [array.numel() for array in arrays if isinstance(array, torch.Tensor)]
    most = _COPIES * sum(sizes) + _SLACK_NUMBERS
    most_tensors = _COPIES * len(sizes) + _SLACK_TENSORS
    counted: list[int] = []  # numbers in each parameter

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            counted.append(parameter.numel())
        if len(counted) > most_tensors or sum(counted) > most:
            raise PolicyError(
                f"its configuration asks for networks of more than {most} numbers, its"
                f" weights are {sum(sizes)} in {len(sizes)}"
            )

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def export_policy(algo: QLearningAlgoBase, path: str | Path) -> None:
    """Write the function ``algo.predict``, scalers included, for any batch size,
    atomically.

    Inputs are observations as floats in the units of the log, a tensor (N, …), or one
    per part; outputs are actions, (N,) int64 or (N, k) float32. For algorithms whose
    predict draws candidates (BCQ, BEAR, CRR) the file draws them, too, with a warning.
    The algorithm is not changed, and an existing file is replaced.
    Raises PolicyError for an algorithm without networks or with another kind of policy,
    ConfigError for endings other than .pt and .onnx and for a missing `onnx` package.
    """
    path = Path(path)
    if path.suffix not in (".pt", ".onnx"):
        raise ConfigError(
            f"{path}: the ending says the format; give .pt (TorchScript) or .onnx"
        )
    check_acts(algo, str(path))
    if path.suffix == ".onnx" and importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            f"{path}: writing ONNX needs the package onnx; {install_command('onnx')}"
        )
    with atomic_file(path, force=True) as temporary, quiet(), warnings.catch_warnings():
        # torch warns of tracing, and that both formats are deprecated
        warnings.simplefilter("ignore")
        with (
            torch.random.fork_rng(devices=[]),
            mock.patch.object(iqn, "get_batch_size", _batch_size),
        ):
            content, draws = _exported(
                _copy_on_cpu(algo), is_onnx=path.suffix == ".onnx"
            )
            temporary.write_bytes(content)
    if draws:
        _LOG.warning(
            "%s draws its actions, as the predict of %s does: the same observation gets"
            " another each time; let koffline evaluate the .d3",
            path,
            type(algo).__name__,
        )


def check_acts(algo: LearnableBase, name: str) -> None:
    """Raise PolicyError for an algorithm of another kind, without networks, or with
    unfitted scalers.
    """
    kind = type(algo).__name__
    acts = hasattr(algo, "predict") and hasattr(algo, "sample_action")
    if acts:
        scalers = [algo.observation_scaler, algo.action_scaler]
    else:
        scalers = []
    unbuilt = [
        type(scaler).__name__
        for scaler in scalers
        if scaler is not None and not scaler.built
    ]
    if not acts:
        raise PolicyError(
            f"{name}: a {kind} does not act on one observation; give a Q-learning"
            " algorithm of d3rlpy"
        )
    if algo.impl is None:
        raise PolicyError(
            f"{name}: the {kind} has no networks yet; fit it or load its weights first"
        )
    if unbuilt:
        raise PolicyError(
            f"{name}: its {', '.join(unbuilt)} holds no ranges; fit the model first"
        )


def _copy_on_cpu(algo: QLearningAlgoBase) -> QLearningAlgoBase:
    """Copy the networks to the CPU, without gradients: the file runs anywhere, `algo`
    stays unchanged.
    """
    copy = dataclasses.replace(algo.config, compile_graph=False).create("cpu")
    copy.create_impl(algo.observation_shape, algo.action_size)
    sources = algo.impl.modules.create_checkpointer("cpu").modules
    for name, module in copy.impl.modules.get_torch_modules().items():
        module.load_state_dict(sources[name].state_dict())
        module.requires_grad_(False)
    return copy


def _exported(algo: QLearningAlgoBase, is_onnx: bool) -> tuple[bytes, bool]:
    """Content of the file, and whether the policy's answers to the same observations
    vary.
    """
    shape = algo.observation_shape
    if isinstance(shape[0], (tuple, list)):
        shapes = tuple(shape)
    else:
        shapes = (shape,)
    examples = tuple(torch.rand((_EXAMPLE_ROWS, *sides)) for sides in shapes)

    def act(*observations: torch.Tensor) -> torch.Tensor:
        x: TorchObservation = [observation.float() for observation in observations]
        if len(x) == 1:
            x = x[0]
        if algo.observation_scaler is not None:
            x = algo.observation_scaler.transform(x)
        action = algo.impl.predict_best_action(x)
        if algo.action_scaler is None:
            return action
        return algo.action_scaler.reverse_transform(action)

    # the best of the drawn actions may be the same twice
    answers = [act(*examples) for _ in range(1 + _COMPARED)]
    draws = not all(
        torch.allclose(answers[0], answer, rtol=0, atol=1e-6, equal_nan=True)
        for answer in answers[1:]
    )
    return traced(act, examples, is_onnx), draws


def traced(
    act: Callable[..., torch.Tensor],
    examples: tuple[torch.Tensor, ...],
    is_onnx: bool,
) -> bytes:
    """Content of a TorchScript or ONNX file of a function of batches of any size.

    examples: inputs (2, …) to trace it with. torch itself would write to no path whose
    name is not UTF-8.
    """
    script = torch.jit.trace(act, examples, check_trace=False)
    if not is_onnx:
        content = io.BytesIO()
        torch.jit.save(script, content)
        return content.getvalue()
    names = [f"input_{i}" for i in range(len(examples))]
    target = ["output_0"]
    with TemporaryDirectory(prefix="koffline-") as folder:
        place = Path(folder, "model.onnx")
        torch.onnx.export(
            script,
            examples,
            str(place),
            input_names=names,
            output_names=target,
            dynamic_axes={name: {0: "batch"} for name in (*names, *target)},
            opset_version=_OPSET,
            dynamo=False,
        )
        return place.read_bytes()


def _batch_size(x: TorchObservation) -> int:
    """Number of rows; in a trace, d3rlpy's own `get_batch_size` would make it a
    constant.
    """
    if not hasattr(x, "shape"):  # observations of several parts
        x = x[0]
    return x.shape[0]
