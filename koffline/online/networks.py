"""Policies and values of K runs as one stack: flat parameters, slow copies, acting and export.

Row k of the flat parameters is [policy network | log standard deviations | value network] of run k; a step
of the optimiser or of the slow copies is one operation for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.data.transitions import ActionSpace, Continuous
from koffline.replicas import StackedMLP

_ACTIVATION = "tanh"  # (Feng et al. 2019, sec:net_arc)
_LEAST_STD = 1e-3  # least standard deviation of an input
_LOG_TWO_PI = float(np.log(2.0 * np.pi))


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
        return space.k if isinstance(space, Continuous) else space.n

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layer sizes of the policy's network and of V."""
        below = self.observation_dim, *self.hidden
        return (*below, self.outputs), (*below, 1)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Slices of the policy's network, its log deviations and V in a row of parameters."""
        policy, value = (sum((i + 1) * o for i, o in itertools.pairwise(sizes)) for sizes in self.sizes)
        middle = policy + (self.outputs if self.continuous else 0)
        return slice(0, policy), slice(policy, middle), slice(middle, middle + value)


Layers = tuple[tuple[np.ndarray, np.ndarray], ...]  # weights (in, out) and biases (out,)


@dataclass(frozen=True, eq=False)
class AgentArrays:
    """One run's networks as plain arrays by layer, tanh between.

    Inputs are (observation − mean) / std. log_std (k,), None for discrete actions. target_*: slow copies.
    """

    shape: Shape
    policy: Layers
    log_std: np.ndarray | None
    value: Layers
    target_policy: Layers
    target_log_std: np.ndarray | None
    target_value: Layers
    observation_mean: np.ndarray
    observation_std: np.ndarray
    kl_coef: float
    entropy_coef: float


def streams_of(seed: int) -> tuple[tuple[int, int], np.random.Generator, np.random.Generator]:
    """Random streams of a run: seeds of policy and V, generators for the replay and for collection."""
    networks, replay, play = np.random.SeedSequence(seed).spawn(3)
    policy, value = map(int, networks.generate_state(2))
    return (policy, value), np.random.default_rng(replay), np.random.default_rng(play)


class AgentStack:
    """Networks of K runs as views of one flat (K, P) tensor, which may be changed in place."""

    def __init__(self, shape: Shape, flat: Tensor) -> None:
        self.shape, self.flat = shape, flat
        (policy_sizes, value_sizes), (policy, deviations, value) = shape.sizes, shape.parts
        self.policy = StackedMLP(policy_sizes, flat[:, policy], _ACTIVATION)
        self.log_std = flat[:, deviations]  # (K, k), or (K, 0) of discrete actions
        self.value = StackedMLP(value_sizes, flat[:, value], _ACTIVATION)

    @classmethod
    def initialise(cls, shape: Shape, seeds: Sequence[tuple[int, int]], dtype: torch.dtype) -> AgentStack:
        """One run per pair of seeds (policy, value); log deviations 0."""
        policy, value = (
            StackedMLP.initialise(sizes, own, _ACTIVATION, dtype=dtype).flat
            for sizes, own in zip(shape.sizes, zip(*seeds, strict=True), strict=True)
        )
        deviations = policy.new_zeros(len(seeds), shape.outputs if shape.continuous else 0)
        return cls(shape, torch.cat((policy, deviations, value), dim=1))

    def layers(self, run: int) -> tuple[Layers, np.ndarray | None, Layers]:
        """Policy's layers, log deviations and V's layers of one run, copied."""
        policy, value = (
            tuple((w[run].numpy().copy(), b[run, 0].numpy().copy()) for w, b in net.layers(net.flat))
            for net in (self.policy, self.value)
        )
        deviations = self.log_std[run].numpy().copy() if self.shape.continuous else None
        return policy, deviations, value


