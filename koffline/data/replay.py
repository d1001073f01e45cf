"""The bridge to d3rlpy: a replay buffer over columns for its algorithms, evaluators and scalers as they are.

The one module of the data floor that needs d3rlpy; importing it takes as long as importing d3rlpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, BinaryIO, NoReturn

import numpy as np

from koffline.data.d3rlpy_dump import action_matrix, d3rlpy_steps, episode_rows, steps_of
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.disk.batches import BlockSampler
from koffline.data.episodes import follow, join_episodes
from koffline.data.replay_views import (
    WINDOW_ROWS,
    LazySequence,
    RowWindow,
    WindowPicker,
    dataset_info_of,
    stock_episode,
    transition_at,
)  # fmt: skip
from koffline.data.spaces import Continuous, Discrete
from koffline.data.statistics import LogTally
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError, KofflineError

d3rlpy = import_d3rlpy()
_dataset = d3rlpy.dataset
_DRAWN = ("observations", "actions", "rewards", "next_observations", "next_actions", "terminated")


class ReadOnlyBufferError(KofflineError, NotImplementedError):
    """Raised by methods that would add to a buffer over a finished log."""


def _refuse_growth(*_: Any) -> NoReturn:
    """Stand in for methods that would add to the buffer. Raises ReadOnlyBufferError."""
    raise ReadOnlyBufferError(
        "a ColumnarReplayBuffer shows a finished log and cannot grow; for online training use "
        "koffline.data.replay.to_d3rlpy(transitions)"
    )


def _refuse_whole(*_: Any) -> NoReturn:
    """Stand in for methods that need whole episodes in memory. Raises DataError."""
    raise DataError(
        "trajectories, returns-to-go and dumps need whole episodes in memory, this log stays on disk; "
        "load it (data.lazy=false)"
    )


class ColumnarReplayBuffer(_dataset.ReplayBufferBase):
    """A d3rlpy replay buffer that shows ``Transitions``; it copies nothing and cannot grow.

    Differences from d3rlpy's own buffer, all on purpose: every row can be drawn, also the last one of an
    episode that was cut; the next observation of a terminal row is the logged one instead of zeros (it has
    no influence); the next action of an episode's last row is its own action, as none was logged; rows
    are drawn in proportion to ``weights`` where the log has them. Without ``seed`` the draws follow
    ``d3rlpy.seed``. Rows without episodes come in windows of 1024, for which evaluators that look at the
    first row only (InitialStateValueEstimation) take one row in 1024; trajectories do not exist then.
    """

    def __init__(self, transitions: Transitions, seed: int | np.random.Generator | None = None) -> None:
        self._log = transitions
        self._actions = action_matrix(transitions)
        # Whether the row below is the next step of the same episode; None where no row has a next one.
        self._goes_on = None if transitions.steps is None else np.append(transitions.steps[1:] > 0, False)
        self._thresholds = None if transitions.weights is None else _cumulative(transitions.weights)
        if seed is None:  # seeded from NumPy's global generator, which d3rlpy.seed sets
            seed = int(np.random.randint(2**31))  # noqa: NPY002
        self._generator = np.random.default_rng(seed)
        self._ones = np.ones((0, 1), dtype=np.float32)

    @property
    def transitions(self) -> Transitions:
        """The log behind the buffer."""
        return self._log

    def whole_log(self) -> Transitions:
        """The log that mini-batches are drawn from."""
        return self._log

    def sample_transition_batch(self, batch_size: int) -> Any:
        """Draw a mini-batch of ``batch_size`` rows with replacement."""
        log, rows = self._log, self._draw(batch_size)
        actions = _gather(self._actions, rows)
        next_actions = actions
        if self._goes_on is not None:
            next_actions = _gather(self._actions, rows + self._goes_on.take(rows))
        if len(self._ones) != batch_size:
            self._ones = np.ones((batch_size, 1), dtype=np.float32)
        return _dataset.TransitionMiniBatch(
            observations=_gather(log.observations, rows),
            actions=actions,
            rewards=_gather(log.rewards, rows).reshape(-1, 1),
            next_observations=_gather(log.next_observations, rows),
            next_actions=next_actions,
            terminals=_gather(log.terminated, rows).reshape(-1, 1),
            intervals=self._ones,
            transitions=LazySequence(batch_size, lambda i: self._transition(int(rows[i]), to_go=True)),
        )

    def sample_transition(self) -> Any:
        """Draw one transition."""
        return self._transition(int(self._draw(1)[0]))

    def sample_trajectory(self, length: int) -> Any:
        """Draw a row and return the ``length`` steps up to it, padded in front if the episode is shorter."""
        row = int(self._draw(1)[0])
        step = row if self._log.steps is None else int(self._log.steps[row])
        return self.trajectory_slicer(self._episode(row - step), step, length)

    def sample_trajectory_batch(self, batch_size: int, length: int) -> Any:
        """Draw ``batch_size`` trajectories."""
        return _dataset.TrajectoryMiniBatch.from_partial_trajectories(
            [self.sample_trajectory(length) for _ in range(batch_size)]
        )

    @cached_property
    def episodes(self) -> Sequence[Any]:
        """Episodes as d3rlpy sees them, made when asked for."""
        if self._log.has_episodes:
            starts = self._log.episode_starts
            return LazySequence(len(starts), lambda i: self._episode(int(starts[i])))
        return LazySequence(-(-len(self._log) // WINDOW_ROWS), lambda i: self._episode(i * WINDOW_ROWS))

    @cached_property
    def dataset_info(self) -> Any:
        """Shapes, dtypes and the declared action space."""
        return dataset_info_of(self._log)

    def size(self) -> int:
        """Number of episodes, or of windows."""
        return len(self.episodes)

    @property
    def transition_count(self) -> int:
        """Number of rows."""
        return len(self._log)

    @cached_property
    def transition_picker(self) -> Any:
        """d3rlpy's own picker for logs with episodes, else `WindowPicker`."""
        return _dataset.BasicTransitionPicker() if self._log.has_episodes else WindowPicker()

    @cached_property
    def trajectory_slicer(self) -> Any:
        """d3rlpy's own slicer."""
        return _dataset.BasicTrajectorySlicer()

    @property
    def buffer(self) -> Any:
        """The buffer itself, which serves as d3rlpy's BufferProtocol: episodes that cannot grow."""
        return self

    def dump(self, f: BinaryIO) -> None:
        """Write a dump that ``ReplayBuffer.load`` reads."""
        _dataset.io.dump(_stock_episodes(self._log), f)

    append = append_episode = clip_episode = _refuse_growth
    # d3rlpy's own buffers, as its interface says; for ours use open_transitions
    load, from_episode_generator = _dataset.ReplayBuffer.load, _dataset.ReplayBuffer.from_episode_generator

    def _draw(self, count: int) -> np.ndarray:
        if self._thresholds is None:
            return self._generator.integers(len(self._log), size=count)
        drawn = np.searchsorted(self._thresholds, self._generator.random(count), side="right")
        return np.minimum(drawn, len(self._log) - 1)

    def _end_of_episode(self, row: int) -> int:
        position = np.searchsorted(self._log.episode_starts, row, side="right") - 1
        return int(self._log.episode_ends[position]) + 1

    def _episode(self, start: int) -> Any:
        if self._log.has_episodes:
            return stock_episode(steps_of(self._log, slice(start, self._end_of_episode(start))))
        return RowWindow(self._log, slice(start, min(start + WINDOW_ROWS, len(self._log))))

    def _transition(self, row: int, to_go: bool = False) -> Any:
        if to_go and not self._log.has_episodes:
            raise DataError("returns-to-go need episodes, this log has none; use another algorithm")
        return transition_at(self._log, row, self._end_of_episode(row) if self._log.has_episodes else row + 1)


