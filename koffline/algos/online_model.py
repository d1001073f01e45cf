"""What online training learned as a model of d3rlpy's kind: type trust_pcl or discrete_trust_pcl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from koffline.algos.quiet import quiet
from koffline.algos.trust_pcl import DiscreteTrustPCLConfig, TrustPCLConfig
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.store.files import atomic_file

if TYPE_CHECKING:
    from koffline.online.config import OnlineConfig
    from koffline.online.networks import AgentArrays

import_d3rlpy()

from d3rlpy.models.encoders import VectorEncoderFactory  # noqa: E402
from d3rlpy.optimizers.optimizers import AdamFactory  # noqa: E402
from d3rlpy.preprocessing import (  # noqa: E402
    MinMaxActionScaler,
    MultiplyRewardScaler,
    StandardObservationScaler,
)

_WIDEST = 1e6  # a box beyond this is no range to scale by, but stands for "unbounded"
_SMALLEST_KL = 1e-8  # the model's config asks for some regularisation, also where training ended without

Layers = Sequence[tuple[np.ndarray, np.ndarray]]


def trust_pcl_model(agent: AgentArrays, config: OnlineConfig) -> Any:
    """The algorithm with the agent's networks; `predict` is its mean action, cut to the environment's box.

    Observations go in and actions come out in the environment's units: the scalers are part of the model. A
    finite box is scaled to [−1, 1], as d3rlpy's algorithms act, by the last layer of the policy; for any
    other the policy has limits of its own. Discrete actions are 0 … n − 1. Torch's generator stays as it was.
    """
    space = agent.shape.action_space
    made = DiscreteTrustPCLConfig if isinstance(space, Discrete) else TrustPCLConfig
    with quiet(), torch.random.fork_rng(devices=[]):
        algo = made(**_options(agent, config)).create("cpu")
        algo.create_impl((agent.shape.observation_dim,), agent.shape.outputs)
    modules = algo.impl.modules
    _put_value(modules.q_funcs[0], agent.value)
    _put_value(modules.targ_q_funcs[0], agent.target_value)
    _put_policy(modules.policy, agent.policy, agent.log_std, space)
    _put_policy(modules.targ_policy, agent.target_policy, agent.target_log_std, space)
    return algo


def save_model(agent: AgentArrays, config: OnlineConfig, path: str | Path) -> None:
    """Write the model as a .d3 file, whole or not at all, over an older one. Raises DataError."""
    algo = trust_pcl_model(agent, config)
    with atomic_file(Path(path), force=True) as temporary:
        algo.save(str(temporary))


def _options(agent: AgentArrays, config: OnlineConfig) -> dict[str, Any]:
    """The config that continues the training on a log with what both modes share."""
    encoder = VectorEncoderFactory(hidden_units=list(agent.shape.hidden), activation="tanh")
    optimizer = AdamFactory(eps=config.adam_epsilon, clip_grad_norm=config.max_grad_norm)
    entropy_coef, kl_coef = float(agent.entropy_coef), float(agent.kl_coef)
    return {
        "batch_size": max(2, config.batch_size),
        "gamma": config.gamma,
        "observation_scaler": _observation_scaler(agent),
        "action_scaler": _action_scaler(agent.shape.action_space),
        "reward_scaler": None if config.reward_scale == 1.0 else MultiplyRewardScaler(config.reward_scale),
        "kernel": "gaussian",
        "bandwidth": f"{config.bandwidth_scale!r} median",
        "diag_weight": config.diag_weight,
        "action_kernel": "joint" if config.kernel_inputs == "state_action" else "none",
        "normalise": False,
        "initial_value": 0.0,  # the values are learned already
        "actor_learning_rate": config.learning_rate,
        "critic_learning_rate": config.learning_rate,
        "actor_optim_factory": optimizer,
        "critic_optim_factory": optimizer,
        "actor_encoder_factory": encoder,
        "critic_encoder_factory": encoder,
        "critic": config.critic,
        "path_length": config.window_length,
        "entropy_coef": entropy_coef,
        "kl_coef": max(kl_coef, _SMALLEST_KL) if entropy_coef == 0.0 else kl_coef,
        "clip_adv": config.clip_adv,
        "target_decay": config.target_decay,
        "squash": False,
    }


def _observation_scaler(agent: AgentArrays) -> Any:
    """None where inputs were not standardised."""
    mean, deviation = (
        np.asarray(part, np.float64) for part in (agent.observation_mean, agent.observation_std)
    )
    if (mean == 0.0).all() and (deviation == 1.0).all():
        return None
    return StandardObservationScaler(mean=mean, std=deviation, eps=0.0)


def _action_scaler(space: ActionSpace) -> Any:
    if not _is_scaled(space):
        return None
    assert isinstance(space, Continuous)
    return MinMaxActionScaler(minimum=np.array(space.low), maximum=np.array(space.high))


def _is_scaled(space: ActionSpace) -> bool:
    """Whether the model's policy acts in [−1, 1] instead of in the environment's units."""
    if isinstance(space, Discrete):
        return False
    low, high = np.array(space.low), np.array(space.high)
    return bool((np.abs([low, high]) <= _WIDEST).all() and (high > low).all())


def _put_value(function: Any, layers: Layers) -> None:
    _put_layers([*_linear_layers(function._encoder), function._fc], layers)


def _put_policy(policy: Any, layers: Layers, log_std: np.ndarray | None, space: ActionSpace) -> None:
    """Logits of discrete actions, or mean and log-deviation in the model's units."""
    if isinstance(space, Discrete):
        _put_layers([*_linear_layers(policy._encoder), policy._fc], layers)
        return
    low, high = np.array(space.low), np.array(space.high)
    centre, half = np.zeros(space.k), np.ones(space.k)
    if _is_scaled(space):
        centre, half = (low + high) / 2.0, (high - low) / 2.0
        low, high = -np.ones(space.k), np.ones(space.k)
    weight, bias = layers[-1]
    scaled = (np.asarray(weight) / half, (np.asarray(bias) - centre) / half)
    _put_layers([*_linear_layers(policy._encoder), policy._mu], [*layers[:-1], scaled])
    assert log_std is not None, "continuous actions have a deviation"
    _put(policy._logstd, np.reshape(log_std, (1, -1)) - np.log(half))
    _put(policy.low, low.reshape(1, -1))
    _put(policy.high, high.reshape(1, -1))


def _linear_layers(encoder: nn.Module) -> list[nn.Linear]:
    return [module for module in encoder.modules() if isinstance(module, nn.Linear)]


def _put_layers(modules: Sequence[nn.Linear], layers: Layers) -> None:
    """Weights are (in, out), the other way round than torch's."""
    for module, (weight, bias) in zip(modules, layers, strict=True):
        _put(module.weight, np.asarray(weight).T)
        _put(module.bias, np.asarray(bias))


@torch.no_grad()
def _put(tensor: Tensor, values: np.ndarray) -> None:
    tensor.copy_(torch.as_tensor(np.ascontiguousarray(values), dtype=tensor.dtype))
