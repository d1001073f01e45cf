"""Policies and values of K runs as one stack: flat parameters, slow copies, export.

Row k of the flat parameters is [policy network | log deviations | value network] of run
k.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.json_types import JsonObject
from koffline.online.config import OnlineConfig
from koffline.replicas import StackedMLP

if TYPE_CHECKING:
    from koffline.algos.trust_pcl import TrustPCL

Floats: TypeAlias = type[np.float32] | type[np.float64]
_ACTIVATION = "tanh"  # (Feng et al. 2019, sec:net_arc)
_LEAST_STD = 1e-3  # least standard deviation of an input
_WIDEST = 1e6  # larger bounds count as unbounded
_LOG_TWO_PI = float(np.log(2.0 * np.pi))


def _parameters_of(sizes: Sequence[int]) -> int:
    """Number of weights and biases of a network with these layers."""
    return sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(sizes))


@dataclass(frozen=True)
class Shape:
    """Shapes that all runs of a stack share."""

    observation_dim: int
    action_space: ActionSpace
    hidden: tuple[int, ...]

    @property
    def continuous(self) -> bool:
        """Whether actions are vectors."""
        return isinstance(self.action_space, Continuous)

    @property
    def outputs(self) -> int:
        """Number of outputs of the policy's network: means, or logits."""
        space = self.action_space
        if isinstance(space, Continuous):
            return space.k
        return space.n

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layer sizes of the policy's network and of V."""
        below = self.observation_dim, *self.hidden
        return (*below, self.outputs), (*below, 1)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Slices of the policy's network, its log deviations and V in a row of
        parameters.
        """
        policy_sizes, value_sizes = self.sizes
        end_of_policy = _parameters_of(policy_sizes)
        begin_of_value = end_of_policy + self.deviations
        end = begin_of_value + _parameters_of(value_sizes)
        return (
            slice(0, end_of_policy),
            slice(end_of_policy, begin_of_value),
            slice(begin_of_value, end),
        )

    @property
    def deviations(self) -> int:
        """Number of log deviations; none for discrete actions."""
        if self.continuous:
            return self.outputs
        return 0


class AgentStack:
    """Networks of K runs as views of one flat (K, P) tensor, which may be modified in
    place.
    """

    kept = ("flat",)

    def __init__(self, shape: Shape, flat: Tensor) -> None:
        self.shape = shape
        self.flat = flat
        policy_sizes, value_sizes = shape.sizes
        policy, deviations, value = shape.parts
        self.policy = StackedMLP(policy_sizes, flat[:, policy], _ACTIVATION)
        self.log_std = flat[:, deviations]  # (K, k), or (K, 0) of discrete actions
        self.value = StackedMLP(value_sizes, flat[:, value], _ACTIVATION)

    @classmethod
    def initialise(
        cls, shape: Shape, seeds: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> AgentStack:
        """Initialise one run per pair of seeds (policy, value), with log deviations
        0.
        """
        policy_sizes, value_sizes = shape.sizes
        policy_seeds, value_seeds = zip(*seeds, strict=True)
        policy = StackedMLP.initialise(
            policy_sizes, policy_seeds, _ACTIVATION, dtype=dtype
        ).flat
        value = StackedMLP.initialise(
            value_sizes, value_seeds, _ACTIVATION, dtype=dtype
        ).flat
        deviations = policy.new_zeros(len(seeds), shape.deviations)
        return cls(shape, torch.cat((policy, deviations, value), dim=1))

    def of(self, runs: slice | Tensor) -> AgentStack:
        """The networks of the given runs: views for a slice, else copies."""
        return AgentStack(self.shape, self.flat[runs])


class Networks(NamedTuple):
    """Networks of K runs and their slow copies."""

    online: AgentStack
    target: AgentStack

    def of(self, runs: slice | Tensor) -> Networks:
        """The networks of the given runs."""
        return Networks(*(stack.of(runs) for stack in self))


@dataclass(frozen=True, eq=False)
class Agent:
    """One run's networks and slow copies, as stacks of one; inputs are (observation −
    mean) / std.
    """

    online: AgentStack
    target: AgentStack
    mean: np.ndarray
    std: np.ndarray
    kl_coef: float
    entropy_coef: float


class InputMoments:
    """Running mean and deviation of each run's observations; 0 and 1 without
    standardisation.
    """

    kept = ("_count", "_mean", "_squares", "mean", "std")

    def __init__(self, runs: int, dimension: int, standardise: Sequence[bool]) -> None:
        self._count = np.zeros((runs, 1))
        self._mean = np.zeros((runs, dimension))
        self._squares = np.zeros((runs, dimension))
        self._on = np.asarray(standardise, dtype=bool)[:, None]
        self.mean = np.zeros((runs, dimension))
        self.std = np.ones((runs, dimension))

    def update(self, observations: np.ndarray) -> None:
        """Add observations (K, n, d)."""
        count = observations.shape[1]
        total = self._count + count
        centred = observations - self._mean[:, None]
        shift = centred.sum(axis=1)
        here = np.square(centred).sum(axis=1) - np.square(shift) / count
        self._squares += here + np.square(shift / count) * self._count * count / total
        self._mean += shift / total
        self._count += count
        self.mean = np.where(self._on, self._mean, 0.0)
        # An input without variation so far must not get a huge scale.
        deviation = np.maximum(np.sqrt(self._squares / self._count), _LEAST_STD)
        self.std = np.where(self._on & (self._count > 1.0), deviation, 1.0)

    def standardised(self, observations: np.ndarray, dtype: Floats) -> np.ndarray:
        """Standardise observations (K, n, d)."""
        return ((observations - self.mean[:, None]) / self.std[:, None]).astype(
            dtype, copy=False
        )


class Density:
    """log π(a|s) of rows (K, N) from the policy network's outputs, and its gradients in
    closed form.
    """

    def __init__(self, outputs: Tensor, log_std: Tensor, actions: Tensor) -> None:
        self._continuous = actions.is_floating_point()
        if self._continuous:
            self._inverse = torch.exp(-log_std).unsqueeze(1)  # (K, 1, k)
            self._scaled = (actions - outputs).mul_(self._inverse)
            constant = (
                log_std.sum(dim=1, keepdim=True) + 0.5 * _LOG_TWO_PI * actions.shape[2]
            )
            self.log_probability = (
                self._scaled.square().sum(dim=2).mul_(-0.5) - constant
            )
            self.mean_std = log_std.exp().mean(dim=1)
        else:
            self._log = outputs.log_softmax(dim=2)
            self._actions = actions.unsqueeze(2)
            self.log_probability = self._log.gather(2, self._actions).squeeze(2)
            self.mean_std = torch.full_like(outputs[:, 0, 0], torch.nan)

    def gradients(
        self, slope: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients in the policy's network and the log deviations, from the gradient
        in log π (K, N).

        pull: the gradient in the network's parameters, from that in its outputs.
        """
        if not self._continuous:
            outwards = -self._log.exp() * slope.unsqueeze(2)
            outwards.scatter_add_(2, self._actions, slope.unsqueeze(2))
            return pull(outwards), slope[:, :0]
        weighted = self._scaled * slope.unsqueeze(2)
        deviations = (weighted * self._scaled).sum(dim=1) - slope.sum(
            dim=1, keepdim=True
        )
        return pull(weighted.mul_(self._inverse)), deviations


