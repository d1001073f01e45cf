"""The replay as a log: row by row against a plain list of what was played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline import Continuous, Discrete, Transitions
from koffline.errors import DataError
from koffline.online.artifacts import replay_transitions
from koffline.online.paths import PathReplay, Paths

BOX = Continuous(2, (-0.5, -1.0), (0.5, 1.0))
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "steps")
Row = dict[str, Any]


def play(
    replay: PathReplay, run: int, steps: int, copies: int = 2, ends: float = 0.2, seed: int = 0
) -> list[list[Row]]:
    """Play copies of a random world in turn and append their sub-episodes; all episodes, as lists of rows."""
    generator = np.random.default_rng(seed)
    is_discrete = replay.held(run).actions.ndim == 2
    episodes: list[list[Row]] = []
    current: list[list[Row]] = [[] for _ in range(copies)]
    numbers, open_rows = [0] * copies, [[] for _ in range(copies)]
    here = generator.normal(size=(copies, 3)).astype(np.float32)
    for copy in range(copies):
        episodes.append(current[copy])
    for _ in range(steps):
        for copy in range(copies):
            there = generator.normal(size=3).astype(np.float32)
            over = generator.random() < ends
            terminated = over and generator.random() < 0.5
            action = generator.integers(0, 4) if is_discrete else generator.normal(size=2).astype(np.float32)
            reward = float(np.float32(generator.normal()))
            values = (here[copy].copy(), action, reward, there, terminated, over and not terminated)
            row = dict(zip(COLUMNS, (*values, len(current[copy])), strict=True))
            current[copy].append(row)
            open_rows[copy].append(row)
            here[copy] = there
            if over or len(open_rows[copy]) == replay.path_length or generator.random() < 0.1:
                replay.append(np.array([run]), one_path(open_rows[copy], copy, numbers[copy], replay))
                open_rows[copy] = []
            if over:
                current[copy], numbers[copy] = [], numbers[copy] + 1
                episodes.append(current[copy])
                here[copy] = generator.normal(size=3)
    for copy in range(copies):
        if open_rows[copy]:
            replay.append(np.array([run]), one_path(open_rows[copy], copy, numbers[copy], replay))
    return [episode for episode in episodes if episode]


def one_path(rows: list[Row], copy: int, number: int, replay: PathReplay) -> Paths:
    filler = replay.path_length - len(rows)

    def padded(values: list[Any], extra: int = 0) -> np.ndarray:
        return np.stack([*values, *[np.full_like(values[-1], 77)] * (filler + extra)])[None]

    states = [row["observations"] for row in rows] + [rows[-1]["next_observations"]]
    return Paths(
        observations=padded(states),
        actions=padded([np.asarray(row["actions"]) for row in rows]),
        rewards=padded([np.asarray(row["rewards"]) for row in rows]),
        lengths=np.array([len(rows)]),
        terminated=np.array([rows[-1]["terminated"]]),
        truncated=np.array([rows[-1]["truncated"]]),
        environments=np.array([copy]),
        episodes=np.array([number]),
        first_steps=np.array([rows[0]["steps"]]),
    )


def assert_is(log: Transitions, episodes: list[list[Row]], space: Any) -> None:
    assert log.n_episodes == len(episodes)
    found = [
        {name: getattr(log, name)[first + i] for name in COLUMNS}
        for first, length in zip(log.episode_starts, log.episode_lengths, strict=True)
        for i in range(length)
    ]
    for episode in episodes:
        for row in episode:
            expected = dict(row)
            if isinstance(space, Continuous):
                expected["actions"] = np.clip(row["actions"], space.low, space.high)
            if row is episode[-1] and not row["terminated"]:
                expected["truncated"] = True
            seen = found.pop(0)
            for name in COLUMNS:
                np.testing.assert_array_equal(seen[name], expected[name], name)
    assert not found


@pytest.mark.parametrize("space", [BOX, Discrete(4)], ids=str)
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    copies=st.integers(1, 3),
    length=st.integers(1, 5),
    capacity=st.integers(4, 60),
)
def test_episodes_are_put_together(space: Any, seed: int, copies: int, length: int, capacity: int) -> None:
    """Also where the oldest paths were overwritten; the other run's paths do not get in."""
    replay = PathReplay(2, capacity, length, 3, None if isinstance(space, Discrete) else 2)
    play(replay, 0, 5, seed=seed + 1)
    episodes = play(replay, 1, 30, copies=copies, seed=seed)
    paths = replay.held(1)
    keys = zip(paths.environments.tolist(), paths.episodes.tolist(), strict=True)
    held: dict[tuple[int, int], int] = {}
    for key, first_step in zip(keys, paths.first_steps.tolist(), strict=True):
        held.setdefault(key, first_step)
    whole = sum(first == 0 for first in held.values())
    if not whole:
        with pytest.raises(DataError, match="larger capacity"):
            replay_transitions(replay, 1, space)
        return
    found = replay_transitions(replay, 1, space)
    dropped = len(held) - whole
    notes = (f"{dropped} episodes whose beginning was overwritten were left out",) if dropped else ()
    assert found.metadata.notes == notes
    kept = [episode for episode in episodes if any(found_in(row, found) for row in episode[:1])]
    assert len(kept) == whole
    by_start = {tuple(episode[0]["observations"]): episode for episode in kept}
    starts = found.initial_observations()
    assert_is(found, [by_start[tuple(start)] for start in starts], space)


def found_in(row: Row, log: Transitions) -> bool:
    return bool((log.initial_observations() == row["observations"]).all(axis=1).any())