class LazyReplayBuffer(ColumnarReplayBuffer):
    """A d3rlpy replay buffer over a log on disk; it cannot grow.

    ``sample_transition_batch`` draws from all rows through a ``BlockSampler`` (with next actions): each row
    once in an epoch, where a buffer in memory draws with replacement. ``episodes``, ``transitions`` and all
    that evaluators read show ``sample``, episodes that fit the memory. Trajectories, returns-to-go and dumps
    raise DataError: they would need all rows of an episode at once.
    """

    def __init__(self, sampler: BlockSampler, sample: Transitions, statistics: LogTally) -> None:
        super().__init__(sample, seed=0)
        self._sampler, self.statistics = sampler, statistics
        # position of the draws, to save and restore
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    def sample_transition_batch(self, batch_size: int) -> Any:
        """Draw a mini-batch of ``batch_size`` rows; each row comes once in an epoch."""
        columns = self._sampler.draw(batch_size)
        drawn = {name: columns[name].astype(np.float32, copy=False) for name in _DRAWN}
        for name in ("actions", "next_actions", "rewards", "terminated"):
            drawn[name] = drawn[name].reshape(batch_size, -1)
        return _dataset.TransitionMiniBatch(
            terminals=drawn.pop("terminated"),
            **drawn,
            intervals=np.ones((batch_size, 1), dtype=np.float32),
            transitions=LazySequence(batch_size, _refuse_whole),
        )

    sample_trajectory = sample_trajectory_batch = whole_log = dump = _refuse_whole  # type: ignore[assignment]

    @property
    def transition_count(self) -> int:
        """Number of rows that are drawn from."""
        return self.statistics.rows


