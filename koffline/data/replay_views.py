"""Rows and episodes of a log in the shapes that d3rlpy reads, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from koffline.data.d3rlpy_dump import action_matrix
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions
from koffline.errors import DataError

_dataset = import_d3rlpy().dataset
# Rows that stand alone are shown to evaluators in windows of this many, which is what they batch by.
WINDOW_ROWS = 1024


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
    """Rows that stand alone, for evaluators and scalers, which ask for their number and pick them one by one.

    Anything else raises DataError: the row below is not the next step.
    """

    def __init__(self, log: Transitions, rows: slice) -> None:
        self.log, self.rows, info = log, rows, dataset_info_of(log)
        self.transition_count = rows.stop - rows.start
        self.observation_signature = info.observation_signature
        self.action_signature, self.reward_signature = info.action_signature, info.reward_signature

    def __len__(self) -> int:
        return self.transition_count

    def compute_return(self) -> float:
        """Sum of rewards."""
        return float(np.sum(self.log.rewards[self.rows], dtype=np.float64))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise DataError(
            "rows without episodes form no trajectory; use the buffer's own transition_picker, or "
            "koffline.data.replay.to_d3rlpy for d3rlpy's own buffer"
        )


class WindowPicker:
    """d3rlpy's TransitionPickerProtocol for rows that stand alone; other episodes go to d3rlpy's own."""

    def __call__(self, episode: Any, index: int) -> Any:
        """The transition at a place of an episode or window."""
        if isinstance(episode, RowWindow):
            row = range(episode.rows.start, episode.rows.stop)[index]
            return transition_at(episode.log, row, row + 1)
        return _dataset.BasicTransitionPicker()(episode, index)


def transition_at(log: Transitions, row: int, episode_end: int) -> Any:
    """d3rlpy's Transition of one row; the rewards to go reach to the end of its episode."""
    actions = action_matrix(log)
    return _dataset.Transition(
        observation=log.observations[row],
        action=actions[row],
        reward=_reward_matrix(log, slice(row, row + 1))[0],
        next_observation=log.next_observations[row],
        next_action=actions[min(row + 1, episode_end - 1)],
        terminal=float(log.terminated[row]),
        interval=1,
        rewards_to_go=_reward_matrix(log, slice(row, episode_end)),
    )


def _reward_matrix(log: Transitions, rows: slice) -> np.ndarray:
    """Rewards (T, 1) as float32."""
    return np.asarray(log.rewards[rows], dtype=np.float32).reshape(-1, 1)


# Evaluators count their batches by the length: the added step must not make an empty one.
_Episode: Any = type("Episode", (_dataset.Episode,), {"__len__": _dataset.Episode.transition_count.fget})


def stock_episode(steps: dict[str, Any]) -> Any:
    """d3rlpy's Episode of what ``steps_of`` gives."""
    return _Episode(**steps | {"rewards": steps["rewards"].astype(np.float32)})


def dataset_info_of(log: Transitions) -> Any:
    """d3rlpy's DatasetInfo: shapes, dtypes and the declared action space."""
    actions, space = action_matrix(log), log.action_space
    kinds = import_d3rlpy().ActionSpace
    return _dataset.DatasetInfo(
        observation_signature=_dataset.Signature([log.observations.dtype], [log.observation_shape]),
        action_signature=_dataset.Signature([actions.dtype], [actions.shape[1:]]),
        reward_signature=_dataset.Signature([np.dtype(np.float32)], [(1,)]),
        action_space=kinds.DISCRETE if isinstance(space, Discrete) else kinds.CONTINUOUS,
        action_size=space.n if isinstance(space, Discrete) else space.k,
    )
