"""The bridge to d3rlpy: a replay buffer over columns, for d3rlpy's algorithms,
evaluators and scalers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np

from koffline.data import import_d3rlpy
from koffline.data.columns import last_rows
from koffline.data.d3rlpy_dump import d3rlpy_steps, episode_rows, steps_of
from koffline.data.disk.block_sampler import DRAWN, BlockSampler
from koffline.data.raw import episodic_log
from koffline.data.statistics import LogTally
from koffline.data.transitions import (
    Continuous,
    Discrete,
    Transitions,
    check_in_memory,
    check_without_masks,
)
from koffline.errors import DataError
from koffline.json_types import JsonObject

d3rlpy = import_d3rlpy()
_dataset = d3rlpy.dataset

Item = TypeVar("Item")
# rows that stand alone come in windows of as many, which is what evaluators batch by
_WINDOW_ROWS = 1024
# Evaluators count their batches by the length: the added step must not make an empty
# one.
_Episode = type(
    "Episode", (_dataset.Episode,), {"__len__": _dataset.Episode.transition_count.fget}
)


class _LazySequence(Sequence[Item]):
    """``count`` items, each made anew whenever it is read."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._count)[index]]
        return self._make(range(self._count)[index])


def _refused(reason: str) -> Callable[..., NoReturn]:
    """Replacement for a method that a buffer cannot support; it raises DataError."""

    def method(*_: object) -> NoReturn:
        raise DataError(reason)

    return method


_refuse_alone = _refused(
    "returns-to-go and trajectories need episodes, this log has none"
)
_refuse_whole = _refused(
    "trajectories, returns-to-go and dumps need whole episodes in memory, this log"
    " stays on disk; load it (data.lazy=false)"
)