def to_d3rlpy(transitions: Transitions) -> Any:
    """d3rlpy's own, growable buffer with every transition of the log.

    An episode that did not terminate gets one step more, with reward 0, that carries its last observation;
    rows without episodes become episodes of their own. Raises DataError where a next observation inside an
    episode is not the observation of the row below.
    """
    info = vars(dataset_info_of(transitions))
    return _dataset.ReplayBuffer(_dataset.InfiniteBuffer(), episodes=_stock_episodes(transitions), **info)


def from_d3rlpy(buffer: Any) -> Transitions:
    """The transitions of any d3rlpy buffer; the last step of an episode that was cut has none."""
    if isinstance(buffer, ColumnarReplayBuffer):
        return buffer.whole_log()
    episodes = []
    for episode in buffer.episodes:
        if not isinstance(episode.observations, np.ndarray):
            raise DataError("the replay buffer holds tuple observations; flatten them into one array")
        rewards, terminated = np.asarray(episode.rewards), bool(episode.terminated)
        episodes.append(episode_rows(episode.observations, episode.actions, rewards, terminated))
    columns = join_episodes(episodes, "the replay buffer")
    notes = follow(columns, "the replay buffer")
    info = buffer.dataset_info
    space: Discrete | Continuous = Continuous(info.action_size)
    if info.action_space == d3rlpy.ActionSpace.DISCRETE:
        space, columns["actions"] = Discrete(info.action_size), columns["actions"].reshape(-1)
    return Transitions(**columns, action_space=space, metadata=Metadata(notes=tuple(notes)))


def _stock_episodes(log: Transitions) -> list[Any]:
    return [stock_episode(steps) for steps in d3rlpy_steps(log)]


def _gather(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of a column as float32, the only dtype that d3rlpy accepts."""
    # `take` is twice as fast, but copies the whole column first where it is not contiguous
    picked = column.take(rows, axis=0) if column.flags.c_contiguous else column[rows]
    return picked.astype(np.float32, copy=False)


def _cumulative(weights: np.ndarray) -> np.ndarray:
    total = np.cumsum(weights, dtype=np.float64)
    return total / total[-1]
