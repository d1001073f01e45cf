"""Rows and episodes of a log in the shapes that d3rlpy reads, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from koffline.data.d3rlpy_dump import action_matrix, steps_of
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


class EpisodeView:
    """An episode that d3rlpy's pickers and slicers read without loss; or rows that stand alone.

    Where it did not terminate, ``observations`` and ``actions`` have one row more than there are steps: the
    observation reached, and the last action once more as the next action that nobody logged. Rows that stand
    alone have no observations: they raise DataError, as the row below is not the next step.
    """

    def __init__(self, log: Transitions, rows: slice) -> None:
        self.log, self.rows, info = log, rows, dataset_info_of(log)
        self.actions, self.rewards = action_matrix(log)[rows], _reward_matrix(log, rows)
        self.terminated = False
        self.observation_signature = info.observation_signature
        self.action_signature, self.reward_signature = info.action_signature, info.reward_signature
        if log.has_episodes:
            stock = self._stock
            self.actions, self.terminated = stock.actions, stock.terminated

    @cached_property
    def _stock(self) -> Any:
        if self.log.has_episodes:
            return stock_episode(steps_of(self.log, self.rows))
        raise DataError(
            "rows without episodes form no trajectory; use the buffer's own transition_picker, or "
            "koffline.data.replay.to_d3rlpy for d3rlpy's own buffer"
        )

    @property
    def observations(self) -> Any:
        """(T, ...), or (T + 1, ...)."""
        return self._stock.observations

    def __len__(self) -> int:
        return len(self.rewards)

    size = __len__
    # every row is a transition, also the last one of an episode that was cut
    transition_count = property(__len__)

    def compute_return(self) -> float:
        """Sum of rewards."""
        return float(np.sum(self.log.rewards[self.rows], dtype=np.float64))

    def serialize(self) -> dict[str, Any]:
        """Arrays of equal length; the added step has reward 0."""
        stored: dict[str, Any] = self._stock.serialize()
        return stored


class WindowPicker:
    """d3rlpy's TransitionPickerProtocol for rows that stand alone; other episodes go to d3rlpy's own."""

    def __call__(self, episode: Any, index: int) -> Any:
        """The transition at a place of an episode or window."""
        if isinstance(episode, EpisodeView) and not episode.log.has_episodes:
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
    """(T, 1) float32."""
    return np.asarray(log.rewards[rows], dtype=np.float32).reshape(-1, 1)


def stock_episode(steps: dict[str, Any]) -> Any:
    """d3rlpy's own Episode of what ``steps_of`` gives."""
    return _dataset.Episode(**steps | {"rewards": steps["rewards"].astype(np.float32)})


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
