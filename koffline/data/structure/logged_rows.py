"""The rows that the tests of structure look at, and where episodes meet in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions

_MOST_COLUMNS = 24  # of an observation; wider ones are projected
_MOST_NUMBERS = 256  # of an observation that are looked at
_MEASURED_ROWS = 20_000
_FEW_OBSERVATIONS = 64
_MOST_ACTIONS = 24  # choices that get a column each; more are hashed to as many
_LEAST_SPREAD = 1e-6
_HASHED_AT_ONCE = 2**22  # numbers


@dataclass(frozen=True, eq=False)
class LoggedRows:
    """Whole episodes of a log, in the log's order.

    units: numbers (E,) of the episodes in the log; neighbours in the log have
    consecutive numbers.
    """

    log: Transitions
    units: Int[np.ndarray, " episode"]

    @classmethod
    def of(
        cls, log: Transitions, units: Int[np.ndarray, " episode"] | None = None
    ) -> LoggedRows:
        """All rows of ``log``; without ``units`` its episodes follow each other in the
        log.
        """
        if units is None:
            units = np.arange(len(log.unit_starts))
        return cls(log=log, units=np.asarray(units))

    @cached_property
    def firsts(self) -> Int[np.ndarray, " episode"]:
        """First row of each episode."""
        return np.asarray(self.log.episode_starts)

    @cached_property
    def lasts(self) -> Int[np.ndarray, " episode"]:
        """Last row of each episode."""
        return np.asarray(self.log.episode_ends)

    @cached_property
    def is_last(self) -> Bool[np.ndarray, " row"]:
        """Whether a row is the last one of its episode."""
        mask = np.zeros(len(self.log), dtype=np.bool_)
        mask[self.lasts] = True
        return mask

    @cached_property
    def episode(self) -> Int[np.ndarray, " row"]:
        """Number of each row's episode within these rows."""
        return np.repeat(
            np.arange(len(self.firsts)), np.asarray(self.log.episode_lengths)
        )

    @cached_property
    def meetings(self) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
        """Last row of an episode, and first row of the episode that follows it in the
        log.
        """
        neighbours = np.flatnonzero(np.diff(self.units) == 1)
        return self.lasts[neighbours], self.firsts[neighbours + 1]

    @cached_property
    def observation_keys(self) -> np.ndarray:
        """One hash (N,) per observation: equal observations have equal hashes."""
        return row_keys(self.log.observations)

    @cached_property
    def next_keys(self) -> np.ndarray:
        """One hash (N,) per next observation, comparable with ``observation_keys``."""
        return row_keys(self.log.next_observations)

    @cached_property
    def few_observations(self) -> Int[np.ndarray, " value"] | None:
        """The sorted keys of all observations, if at most 64 different ones were
        logged.
        """
        values = np.unique(self.observation_keys)
        if len(values) <= _FEW_OBSERVATIONS:
            return values
        return None

    @cached_property
    def _columns(self) -> Int[np.ndarray, " column"]:
        """Numbers of an observation that are looked at: all, or 256 drawn from a
        picture.
        """
        width = int(np.prod(self.log.observation_shape, dtype=np.int64))
        if width <= _MOST_NUMBERS:
            return np.arange(width)
        return np.sort(
            np.random.default_rng(0).choice(width, size=_MOST_NUMBERS, replace=False)
        )

    def _numbers(
        self, rows: np.ndarray, following: bool = False
    ) -> Float[np.ndarray, "some column"]:
        """The numbers of some observations that are looked at, as float64."""
        if following:
            source = self.log.next_observations
        else:
            source = self.log.observations
        flat = source.reshape(len(source), -1)
        if flat.shape[1] == len(self._columns):
            return np.asarray(flat[rows], dtype=np.float64)
        return np.asarray(flat[np.ix_(rows, self._columns)], dtype=np.float64)

    @cached_property
    def _scale(
        self,
    ) -> tuple[Float[np.ndarray, " column"], Float[np.ndarray, " column"]]:
        """Mean and standard deviation of each number, over at most some 20,000 rows."""
        stride = max(1, len(self.log) // _MEASURED_ROWS)
        sample = self._numbers(np.arange(0, len(self.log), stride))
        mean = sample.mean(axis=0)
        deviation = sample.std(axis=0)
        is_constant = deviation <= _LEAST_SPREAD * (1.0 + np.abs(mean))
        return mean, np.where(is_constant, 1.0, deviation)

    @cached_property
    def _projection(self) -> Float[np.ndarray, "column projected"] | None:
        """Random projection of wide observations; None for narrow ones."""
        width = len(self._columns)
        if width <= _MOST_COLUMNS:
            return None
        generator = np.random.default_rng(1)
        directions = generator.normal(size=(width, _MOST_COLUMNS)) / np.sqrt(
            _MOST_COLUMNS
        )
        return directions.astype(np.float32)

    def states(
        self, rows: np.ndarray, following: bool = False
    ) -> Float[np.ndarray, "some column"]:
        """Standardised observations of some rows (or their next ones), at most 24
        columns wide.
        """
        mean, deviation = self._scale
        numbers = self._numbers(rows=rows, following=following)
        standard = ((numbers - mean) / deviation).astype(np.float32)
        if self._projection is None:
            return standard
        return standard @ self._projection

    def actions(self, rows: np.ndarray) -> Float[np.ndarray, "some action"]:
        """Actions of some rows as numbers: one column per choice, or standardised
        quantities.
        """
        taken = np.asarray(self.log.actions[rows])
        if isinstance(self.log.action_space, Discrete):
            width = min(self.log.action_space.n, _MOST_ACTIONS)
            return np.eye(width, dtype=np.float32)[taken % width]
        sample = np.asarray(
            self.log.actions[:: max(1, len(self.log) // _MEASURED_ROWS)],
            dtype=np.float64,
        )
        deviation = sample.std(axis=0)
        deviation = np.where(deviation > _LEAST_SPREAD, deviation, 1.0)
        return ((taken - sample.mean(axis=0)) / deviation).astype(np.float32)


def row_keys(rows: np.ndarray) -> Int[np.ndarray, " row"]:
    """A 64-bit hash of each row's numbers in single precision, so that equal rows have
    equal hashes.
    """
    count = len(rows)
    width = int(np.prod(rows.shape[1:], dtype=np.int64))
    factors = np.random.default_rng(0).integers(
        1, 2**63, size=width, dtype=np.uint64
    ) * np.uint64(2) + np.uint64(1)
    keys = np.empty(count, dtype=np.uint64)
    block = max(1, _HASHED_AT_ONCE // max(1, width))
    for start in range(0, count, block):
        part = np.asarray(rows[start : start + block], dtype=np.float32).reshape(
            -1, width
        ) + np.float32(0.0)
        words = np.ascontiguousarray(part).view(np.uint32).astype(np.uint64)
        keys[start : start + len(part)] = (words * factors).sum(axis=1, dtype=np.uint64)
    return keys.view(np.int64)
