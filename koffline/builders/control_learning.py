"""Learning by playing: recipes, the rows that a learner saw and the policies that it was on its way."""

from __future__ import annotations

import ast
import dataclasses
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
        for name in ("steps", "batch_size", "update_every", "evaluate_every", "episodes", "keep_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give a number that is not negative")


@dataclass(frozen=True)
class Recipe:
    """A learner that succeeds, and the step at which it was medium with seed 0 where its policies were made.

    medium_noise: of the medium policy, where the usual noise would make much less of it.
    """

    learning: LearningSettings
    medium_step: int
    medium_noise: float | None = None


_LEARNERS = (
    Recipe(
        LearningSettings(
            "CartPole-v1", 12_000, hidden=(128, 128), target_interval=128, reward_factor=0.1, update_every=2,
            exploration=0.04, exploration_steps=10_000, evaluate_every=500,
        ),
        5500,
    ),
    Recipe(
        LearningSettings(
            "Pendulum-v1", 15_000, batch_size=256, reward_factor=0.1, update_every=2, evaluate_every=500
        ),
        5500,
    ),
    Recipe(LearningSettings("InvertedPendulum-v5", 6000, reward_factor=0.1, evaluate_every=25), 5175, 0.05),
    Recipe(
        LearningSettings(
            "HalfCheetah-v5", 50_000, hidden=(128, 128), reward_factor=0.1, random_steps=2000,
            evaluate_every=2500, episodes=5, keep_every=2000,
        ),
        20_000,
        0.1,
    ),
)  # fmt: skip
RECIPES = {recipe.learning.env: recipe for recipe in _LEARNERS}


def learning_settings(env: str, seed: int, steps: int | None = None) -> LearningSettings:
    """The recipe of an environment with a seed; without ``steps`` up to where its learner is medium.

    Raises ConfigError for an environment without a recipe and without steps.
    """
    if env in RECIPES:
        recipe = RECIPES[env]
        return dataclasses.replace(recipe.learning, seed=seed, steps=steps or recipe.medium_step)
    if steps is None:
        raise ConfigError(
            f"{env} has no recipe that says how long to learn ({', '.join(RECIPES)} have); give --train-steps"
        )
    every = max(1, min(1000, steps // 10))
    return LearningSettings(env, steps, seed, evaluate_every=every)


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
            run = _Run(settings, copies)
            if checkpoint is not None and checkpoint.is_file():
                run.load(checkpoint)
            while run.step < settings.steps:
                run.play_episode()
                if progress is not None:
                    progress(run.step)
                if checkpoint is not None and run.step - run.saved >= settings.keep_every:
                    run.save(checkpoint)
            return Learned(run.columns, run.snapshots)
    finally:
        copies.close()


class _Run:
    def __init__(self, settings: LearningSettings, copies: Copies) -> None:
        self._settings, self._copies = settings, copies
        self._generator = np.random.default_rng(settings.seed)
        space, shape, steps = copies.action_space, copies.observation_shape, settings.steps
        own = {name: getattr(settings, name) for name in LearnerSettings.__dataclass_fields__}
        self._learner = OnlineLearner(space, shape, LearnerSettings(**own))
        width, kind = ((), np.int64) if isinstance(space, Discrete) else ((space.k,), copies.action_dtype)
        self.columns: Columns = {
            "observations": np.zeros((steps, *shape), np.float32),
            "actions": np.zeros((steps, *width), kind),
            "rewards": np.zeros(steps),
            "next_observations": np.zeros((steps, *shape), np.float32),
            **{name: np.zeros(steps, bool) for name in ("terminated", "truncated")},
            **{name: np.zeros(steps, np.int64) for name in ("episode_ids", "steps")},
        }
        self.step = self.saved = self._episode = 0
        self.snapshots: list[Snapshot] = []

    def play_episode(self) -> None:
        settings = self._settings
        seed = environment_seed(settings.seed, self._episode)
        observations, length, over = self._copies.reset([seed]), 0, False
        while not over and self.step < settings.steps:
            actions = self._actions(observations)
            step = self._copies.step([0], actions)
            over = bool(step.terminated[0] | step.truncated[0])
            row = (observations, actions, step.rewards, step.observations, step.terminated, step.truncated)
            for name, values in zip(_ROW_KEYS, row, strict=True):
                self.columns[name][self.step] = values[0]
            self.columns["episode_ids"][self.step], self.columns["steps"][self.step] = self._episode, length
            observations, length = step.observations, length + 1
            self.step += 1
            if self.step > settings.random_steps and self.step % settings.update_every == 0:
                drawn = self._generator.integers(self.step, size=settings.batch_size)
                self._learner.update({name: self.columns[name][drawn] for name in _ROW_KEYS})
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                policy = self._learner.policy()
                returns = policy_returns(settings.env, policy, settings.episodes, _EVALUATION_SEED)
                self.snapshots.append(Snapshot(self.step, policy, float(np.mean(returns))))
        self._episode += 1

    def _actions(self, observations: np.ndarray) -> np.ndarray:
        settings, space = self._settings, self._copies.action_space
        explores = self.step < settings.random_steps
        if isinstance(space, Discrete):
            share = max(settings.exploration, 1.0 - self.step / max(1, settings.exploration_steps))
            if explores or self._generator.random() < share:
                return self._generator.integers(space.n, size=1)
            return self._learner.act(observations)
        if explores:
            drawn = self._generator.uniform(space.low, space.high, (1, space.k))
            return drawn.astype(self._copies.action_dtype)
        return self._learner.act(observations).astype(self._copies.action_dtype)

    def save(self, path: Path) -> None:
        """Between two episodes, as the state of an environment cannot be kept."""
        returns = [(snapshot.step, snapshot.mean_return) for snapshot in self.snapshots]
        arrays: dict[str, Any] = {
            **{f"row.{name}": column[: self.step] for name, column in self.columns.items()},
            "learner": np.frombuffer(self._learner.state(), dtype=np.uint8),
            "generator": np.asarray(repr(self._generator.bit_generator.state)),
            "settings": np.asarray(repr(self._settings)),
            "episode": np.asarray(self._episode),
            "returns": np.asarray(returns, dtype=float).reshape(-1, 2),
        }
        for number, snapshot in enumerate(self.snapshots):
            for key, value in policy_arrays(snapshot.policy).items():
                arrays[f"snapshot.{number}.{key}"] = value
        with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        self.saved = self.step

    def load(self, path: Path) -> None:
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
        self.step = self.saved = len(arrays["row.rewards"])
        for name, column in self.columns.items():
            column[: self.step] = arrays[f"row.{name}"]
        self._episode = int(arrays["episode"])
        self._learner.load_state(arrays["learner"].tobytes())
        self._generator.bit_generator.state = ast.literal_eval(str(arrays["generator"]))
        for number, (step, mean_return) in enumerate(arrays["returns"]):
            start = f"snapshot.{number}."
            own = {key[len(start) :]: value for key, value in arrays.items() if key.startswith(start)}
            self.snapshots.append(Snapshot(int(step), mlp_from_arrays(own), float(mean_return)))


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
