"""A run's policy as a Trust-PCL model (.d3), and its replay as a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from koffline.data.transitions import ActionSpace, Continuous, Discrete, Metadata, Transitions
from koffline.errors import DataError
from koffline.online.config import OnlineConfig
from koffline.online.networks import AgentArrays, Layers
from koffline.online.paths import PathReplay

_WIDEST = 1e6  # larger bounds count as unbounded
_SMALLEST_KL = 1e-8  # the model's config needs a positive kl_coef, even if training ended with zero


def write_model(agent: AgentArrays, config: OnlineConfig, path: str | Path) -> None:
    """Write the model as a .d3 file, whole or not at all, over an older one. Raises DataError."""
    trust_pcl_model(agent, config).save(str(path))


def trust_pcl_model(agent: AgentArrays, config: OnlineConfig) -> Any:
    """Build the algorithm from the agent's networks; `predict` is the mean action, clipped to the box.

    Observations go in and actions come out in the environment's units: the scalers are part of the model. A
    finite box is scaled to [−1, 1], as d3rlpy's algorithms act, by the last layer of the policy; for any
    other the policy has limits of its own. Discrete actions are 0 … n − 1. Torch's generator stays as it was.
    """
    from koffline.algos.options import resolve_params
    from koffline.algos.training import make_algorithm
    from koffline.data.d3rlpy_import import quiet

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
    """Options of the offline algorithm that are shared with online training."""
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
    remembers = config.critic == "memory"
    return {
        **{name: getattr(config, name) for name in ("gamma", "diag_weight", "clip_adv", "target_decay")},
        "critic": "kloss" if remembers else config.critic,
        "memory": config.memory if remembers else 0.0,
        **{f"{network}_{name}": value for network in ("actor", "critic") for name, value in both.items()},
        "batch_size": max(2, config.batch_size),
        "observation_scaler": {"type": "standard", "params": standard} if is_standardised else None,
        "action_scaler": None if box is None else {"type": "min_max", "params": box},
        "reward_scaler": None if config.reward_scale == 1.0 else reward_scale,
        "kernel": "gaussian",
        "bandwidth": f"{config.bandwidth_scale!r} median",
        "action_kernel": "joint" if config.kernel_inputs == "state_action" else "none",
        "normalise": False,
        "initial_value": 0.0,  # the values are already trained
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
    """Copy the policy: logits of discrete actions, or mean and log-deviation in the model's units."""
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
    """Copy layers; their weights are (in, out), transposed relative to torch's."""
    modules = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    for module, (weight, bias) in zip([*modules, last], layers, strict=True):
        _put(module.weight, np.asarray(weight).T)
        _put(module.bias, np.asarray(bias))


@torch.no_grad()
def _put(tensor: Tensor, values: np.ndarray) -> None:
    tensor.copy_(torch.as_tensor(np.ascontiguousarray(values), dtype=tensor.dtype))


def replay_transitions(
    replay: PathReplay, run: int, action_space: ActionSpace, gamma: float | None = None
) -> Transitions:
    """Log of one run's replay; sub-episodes are joined to episodes in the order of their starts.

    Continuous actions are those that the environment got: cut to the box. The last row of an episode that
    still runs is truncated; episodes whose first steps were overwritten are left out, which a note says.
    Raises DataError where no episode is held from its beginning.
    """
    paths = replay.held(run)
    keys = np.stack((paths.environments, paths.episodes), axis=1)
    _, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    episode = np.argsort(np.argsort(first))[label.reshape(-1)]  # 0, 1, … in the order first seen
    begins = np.bincount(episode, weights=paths.first_steps == 0) > 0
    if not begins.any():
        raise DataError(
            f"the replay of run {run} holds no episode from its beginning ({len(paths.lengths)} paths); "
            "play longer, or give the replay a larger capacity"
        )
    order = np.lexsort((paths.first_steps, episode))
    order = order[begins[episode][order]]
    paths, episode = paths.flat_rows(order, leading=1), episode[order]
    step, lengths = np.arange(paths.rewards.shape[1]), paths.lengths[:, None]
    inside, last = step < lengths, step == lengths - 1
    changes = np.diff(np.repeat(episode, paths.lengths)) != 0
    terminated = (paths.terminated[:, None] & last)[inside]
    actions = paths.actions[inside]
    if isinstance(action_space, Continuous):
        actions = np.clip(actions, action_space.low, action_space.high)
    dropped = int((~begins).sum())
    notes = (f"{dropped} episodes whose beginning was overwritten were left out",) if dropped else ()
    return Transitions(
        observations=paths.observations[:, :-1][inside],
        actions=actions,
        rewards=paths.rewards[inside],
        next_observations=paths.observations[:, 1:][inside],
        terminated=terminated,
        truncated=np.append(changes, True) & ~terminated,
        episode_ids=np.cumsum(np.append(False, changes)),
        steps=(paths.first_steps[:, None] + step)[inside],
        action_space=action_space,
        metadata=Metadata(notes=notes, gamma=gamma),
    )
