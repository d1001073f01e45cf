"""Learning by playing: the rows that a learner saw and the policies that it was on its way."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from koffline.algos.stock_learners import LearnerSettings, OnlineLearner, randomness
from koffline.builders.copies import Copies, closed_copies, environment_seed, make_copies
from koffline.builders.rollouts import Columns, RolloutPlayer, RolloutSettings
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, DataError
from koffline.policies.mlp import Mlp, mlp_policy
from koffline.policies.policy_file import mlp_from_arrays
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import read_arrays

_ROW_KEYS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
_EVALUATION_SEED = 20190533


@dataclass(frozen=True)
class LearningSettings:
    """How a learner plays.

    steps: of the environment. random_steps: uniform actions at the start. update_every: steps per update.
    exploration: share of uniform actions of a discrete learner at its end; it falls linearly from one until
    ``exploration_steps``. evaluate_every: steps between two looks at the policy, over ``episodes`` episodes.
    keep_every: steps between two checkpoints, about.
    """

    env: str
    steps: int
    seed: int = 0
    gamma: float = 0.99
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 1e-3
    batch_size: int = 128
    target_interval: int = 200
    reward_factor: float = 1.0
    random_steps: int = 500
    update_every: int = 1
    exploration: float = 0.05
    exploration_steps: int = 4000
    evaluate_every: int = 1000
    episodes: int = 10
    keep_every: int = 500

    def __post_init__(self) -> None:
        if min(self.steps, self.update_every, self.evaluate_every, self.episodes, self.keep_every) < 1:
            raise ConfigError(f"{self} cannot be learned; give positive numbers")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; give a positive number")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give a number that is not negative")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The policy after some steps, and its mean return over a few episodes."""

    step: int
    policy: Mlp
    mean_return: float


@dataclass(frozen=True, eq=False)
class Learned:
    """All rows in the order in which they were played, and the snapshots; the last may be the best or not."""

    rows: Columns
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def best(self) -> Snapshot:
        """The snapshot of the largest return, the earliest of equals."""
        return max(self.snapshots, key=lambda snapshot: snapshot.mean_return)

    def nearest(self, mean_return: float) -> Snapshot:
        """The snapshot before the best one whose return is nearest to a number."""
        before = [snapshot for snapshot in self.snapshots if snapshot.step <= self.best.step]
        return min(before, key=lambda snapshot: abs(snapshot.mean_return - mean_return))


def learn(
    settings: LearningSettings,
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
) -> Learned:
    """Play and learn; with ``checkpoint`` a killed run goes on from its last whole episode, to the same rows.

    The same seed gives the same rows on the same machine. Raises ConfigError and DataError.
    """
    copies = make_copies(settings.env, None)
    try:
        with randomness(settings.seed):
            return _Run(settings, copies, checkpoint).play(progress)
    finally:
        copies.close()


