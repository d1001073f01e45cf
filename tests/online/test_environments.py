"""Copies in this process and in workers: what they play, stacks in them, what happens when one breaks."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest

from koffline.data.hdf5 import write_hdf5
from koffline.errors import ConfigError
from koffline.online.artifacts import LOGGED, replay_transitions
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.environments import LocalEnvironments, WorkerEnvironments
from koffline.online.lockstep import LockStep
from tests.online.toys import NAME, STEPS

KINDS = {"local": LocalEnvironments, "async": WorkerEnvironments}
COPIES = 3
ZEROS = np.zeros((COPIES, 2))
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def made() -> Any:
    """Makes environments and closes them after the test."""
    with contextlib.ExitStack() as kept:
        yield lambda kind, name=NAME, **options: kept.enter_context(
            contextlib.closing(KINDS[kind](name, options, COPIES))
        )


@kinds
@pytest.mark.parametrize("actions", ["box", "matrix", "discrete"])
def test_an_episode_follows_another_within_a_step(kind: str, actions: str, made: Any) -> None:
    """Toy shows (seed, steps taken), pays steps + sum of action / 10; even seeds terminate, odd are cut."""
    environments, generator = made(kind, actions=actions), np.random.default_rng(0)
    here = environments.reset([0, 1, 2])
    np.testing.assert_array_equal(here, [[0, 0], [1, 0], [2, 0]])
    for step in range(3 * STEPS):
        space = environments.action_space
        chosen = (
            generator.integers(0, 3, COPIES)
            if actions == "discrete"
            else generator.uniform(space.low, space.high, (COPIES, space.k)).astype(np.float32)
        )
        out = environments.step(chosen, [10 * (step // STEPS + 1) + copy for copy in range(COPIES)])
        taken, is_over, even = step % STEPS + 1, step % STEPS == STEPS - 1, here[:, 0] % 2 == 0
        np.testing.assert_array_equal(out.final_observations, np.c_[here[:, 0], [taken] * COPIES])
        native = chosen + 5 if actions == "discrete" else chosen
        np.testing.assert_allclose(
            out.rewards, taken + 0.1 * native.reshape(COPIES, -1).sum(axis=1), rtol=1e-6
        )
        np.testing.assert_array_equal(out.terminated, is_over & even)
        np.testing.assert_array_equal(out.truncated, is_over & ~even)
        fresh = [[10 * (step // STEPS + 1) + copy, 0] for copy in range(COPIES)]
        here = out.observations
        np.testing.assert_array_equal(here, fresh if is_over else out.final_observations)


@kinds
def test_observations_that_are_no_vectors_are_flattened(kind: str, made: Any) -> None:
    """Parts in Gymnasium's order: a, then b one-hot."""
    shaped = made(kind, shape=(2, 1, 2))
    assert shaped.reset([2, 3, 4]).shape == (COPIES, 4)
    assert shaped.step(ZEROS, [4, 5, 6]).final_observations.shape == (COPIES, 4)
    joined = made(kind, fault="dict")
    np.testing.assert_array_equal(joined.reset([2, 3, 4])[:2], [[2, 1, 0, 0, 0], [3, 1, 0, 0, 0]])
    np.testing.assert_array_equal(joined.step(ZEROS, [4, 5, 6]).observations[1], [3, 0, 1, 0, 0])


@kinds
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "an observation that is not a finite number"),
        ("reward", "a reward that is not a finite number"),
        ("raise", r"failed in step .*100% broken in step"),
        ("shape", "shape"),
    ],
)
def test_a_fault_is_one_line(kind: str, fault: str, reason: str, made: Any) -> None:
    def play() -> None:
        environments = made(kind, fault=fault)
        environments.reset([0, 1, 2])
        for _ in range(2):
            environments.step(ZEROS, [4, 6, 8])

    with pytest.raises(ConfigError, match=reason) as caught:
        play()
    assert "\n" not in str(caught.value)
    assert "oy" in str(caught.value), "the environment is named"