class ColumnarReplayBuffer(_dataset.ReplayBuffer):
    """A d3rlpy replay buffer that shows ``Transitions``; it copies nothing and cannot
    grow.

    Intended differences from d3rlpy's own buffer: every row can be drawn, also the last
    row of a cut episode. The next observation of a terminal row is the logged one
    instead of zeros (it has no influence). The next action of an episode's last row is
    its own action, because none was logged. Rows are drawn in proportion to ``weights``
    if the log has them. Without ``seed`` the draws follow ``d3rlpy.seed``. Rows without
    episodes come in windows of 1024; evaluators that only use first rows
    (InitialStateValueEstimation) then use one row in 1024, and trajectories do not
    exist. ``transitions`` is the log behind the buffer. Raises DataError for a log on
    disk, and for one with masks of available actions.
    """

    def __init__(
        self, transitions: Transitions, seed: int | np.random.Generator | None = None
    ) -> None:
        check_in_memory(transitions)
        check_without_masks(transitions, "d3rlpy's algorithms")
        self.transitions = transitions
        # (N, 1) indices or (N, k) vectors
        self._actions = transitions.actions.reshape(len(transitions), -1)
        # whether the row below is the episode's next step
        self._goes_on = ~last_rows(transitions.columns)
        weights = transitions.weights
        if weights is None:
            total = None
        else:
            total = np.cumsum(weights, dtype=np.float64)
        if total is None:
            self._thresholds = None
        else:
            self._thresholds = total / total[-1]
        if seed is None:  # seeded from NumPy's global generator, which d3rlpy.seed sets
            seed = int(np.random.randint(2**31))  # noqa: NPY002
        self._generator = np.random.default_rng(seed)

    def sample_transition_batch(self, batch_size: int) -> _dataset.TransitionMiniBatch:
        """Draw a mini-batch of ``batch_size`` rows with replacement."""
        rows = self._draw(batch_size)
        columns = {
            name: _gather(getattr(self.transitions, name), rows) for name in DRAWN
        }
        columns["next_actions"] = _gather(
            self.transitions.actions, rows + self._goes_on.take(rows)
        )
        if self.transitions.has_episodes:
            transition = self._transition
        else:
            transition = _refuse_alone
        return mini_batch(columns, lambda i: transition(int(rows[i])))

    def sample_transition(self) -> _dataset.Transition:
        """Draw one transition."""
        return self._transition(int(self._draw(1)[0]))

    def sample_trajectory(self, length: int) -> _dataset.PartialTrajectory:
        """Draw a row and return the ``length`` steps up to it, padded in front if the
        episode is shorter.
        """
        if not self.transitions.has_episodes:
            _refuse_alone()
        row = int(self._draw(1)[0])
        step = int(self.transitions.columns["steps"][row])
        return self.trajectory_slicer(self._episode(row - step), step, length)

    @cached_property
    def episodes(self) -> Sequence[_dataset.Episode]:
        """Episodes as d3rlpy sees them, made when they are read."""
        starts: Sequence[int] | np.ndarray = range(
            0, len(self.transitions), _WINDOW_ROWS
        )
        if self.transitions.has_episodes:
            starts = self.transitions.episode_starts
        return _LazySequence(len(starts), lambda i: self._episode(int(starts[i])))

    @cached_property
    def _dataset_info(self) -> _dataset.DatasetInfo:
        """Shapes, dtypes and the declared action space."""
        space = self.transitions.action_space
        if isinstance(space, Discrete):
            kind = d3rlpy.ActionSpace.DISCRETE
            size = space.n
        else:
            kind = d3rlpy.ActionSpace.CONTINUOUS
            size = space.k
        observations = self.transitions.observations
        actions = self._actions
        return _dataset.DatasetInfo(
            observation_signature=_dataset.Signature(
                [observations.dtype], [observations.shape[1:]]
            ),
            action_signature=_dataset.Signature([actions.dtype], [actions.shape[1:]]),
            reward_signature=_dataset.Signature([np.dtype(np.float32)], [(1,)]),
            action_space=kind,
            action_size=size,
        )

    @property
    def transition_count(self) -> int:
        """Number of rows."""
        return len(self.transitions)

    @cached_property
    def _transition_picker(self) -> Any:
        """d3rlpy's own picker for logs with episodes, else one for windows of rows."""
        if self.transitions.has_episodes:
            return _dataset.BasicTransitionPicker()
        return lambda window, i: self._transition(window.start + range(len(window))[i])

    @property
    def _buffer(self) -> ColumnarReplayBuffer:
        """The buffer itself, as d3rlpy's BufferProtocol: a sequence of episodes that
        cannot grow.
        """
        return self

    def dump(self, f: BinaryIO) -> None:
        """Write a dump that ``ReplayBuffer.load`` reads."""
        _dataset.io.dump(
            [_stock_episode(steps) for steps in d3rlpy_steps(self.transitions)], f
        )

    _trajectory_slicer = _dataset.BasicTrajectorySlicer()
    append = append_episode = clip_episode = _refused(
        "a ColumnarReplayBuffer shows a finished log and cannot grow; for online"
        " training use koffline.data.replay.to_d3rlpy(transitions)"
    )
    # d3rlpy's own buffers, as its interface says; for ours use open_transitions
    load = _dataset.ReplayBuffer.load
    from_episode_generator = _dataset.ReplayBuffer.from_episode_generator

    def state_dict(self) -> JsonObject:
        """State of the random generator, as JSON values."""
        return dict(self._generator.bit_generator.state)

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a state, from which the draws continue."""
        self._generator.bit_generator.state = state

    def _draw(self, count: int) -> np.ndarray:
        if self._thresholds is None:
            return self._generator.integers(len(self.transitions), size=count)
        drawn = np.searchsorted(
            self._thresholds, self._generator.random(count), side="right"
        )
        return np.minimum(drawn, len(self.transitions) - 1)

    def _episode_end(self, row: int) -> int:
        if not self.transitions.has_episodes:
            return row + 1
        return int(self.transitions.episode_ends[self.transitions.units[row]]) + 1

    def _episode(self, start: int) -> _dataset.Episode:
        if self.transitions.has_episodes:
            return _stock_episode(
                steps_of(self.transitions, slice(start, self._episode_end(start)))
            )
        rows = slice(start, start + _WINDOW_ROWS)
        log = self.transitions
        window = _Episode(
            log.observations[rows], self._actions[rows], log.rewards[rows, None], True
        )
        object.__setattr__(window, "start", start)  # for the picker
        return window

    def _transition(self, row: int) -> _dataset.Transition:
        """d3rlpy's Transition of one row; its rewards to go end with the episode."""
        log = self.transitions
        end = self._episode_end(row)
        rewards = np.asarray(log.rewards[row:end], dtype=np.float32)
        return _dataset.Transition(
            observation=log.observations[row],
            action=self._actions[row],
            reward=rewards[:1],
            next_observation=log.next_observations[row],
            next_action=self._actions[min(row + 1, end - 1)],
            terminal=float(log.terminated[row]),
            interval=1,
            rewards_to_go=rewards.reshape(-1, 1),
        )