class _Run:
    def __init__(self, settings: LearningSettings, copies: Copies, checkpoint: Path | None) -> None:
        self._settings, self._copies, self._checkpoint = settings, copies, checkpoint
        self._generator = np.random.default_rng(settings.seed)
        numbers = {name: getattr(settings, name) for name in LearnerSettings.__dataclass_fields__}
        self._learner = OnlineLearner(
            copies.action_space, copies.observation_shape, LearnerSettings(**numbers)
        )
        self._columns = _empty_columns(settings.steps, copies)
        self._step, self._episode, self._saved = 0, 0, 0
        self._snapshots: list[Snapshot] = []

    def play(self, progress: Callable[[int], None] | None) -> Learned:
        if self._checkpoint is not None and self._checkpoint.is_file():
            self._load(self._checkpoint)
        while self._step < self._settings.steps:
            self._play_episode()
            if progress is not None:
                progress(self._step)
            if self._checkpoint is not None and self._step - self._saved >= self._settings.keep_every:
                self._save(self._checkpoint)
        return Learned(self._columns, self._snapshots)

    def _play_episode(self) -> None:
        seed = environment_seed(self._settings.seed, self._episode)
        observations, length, over = self._copies.reset([seed]), 0, False
        while not over and self._step < self._settings.steps:
            actions = self._actions(observations)
            step = self._copies.step([0], actions)
            over = bool(step.terminated[0] | step.truncated[0])
            row: dict[str, Any] = {
                "observations": observations,
                "actions": actions,
                "rewards": step.rewards,
                "next_observations": step.observations,
                "terminated": step.terminated,
                "truncated": step.truncated,
                "episode_ids": self._episode,
                "steps": length,
            }
            for name, column in self._columns.items():
                column[self._step] = row[name] if np.isscalar(row[name]) else row[name][0]
            observations, length = step.observations, length + 1
            self._step += 1
            self._learn()
        self._episode += 1

    def _learn(self) -> None:
        settings = self._settings
        if self._step > settings.random_steps and self._step % settings.update_every == 0:
            drawn = self._generator.integers(self._step, size=settings.batch_size)
            self._learner.update({name: self._columns[name][drawn] for name in _ROW_KEYS})
        if self._step % settings.evaluate_every == 0 or self._step == settings.steps:
            policy = self._learner.policy()
            value = float(np.mean(policy_returns(settings.env, policy, settings.episodes, _EVALUATION_SEED)))
            self._snapshots.append(Snapshot(self._step, policy, value))

    def _actions(self, observations: np.ndarray) -> np.ndarray:
        settings, space = self._settings, self._copies.action_space
        explores = self._step < settings.random_steps
        if isinstance(space, Discrete):
            share = max(settings.exploration, 1.0 - self._step / max(1, settings.exploration_steps))
            if explores or self._generator.random() < share:
                return self._generator.integers(space.n, size=1)
            return self._learner.act(observations)
        if explores:
            drawn = self._generator.uniform(space.low, space.high, (1, space.k))
            return drawn.astype(self._copies.action_dtype)
        return self._learner.act(observations).astype(self._copies.action_dtype)

    def _save(self, path: Path) -> None:
        """Between two episodes, as the state of an environment cannot be kept."""
        arrays: dict[str, Any] = {
            f"row.{name}": column[: self._step] for name, column in self._columns.items()
        }
        returns = [(snapshot.step, snapshot.mean_return) for snapshot in self._snapshots]
        arrays |= {
            "learner": np.frombuffer(self._learner.state(), dtype=np.uint8),
            "generator": np.asarray(repr(self._generator.bit_generator.state)),
            "settings": np.asarray(repr(self._settings)),
            "episode": np.asarray(self._episode),
            "returns": np.asarray(returns, dtype=float).reshape(-1, 2),
        }
        for number, snapshot in enumerate(self._snapshots):
            for key, value in policy_arrays(snapshot.policy).items():
                arrays[f"snapshot.{number}.{key}"] = value
        with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        self._saved = self._step

    def _load(self, path: Path) -> None:
        try:
            arrays = read_arrays(path)
            fits = str(arrays["settings"]) == repr(self._settings)
        except Exception:  # numpy and zipfile raise many kinds; all mean that the file is not ours
            fits = False
        if not fits:
            raise DataError(
                f"{path} is damaged or of a learner with other settings; repeat its command, or start anew "
                "with --force"
            )
        self._step = self._saved = len(arrays["row.rewards"])
        for name, column in self._columns.items():
            column[: self._step] = arrays[f"row.{name}"]
        self._episode = int(arrays["episode"])
        self._learner.load_state(arrays["learner"].tobytes())
        self._generator.bit_generator.state = ast.literal_eval(str(arrays["generator"]))
        self._snapshots = []
        for number, (step, mean_return) in enumerate(arrays["returns"]):
            start = f"snapshot.{number}."
            own = {key[len(start) :]: value for key, value in arrays.items() if key.startswith(start)}
            self._snapshots.append(Snapshot(int(step), mlp_from_arrays(own), float(mean_return)))


def policy_arrays(policy: Mlp) -> dict[str, np.ndarray]:
    """A learned network as the arrays of a policy file."""
    arrays: dict[str, Any] = {"output": policy.output}
    for layer, (weight, bias) in enumerate(zip(policy.weights, policy.biases, strict=True)):
        arrays |= {f"W{layer}": weight, f"b{layer}": bias}
    if policy.action_low is not None and policy.action_high is not None:
        arrays |= {"action_low": policy.action_low, "action_high": policy.action_high}
    return {key: np.asarray(value) for key, value in arrays.items()}


def policy_returns(env: str, policy: Any, episodes: int, seed: int) -> np.ndarray:
    """Undiscounted returns (episodes,) of a policy: a spec, a network or anything `as_policy` takes."""
    if isinstance(policy, Mlp):
        policy = network_policy(env, policy)
    with RolloutPlayer(RolloutSettings(env, episodes, seed=seed), [policy]) as player:
        return log_returns(player.join(list(player.play(range(player.batches)))))


def network_policy(env: str, policy: Mlp) -> Any:
    """A network as a policy of an environment."""
    copies = closed_copies(env)
    return mlp_policy(policy, "learned", copies.action_space, copies.observation_shape)


def log_returns(log: Transitions) -> np.ndarray:
    """Undiscounted return of every episode, (E,)."""
    return np.add.reduceat(log.rewards, log.episode_starts)


def _empty_columns(steps: int, copies: Copies) -> Columns:
    space, shape = copies.action_space, copies.observation_shape
    actions = (
        np.zeros(steps, dtype=np.int64)
        if isinstance(space, Discrete)
        else np.zeros((steps, space.k), copies.action_dtype)
    )
    return {
        "observations": np.zeros((steps, *shape), dtype=np.float32),
        "actions": actions,
        "rewards": np.zeros(steps),
        "next_observations": np.zeros((steps, *shape), dtype=np.float32),
        "terminated": np.zeros(steps, dtype=bool),
        "truncated": np.zeros(steps, dtype=bool),
        "episode_ids": np.zeros(steps, dtype=np.int64),
        "steps": np.zeros(steps, dtype=np.int64),
    }
