"""Sub-paths of a log as mini-batches, arrays and tensors: what a path-consistency critic learns from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from d3rlpy.dataset import TransitionMiniBatch
from d3rlpy.torch_utility import TorchMiniBatch, convert_to_torch
from jaxtyping import Float
from torch import Tensor

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

    @classmethod
    def of_single_steps(cls, batch: TransitionMiniBatch) -> PathMiniBatch:
        """The transitions of an ordinary mini-batch as paths of one step."""
        if isinstance(batch, PathMiniBatch):
            return batch
        if np.any(batch.intervals != 1):
            raise DataError("a path needs every step; give one-step transitions and set path_length")
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(TransitionMiniBatch)}
        return cls(
            **fields,
            path_observations=np.asarray(batch.observations)[:, None],
            path_actions=np.asarray(batch.actions)[:, None],
            path_rewards=np.asarray(batch.rewards),
        )


class PathReplayBuffer(ColumnarReplayBuffer):
    """A columnar buffer whose mini-batches are paths, each starting at a row drawn as usual.

    A path is shorter than `length` where its episode ends; a log without episodes has none longer than 1.
    Raises DataError for a length above 1 without episodes.
    """

    def __init__(
        self, transitions: Transitions, length: int, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(transitions, seed)
        if length > 1 and not transitions.has_episodes:
            raise DataError(f"paths of {length} steps need episodes, this log has none; set path_length to 1")
        self._length = length
        rows = np.arange(len(transitions))
        ends = rows
        if transitions.has_episodes:
            which = np.searchsorted(transitions.episode_starts, rows, side="right") - 1
            ends = np.asarray(transitions.episode_ends)[which]
        self._steps_left = ends - rows + 1

    def sample_transition_batch(self, batch_size: int) -> PathMiniBatch:
        """`batch_size` paths."""
        log, rows = self.transitions, self._draw(batch_size)
        lengths = np.minimum(self._steps_left[rows], self._length)
        last = rows + lengths - 1
        steps = np.minimum(rows[:, None] + np.arange(self._length), last[:, None])  # (B, L)
        actions, rewards = self._actions, log.rewards
        return PathMiniBatch(
            observations=_floats(log.observations[rows]),
            actions=_floats(actions[rows]),
            rewards=_floats(rewards[rows])[:, None],
            next_observations=_floats(log.next_observations[last]),
            next_actions=_floats(actions[np.minimum(last + 1, len(log) - 1)]),
            terminals=_floats(log.terminated[last])[:, None],
            intervals=_floats(lengths)[:, None],
            transitions=[],
            path_observations=_floats(log.observations[steps]),
            path_actions=_floats(actions[steps]),
            path_rewards=_floats(rewards[steps]),
        )


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


def _floats(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)