@pytest.mark.parametrize("when", ["reset", "step", "by itself"])
def test_a_worker_that_dies_is_named_and_the_others_end(when: str, made: Any) -> None:
    environments = made("async", fault="die" if when == "by itself" else "")
    environments.reset([0, 1, 2])
    environments.step(ZEROS, [4, 6, 8])
    if when != "by itself":
        os.kill(environments.workers[1].pid, signal.SIGKILL)
        environments.workers[1].join()
    with pytest.raises(ConfigError, match=r"a worker process of .* died in .*copy 1: -9") as caught:
        environments.reset([0, 1, 2]) if when == "reset" else environments.step(ZEROS, [4, 6, 8])
    assert "\n" not in str(caught.value)
    assert not any(worker.is_alive() for worker in environments.workers)


def test_workers_leave_ctrl_c_to_their_maker_and_end_with_it(made: Any) -> None:
    environments = made("async")
    environments.reset([2, 4, 6])
    for worker in environments.workers:
        os.kill(worker.pid, signal.SIGINT)
    np.testing.assert_array_equal(environments.step(ZEROS, [6, 8, 9]).observations[1], [4, 1])
    environments.close()
    assert not any(worker.is_alive() for worker in environments.workers)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("InvertedPendulun-v5", {}, "did you mean InvertedPendulum-v5"),
        (NAME, {"actions": "multi"}, "Discrete and Box actions"),
    ],
)
@kinds
def test_what_cannot_be_played_is_refused_in_one_line(
    kind: str, name: str, options: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        KINDS[kind](name, options, 2)
    assert "\n" not in str(caught.value)


CONFIG = OnlineConfig(
    NAME,
    n_environments=2,
    steps_per_iteration=8,
    window_length=2,
    batch_size=8,
    learning_starts=8,
    hidden=(4,),
)


def stack_of(kind: str, **changes: Any) -> Any:
    """Two runs of two copies each, closed after a with."""
    config = CONFIG.with_changes(vectorization=kind, **changes)
    return contextlib.closing(LockStep([OnlineRun(config, seed) for seed in (3, 4)]))


def iterated(stack: LockStep, times: int) -> LockStep:
    for _ in range(times):
        stack.iterate()
    return stack


def assert_same(left: Any, right: Any) -> None:
    """Nested states, arrays to the bit."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left.keys() - {"seconds"}:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    else:
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("kind", "before", "actions"), [("async", 5, "box"), ("local", 6, "discrete")])
def test_every_kind_plays_the_same_and_goes_on_from_a_state(kind: str, before: int, actions: str) -> None:
    options = {"environment_options": {"actions": actions}}
    with stack_of("local", **options) as stack, stack_of(kind, **options) as again:
        state = iterated(stack, before).state_dict()
        iterated(stack, 4)
        iterated(again, 2)
        assert again.load_state_dict(state)
        assert_same(iterated(again, 4).state_dict(), stack.state_dict())


def test_a_world_that_does_not_repeat_begins_anew() -> None:
    with stack_of("local") as stack:
        state = iterated(stack, 6).state_dict()
        state["collector"]["observations"] += 1.0
        assert not stack.load_state_dict(state)
        log = replay_transitions(iterated(stack, 6).replay, 0, stack.shape.action_space)
        assert log.episode_lengths.max() == STEPS


@pytest.mark.parametrize("actions", ["box", "discrete"])
def test_a_run_starts_from_the_log_of_another(actions: str, tmp_path: Any) -> None:
    """Offline to online: the log's episodes are in the replay, apart from those played after it."""
    options = {"environment_options": {"actions": actions}}
    with stack_of("local", **options) as stack:
        log = replay_transitions(iterated(stack, 6).replay, 0, stack.shape.action_space)
    write_hdf5(log, tmp_path / "log.hdf5")
    with stack_of("local", initial_log=str(tmp_path / "log.hdf5"), **options) as stack:
        np.testing.assert_allclose(stack.moments.mean, [log.observations.mean(axis=0)] * 2, rtol=1e-6)
        iterated(stack, 3)
        for run in range(2):
            held = stack.replay.held(run)
            assert held.lengths[held.environments == LOGGED].sum() == len(log)
            assert held.lengths[held.environments != LOGGED].sum() == 3 * 8
            found = replay_transitions(stack.replay, run, stack.shape.action_space)
            assert found.select(np.arange(len(log))).sha256 == log.sha256
        assert stack.take_metrics()[0], "it learned at once"
