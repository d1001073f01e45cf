"""Vector environments of every kind against copies stepped by hand; and what happens when one breaks."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.online.environments import LocalEnvironments
from koffline.online.vector_environments import VectorEnvironments, make_copy, make_vector_environments
from tests.online.toys import NAME, STEPS

COPIES = 3
KINDS = ("sync", "async", "same_step")


class SameStep(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Copies that reset within the step that ends an episode, as Gymnasium's do from 1.1 on."""

    metadata = {"autoreset_mode": "SameStep"}  # noqa: RUF012

    def __init__(self, copies: list[Any], is_silent: bool = False) -> None:
        self.copies, self.num_envs, self._is_silent = copies, len(copies), is_silent
        self.single_observation_space = copies[0].observation_space
        self.single_action_space = copies[0].action_space
        self._all = np.zeros((len(copies), *self.single_observation_space.shape))  # written again and again

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for i, copy in enumerate(self.copies):
            self._all[i] = copy.reset(seed=seed[i])[0]
        return self._all, {}

    def step(self, actions: Any) -> Any:
        columns: list[Any] = [[], [], []]
        infos: dict[str, Any] = {}
        for i, (copy, action) in enumerate(zip(self.copies, actions, strict=True)):
            observation, *rest, info = copy.step(action)
            for column, value in zip(columns, rest, strict=True):
                column.append(value)
            infos = self._add_info(infos, info, i)
            if rest[1] or rest[2]:
                if not self._is_silent:
                    infos = self._add_info(infos, {"final_obs": np.array(observation)}, i)
                observation, _ = copy.reset()
            self._all[i] = observation
        return (self._all, *columns, infos)

    def call(self, name: str, *arguments: Any) -> Any:
        return tuple(getattr(copy, name)(*arguments) for copy in self.copies)


def make(kind: str, n: int = COPIES, name: str = NAME, **options: Any) -> Any:
    if kind == "local":
        return LocalEnvironments(name, options, n)
    if kind == "same_step":
        return VectorEnvironments(SameStep([make_copy(name, options, i) for i in range(n)]), "Toy", True)
    return make_vector_environments(name, options, n, kind)


@pytest.fixture
def made() -> Any:
    """Makes environments and closes them after the test."""
    kept: list[Any] = []

    def keep(*arguments: Any, **options: Any) -> Any:
        kept.append(make(*arguments, **options))
        return kept[-1]

    yield keep
    for environments in kept:
        environments.close()


def actions_for(environments: Any, generator: np.random.Generator) -> np.ndarray:
    space = environments.action_space
    if hasattr(space, "n"):
        return generator.integers(0, space.n, environments.n)
    return generator.uniform(space.low, space.high, (environments.n, space.k))


def seed_of(copy: int, episode: int) -> int:
    return 10 * episode + copy


def played(environments: Any, steps: int, seed: int = 0) -> list[list[tuple[Any, ...]]]:
    """Each copy's transitions, as a collector takes them: rows that only reset are left out."""
    generator = np.random.default_rng(seed)
    episodes = [0] * environments.n
    here = environments.reset([seed_of(copy, 0) for copy in range(environments.n)])
    rows: list[list[tuple[Any, ...]]] = [[] for _ in range(environments.n)]
    actions = np.stack([actions_for(environments, generator) for _ in range(steps)])
    taken = [0] * environments.n
    while min(taken) < steps:
        now = np.stack([actions[min(taken[i], steps - 1)][i] for i in range(environments.n)])
        out = environments.step(now, [seed_of(copy, episodes[copy] + 1) for copy in range(environments.n)])
        for copy in np.flatnonzero(out.valid):
            flags = (bool(out.terminated[copy]), bool(out.truncated[copy]))
            row = (*here[copy], *now[copy].ravel(), out.rewards[copy], *out.final_observations[copy], *flags)
            rows[copy].append(row)
            taken[copy] += 1
            episodes[copy] += any(flags)
        assert not (out.terminated | out.truncated)[~out.valid].any()
        assert not out.rewards[~out.valid].any()
        here = out.observations.copy()
    return [row[:steps] for row in rows]


