"""What is in a log, as one record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from koffline.data.raw import space_to_json
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.transitions import Transitions


@dataclass(frozen=True)
class Spread:
    """Least, mean and greatest of some numbers."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class LogSummary:
    """Rows, episodes, spaces, returns, ends, coverage of the actions, and where it all comes from.

    ``time_limit`` is the length that all cut episodes share and none exceeds. ``action_counts`` (n) is for
    discrete actions, ``action_ranges`` (k) for continuous ones. Returns are undiscounted, of whole episodes
    as logged.
    """

    source: str | None
    sha256: str
    rows: int
    episodes: int
    observation_shape: tuple[int, ...]
    observation_dtype: str
    action_space: ActionSpace
    rewards: Spread
    returns: Spread | None
    lengths: Spread | None
    terminated: int
    truncated: int
    unfinished: int
    time_limit: int | None
    action_counts: tuple[int, ...] | None
    action_ranges: tuple[Spread, ...] | None
    has_log_probabilities: bool
    has_weights: bool
    gamma: float | None
    extra: Mapping[str, Any]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["action_space"] = space_to_json(self.action_space)
        for name in ("rewards", "returns", "lengths"):
            values[name] = None if values[name] is None else asdict(values[name])
        if self.action_ranges is not None:
            values["action_ranges"] = [asdict(spread) for spread in self.action_ranges]
        values["extra"] = dict(self.extra)
        return values


def summarise(log: Transitions) -> LogSummary:
    """Look through a log once."""
    discrete = isinstance(log.action_space, Discrete)
    truncated = log.truncated & ~log.terminated
    unfinished = 0
    if log.has_episodes:
        unfinished = int(np.sum(~(log.terminated | log.truncated)[log.episode_ends]))
    return LogSummary(
        source=log.metadata.source,
        sha256=log.sha256,
        rows=len(log),
        episodes=log.n_episodes,
        observation_shape=log.observation_shape,
        observation_dtype=str(log.observations.dtype),
        action_space=log.action_space,
        rewards=_spread(log.rewards),
        returns=_spread(log.returns()) if log.has_episodes else None,
        lengths=_spread(log.episode_lengths) if log.has_episodes else None,
        terminated=int(log.terminated.sum()),
        truncated=int(truncated.sum()),
        unfinished=unfinished,
        time_limit=_time_limit(log, truncated),
        action_counts=_action_counts(log) if discrete else None,
        action_ranges=None if discrete else tuple(_spread(column) for column in log.actions.T),
        has_log_probabilities=log.behavior_log_probabilities is not None,
        has_weights=log.weights is not None,
        gamma=log.metadata.gamma,
        extra=log.metadata.extra,
        notes=log.metadata.notes,
    )


def _spread(values: np.ndarray) -> Spread:
    mean = math.fsum(np.asarray(values, dtype=np.float64)) / len(values)
    return Spread(float(values.min()), mean, float(values.max()))


def _time_limit(log: Transitions, truncated: np.ndarray) -> int | None:
    if not log.has_episodes:
        return None
    lengths = np.asarray(log.episode_lengths)
    cut = np.unique(lengths[truncated[log.episode_ends]])
    return int(cut[0]) if len(cut) == 1 and lengths.max() == cut[0] else None


def _action_counts(log: Transitions) -> tuple[int, ...]:
    assert isinstance(log.action_space, Discrete)
    counts = np.bincount(log.actions, minlength=log.action_space.n)
    return tuple(int(count) for count in counts)