class Actor:
    """The policies in numpy on the stack's own memory: a step of all runs takes some microseconds."""

    def __init__(self, stack: AgentStack) -> None:
        self._continuous = stack.shape.continuous
        self._layers = [(w.numpy(), b.numpy()) for w, b in stack.policy.layers(stack.policy.flat)]
        self._log_std = stack.log_std.numpy()

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """Means (K, E, k) or logits (K, E, n) from standardised observations (K, E, d)."""
        hidden = inputs
        *below, (top, top_bias) = self._layers
        for weight, bias in below:
            hidden = np.matmul(hidden, weight)
            hidden += bias
            np.tanh(hidden, out=hidden)
        return np.matmul(hidden, top) + top_bias

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions (K, E, k) from normal noise of that shape, or (K, E) from uniform noise of that shape."""
        outputs = self.outputs(inputs)
        if self._continuous:
            return outputs + np.exp(self._log_std)[:, None] * noise
        weights = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        cumulative = np.cumsum(weights, axis=-1)
        return (cumulative[..., :-1] <= noise[..., None] * cumulative[..., -1:]).sum(axis=-1)

    def best(self, inputs: np.ndarray) -> np.ndarray:
        """Mean actions (K, E, k), or the most probable ones (K, E)."""
        outputs = self.outputs(inputs)
        return outputs if self._continuous else outputs.argmax(axis=-1)


class InputMoments:
    """Running mean and deviation of each run's observations; the identity without standardisation."""

    def __init__(self, runs: int, dimension: int, standardise: Sequence[bool]) -> None:
        self._count = np.zeros((runs, 1))
        self._mean, self._squares = np.zeros((runs, dimension)), np.zeros((runs, dimension))
        self._on = np.asarray(standardise, dtype=bool)[:, None]
        self.mean, self.std = np.zeros((runs, dimension)), np.ones((runs, dimension))

    def update(self, observations: np.ndarray) -> None:
        """Take in observations (K, n, d)."""
        count = observations.shape[1]
        total = self._count + count
        centred = observations - self._mean[:, None]
        shift = centred.sum(axis=1)
        here = np.square(centred).sum(axis=1) - np.square(shift) / count
        self._squares += here + np.square(shift / count) * self._count * count / total
        self._mean += shift / total
        self._count += count
        self._set()

    def standardised(self, observations: np.ndarray, dtype: Any) -> np.ndarray:
        """Standardise observations (K, n, d)."""
        return ((observations - self.mean[:, None]) / self.std[:, None]).astype(dtype, copy=False)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Counts and sums."""
        return {name: getattr(self, f"_{name}").copy() for name in ("count", "mean", "squares")}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Go on from ``state_dict``."""
        for name, values in state.items():
            getattr(self, f"_{name}")[:] = values
        self._set()

    def _set(self) -> None:
        if not self._on.any():
            return
        deviation = np.sqrt(self._squares / np.maximum(self._count, 1.0))
        self.mean = np.where(self._on, self._mean, 0.0)
        # An input without variation so far must not get a huge scale.
        self.std = np.where(self._on & (self._count > 1.0), np.maximum(deviation, _LEAST_STD), 1.0)


class Density:
    """log π(a|s) of rows (K, N) from the policy network's outputs, and its gradients in closed form."""

    def __init__(self, outputs: Tensor, log_std: Tensor, actions: Tensor) -> None:
        self._continuous = actions.is_floating_point()
        if self._continuous:
            self._inverse = torch.exp(-log_std).unsqueeze(1)  # (K, 1, k)
            self._scaled = (actions - outputs).mul_(self._inverse)
            constant = log_std.sum(dim=1, keepdim=True) + 0.5 * _LOG_TWO_PI * actions.shape[2]
            self.log_probability = self._scaled.square().sum(dim=2).mul_(-0.5) - constant
            self.mean_std = log_std.exp().mean(dim=1)
        else:
            self._log = outputs.log_softmax(dim=2)
            self._actions = actions.unsqueeze(2)
            self.log_probability = self._log.gather(2, self._actions).squeeze(2)
            self.mean_std = torch.full_like(outputs[:, 0, 0], torch.nan)

    def gradients(self, slope: Tensor, pull: Any) -> tuple[Tensor, Tensor]:
        """Gradients in the policy's network and the log deviations from that in log π (K, N)."""
        if not self._continuous:
            outwards = -self._log.exp() * slope.unsqueeze(2)
            outwards.scatter_add_(2, self._actions, slope.unsqueeze(2))
            return pull(outwards), slope[:, :0]
        weighted = self._scaled * slope.unsqueeze(2)
        deviations = (weighted * self._scaled).sum(dim=1) - slope.sum(dim=1, keepdim=True)
        return pull(weighted.mul_(self._inverse)), deviations
