"""Loading any .d3 model, d3rlpy's or ours, optimisers included; nothing in the file can run."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import d3rlpy
import torch
from d3rlpy.base import LearnableConfig, LearnableConfigWithShape
from d3rlpy.serializable_config import CONFIG_STORAGE
from torch import nn

from koffline.algos.loggers import quiet
from koffline.errors import ConfigError, KofflineError, PolicyError
from koffline.policies.base import one_line
from koffline.policies.d3 import D3File, read_d3_model
from koffline.policies.files import detect

_LOG = logging.getLogger(__name__)
# Target networks, and what an algorithm builds beside what it saves.
_COPIES, _SLACK_NUMBERS, _SLACK_TENSORS = 8, 1_000_000, 500


def load(path: str | Path, device: str | int | bool = "cpu") -> Any:
    """The algorithm saved in a .d3 file, as ``d3rlpy.load_learnable`` gives it, but without its unpickling.

    Weights, scalers and the states of the optimisers are restored; ``fit`` goes on where it was saved. The
    algorithms of d3rlpy and of koffline are known; those of other packages once these are imported.
    Torch's random generator is left as it was.
    device: "cpu", "cuda" or "cuda:1"; True and whole numbers as in d3rlpy.
    Raises PolicyError for a file that is no model, has code in it, is corrupt, or is of an unknown type,
    ConfigError for a device that is not there.
    """
    path = Path(path)
    if path.is_dir():
        models = sorted(path.glob("*.d3"), key=lambda model: (len(model.name), model.name))
        hint = f"give one of its models, such as {models[-1].name}" if models else "it holds no .d3 model"
        raise PolicyError(f"{path} is a folder; {hint}")
    if not path.exists():
        raise PolicyError(f"{path}: there is no such file; check the path")
    kind = detect(path)
    if kind != "d3":
        raise PolicyError(
            f"{path}: this is a policy of kind {kind}, without critic or optimisers; koffline.load_policy "
            "reads it, a model is what algo.save(path) writes"
        )
    device = device_name(device)
    file = read_d3_model(path)
    if file.algorithm == "fqe":
        raise PolicyError(
            f"{path}: d3rlpy's FQE does not save the policy it evaluates, so that it cannot be rebuilt; "
            "use koffline.algos.KLossFQE, which does, or FQE(algo, config) and its load_model"
        )
    if file.version != d3rlpy.__version__:
        _LOG.warning("%s was written by d3rlpy %s, %s is installed", path, file.version, d3rlpy.__version__)
    with quiet():
        algo = algo_of(file, device)
    modules = algo.impl.modules.get_torch_modules().values()
    if not all(bool(p.isfinite().all()) for module in modules for p in module.parameters()):
        _LOG.warning("%s holds weights that are not finite: its training diverged", path)
    return algo


def algo_of(file: D3File, device: str = "cpu", optimisers: bool = True) -> Any:
    """The algorithm of a file, with the states of its optimisers unless only acting counts.

    Raises PolicyError for a configuration that cannot be built, and weights that do not fit it.
    """
    known = CONFIG_STORAGE[LearnableConfig].config_list
    if file.algorithm not in known:
        near = get_close_matches(file.algorithm, known, 1)
        raise PolicyError(
            f"{file.name}: the algorithm '{file.algorithm}' is not one of {', '.join(sorted(known))}"
            + (f" (the nearest is {near[0]})" if near else "")
            + "; import the package that defines it and pass the loaded algorithm, or export TorchScript"
        )
    doing = f"d3rlpy cannot rebuild the {file.algorithm} networks"
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks of the JSON reader on optional fields
            with _no_more_parameters_than(file.states):
                algo = LearnableConfigWithShape.deserialize(file.config).create(device=device)
            doing = f"the weights do not fit the {file.algorithm} networks of the configuration"
            _put_states(file.states, algo, optimisers)
    except Exception as error:  # a configuration of another version or a damaged one fails in any way
        reason = str(error) if isinstance(error, KofflineError) else one_line(error)
        raise PolicyError(
            f"{file.name}: {doing} ({reason}); the file was written by d3rlpy {file.version}: save it again "
            "with the installed version"
        ) from error
    return algo


def _put_states(states: dict[str, Any], algo: Any, optimisers: bool) -> None:
    """As the implementation itself loads its model, which may restore more than its modules.

    It is given states that have been read as data and written anew, never the file's own bytes.
    """
    if optimisers:
        content = io.BytesIO()
        torch.save(states, content)
        content.seek(0)
        algo.impl.load_model(content)
    else:
        for key, module in algo.impl.modules.get_torch_modules().items():
            module.load_state_dict(states[key])


def device_name(device: str | int | bool) -> str:
    """The device as d3rlpy writes it: "cpu" or "cuda:<number>". Raises ConfigError."""
    if isinstance(device, bool):
        device = "cuda:0" if device else "cpu"
    try:
        asked = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    except (RuntimeError, TypeError):
        asked = torch.device("meta")
    if asked.type == "cpu":
        return "cpu"
    if asked.type != "cuda":
        raise ConfigError(f"device is {device!r}, unknown to d3rlpy; give cpu, cuda or cuda:<number>")
    index, there = asked.index or 0, torch.cuda.device_count()
    if index >= there:
        raise ConfigError(f"device is {device!r}, but {there or 'no'} CUDA devices were found; give cpu")
    return f"cuda:{index}"


@contextlib.contextmanager
def _no_more_parameters_than(states: Any) -> Iterator[None]:
    """Count the parameters that are made inside; PolicyError as soon as the saved ones cannot explain them.

    A configuration may claim layers of any width: the claim is refused while it is carried out, before the
    memory is filled with numbers.
    """
    sizes = list(_sizes(states))
    most, most_tensors = _COPIES * sum(sizes) + _SLACK_NUMBERS, _COPIES * len(sizes) + _SLACK_TENSORS
    made: list[int] = []

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            made.append(parameter.numel())
        if len(made) > most_tensors or sum(made) > most:
            raise PolicyError(
                f"its configuration asks for networks of more than {most} numbers in {most_tensors} arrays, "
                f"its weights are {sum(sizes)} in {len(sizes)}"
            )

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _sizes(states: Any) -> Iterator[int]:
    """How many numbers each tensor of a nested state holds."""
    if isinstance(states, torch.Tensor):
        yield states.numel()
    elif isinstance(states, (dict, list, tuple)):
        for part in states.values() if isinstance(states, dict) else states:
            yield from _sizes(part)
