"""Rows and episodes of a log in the shapes that d3rlpy reads, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from koffline.data.d3rlpy_dump import action_matrix
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions

d3rlpy = import_d3rlpy()
_dataset = d3rlpy.dataset
# Rows that stand alone are shown to evaluators in windows of this many, which is what they batch by.
WINDOW_ROWS = 1024
# Evaluators count their batches by the length: the added step must not make an empty one.
_Episode: Any = type("Episode", (_dataset.Episode,), {"__len__": _dataset.Episode.transition_count.fget})


class LazySequence(Sequence[Any]):
    """``count`` items, each made anew when it is read."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._count)[index]]
        return self._make(range(self._count)[index])


class RowWindow:
    """Rows that stand alone, for evaluators and scalers, which pick them one by one."""

    def __init__(self, log: Transitions, start: int) -> None:
        self.log, self.start, info = log, start, dataset_info_of(log)
        self.transition_count = min(WINDOW_ROWS, len(log) - start)
        self.observation_signature = info.observation_signature
        self.action_signature, self.reward_signature = info.action_signature, info.reward_signature

    def __len__(self) -> int:
        return self.transition_count

    def compute_return(self) -> float:
        """Sum of rewards."""
        rows = slice(self.start, self.start + self.transition_count)
        return float(np.sum(self.log.rewards[rows], dtype=np.float64))


def pick_row(window: RowWindow, index: int) -> Any:
    """The transition at a place of a window."""
    row = range(window.start, window.start + len(window))[index]
    return transition_at(window.log, row, row + 1)


def transition_at(log: Transitions, row: int, episode_end: int) -> Any:
    """d3rlpy's Transition of one row; the rewards to go reach to the end of its episode."""
    actions, rewards = action_matrix(log), np.asarray(log.rewards[row:episode_end], dtype=np.float32)
    return _dataset.Transition(
        observation=log.observations[row],
        action=actions[row],
        reward=rewards[:1],
        next_observation=log.next_observations[row],
        next_action=actions[min(row + 1, episode_end - 1)],
        terminal=float(log.terminated[row]),
        interval=1,
        rewards_to_go=rewards.reshape(-1, 1),
    )


def mini_batch(columns: dict[str, np.ndarray], transition_of: Callable[[int], Any]) -> Any:
    """d3rlpy's mini-batch of rows, as float32, the only dtype that it accepts."""
    held = {name: column.astype(np.float32, copy=False) for name, column in columns.items()}
    count = len(held["rewards"])
    for name in ("actions", "next_actions", "rewards", "terminated"):
        held[name] = held[name].reshape(count, -1)
    return _dataset.TransitionMiniBatch(
        terminals=held.pop("terminated"),
        **held,
        intervals=np.ones((count, 1), dtype=np.float32),
        transitions=LazySequence(count, transition_of),
    )


def stock_episode(steps: dict[str, Any]) -> Any:
    """d3rlpy's Episode of what ``steps_of`` gives."""
    return _Episode(**steps | {"rewards": steps["rewards"].astype(np.float32)})


def dataset_info_of(log: Transitions) -> Any:
    """d3rlpy's DatasetInfo: shapes, dtypes and the declared action space."""
    actions, space = action_matrix(log), log.action_space
    kinds = d3rlpy.ActionSpace
    return _dataset.DatasetInfo(
        observation_signature=_dataset.Signature([log.observations.dtype], [log.observation_shape]),
        action_signature=_dataset.Signature([actions.dtype], [actions.shape[1:]]),
        reward_signature=_dataset.Signature([np.dtype(np.float32)], [(1,)]),
        action_space=kinds.DISCRETE if isinstance(space, Discrete) else kinds.CONTINUOUS,
        action_size=space.n if isinstance(space, Discrete) else space.k,
    )
