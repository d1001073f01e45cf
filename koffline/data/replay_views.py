"""Rows and episodes of a log in the shapes that d3rlpy reads, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions
from koffline.errors import DataError

_dataset = import_d3rlpy().dataset

# Rows that stand alone are shown to evaluators in windows of this many, which is what they batch by.
WINDOW_ROWS = 1024


def action_matrix(log: Transitions) -> np.ndarray:
    """(N, 1) indices or (N, k) vectors: d3rlpy keeps a feature axis for discrete actions too."""
    return log.actions.reshape(-1, 1) if log.actions.ndim == 1 else log.actions


def reward_matrix(log: Transitions, rows: slice) -> np.ndarray:
    """(T, 1) float32."""
    return np.asarray(log.rewards[rows], dtype=np.float32).reshape(-1, 1)


def transition_at(log: Transitions, row: int, episode_end: int) -> Any:
    """d3rlpy's Transition of one row; the rewards to go reach to the end of its episode."""
    actions = action_matrix(log)
    return _dataset.Transition(
        observation=log.observations[row],
        action=actions[row],
        reward=reward_matrix(log, slice(row, row + 1))[0],
        next_observation=log.next_observations[row],
        next_action=actions[min(row + 1, episode_end - 1)],
        terminal=float(log.terminated[row]),
        interval=1,
        rewards_to_go=reward_matrix(log, slice(row, episode_end)),
    )


def dataset_info_of(log: Transitions) -> Any:
    """d3rlpy's DatasetInfo: shapes, dtypes and the declared action space."""
    actions, space = action_matrix(log), log.action_space
    is_discrete = isinstance(space, Discrete)
    spaces = import_d3rlpy().ActionSpace
    return _dataset.DatasetInfo(
        observation_signature=_dataset.Signature([log.observations.dtype], [log.observation_shape]),
        action_signature=_dataset.Signature([actions.dtype], [actions.shape[1:]]),
        reward_signature=_dataset.Signature([np.dtype(np.float32)], [(1,)]),
        action_space=spaces.DISCRETE if is_discrete else spaces.CONTINUOUS,
        action_size=space.n if isinstance(space, Discrete) else space.k,
    )


class LazySequence(Sequence[Any]):
    """``count`` items, each made anew when it is read."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._count)[index]]
        return self._make(range(self._count)[index])


class _View:
    """What episodes and windows share of d3rlpy's EpisodeBase: T rows of a log."""

    def __init__(self, log: Transitions, rows: slice) -> None:
        self._log = log
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.stop - self._rows.start

    def size(self) -> int:
        """T."""
        return len(self)

    @property
    def transition_count(self) -> int:
        """T: every row is a transition, also the last one of an episode that was cut."""
        return len(self)

    @property
    def actions(self) -> np.ndarray:
        """(T, k)."""
        return action_matrix(self._log)[self._rows]

    @property
    def rewards(self) -> np.ndarray:
        """(T, 1) float32."""
        return reward_matrix(self._log, self._rows)

    @property
    def observation_signature(self) -> Any:
        """Shape and dtype of an observation."""
        return _dataset.Signature([self._log.observations.dtype], [self._log.observation_shape])

    @property
    def action_signature(self) -> Any:
        """Shape and dtype of an action."""
        actions = action_matrix(self._log)
        return _dataset.Signature([actions.dtype], [actions.shape[1:]])

    @property
    def reward_signature(self) -> Any:
        """Shape and dtype of a reward."""
        return _dataset.Signature([np.dtype(np.float32)], [(1,)])

    def compute_return(self) -> float:
        """Sum of rewards."""
        return float(np.sum(self._log.rewards[self._rows], dtype=np.float64))

    @classmethod
    def deserialize(cls, serializedData: dict[str, Any]) -> Any:
        """d3rlpy's own Episode: a view needs a log to look at."""
        return _dataset.Episode.deserialize(serializedData)


class EpisodeView(_View):
    """An episode that d3rlpy's pickers and slicers read without loss.

    Where it did not terminate, ``observations`` and ``actions`` have one row more than there are steps: the
    observation reached, and the last action once more as the next action that nobody logged.
    """

    @property
    def terminated(self) -> bool:
        """Whether the world ended with the last row."""
        return bool(self._log.terminated[self._rows.stop - 1])

    @cached_property
    def observations(self) -> np.ndarray:
        """(T, ...), or (T + 1, ...) where the episode goes on."""
        own = self._log.observations[self._rows]
        last = slice(self._rows.stop - 1, self._rows.stop)
        return own if self.terminated else np.concatenate([own, self._log.next_observations[last]])

    @cached_property
    def actions(self) -> np.ndarray:
        """(T, k), or (T + 1, k) where the episode goes on."""
        own = action_matrix(self._log)[self._rows]
        return own if self.terminated else np.concatenate([own, own[-1:]])

    def serialize(self) -> dict[str, Any]:
        """Arrays of equal length; the added step has reward 0."""
        padding = np.zeros((len(self.observations) - len(self), 1), dtype=np.float32)
        return {
            "observations": self.observations,
            "actions": self.actions,
            "rewards": np.concatenate([self.rewards, padding]),
            "terminated": self.terminated,
        }


class RowWindow(_View):
    """Rows that stand alone, gathered so that evaluators take them in one pass; no trajectory."""

    terminated = False

    def pick(self, index: int) -> Any:
        """The transition of one row."""
        row = range(self._rows.start, self._rows.stop)[index]
        return transition_at(self._log, row, row + 1)

    @property
    def observations(self) -> np.ndarray:
        """Raises DataError: the row below is not the next step."""
        raise DataError(
            "rows without episodes form no trajectory; use the buffer's own transition_picker, or "
            "koffline.data.replay.to_d3rlpy for d3rlpy's own buffer"
        )

    def serialize(self) -> dict[str, Any]:
        """Raises DataError."""
        return {"observations": self.observations}


class WindowPicker:
    """d3rlpy's TransitionPickerProtocol for windows; episodes go to d3rlpy's own picker."""

    def __init__(self) -> None:
        self._for_episodes = _dataset.BasicTransitionPicker()

    def __call__(self, episode: Any, index: int) -> Any:
        """The transition at a place of an episode or window."""
        if isinstance(episode, RowWindow):
            return episode.pick(index)
        return self._for_episodes(episode, index)
