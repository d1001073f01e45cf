"""Sub-paths of a log as mini-batches for path-consistency critics.

A mini-batch of paths has d3rlpy's form. Observations (B, L, d), actions (B, L, k or 1)
and rewards (B, L) are those of every step, next observations and terminals those of the
last; intervals are the true lengths. Steps after the end of a path repeat its last step
and are ignored.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from d3rlpy.dataset import TransitionMiniBatch

from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Transitions
from koffline.errors import DataError


class PathReplayBuffer(ColumnarReplayBuffer):
    """A columnar buffer whose mini-batches are paths, each starting at a row that is
    drawn as usual.

    A path is shorter than `length` if its episode ends. Raises DataError for a log
    without episodes.
    """

    def __init__(
        self,
        transitions: Transitions,
        length: int,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(transitions, seed)
        if not transitions.has_episodes:
            raise DataError(
                f"paths of {length} steps need episodes, this log has none; set"
                " path_length to 1"
            )
        self._length = length
        ends = np.repeat(transitions.episode_ends, transitions.episode_lengths)
        self._steps_left = ends - np.arange(len(transitions)) + 1

    def sample_transition_batch(self, batch_size: int) -> TransitionMiniBatch:
        """Draw `batch_size` paths."""
        log = self.transitions
        rows = self._draw(batch_size)
        lengths = np.minimum(self._steps_left[rows], self._length)
        last = rows + lengths - 1
        # (B, L)
        steps = np.minimum(rows[:, None] + np.arange(self._length), last[:, None])
        columns = {
            "observations": log.observations[steps],
            "actions": self._actions[steps],
            "rewards": log.rewards[steps],
            "next_observations": log.next_observations[last],
            "next_actions": self._actions[np.minimum(last + 1, len(log) - 1)],
            "terminals": log.terminated[last][:, None],
            "intervals": lengths[:, None],
        }
        floats = {
            name: column.astype(np.float32, copy=False)
            for name, column in columns.items()
        }
        return TransitionMiniBatch(**floats, transitions=[])


def as_paths(batch: TransitionMiniBatch) -> TransitionMiniBatch:
    """A mini-batch of single steps as paths; paths as they are.

    Raises DataError for n-step transitions.
    """
    states = np.asarray(batch.observations)
    if states.ndim > 2:
        return batch
    if np.any(batch.intervals != 1):
        raise DataError(
            "a path needs every step; give one-step transitions and set path_length"
        )
    return dataclasses.replace(
        batch, observations=states[:, None], actions=batch.actions[:, None]
    )


def first_steps(batch: TransitionMiniBatch) -> TransitionMiniBatch:
    """A mini-batch with only the first step of each path, as input of a kernel."""
    states = np.asarray(batch.observations)
    if states.ndim < 3:
        return batch
    first = {
        "observations": states[:, 0],
        "actions": batch.actions[:, 0],
        "rewards": batch.rewards[:, :1],
    }
    return dataclasses.replace(batch, **first)
