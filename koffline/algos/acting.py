"""How a d3rlpy algorithm acts: deterministic or not, with which probabilities, in whose units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.algos import BC, DDPG, PLAS, PRDC, TD3, DiscreteSAC, ReBRAC, TD3PlusBC  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402


def acts_deterministically(algo: Any) -> bool:
    """Whether acting involves no draw; an unknown continuous algorithm is taken to draw, right either way."""
    stock = isinstance(algo, (BC, DDPG, PLAS, PRDC, TD3, ReBRAC, TD3PlusBC))
    return stock or getattr(algo, "is_deterministic", False)


def action_probabilities(algo: Any, observations: Tensor) -> Tensor:
    """(N, n), observations in the units of the log: the policy's, or all on the greedy action."""
    scaled = _scaled(observations, algo.observation_scaler)
    if isinstance(algo, DiscreteSAC):
        algo.impl.modules.set_eval()
        return algo.impl.policy(scaled).probs
    if hasattr(algo.impl, "action_probabilities"):
        algo.impl.modules.set_eval()
        return algo.impl.action_probabilities(scaled)
    greedy = algo.impl.predict_best_action(scaled).reshape(-1).long()
    return F.one_hot(greedy, algo.action_size).float()


class TargetPolicy:
    """The policy of an algorithm as an evaluator with scalers of its own needs it; without gradients."""

    def __init__(self, algo: Any, device: str, observation_scaler: Any, action_scaler: Any) -> None:
        self._algo = algo
        self._device = device
        self._observation_scaler = observation_scaler  # the evaluator's
        self._action_scaler = action_scaler
        is_discrete = algo.get_action_type() == ActionSpace.DISCRETE
        self.is_deterministic = not is_discrete and acts_deterministically(algo)
        self._is_discrete = is_discrete

    @torch.no_grad()
    def probabilities(self, observations: Tensor) -> Tensor:
        """(N, n), observations in the units of the log."""
        return action_probabilities(self._algo, observations.float())

    @torch.no_grad()
    def greedy(self, observations: Tensor) -> Tensor:
        """Greedy actions in the units of the log."""
        scaled = _scaled(observations.float(), self._algo.observation_scaler)
        return self._unscaled_actions(self._algo.impl.predict_best_action(scaled))

    @torch.no_grad()
    def sample(self, observations: Tensor) -> Tensor:
        """Actions in the units of the log, drawn where the policy is stochastic."""
        if self._is_discrete:
            return torch.distributions.Categorical(self.probabilities(observations)).sample()
        if self.is_deterministic:
            return self.greedy(observations)
        scaled = _scaled(observations.float(), self._algo.observation_scaler)
        return self._unscaled_actions(self._algo.impl.sample_action(scaled))

    def unscaled(self, observations: Tensor) -> Tensor:
        """Observations as the evaluator scales them, back in the units of the log."""
        if self._observation_scaler is None:
            return observations
        return self._observation_scaler.reverse_transform(observations)

    def scaled_actions(self, actions: Tensor) -> Tensor:
        """Actions in the units of the log, as the evaluator scales them."""
        return actions if self._action_scaler is None else self._action_scaler.transform(actions)

    def _unscaled_actions(self, actions: Tensor) -> Tensor:
        scaler = self._algo.action_scaler
        return actions if scaler is None else scaler.reverse_transform(actions)


def _scaled(observations: Tensor, scaler: Any) -> Tensor:
    return observations if scaler is None else scaler.transform(observations)