def trust_pcl_model(agent: Agent, config: OnlineConfig) -> TrustPCL:
    """Make a d3rlpy model from the agent's networks; `predict` is the mean action,
    clipped to the bounds.

    Observations and actions are in the environment's units: the scalers are part of the
    model. Finite bounds are scaled to [−1, 1], as for d3rlpy's algorithms, by the
    policy's last layer; otherwise the policy has its own limits. Discrete actions are 0
    … n − 1. Torch's generator is left unchanged.
    """
    from koffline.algos.options import resolve_params
    from koffline.algos.training import make_algorithm
    from koffline.data import quiet

    shape = agent.online.shape
    if isinstance(shape.action_space, Discrete):
        kind = "discrete_trust_pcl"
    else:
        kind = "trust_pcl"
    with quiet(), torch.random.fork_rng(devices=[]):
        algo = make_algorithm(kind, resolve_params(kind, _options(agent, config)))
        algo.create_impl((shape.observation_dim,), shape.outputs)
    modules = algo.impl.modules
    _put_policy(modules.policy, agent.online)
    _put_policy(modules.targ_policy, agent.target)
    for function, stack in (
        (modules.q_funcs[0], agent.online),
        (modules.targ_q_funcs[0], agent.target),
    ):
        _put_layers(function, _layers(stack.value))
    return algo


