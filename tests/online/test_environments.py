"""Copies of an environment: what they play, and what is said when one breaks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from koffline.envs.make import Copies
from koffline.errors import ConfigError
from tests.online.toys import NAME, STEPS


@pytest.mark.parametrize("actions", ["box", "matrix", "discrete"])
def test_copies_play_episodes_of_their_own(actions: str) -> None:
    """Toy shows (seed, steps taken), pays steps + sum of action / 10; even seeds terminate, odd are cut."""
    generator = np.random.default_rng(0)
    with contextlib.closing(Copies(NAME, actions=actions)) as copies:
        space = copies.action_space
        np.testing.assert_array_equal(copies.reset([0, 1, 2]), [[0, 0], [1, 0], [2, 0]])
        for taken in range(1, STEPS + 1):
            chosen = (
                generator.integers(0, 3, 2)
                if actions == "discrete"
                else generator.uniform(space.low, space.high, (2, space.k)).astype(np.float32)
            )
            here = copies.step([0, 1], chosen)  # the third one rests
            np.testing.assert_array_equal(here.observations, [[0, taken], [1, taken]])
            native = chosen + 5 if actions == "discrete" else chosen
            np.testing.assert_allclose(here.rewards, taken + 0.1 * native.reshape(2, -1).sum(axis=1), 1e-6)
            np.testing.assert_array_equal(here.terminated, [taken == STEPS, False])
            np.testing.assert_array_equal(here.truncated, [False, taken == STEPS])
        np.testing.assert_array_equal(copies.reset([7], [1]), [[7, 0]])
        np.testing.assert_array_equal(copies.step([2, 1], chosen).observations, [[2, 1], [7, 1]])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "an observation that is not a finite number"),
        ("reward", "a reward that is not a finite number"),
        ("raise", r"failed in step .*100% broken in step"),
        ("reset", r"failed in reset .*100% broken in reset"),
        ("shape", "failed in step"),
        ("sequence", "wrap it so that they are arrays"),
    ],
)
def test_a_fault_is_one_line(fault: str, reason: str) -> None:
    def play() -> None:
        copies = Copies(NAME, fault=fault)
        copies.reset([0, 1, 2])
        for _ in range(2):
            copies.step(range(3), np.zeros((3, 2)))

    with pytest.raises(ConfigError, match=reason) as caught:
        play()
    assert "\n" not in str(caught.value)
    assert "Toy-v0" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("InvertedPendulun-v5", {}, "did you mean InvertedPendulum-v5"),
        (NAME, {"actions": "multi"}, "Discrete and Box actions"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(name: str, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Copies(name, **options)
    assert "\n" not in str(caught.value)
