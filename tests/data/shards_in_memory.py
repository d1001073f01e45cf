"""A log of shards in memory: what readers of lazy logs ask for, and how much they read."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from koffline.data.transitions import ROW_COLUMNS, Metadata, Transitions
from tests.data.logs import roll_out

BLOCK_ROWS = 64


@dataclass
class MemoryShards:
    """Behaves like LazyTransitions for its readers; ``rows_read`` counts what was read."""

    logs: list[Transitions]
    rows_read: int = 0
    opened: int = 0
    metadata: Metadata = field(default_factory=Metadata)
    sha256: str = "0" * 64

    @property
    def shards(self):
        return tuple(
            SimpleNamespace(name=f"shard-{i:05d}", rows=len(log), episodes=log.n_episodes, sha256=None)
            for i, log in enumerate(self.logs)
        )

    def __len__(self) -> int:
        return sum(len(log) for log in self.logs)

    def __getattr__(self, name):
        if name in ("action_space", "observation_shape", "has_episodes"):
            return getattr(self.logs[0], name)
        if name == "n_episodes":
            return sum(log.n_episodes for log in self.logs)
        raise AttributeError(name)

    @property
    def columns(self):
        return self.logs[0].columns

    @property
    def row_bytes(self) -> int:
        return sum(column.nbytes // len(self.logs[0]) for column in columns_of(self.logs[0]).values())

    def block_rows_for(self, memory_bytes: int) -> int:
        return max(1, memory_bytes // self.row_bytes)

    def shard_blocks(self, shard: int, block_rows: int | None = None):
        step = block_rows or BLOCK_ROWS
        for start in range(0, len(self.logs[shard]), step):
            yield self.read_rows(shard, start, min(start + step, len(self.logs[shard])))

    def blocks(self, block_rows: int | None = None):
        for shard in range(len(self.logs)):
            yield from self.shard_blocks(shard, block_rows)

    def read_rows(self, shard: int, start: int, stop: int) -> Transitions:
        log = self.logs[shard]
        assert 0 <= start < stop <= len(log)
        self.rows_read += stop - start
        return log.part(slice(start, stop))

    @contextlib.contextmanager
    def open_shard(self, shard: int):
        self.opened += 1
        yield shard

    def block_of(self, opened: int, shard: int, start: int, stop: int) -> Transitions:
        assert opened == shard
        return self.read_rows(shard, start, stop)

    def load(self) -> Transitions:
        """All rows in one log."""
        names = [name for name in ROW_COLUMNS if getattr(self.logs[0], name) is not None]
        names += ["steps"] if self.has_episodes else []
        joined = {name: np.concatenate([getattr(log, name) for log in self.logs]) for name in names}
        return Transitions(**joined, action_space=self.action_space, metadata=self.metadata)


def columns_of(log: Transitions) -> dict[str, np.ndarray]:
    present = {name: getattr(log, name) for name in ROW_COLUMNS}
    return {name: column for name, column in present.items() if column is not None}


def numbered_shards(
    episodes=(30, 17, 25), length: int = 12, discrete: bool = True, **changes
) -> MemoryShards:
    """Shards of episodes of 1 … ``length`` steps; rewards count the rows of the whole log."""
    generator = np.random.default_rng(5)
    logs, first = [], 0
    for seed, count in enumerate(episodes):
        lengths = generator.integers(1, length + 1, count).tolist()
        ends = generator.choice(["terminated", "truncated", "neither"], count).tolist()
        rollout = roll_out(ends, lengths, discrete=discrete, seed=seed)
        rewards = np.arange(first, first + len(rollout.rows), dtype=np.float64)
        made = {name: change(rewards) if callable(change) else change for name, change in changes.items()}
        logs.append(rollout.transitions(rewards=rewards, **made))
        first += len(rollout.rows)
    return MemoryShards(logs)


def leaves(value, name=""):
    """The values of a JSON object by their path, to be compared with ``pytest.approx``."""
    if not isinstance(value, (dict, list, tuple)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: leaf for key, part in items for path, leaf in leaves(part, f"{name}/{key}").items()}