def _options(agent: Agent, config: OnlineConfig) -> JsonObject:
    """Options of the offline algorithm that online training shares."""
    adam = {"eps": config.adam_epsilon, "clip_grad_norm": config.max_grad_norm}
    layers = {
        "hidden_units": list(agent.online.shape.hidden),
        "activation": _ACTIVATION,
    }
    options: JsonObject = {
        "gamma": config.gamma,
        "diag_weight": config.diag_weight,
        "clip_adv": config.clip_adv,
        "target_decay": config.target_decay,
        "critic": config.critic,
        "memory": 0.0,
        "batch_size": max(2, config.batch_size),
        "observation_scaler": None,
        "action_scaler": None,
        "reward_scaler": None,
        "kernel": "gaussian",
        "bandwidth": f"{config.bandwidth_scale!r} median",
        "action_kernel": "none",
        "normalise": False,
        "initial_value": 0.0,  # the values are already trained
        "path_length": config.window_length,
        "entropy_coef": agent.entropy_coef,
        "kl_coef": agent.kl_coef,
        "squash": False,
    }
    for network in ("actor", "critic"):
        options[f"{network}_learning_rate"] = config.learning_rate
        options[f"{network}_optim_factory"] = {"type": "adam", "params": adam}
        options[f"{network}_encoder_factory"] = {"type": "vector", "params": layers}
    if config.critic == "memory":
        options["critic"] = "kloss"
        options["memory"] = config.memory
    if (agent.mean != 0.0).any() or (agent.std != 1.0).any():
        standard = {"mean": agent.mean, "std": agent.std, "eps": 0.0}
        options["observation_scaler"] = {"type": "standard", "params": standard}
    space = agent.online.shape.action_space
    if _is_scaled(space):
        box = {"minimum": space.low, "maximum": space.high}
        options["action_scaler"] = {"type": "min_max", "params": box}
    if config.reward_scale != 1.0:
        multiplier = {"multiplier": config.reward_scale}
        options["reward_scaler"] = {"type": "multiply", "params": multiplier}
    if config.kernel_inputs == "state_action":
        options["action_kernel"] = "joint"
    # one of the two must be positive, and this one may have ended at zero
    if agent.entropy_coef <= 0.0:
        options["kl_coef"] = max(agent.kl_coef, 1e-8)
    return options


def _is_scaled(space: ActionSpace) -> TypeGuard[Continuous]:
    """Whether the model's policy acts in [−1, 1] instead of in the environment's
    units.
    """
    if isinstance(space, Discrete):
        return False
    low = np.array(space.low)
    high = np.array(space.high)
    return bool((np.abs([low, high]) <= _WIDEST).all() and (high > low).all())


def _put_policy(policy: Any, stack: AgentStack) -> None:
    """Copy the policy: logits of discrete actions, or mean and log-deviation in the
    model's units.
    """
    space = stack.shape.action_space
    layers = _layers(stack.policy)
    if isinstance(space, Discrete):
        _put_layers(policy, layers)
        return
    low = np.array(space.low)
    high = np.array(space.high)
    centre = np.zeros(space.k)
    half = np.ones(space.k)
    if _is_scaled(space):
        centre = (low + high) / 2.0
        half = (high - low) / 2.0
        low = -np.ones(space.k)
        high = np.ones(space.k)
    weight, bias = layers.pop()
    _put_layers(policy, [*layers, (weight / half, (bias - centre) / half)])
    _put(policy._logstd, stack.log_std.numpy() - np.log(half))
    _put(policy.low, low.reshape(1, -1))
    _put(policy.high, high.reshape(1, -1))


def _layers(network: StackedMLP) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights (in, out) and biases (out,) of a stack of one."""
    return [
        (weight[0].numpy(), bias[0, 0].numpy())
        for weight, bias in network.layers(network.flat)
    ]


def _put_layers(
    network: nn.Module, layers: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Copy layers; torch's weights are (out, in)."""
    modules = [module for module in network.modules() if isinstance(module, nn.Linear)]
    for module, (weight, bias) in zip(modules, layers, strict=True):
        _put(module.weight, weight.T)
        _put(module.bias, bias)


@torch.no_grad()
def _put(tensor: Tensor, values: np.ndarray) -> None:
    tensor.copy_(torch.as_tensor(np.ascontiguousarray(values), dtype=tensor.dtype))
