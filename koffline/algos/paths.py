"""Sub-paths of a log as mini-batches, arrays and tensors: what a path-consistency critic learns from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from d3rlpy.dataset import TransitionMiniBatch
from d3rlpy.torch_utility import convert_to_torch
from jaxtyping import Float
from torch import Tensor, arange

from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Transitions
from koffline.errors import DataError


@dataclasses.dataclass(frozen=True)
class PathMiniBatch(TransitionMiniBatch):
    """Paths of at most L steps: the usual fields are of the first step, the next observation of the last.

    rewards: (B, 1), of the first step alone. intervals: true lengths (B, 1). terminals: of the last step.
    path_observations (B, L, …), path_actions (B, L, k or 1), path_rewards (B, L); rows past the end of a path
    repeat its last one and count for nothing.
    """

    path_observations: np.ndarray
    path_actions: np.ndarray
    path_rewards: np.ndarray


class PathReplayBuffer(ColumnarReplayBuffer):
    """A columnar buffer whose mini-batches are paths, each starting at a row drawn as usual.

    A path is shorter than `length` where its episode ends. Raises DataError for a log without episodes.
    """

    def __init__(
        self, transitions: Transitions, length: int, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(transitions, seed)
        if not transitions.has_episodes:
            raise DataError(f"paths of {length} steps need episodes, this log has none; set path_length to 1")
        self._length = length
        ends = np.repeat(transitions.episode_ends, transitions.episode_lengths)
        self._steps_left = ends - np.arange(len(transitions)) + 1

    def sample_transition_batch(self, batch_size: int) -> PathMiniBatch:
        """Draw `batch_size` paths."""
        log, rows = self.transitions, self._draw(batch_size)
        lengths = np.minimum(self._steps_left[rows], self._length)
        last = rows + lengths - 1
        steps = np.minimum(rows[:, None] + np.arange(self._length), last[:, None])  # (B, L)
        columns = {
            "observations": log.observations[rows],
            "actions": self._actions[rows],
            "rewards": log.rewards[rows][:, None],
            "next_observations": log.next_observations[last],
            "next_actions": self._actions[np.minimum(last + 1, len(log) - 1)],
            "terminals": log.terminated[last][:, None],
            "intervals": lengths[:, None],
            "path_observations": log.observations[steps],
            "path_actions": self._actions[steps],
            "path_rewards": log.rewards[steps],
        }
        floats = {name: column.astype(np.float32, copy=False) for name, column in columns.items()}
        return PathMiniBatch(**floats, transitions=[])


@dataclasses.dataclass(frozen=True)
class TorchPathBatch:
    """Paths of at most L steps as tensors, scaled for the networks.

    path_observations (B, L, …), path_actions (B, L, k or 1) and path_rewards (B, L) are of every step,
    next_observations and terminals of the last; intervals: true lengths; mask: 0 past the end of a path.
    """

    path_observations: Tensor
    path_actions: Tensor
    path_rewards: Float[Tensor, "row step"]
    next_observations: Tensor
    terminals: Float[Tensor, "row 1"]
    intervals: Float[Tensor, "row 1"]
    mask: Float[Tensor, "row step"]

    @property
    def observations(self) -> Tensor:
        """Observations (B, …) of the first step."""
        return self.path_observations[:, 0]

    @property
    def actions(self) -> Tensor:
        """Actions (B, k or 1) of the first step."""
        return self.path_actions[:, 0]

    @classmethod
    def of(cls, batch: TransitionMiniBatch, config: Any, device: str) -> TorchPathBatch:
        """Tensors on the device, through the scalers of the algorithm's config; single steps are paths too.

        Raises DataError for a mini-batch of n-step transitions.
        """
        states, actions = np.asarray(batch.observations)[:, None], batch.actions[:, None]
        rewards = batch.rewards
        if isinstance(batch, PathMiniBatch):
            states, actions, rewards = batch.path_observations, batch.path_actions, batch.path_rewards
        elif np.any(batch.intervals != 1):
            raise DataError("a path needs every step; give one-step transitions and set path_length")

        def scaled(kind: str, array: Any) -> Tensor:
            scaler, tensor = getattr(config, f"{kind}_scaler"), convert_to_torch(array, device)
            return tensor if scaler is None else scaler.transform(tensor)

        after = scaled("observation", batch.next_observations)
        path = scaled("observation", states), scaled("action", actions), scaled("reward", rewards)
        terminals, lengths = (convert_to_torch(a, device) for a in (batch.terminals, batch.intervals))
        mask = (arange(rewards.shape[1], device=device) < lengths).float()
        return cls(*path, after, terminals, lengths, mask)
