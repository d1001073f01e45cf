"""The bridge from a log on disk to d3rlpy: mini-batches from all of its rows, all else from a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.disk.batches import BlockSampler
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.replay_views import LazySequence
from koffline.data.statistics import LogStatistics
from koffline.data.transitions import Transitions
from koffline.errors import DataError

_dataset = import_d3rlpy().dataset


class LazyReplayBuffer(ColumnarReplayBuffer):
    """A d3rlpy replay buffer over a log on disk; it cannot grow.

    ``sample_transition_batch`` draws from all rows through a ``BlockSampler`` (with next actions): each row
    once in an epoch, where a buffer in memory draws with replacement. ``episodes``, ``transitions`` and all
    that evaluators read show ``sample``, episodes that fit the memory. Trajectories, returns-to-go and dumps
    raise DataError: they would need all rows of an episode at once.
    """

    def __init__(self, sampler: BlockSampler, sample: Transitions, statistics: LogStatistics) -> None:
        super().__init__(sample, seed=0)
        self._sampler = sampler
        self.statistics = statistics

    def sample_transition_batch(self, batch_size: int) -> Any:
        """``batch_size`` rows, none of which comes twice in an epoch."""
        drawn = self._sampler.draw(batch_size)
        assert drawn.next_actions is not None, "the sampler was made with next actions"
        return _dataset.TransitionMiniBatch(
            observations=_float32(drawn.observations),
            actions=_float32(drawn.actions).reshape(batch_size, -1),
            rewards=_float32(drawn.rewards).reshape(-1, 1),
            next_observations=_float32(drawn.next_observations),
            next_actions=_float32(drawn.next_actions).reshape(batch_size, -1),
            terminals=_float32(drawn.terminated).reshape(-1, 1),
            intervals=np.ones((batch_size, 1), dtype=np.float32),
            transitions=LazySequence(batch_size, lambda _: _refuse("returns-to-go")),
        )

    def sample_trajectory(self, length: int) -> Any:
        """Raises DataError."""
        _refuse("trajectories")

    def sample_trajectory_batch(self, batch_size: int, length: int) -> Any:
        """Raises DataError."""
        _refuse("trajectories")

    def whole_log(self) -> Transitions:
        """Raises DataError."""
        _refuse("paths and copies")

    def dump(self, f: Any) -> None:
        """Raises DataError."""
        _refuse("dumps")

    @property
    def transition_count(self) -> int:
        """Number of rows that are drawn from."""
        return self.statistics.rows

    def state_dict(self) -> dict[str, Any]:
        """Where the draws are, as plain numbers."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the very same mini-batches. Raises ConfigError for another buffer's state."""
        self._sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        self._sampler.close()


def _float32(column: np.ndarray) -> np.ndarray:
    return column.astype(np.float32, copy=False)


def _refuse(what: str) -> NoReturn:
    raise DataError(
        f"{what} need whole episodes in memory, this log stays on disk; load it (data.lazy=false)"
    )
