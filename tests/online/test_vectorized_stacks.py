"""Whole stacks in Gymnasium's vector environments: no path joins episodes, and resuming is exact."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import koffline
from koffline.cli import cli
from koffline.data.hdf5 import write_hdf5
from koffline.errors import ConfigError
from koffline.online.artifacts import write_model
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.online.replay_log import LOGGED, replay_transitions
from tests.algos.test_export import run_file
from tests.online.test_vector_environments import SameStep
from tests.online.toys import NAME, STEPS

CONFIG = OnlineConfig(
    NAME,
    n_environments=2,
    steps_per_iteration=8,
    path_length=10,
    window_length=2,
    batch_size=8,
    learning_starts=8,
    hidden=(4,),
)


def stack_of(kind: str, **changes: Any) -> Any:
    """Two runs of two copies each, closed after a with."""
    config = CONFIG.with_changes(vectorization="local" if kind == "same_step" else kind, **changes)
    runs = [OnlineRun(config, seed) for seed in (3, 4)]
    if kind != "same_step":
        return contextlib.closing(LockStep(runs))
    from koffline.online.vector_environments import VectorEnvironments, make_copy

    copies = SameStep([make_copy(NAME, config.environment_options, i) for i in range(4)])
    return contextlib.closing(LockStep(runs, VectorEnvironments(copies, "Toy", is_seeded=True)))


def iterated(stack: LockStep, times: int) -> None:
    for _ in range(times):
        stack.iterate()


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


@pytest.mark.parametrize("kind", ["local", "sync", "async", "same_step"])
def test_no_path_joins_two_episodes(kind: str) -> None:
    """Toy's observations are (seed, steps taken): one seed per path, steps that count, flags at step 3."""
    with stack_of(kind) as stack:
        iterated(stack, 6)
        for run in range(2):
            paths = stack.replay.held(run)
            for i, length in enumerate(paths.lengths):
                seeds, taken = paths.observations[i, : length + 1].T
                assert len(set(seeds)) == 1
                np.testing.assert_array_equal(taken, paths.first_steps[i] + np.arange(length + 1))
                assert (paths.terminated[i] or paths.truncated[i]) == (taken[-1] == STEPS)
                assert not (paths.terminated[i] and paths.truncated[i])
            assert {*paths.terminated, *paths.truncated} == {True, False}
            log = replay_transitions(stack.replay, run, stack.shape.action_space).transitions
            whole = log.episode_lengths[log.terminated[log.episode_ends] | (log.episode_lengths == STEPS)]
            assert set(whole) == {STEPS}
            assert (log.actions >= log.action_space.low).all()
            assert (log.actions <= log.action_space.high).all()


@pytest.mark.parametrize(
    ("kind", "before", "actions"),
    [
        ("local", 5, "box"),
        ("local", 6, "discrete"),
        *(("sync", before, "box") for before in (0, 5, 6)),
        ("sync", 5, "discrete"),
        ("async", 5, "box"),
        ("same_step", 5, "box"),
        ("same_step", 6, "discrete"),
    ],
)
def test_going_on_from_a_state_is_exact(kind: str, before: int, actions: str) -> None:
    options = {"environment_options": {"actions": actions}}
    with stack_of(kind, **options) as stack, stack_of(kind, **options) as again:
        iterated(stack, before)
        state = stack.state_dict()
        iterated(stack, 4)
        iterated(again, 2)
        assert again.load_state_dict(state)
        iterated(again, 4)
        assert_same(again.state_dict(), stack.state_dict())


def test_a_world_that_does_not_repeat_begins_anew() -> None:
    with stack_of("sync") as stack:
        iterated(stack, 6)
        state = stack.state_dict()
        state["collector"]["observations"] += 1.0
        assert not stack.load_state_dict(state)
        iterated(stack, 6)
        log = replay_transitions(stack.replay, 0, stack.shape.action_space).transitions
        assert log.episode_lengths.max() == STEPS


def test_a_dead_worker_ends_the_run_in_one_line() -> None:
    with stack_of("async") as stack:
        iterated(stack, 2)
        worker = stack._environments._vector.processes[3]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ConfigError, match=r"a worker process of .* died in "):
            iterated(stack, 1)


@pytest.mark.parametrize("actions", ["box", "discrete"])
def test_a_run_starts_from_the_log_of_another(actions: str, tmp_path: Any) -> None:
    """Offline to online: the log's episodes are in the replay, apart from those played after it."""
    options = {"environment_options": {"actions": actions}}
    with stack_of("local", **options) as stack:
        iterated(stack, 6)
        log = replay_transitions(stack.replay, 0, stack.shape.action_space).transitions
    write_hdf5(log, tmp_path / "log.hdf5")
    with stack_of("local", initial_log=str(tmp_path / "log.hdf5"), **options) as stack:
        iterated(stack, 3)
        for run in range(2):
            held = stack.replay.held(run)
            assert held.lengths[held.environments == LOGGED].sum() == len(log)
            assert held.lengths[held.environments != LOGGED].sum() == 3 * 8
            found = replay_transitions(stack.replay, run, stack.shape.action_space).transitions
            assert found.select(np.arange(len(log))).sha256 == log.sha256
        assert stack.take_metrics()[0], "it learned at once"


@pytest.mark.parametrize("actions", ["box", "discrete"])
def test_the_saved_model_acts_as_the_stack_does(actions: str, tmp_path: Any) -> None:
    """The .d3 file predicts the mean action inside the box; so does what the command exports from it."""
    with stack_of("local", environment_options={"actions": actions}, bandwidth_scale=0.7) as stack:
        iterated(stack, 12)
        agents = [stack.agent(run) for run in range(2)]
        observations = np.random.default_rng(0).normal(size=(2, 50, 2)) * 5
        expected = stack.act(observations)
    for run, agent in enumerate(agents):
        path, exported = tmp_path / f"model_{run}.d3", tmp_path / f"policy_{run}.onnx"
        write_model(agent, CONFIG, path)
        rows = observations[run].astype(np.float32)
        np.testing.assert_allclose(koffline.load(path).predict(rows), expected[run], rtol=1e-4, atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(cli, ["export", str(path), str(exported)])
        assert done.exit_code == 0, done.output
        np.testing.assert_allclose(run_file(exported, rows), expected[run], rtol=1e-4, atol=1e-5)
