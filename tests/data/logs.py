"""Logs whose every row is known: episodes of a random walk, recorded step by step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from hypothesis import strategies as st

from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.sources import open_transitions
from koffline.data.transitions import (
    REQUIRED_COLUMNS,
    Continuous,
    Discrete,
    Metadata,
    Transitions,
)


def small(**changes) -> Transitions:
    """Four rows, any field of which may be changed."""
    columns = {
        "observations": np.arange(12.0, dtype=np.float32).reshape(4, 3),
        "actions": np.array([0, 1, 1, 0]),
        "rewards": np.array([1.0, 2.0, 3.0, 4.0]),
        "next_observations": np.arange(12.0, dtype=np.float32).reshape(4, 3) + 3,
        "terminated": np.array([False, True, False, False]),
        "truncated": np.array([False, False, False, True]),
        "action_space": Discrete(2),
    }
    return Transitions(**{**columns, **changes})


class Row(NamedTuple):
    """One step as it happened."""

    observation: np.ndarray
    action: np.ndarray
    reward: float
    next_observation: np.ndarray
    terminated: bool
    truncated: bool
    episode: int
    step: int


@dataclass(frozen=True)
class Rollout:
    """Rows of whole episodes, and the space their actions come from."""

    rows: list[Row]
    action_space: Discrete | Continuous
    lengths: list[int] = field(default_factory=list)

    def episode(self, index: int) -> list[Row]:
        return [row for row in self.rows if row.episode == index]

    def transitions(self, **changes) -> Transitions:
        names = (*REQUIRED_COLUMNS, "episode_ids", "steps")
        columns = dict(
            zip(names, map(np.stack, zip(*self.rows, strict=True)), strict=True)
        )
        return Transitions(**{**columns, "action_space": self.action_space, **changes})


_ENDS = ("terminated", "truncated", "truncated", "terminated", "truncated")


def roll_out(
    ends=_ENDS,
    lengths=(4, 3, 5, 1, 2),
    discrete=True,
    shape=(3,),
    dtype=np.float32,
    seed=0,
):
    """Play episodes of a random walk; ``ends`` says how each ends: terminated,
    truncated, both or neither.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for episode, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        state = draw_state(generator, shape, dtype)
        for step in range(length):
            action = (
                np.int64(generator.integers(3))
                if discrete
                else generator.uniform(-1, 1, 2)
            )
            following = draw_state(generator, shape, dtype)
            reward = float(generator.standard_normal())
            flags = (
                step == length - 1 and end in (flag, "both")
                for flag in ("terminated", "truncated")
            )
            rows.append(Row(state, action, reward, following, *flags, episode, step))
            state = following
    return Rollout(
        rows, Discrete(3) if discrete else Continuous(2, -1.0, 1.0), list(lengths)
    )


def draw_state(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: type
) -> np.ndarray:
    if dtype == np.uint8:
        return generator.integers(0, 256, shape).astype(np.uint8)
    return generator.standard_normal(shape).astype(dtype)


def numbered_log(episodes: int = 72, **changes) -> Transitions:
    """Episodes of 1 … 12 steps; rewards count the rows."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, 13, episodes).tolist()
    rollout = roll_out(
        generator.choice(["terminated", "truncated", "neither"], episodes), lengths
    )
    return rollout.transitions(
        rewards=np.arange(len(rollout.rows), dtype=np.float64), **changes
    )


def in_shards(log: Transitions, folder: Path, shard_rows: int = 150) -> LazyTransitions:
    with ShardWriter(folder, shard_rows) as writer:
        writer.append(log)
        writer.metadata = log.metadata
    return open_transitions(folder, lazy=True)


def leaves(value, name=""):
    """The values of a JSON object by their path, to be compared with
    ``pytest.approx``.
    """
    if not isinstance(value, (dict, list, tuple)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        path: leaf
        for key, part in items
        for path, leaf in leaves(part, f"{name}/{key}").items()
    }


def assert_same_rows(
    read_back: Transitions, expected: Transitions, terminal_next: bool = True
) -> None:
    """Every column equal, value for value; next observations of terminal rows only if
    they are kept.
    """
    assert len(read_back) == len(expected)
    for name in ("observations", "actions", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(read_back, name), getattr(expected, name))
    compared = slice(None) if terminal_next else ~expected.terminated
    np.testing.assert_array_equal(
        read_back.next_observations[compared], expected.next_observations[compared]
    )
    assert read_back.has_episodes == expected.has_episodes
    np.testing.assert_array_equal(read_back.episode_lengths, expected.episode_lengths)


def d4rl_arrays(
    rollout: Rollout, **changes: np.ndarray | None
) -> dict[str, np.ndarray]:
    """The arrays of a D4RL file, some changed; None takes one out."""
    log = rollout.transitions()
    arrays = {
        "observations": log.observations,
        "actions": log.actions,
        "rewards": log.rewards.astype(np.float32),
        "terminals": log.terminated,
        "next_observations": log.next_observations,
        "timeouts": log.truncated,
    }
    return {
        key: array for key, array in {**arrays, **changes}.items() if array is not None
    }


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A plain HDF5 file with these arrays."""
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    return path


@dataclass(frozen=True)
class Drawn:
    """What hypothesis drew; the log itself is made in the test, where it may be checked
    by any means.
    """

    lengths: list[int]
    rollout: dict
    changes: set[str]
    episodes: bool

    def log(self) -> Transitions:
        rollout = roll_out(lengths=self.lengths, **self.rollout)
        generator = np.random.default_rng(1)
        count = len(rollout.rows)
        columns = {
            "behavior_log_probabilities": -generator.random(count),
            "weights": generator.random(count).astype(np.float32) + 0.5,
            "clusters": (
                generator.integers(-4, 4, len(self.lengths)).repeat(self.lengths)
            ),
            "metadata": Metadata(
                gamma=0.9, extra={"environment": "walk"}, notes=("made up",)
            ),
        }
        changes = {name: columns[name] for name in self.changes}
        return rollout.transitions(
            **changes, **({} if self.episodes else {"episode_ids": None, "steps": None})
        )


@st.composite
def drawn_logs(draw, episodes: bool | None = None) -> Drawn:
    """Any log: discrete or not, any mix of ends, with or without episodes, extras and
    metadata.
    """
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    end = st.sampled_from(["terminated", "truncated", "both", "neither"])
    rollout = {
        "ends": draw(st.lists(end, min_size=len(lengths), max_size=len(lengths))),
        "discrete": draw(st.booleans()),
        "shape": draw(st.sampled_from([(1,), (3,), (2, 2)])),
        "dtype": draw(st.sampled_from([np.float32, np.float64, np.uint8])),
        "seed": draw(st.integers(0, 2**16)),
    }
    extras = ["behavior_log_probabilities", "weights", "clusters", "metadata"]
    changes = draw(st.sets(st.sampled_from(extras)))
    return Drawn(
        lengths, rollout, changes, draw(st.booleans()) if episodes is None else episodes
    )
