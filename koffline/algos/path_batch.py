"""A mini-batch of paths as tensors, scaled as the algorithm scales everything."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.algos.path_buffer import PathMiniBatch
from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.torch_utility import TorchMiniBatch, convert_to_torch  # noqa: E402


@dataclasses.dataclass(frozen=True)
class TorchPathBatch:
    """Paths of at most L steps; rows past a path's end have mask 0.

    observations, actions: of the first step. next_observations, terminals (N, 1): after the last.
    intervals: true lengths (N, 1). path_observations (N · L, d), path_actions (N · L, k or 1).
    """

    observations: Tensor
    actions: Tensor
    next_observations: Tensor
    terminals: Float[Tensor, "row 1"]
    intervals: Float[Tensor, "row 1"]
    path_observations: Tensor
    path_actions: Tensor
    path_rewards: Float[Tensor, "row step"]
    mask: Float[Tensor, "row step"]

    @classmethod
    def of(cls, batch: Any) -> TorchPathBatch:
        """The batch itself, or an ordinary mini-batch as paths of one step."""
        if isinstance(batch, cls):
            return batch
        assert isinstance(batch, TorchMiniBatch)
        return cls(
            observations=batch.observations,
            actions=batch.actions,
            next_observations=batch.next_observations,
            terminals=batch.terminals,
            intervals=batch.intervals,
            path_observations=batch.observations,
            path_actions=batch.actions,
            path_rewards=batch.rewards,
            mask=torch.ones_like(batch.rewards),
        )

    @classmethod
    def from_paths(cls, paths: PathMiniBatch, config: Any, device: str) -> TorchPathBatch:
        """Tensors on the device, through the scalers of the algorithm's config."""

        def scaled(array: Any, scaler: Any) -> Tensor:
            tensor = convert_to_torch(array, device)
            return tensor if scaler is None else scaler.transform(tensor)

        length = paths.path_rewards.shape[1]
        steps = torch.arange(length, device=device)
        intervals = convert_to_torch(paths.intervals, device)
        flat_observations = paths.path_observations.reshape(-1, *paths.path_observations.shape[2:])
        flat_actions = paths.path_actions.reshape(-1, *paths.path_actions.shape[2:])
        return cls(
            observations=scaled(paths.observations, config.observation_scaler),
            actions=scaled(paths.actions, config.action_scaler),
            next_observations=scaled(paths.next_observations, config.observation_scaler),
            terminals=convert_to_torch(paths.terminals, device),
            intervals=intervals,
            path_observations=scaled(flat_observations, config.observation_scaler),
            path_actions=scaled(flat_actions, config.action_scaler),
            path_rewards=scaled(paths.path_rewards, config.reward_scaler),
            mask=(steps < intervals).float(),
        )
