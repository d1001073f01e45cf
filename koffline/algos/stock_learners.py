"""d3rlpy's double DQN and SAC, trained online as sources of policies.

`koffline.builders.control_learning` runs the episodes and keeps the policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import d3rlpy
import numpy as np
import torch
from d3rlpy.algos import DoubleDQNConfig, SACConfig
from d3rlpy.models import VectorEncoderFactory

from koffline.data.replay import mini_batch
from koffline.data.transitions import ActionSpace, Discrete
from koffline.errors import ConfigError
from koffline.policies.builtin import Mlp, finite_box


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Settings of an online learner. target_interval: double DQN's, in updates.

    steps: of the environment. random_steps: uniform actions at the start. update_every: steps per update.
    exploration: share of uniform actions of a discrete learner at its end; it falls linearly from one until
    ``exploration_steps``. evaluate_every: steps between two looks at the policy, over ``episodes`` episodes.
    """

    env: str
    steps: int
    seed: int = 0
    gamma: float = 0.99
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 1e-3
    batch_size: int = 128
    target_interval: int = 200
    reward_factor: float = 1.0
    random_steps: int = 500
    update_every: int = 1
    exploration: float = 0.05
    exploration_steps: int = 4000
    evaluate_every: int = 1000
    episodes: int = 10


class OnlineLearner:
    """Double DQN for discrete actions, SAC for a bounded box; it draws from the global generators.

    Raises ConfigError for observations that are not vectors, PolicyError for an infinite box.
    """

    def __init__(
        self, action_space: ActionSpace, observation_shape: tuple[int, ...], settings: LearningSettings
    ) -> None:
        if len(observation_shape) != 1:
            what = f"observations have shape {observation_shape}; the learner takes vectors: wrap it"
            raise ConfigError(what)
        self._space, factor, rate = action_space, settings.reward_factor, settings.learning_rate
        scaler = None if factor == 1.0 else d3rlpy.preprocessing.MultiplyRewardScaler(factor)
        common: dict[str, Any] = {"gamma": settings.gamma, "batch_size": settings.batch_size}
        common["reward_scaler"] = scaler
        encoder = VectorEncoderFactory(hidden_units=list(settings.hidden))
        config: Any
        if isinstance(action_space, Discrete):
            interval, size = settings.target_interval, action_space.n
            common |= {"encoder_factory": encoder, "target_update_interval": interval}
            config = DoubleDQNConfig(learning_rate=rate, **common)
        else:
            self._box, size = finite_box(action_space, "the learner"), action_space.k
            rates = dict.fromkeys((f"{part}_learning_rate" for part in ("actor", "critic", "temp")), rate)
            common |= dict.fromkeys(("actor_encoder_factory", "critic_encoder_factory"), encoder)
            box = d3rlpy.preprocessing.MinMaxActionScaler(*(side.tolist() for side in self._box))
            config = SACConfig(**rates, action_scaler=box, **common)
        self._algo: Any = config.create(device="cpu")
        self._algo.create_impl(observation_shape, size)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Actions (n,) or (n, k) while learning: greedy for DQN, sampled for SAC."""
        observations = observations.astype(np.float32)
        if isinstance(self._space, Discrete):
            return self._algo.predict(observations)
        return np.clip(self._algo.sample_action(observations), *self._box)

    def update(self, batch: Mapping[str, np.ndarray]) -> None:
        """One gradient step on columns (B, …) named as in Transitions, B the learner's batch size."""
        columns = {name: column for name, column in batch.items() if name != "truncated"}
        columns["next_actions"] = batch["actions"]  # used by neither algorithm
        self._algo.update(mini_batch(columns, lambda _: None))

    def policy(self) -> Mlp:
        """Greedy policy as a network of plain arrays: argmax of the values, or SAC's mean."""
        if isinstance(self._space, Discrete):
            network = self._algo.impl.q_function[0]
            return Mlp(*_layers(network.encoder, network._fc), output="argmax")
        network, (low, high) = self._algo.impl.policy, self._box
        layers = _layers(network._encoder, network._mu)
        return Mlp(*layers, output="tanh", action_low=low, action_high=high)


def _layers(encoder: Any, last: Any) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Weights (in, out) and biases (out,) of the hidden layers and the last one, float32."""
    linear = [module for module in encoder.modules() if isinstance(module, torch.nn.Linear)]
    weights = [module.weight.detach().numpy().T.copy() for module in (*linear, last)]
    biases = [module.bias.detach().numpy().copy() for module in (*linear, last)]
    return tuple(weights), tuple(biases)
