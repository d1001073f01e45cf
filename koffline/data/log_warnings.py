"""What is worth a look in the sound rows of a log, counted block by block, and the sentences that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from koffline.data.columns import counted
from koffline.data.flat import rows_are_linked
from koffline.data.spaces import ActionSpace, Discrete
from koffline.data.transitions import Transitions
from koffline.data.units import RepeatedRows

_MOST_LISTED = 20
_FEW_EPISODES = 10
_COLUMNS = ("observations", "actions", "rewards")


@dataclass
class RowCount:
    """How many rows, and the first of them."""

    count: int = 0
    first: int = -1

    def add(self, is_so: np.ndarray, start: int) -> None:
        """Rows of a block that begins at row ``start``; blocks come in order."""
        if is_so.any():
            self.merge(RowCount(int(is_so.sum()), int(is_so.argmax())), start)

    def merge(self, other: RowCount, start: int) -> None:
        """Rows of the part of the log that begins at row ``start``, below all rows so far."""
        if other.count:
            self.first = self.first if self.count else start + other.first
            self.count += other.count

    def __str__(self) -> str:
        return f"row {self.first}" if self.count == 1 else f"{self.count} rows (first: row {self.first})"


class WarningTally:
    """What is worth a look in sound rows; rows are numbered through all shards."""

    def __init__(self, space: ActionSpace, has_episodes: bool, most_hashes: int | None = None) -> None:
        self._space, self._has_episodes = space, has_episodes
        self._rows = self._episodes = 0
        self._found = {name: RowCount() for name in ("unfinished", "both", "broken", "shifted")}
        self._weighted, self._any_weight = False, False  # whether rows have weights, and any above 0
        self._repeated = RepeatedRows(most_hashes)
        self._ranges: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._counts = np.zeros(space.n if isinstance(space, Discrete) else 0, dtype=np.int64)
        self._first: np.ndarray | None = None  # observation
        self._last: Transitions | None = None  # the last row, alone

    def add(self, block: Transitions) -> None:
        """The next rows of a shard."""
        self._repeated.add(block)
        if block.weights is not None:
            self._weighted = True
            self._any_weight |= bool((block.weights > 0).any())
        for name in _COLUMNS:
            flat = getattr(block, name).reshape(len(block), -1)
            self._widen(name, flat.min(axis=0), flat.max(axis=0))
        if self._counts.size:
            self._counts += np.bincount(block.actions, minlength=len(self._counts))
        if block.steps is not None:
            begins = block.steps == 0
            self._episodes += int(begins.sum())
            self._found["both"].add(block.terminated & block.truncated, self._rows)
            if self._last is not None:
                linked = _linked(self._last, block.observations[:1])
                self._add_pairs(linked, begins[:1], self._last, self._rows - 1)
            linked = rows_are_linked(block.observations, block.next_observations)
            self._add_pairs(linked, begins[1:], block, self._rows)
            self._first = block.observations[:1] if self._first is None else self._first
            self._last = block.part(np.array([len(block) - 1]))  # copied: the block can be let go
        self._rows += len(block)

    def _add_pairs(self, linked: np.ndarray, ends: np.ndarray, above: Transitions, start: int) -> None:
        """Rows above others: whether those are their next steps, and where they begin another episode."""
        terminated, truncated = above.terminated[: len(ends)], above.truncated[: len(ends)]
        self._found["unfinished"].add(ends & ~(terminated | truncated), start)
        self._found["broken"].add(~linked & ~ends, start)
        self._found["shifted"].add(linked & ends & ~terminated, start)

    def end_shard(self) -> None:
        """The last row of a shard ends its episode; ready to be sent elsewhere."""
        if self._last is not None and not (self._last.terminated[0] or self._last.truncated[0]):
            self._found["unfinished"].merge(RowCount(1, 0), self._rows - 1)
        self._repeated.settle()

    def merge(self, other: WarningTally) -> None:
        """Add the rows of a later shard; both have ended."""
        if self._last is not None and other._first is not None and not self._last.terminated[0]:
            self._found["shifted"].add(_linked(self._last, other._first), self._rows - 1)
        for name, count in other._found.items():
            self._found[name].merge(count, self._rows)
        for name, (low, high) in other._ranges.items():
            self._widen(name, low, high)
        self._repeated.merge(other._repeated)
        self._counts += other._counts
        self._rows += other._rows
        self._weighted |= other._weighted
        self._any_weight |= other._any_weight
        self._episodes += other._episodes
        self._first = other._first if self._first is None else self._first
        self._last = other._last or self._last

    @property
    def is_weightless(self) -> bool:
        """Whether all rows have the weight 0, which is an error in all shards together."""
        return self._weighted and not self._any_weight

    def messages(self) -> Iterator[str]:
        """One sentence for each thing to look at."""
        yield from self._episode_messages()
        repeated, about = self._repeated.count(), "about " if self._repeated.level else ""
        if repeated:
            rows = f"{about}{repeated} of {self._rows} rows"
            yield f"{rows} repeat an earlier row exactly; were episodes written twice?"
        for name, (low, high) in self._ranges.items() if self._rows > 1 else ():
            constant = np.flatnonzero(low == high)
            if constant.size and len(low) == 1:
                yield f"{name} are all {low[0]:g}"
            elif constant.size:
                yield f"{name}: {constant.size} of {len(low)} columns are constant ({_listed(constant, 8)})"
        missing = np.flatnonzero(self._counts == 0)
        if missing.size:
            yield f"actions {_listed(missing, _MOST_LISTED)} never appear: nothing can be learnt of them"
        space = self._space
        if not isinstance(space, Discrete) and not np.isfinite([*space.low, *space.high]).all():
            yield "action bounds are infinite; declare them (--continuous LOW HIGH) for uniform policies"

    def _episode_messages(self) -> Iterator[str]:
        if not self._has_episodes:
            yield "no episodes: every row counts as an initial state, and intervals resample single rows"
            return
        if self._episodes < _FEW_EPISODES:
            yield f"only {counted(self._episodes, 'episode')}: an interval from so few is rough, or none"
        unfinished = self._found["unfinished"]
        sentences = {
            "unfinished": f"{unfinished.count} episodes end without a flag, the first in row "
            f"{unfinished.first}; taken as cut",
            "both": "{} are terminated and truncated; taken as terminated",
            "broken": "next observation is not the observation of the row below in {} inside episodes",
            "shifted": "the next observation is the first one of the following episode in {}; is it one "
            "stream cut into pieces, or was it exported by shifting the observations by one?",
        }
        for name, sentence in sentences.items():
            if self._found[name].count:
                yield sentence.format(self._found[name])

    def _widen(self, name: str, low: np.ndarray, high: np.ndarray) -> None:
        if name in self._ranges:
            low, high = np.minimum(low, self._ranges[name][0]), np.maximum(high, self._ranges[name][1])
        self._ranges[name] = low, high


def _listed(numbers: np.ndarray, most: int) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown}, … ({numbers.size} in all)" if numbers.size > most else shown


def _linked(above: Transitions, below: np.ndarray) -> np.ndarray:
    """(1,) whether the next observation of a row is the observation (1, ...) of the row below."""
    following = np.concatenate([above.next_observations, below])
    return rows_are_linked(np.concatenate([above.observations, below]), following)
