"""What a stack leaves besides numbers: each seed's policy as a Trust-PCL model (.d3), its replay as a log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import DataError
from koffline.online.config import OnlineConfig
from koffline.online.lockstep import LockStep
from koffline.online.networks import AgentArrays, Layers
from koffline.store.files import atomic_file

MODEL, REPLAY, MINARI = "model.d3", "replay.hdf5", "minari"
_WIDEST = 1e6  # a box beyond this is no range to scale by, but stands for "unbounded"
_SMALLEST_KL = 1e-8  # the model's config asks for some regularisation, also where training ended without
_LOG = logging.getLogger(__name__)


def save_model(stack: LockStep, place: int, config: OnlineConfig, folder: Path) -> None:
    """The policy of run number ``place`` as model.d3, over an older one, where it is finite."""
    agent = stack.agent(place)
    if is_finite(agent):
        write_model(agent, config, folder / MODEL)


def save_replay(stack: LockStep, place: int, config: OnlineConfig, folder: Path, minari: bool) -> None:
    """The replay of run number ``place`` as replay.hdf5 and, on request, as a Minari dataset in a folder."""
    from koffline.data.sources import write_transitions
    from koffline.online.replay_log import replay_transitions

    gamma = config.gamma if 0.0 < config.gamma < 1.0 else None
    try:
        log = replay_transitions(stack.replay, place, stack.shape.action_space, gamma)
    except DataError as error:
        _LOG.warning("no log of the replay in %s: %s", folder, error)
        return
    write_transitions(log, folder / REPLAY, force=True)
    if minari:
        write_transitions(log, folder / MINARI, "minari", force=True)


def is_finite(agent: AgentArrays) -> bool:
    """Whether all weights of policy and value are finite."""
    arrays = [part for layers in (agent.policy, agent.value) for layer in layers for part in layer]
    return all(np.isfinite(array).all() for array in (*arrays, agent.log_std) if array is not None)


def write_model(agent: AgentArrays, config: OnlineConfig, path: str | Path) -> None:
    """Write the model as a .d3 file, whole or not at all, over an older one. Raises DataError."""
    algo = trust_pcl_model(agent, config)
    with atomic_file(Path(path), force=True) as temporary:
        algo.save(str(temporary))


def trust_pcl_model(agent: AgentArrays, config: OnlineConfig) -> Any:
    """The algorithm with the agent's networks; `predict` is its mean action, cut to the environment's box.

    Observations go in and actions come out in the environment's units: the scalers are part of the model. A
    finite box is scaled to [−1, 1], as d3rlpy's algorithms act, by the last layer of the policy; for any
    other the policy has limits of its own. Discrete actions are 0 … n − 1. Torch's generator stays as it was.
    """
    from koffline.algos.from_config import make_algorithm, resolve_params
    from koffline.algos.loggers import quiet

    space = agent.shape.action_space
    kind = "discrete_trust_pcl" if isinstance(space, Discrete) else "trust_pcl"
    with quiet(), torch.random.fork_rng(devices=[]):
        algo = make_algorithm(kind, resolve_params(kind, _options(agent, config)))
        algo.create_impl((agent.shape.observation_dim,), agent.shape.outputs)
    modules = algo.impl.modules
    for function, value in ((modules.q_funcs[0], agent.value), (modules.targ_q_funcs[0], agent.target_value)):
        _put_layers(function._encoder, function._fc, value)
    _put_policy(modules.policy, agent.policy, agent.log_std, space)
    _put_policy(modules.targ_policy, agent.target_policy, agent.target_log_std, space)
    return algo


def _options(agent: AgentArrays, config: OnlineConfig) -> dict[str, Any]:
    """The options that continue the training on a log with what both modes share."""
    adam = {"eps": config.adam_epsilon, "clip_grad_norm": config.max_grad_norm}
    both = {
        "learning_rate": config.learning_rate,
        "optim_factory": {"type": "adam", "params": adam},
        "encoder_factory": {
            "type": "vector",
            "params": {"hidden_units": list(agent.shape.hidden), "activation": "tanh"},
        },
    }
    entropy_coef, kl_coef, space = float(agent.entropy_coef), float(agent.kl_coef), agent.shape.action_space
    mean, deviation = agent.observation_mean, agent.observation_std
    is_standardised = (mean != 0.0).any() or (deviation != 1.0).any()
    standard = {"mean": mean, "std": deviation, "eps": 0.0}
    box = {"minimum": space.low, "maximum": space.high} if _is_scaled(space) else None
    reward_scale = {"type": "multiply", "params": {"multiplier": config.reward_scale}}
    same = ("gamma", "diag_weight", "critic", "clip_adv", "target_decay")
    return {
        **{name: getattr(config, name) for name in same},
        **{f"{network}_{name}": value for network in ("actor", "critic") for name, value in both.items()},
        "batch_size": max(2, config.batch_size),
        "observation_scaler": {"type": "standard", "params": standard} if is_standardised else None,
        "action_scaler": None if box is None else {"type": "min_max", "params": box},
        "reward_scaler": None if config.reward_scale == 1.0 else reward_scale,
        "kernel": "gaussian",
        "bandwidth": f"{config.bandwidth_scale!r} median",
        "action_kernel": "joint" if config.kernel_inputs == "state_action" else "none",
        "normalise": False,
        "initial_value": 0.0,  # the values are learned already
        "path_length": config.window_length,
        "entropy_coef": entropy_coef,
        "kl_coef": max(kl_coef, _SMALLEST_KL) if entropy_coef == 0.0 else kl_coef,
        "squash": False,
    }


def _is_scaled(space: ActionSpace) -> TypeGuard[Continuous]:
    """Whether the model's policy acts in [−1, 1] instead of in the environment's units."""
    if isinstance(space, Discrete):
        return False
    low, high = np.array(space.low), np.array(space.high)
    return bool((np.abs([low, high]) <= _WIDEST).all() and (high > low).all())


def _put_policy(policy: Any, layers: Layers, log_std: np.ndarray | None, space: ActionSpace) -> None:
    """Logits of discrete actions, or mean and log-deviation in the model's units."""
    if isinstance(space, Discrete):
        _put_layers(policy._encoder, policy._fc, layers)
        return
    low, high = np.array(space.low), np.array(space.high)
    centre, half = np.zeros(space.k), np.ones(space.k)
    if _is_scaled(space):
        centre, half = (low + high) / 2.0, (high - low) / 2.0
        low, high = -np.ones(space.k), np.ones(space.k)
    weight, bias = layers[-1]
    scaled = (np.asarray(weight) / half, (np.asarray(bias) - centre) / half)
    _put_layers(policy._encoder, policy._mu, (*layers[:-1], scaled))
    assert log_std is not None
    _put(policy._logstd, np.reshape(log_std, (1, -1)) - np.log(half))
    _put(policy.low, low.reshape(1, -1))
    _put(policy.high, high.reshape(1, -1))


def _put_layers(encoder: nn.Module, last: nn.Linear, layers: Layers) -> None:
    """Weights are (in, out), the other way round than torch's."""
    modules = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    for module, (weight, bias) in zip([*modules, last], layers, strict=True):
        _put(module.weight, np.asarray(weight).T)
        _put(module.bias, np.asarray(bias))


@torch.no_grad()
def _put(tensor: Tensor, values: np.ndarray) -> None:
    tensor.copy_(torch.as_tensor(np.ascontiguousarray(values), dtype=tensor.dtype))