class LazyReplayBuffer(ColumnarReplayBuffer):
    """A d3rlpy replay buffer over a log on disk; it cannot grow.

    ``sample_transition_batch`` draws from all rows through a ``BlockSampler``: each row
    once per epoch, while a buffer in memory draws with replacement. ``episodes``,
    ``transitions`` and everything that evaluators read come from ``sample``, a sample
    of episodes that fits into memory. Trajectories, returns-to-go and dumps raise
    DataError, because they need all rows of an episode at once.
    """

    def __init__(
        self, sampler: BlockSampler, sample: Transitions, statistics: LogTally
    ) -> None:
        super().__init__(sample, seed=0)
        self._sampler = sampler
        self.statistics = statistics

    def sample_transition_batch(self, batch_size: int) -> _dataset.TransitionMiniBatch:
        """Draw a mini-batch of ``batch_size`` rows; each row is drawn once per
        epoch.
        """
        return mini_batch(self._sampler.draw(batch_size), _refuse_whole)

    sample_trajectory = sample_trajectory_batch = dump = _refuse_whole

    def state_dict(self) -> JsonObject:
        """Position of the draws."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a position, from which the draws continue."""
        self._sampler.load_state_dict(state)

    @property
    def transition_count(self) -> int:
        """Number of rows that batches are drawn from."""
        return self.statistics.rows


def to_d3rlpy(transitions: Transitions) -> _dataset.ReplayBuffer:
    """d3rlpy's own, growable buffer with every transition of the log.

    An episode that did not terminate gets one more step, with reward 0, that holds its
    last observation. Rows without episodes become episodes of one row. Raises DataError
    if a next observation inside an episode differs from the observation of the next
    row.
    """
    episodes = [_stock_episode(steps) for steps in d3rlpy_steps(transitions)]
    info = vars(ColumnarReplayBuffer(transitions, seed=0).dataset_info)
    return _dataset.ReplayBuffer(_dataset.InfiniteBuffer(), episodes=episodes, **info)


def from_d3rlpy(buffer: _dataset.ReplayBufferBase) -> Transitions:
    """The transitions of any d3rlpy buffer, without the last step of cut episodes (no
    next observation).
    """
    if isinstance(buffer, LazyReplayBuffer):
        _refuse_whole()
    if isinstance(buffer, ColumnarReplayBuffer):
        return buffer.transitions
    episodes = []
    info = buffer.dataset_info
    source = "the replay buffer"
    for episode in buffer.episodes:
        if not isinstance(episode.observations, np.ndarray):
            raise DataError(
                f"{source} holds tuple observations; flatten them into one array"
            )
        episodes.append(
            episode_rows(
                episode.observations,
                episode.actions,
                np.asarray(episode.rewards),
                bool(episode.terminated),
            )
        )
    space: Discrete | Continuous
    if info.action_space == d3rlpy.ActionSpace.DISCRETE:
        space = Discrete(info.action_size)
    else:
        space = Continuous(info.action_size)
    return episodic_log(episodes, None, space, source).transitions()


def _gather(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of a column; ``take`` is twice as fast, but it would copy a column that is
    not contiguous.
    """
    if column.flags.c_contiguous:
        return column.take(rows, axis=0)
    return column[rows]


def mini_batch(
    columns: dict[str, np.ndarray], transition_of: Callable[[int], _dataset.Transition]
) -> _dataset.TransitionMiniBatch:
    """d3rlpy's mini-batch of rows, as float32, the only dtype that it accepts."""
    held = {
        name: column.astype(np.float32, copy=False) for name, column in columns.items()
    }
    count = len(held["rewards"])
    for name in ("actions", "next_actions", "rewards", "terminated"):
        held[name] = held[name].reshape(count, -1)
    return _dataset.TransitionMiniBatch(
        terminals=held.pop("terminated"),
        **held,
        intervals=np.ones((count, 1), dtype=np.float32),
        transitions=_LazySequence(count, transition_of),
    )


def _stock_episode(steps: dict[str, Any]) -> _dataset.Episode:
    """d3rlpy's Episode from the result of ``steps_of``."""
    return _Episode(**steps | {"rewards": steps["rewards"].astype(np.float32)})
