"""Sub-paths of a log as d3rlpy mini-batches: what a path-consistency critic is trained on."""

from __future__ import annotations

import dataclasses

import numpy as np

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Transitions
from koffline.errors import DataError

import_d3rlpy()

from d3rlpy.dataset import TransitionMiniBatch  # noqa: E402


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


def _floats(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)