@pytest.mark.parametrize("actions", ["box", "matrix", "discrete"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_plays_what_copies_by_hand_play(kind: str, actions: str, made: Any) -> None:
    """True final observations, flags apart, a seed for every episode; also where resets cost a step."""
    assert played(made(kind, actions=actions), 10) == played(made("local", actions=actions), 10)


@pytest.mark.parametrize("kind", ["local", *KINDS])
def test_no_transition_joins_two_episodes(kind: str, made: Any) -> None:
    for copy, rows in enumerate(played(made(kind), 3 * STEPS)):
        for i, (seed, steps, _, _, reward, next_seed, next_steps, terminated, truncated) in enumerate(rows):
            assert seed == next_seed == seed_of(copy, i // STEPS)
            assert steps == i % STEPS
            assert next_steps == steps + 1
            assert int(reward) >= steps
            is_over = steps == STEPS - 1
            assert (terminated, truncated) == (is_over and seed % 2 == 0, is_over and seed % 2 == 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_step_that_only_resets_is_not_valid(kind: str, made: Any) -> None:
    environments = made(kind, 2)
    environments.reset([2, 4])
    zeros = np.zeros((2, 2))
    for _ in range(STEPS):
        out = environments.step(zeros, [6, 8])
        assert out.valid.all()
    assert out.terminated.all()
    np.testing.assert_array_equal(out.observations, [[2, 3], [4, 3]])
    out = environments.step(zeros, [10, 12])
    assert not out.valid.any()
    np.testing.assert_array_equal(out.observations, [[6, 0], [8, 0]])
    assert environments.step(zeros, [10, 12]).valid.all()


@pytest.mark.parametrize(
    ("kind", "steps"),
    [*((kind, steps) for kind in ("local", "sync", "same_step") for steps in range(6)), ("async", 3)],
)
def test_going_back_to_a_moment(kind: str, steps: int, made: Any) -> None:
    """Seeds, actions since and what awaits a reset are enough to go on, whatever was played meanwhile."""
    environments = made(kind, 2)
    seeds, pending = [2, 5], [6, 9]
    here = environments.reset(seeds)
    actions = np.random.default_rng(0).uniform(0, 1, (4 * STEPS, 2, 2)).astype(np.float32)
    story: list[list[Any]] = [[], []]

    def go_on(played: Any, step: int) -> Any:
        out = played.step(actions[step], pending)
        for copy in np.flatnonzero(out.valid):
            story[copy].append(actions[step, copy])
            if (out.terminated | out.truncated)[copy]:
                seeds[copy], story[copy] = pending[copy], []
                pending[copy] += 4
        return out

    for step in range(steps):
        here = go_on(environments, step).observations
    moment = (list(seeds), [np.array(part).reshape(-1, 2) for part in story], environments.awaiting)
    kept = list(pending)
    expected = [go_on(environments, step) for step in range(steps, steps + 2 * STEPS)]
    pending[:] = kept
    found = environments.restore(*moment)
    np.testing.assert_array_equal(found[~moment[2]], here[~moment[2]])
    for step, wanted in enumerate(expected, start=steps):
        out = go_on(environments, step)
        for name in vars(wanted):
            np.testing.assert_array_equal(getattr(out, name), getattr(wanted, name), name)


@pytest.mark.parametrize("kind", KINDS)
def test_observations_that_are_no_vectors_are_flattened(kind: str, made: Any) -> None:
    environments = made(kind, 2, shape=(2, 1, 2))
    assert environments.observation_dim == 4
    assert environments.reset([2, 3]).shape == (2, 4)
    assert environments.step(np.zeros((2, 2)), [4, 5]).final_observations.shape == (2, 4)


@pytest.mark.parametrize("kind", ["local", "sync", "async"])
def test_parts_are_joined(kind: str, made: Any) -> None:
    """Gymnasium's order: a, then b one-hot."""
    environments = made(kind, 2, fault="dict")
    np.testing.assert_array_equal(environments.reset([2, 3]), [[2, 1, 0, 0, 0], [3, 1, 0, 0, 0]])
    out = environments.step(np.zeros((2, 2)), [4, 5])
    np.testing.assert_array_equal(out.observations, [[2, 0, 1, 0, 0], [3, 0, 1, 0, 0]])


@pytest.mark.parametrize("kind", ["local", *KINDS])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "an observation that is not a finite number"),
        ("reward", "a reward that is not a finite number"),
        ("raise", r"failed in step .*100% broken in step"),
        ("shape", "shape"),
        ("longer", "shape"),
    ],
)
def test_a_fault_in_a_step_is_one_line(kind: str, fault: str, reason: str, made: Any) -> None:
    environments = made(kind, fault=fault)
    environments.reset([0, 1, 2])
    environments.step(np.zeros((COPIES, 2)), [4, 6, 8])
    with pytest.raises(ConfigError, match=reason) as caught:
        environments.step(np.zeros((COPIES, 2)), [4, 6, 8])
    assert "\n" not in str(caught.value)
    assert "oy" in str(caught.value), "the environment is named"
    environments.close()
    environments.close()


@pytest.mark.parametrize("kind", ["local", "sync", "async"])
def test_a_fault_in_a_reset_is_one_line(kind: str, made: Any) -> None:
    environments = made(kind, fault="reset")
    with pytest.raises(ConfigError, match=r"failed in reset .*100% broken in reset"):
        environments.reset([0, 1, 2])


@pytest.mark.parametrize("when", ["reset", "step", "by itself"])
def test_a_worker_that_dies_is_named_and_the_others_end(when: str, made: Any) -> None:
    environments = made("async", fault="die" if when == "by itself" else "")
    workers = list(environments._vector.processes)
    zeros = np.zeros((COPIES, 2))
    environments.reset([0, 1, 2])
    environments.step(zeros, [4, 6, 8])
    if when != "by itself":
        os.kill(workers[1].pid, signal.SIGKILL)
        workers[1].join()
    with pytest.raises(ConfigError, match=r"a worker process of .* died in .*copy 1: -9") as caught:
        environments.reset([0, 1, 2]) if when == "reset" else environments.step(zeros, [4, 6, 8])
    assert "\n" not in str(caught.value)
    assert not any(worker.is_alive() for worker in workers)
    environments.close()


def test_workers_leave_ctrl_c_to_their_maker(made: Any) -> None:
    environments = made("async", 2)
    environments.reset([2, 4])
    for worker in environments._vector.processes:
        os.kill(worker.pid, signal.SIGINT)
    out = environments.step(np.zeros((2, 2)), [6, 8])
    np.testing.assert_array_equal(out.observations, [[2, 1], [4, 1]])


def test_closing_ends_the_workers(made: Any) -> None:
    environments = made("async", 2)
    workers = list(environments._vector.processes)
    environments.close()
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("kind", ["local", "sync", "async"])
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("CartPole-v7", {}, "CartPole"),
        ("InvertedPendulun-v5", {}, "did you mean InvertedPendulum-v5"),
        ("no_such_package:Toy-v0", {}, "no_such_package"),
        (NAME, {"actions": "multi"}, "Discrete and Box actions"),
        (NAME, {"fault": "sequence"}, "arrays of numbers"),
        (NAME, {"wings": 2}, "wings"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(
    kind: str, name: str, options: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make(kind, 2, name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["local", "sync", "async"])
def test_without_mujoco_the_extra_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"needs MuJoCo.*pip install mujoco imageio"):
        make(kind, 2, "InvertedPendulum-v5")


@pytest.mark.parametrize("mode", ["Disabled", "sometimes", None])
def test_another_way_of_resetting_is_refused(mode: Any) -> None:
    vector = SameStep([make_copy(NAME, {}, 0)])
    vector.metadata = {"autoreset_mode": mode} if mode else {}
    with pytest.raises(ConfigError, match=f"autoreset_mode '{mode}'"):
        VectorEnvironments(vector, "Toy")


@pytest.mark.parametrize("mode", ["NEXT_STEP", "NextStep", "next_step"])
def test_modes_by_any_of_their_names(mode: str, made: Any) -> None:
    environments = made("sync")
    vector = environments._vector
    vector.metadata = {"autoreset_mode": mode}
    assert played(VectorEnvironments(vector, "Toy", True), 5) == played(made("local"), 5)


def test_same_step_without_the_true_observation_is_refused() -> None:
    vector = SameStep([make_copy(NAME, {}, i) for i in range(2)], is_silent=True)
    environments = VectorEnvironments(vector, "Toy", True)
    environments.reset([2, 4])
    for _ in range(STEPS - 1):
        environments.step(np.zeros((2, 2)), [6, 8])
    with pytest.raises(ConfigError, match="leaves out info"):
        environments.step(np.zeros((2, 2)), [6, 8])


def test_copies_of_others_have_their_own_seeds() -> None:
    """A ready vector environment: first episodes have the given seeds; it cannot be taken back."""
    vector = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("InvertedPendulum-v5")] * 2)
    environments = VectorEnvironments(vector, "InvertedPendulum-v5")
    expected = gymnasium.make("InvertedPendulum-v5").reset(seed=7)[0]
    np.testing.assert_array_equal(environments.reset([6, 7])[1], expected)
    assert environments.step(np.zeros((2, 1)), [8, 9]).valid.all()
    assert environments.restore([6, 7], [np.zeros((0, 1))] * 2, np.zeros(2, dtype=bool)) is None
    environments.close()
