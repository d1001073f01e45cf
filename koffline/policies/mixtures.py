"""Mixtures of networks: in every step one of them acts, drawn by fixed shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import (
    Actions,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    pick_actions,
)
from koffline.policies.builtin import Mlp, softmax

DISCRETE_OUTPUTS = ("softmax", "argmax")
_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class MixturePart:
    """One network of a mixture.

    ``gate``: a classifier of actions; the network then chooses among the actions whose
    probability, divided by that of the likeliest action, is at least ``gate_ratio``
    (Fujimoto et al. 2019, discrete BCQ). Raises PolicyError if they do not fit.
    """

    network: Mlp
    gate: Mlp | None = None
    gate_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.gate is None:
            return
        is_discrete = {self.network.output, self.gate.output} <= set(DISCRETE_OUTPUTS)
        same_sizes = (
            self.network.inputs == self.gate.inputs
            and self.network.outputs == self.gate.outputs
        )
        if not is_discrete or not same_sizes:
            raise PolicyError(
                "a gate chooses among discrete actions; give one with the inputs and"
                " the outputs of the network"
            )
        if not 0.0 <= self.gate_ratio <= 1.0:
            raise PolicyError(
                f"gate_ratio is {self.gate_ratio}; give a number in [0, 1]"
            )

    @property
    def is_discrete(self) -> bool:
        """Whether the network chooses among discrete actions."""
        return self.network.output in DISCRETE_OUTPUTS

    @property
    def deterministic(self) -> bool:
        """Whether a continuous network gives one action for each observation."""
        return self.network.output != "gaussian"

    def probabilities(self, observations: np.ndarray) -> Actions:
        """Probabilities (N, n) of discrete actions."""
        values = self.network.last_layer(observations)
        if self.gate is not None:
            likeliness = softmax(self.gate.last_layer(observations))
            ratios = likeliness / likeliness.max(axis=1, keepdims=True)
            values = np.where(ratios >= self.gate_ratio, values, -math.inf)
        if self.network.output == "argmax":
            return np.eye(self.network.outputs)[values.argmax(axis=1)]
        return softmax(values, self.network.temperature)


@dataclass(frozen=True, eq=False)
class Mixture:
    """π(a|s) = Σ_i share_i π_i(a|s): the share of each part, which is the probability
    that it acts, in every step anew.

    Raises PolicyError if shares are no probabilities, or if parts differ in inputs,
    outputs or kind of actions.
    """

    parts: tuple[MixturePart, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        shares = np.asarray(self.shares, dtype=np.float64)
        is_distribution = (
            shares.shape == (len(self.parts),)
            and len(shares) > 0
            and bool((shares >= 0.0).all())
            and abs(float(shares.sum()) - 1.0) < _SUM_TOLERANCE
        )
        if not is_distribution:
            raise PolicyError(
                f"shares are {list(self.shares)} for {len(self.parts)} networks; give"
                " each a probability, with sum 1"
            )
        kinds = {
            (part.network.inputs, part.network.outputs, part.is_discrete)
            for part in self.parts
        }
        if len(kinds) > 1:
            raise PolicyError(
                "the networks of a mixture differ in inputs, outputs or kind of"
                " actions; give networks for the same log"
            )

    @property
    def is_discrete(self) -> bool:
        """Whether actions are discrete."""
        return self.parts[0].is_discrete

    @property
    def outputs(self) -> int:
        """Number of actions, or action dimensions."""
        return self.parts[0].network.outputs

    @property
    def inputs(self) -> int:
        """Numbers in one flattened observation."""
        return self.parts[0].network.inputs

    @property
    def acting(self) -> list[tuple[float, MixturePart]]:
        """The parts with a positive share, and their shares."""
        pairs = zip(self.shares, self.parts, strict=True)
        return [(share, part) for share, part in pairs if share > 0.0]

    def discrete(self, observations: np.ndarray) -> Actions:
        """Probabilities (N, n) of discrete actions."""
        total = np.zeros((len(observations), self.outputs))
        for share, part in self.acting:
            total += share * part.probabilities(observations)
        return total

    def sample(
        self, observations: np.ndarray, generator: np.random.Generator
    ) -> Actions:
        """Draws (N, k) of continuous actions: first which part acts, then the noise of
        the Gaussian parts.
        """
        shares = np.array([share for share, _ in self.acting])
        drawn = pick_actions(
            np.broadcast_to(shares, (len(observations), len(shares))),
            generator.random(len(observations)),
        )
        actions = np.empty((len(observations), self.outputs))
        for number, (_, part) in enumerate(self.acting):
            if part.deterministic:
                of_part = part.network.mean(observations)
            else:
                # for all rows, so that the draws of one part do not depend on another
                of_part = part.network.sample(observations, generator)
            is_acting = drawn == number
            actions[is_acting] = of_part[is_acting]
        return actions

    def mean(self, observations: np.ndarray) -> Actions:
        """Mean actions (N, k); those of a mixture of deterministic parts are no action
        of the policy.
        """
        total = np.zeros((len(observations), self.outputs))
        for share, part in self.acting:
            total += share * part.network.mean(observations)
        return total


def mixture_policy(
    mixture: Mixture,
    name: str,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
) -> Policy:
    """The mixture as a policy for a log's spaces.

    name: the policy's, for messages. Raises PolicyError if the networks' sizes do not
    fit.
    """
    shape = tuple(observation_shape)
    actions: ActionSpace
    if mixture.is_discrete:
        actions = Discrete(mixture.outputs)
    else:
        actions = Continuous(mixture.outputs)
    check_spaces(name, (actions, None), (action_space, shape))
    if math.prod(shape) != mixture.inputs:
        raise PolicyError(
            f"{name}: the policy takes {mixture.inputs} numbers per observation, the"
            f" log has shape {shape}; give a policy made for this log"
        )
    if mixture.is_discrete:
        return DiscretePolicy(mixture.outputs, mixture.discrete, name, shape)
    if len(mixture.acting) == 1 and mixture.acting[0][1].deterministic:
        return ContinuousPolicy(mixture.outputs, mixture.mean, None, name, shape)
    return ContinuousPolicy(mixture.outputs, mixture.mean, mixture.sample, name, shape)
