"""Policies trained online with d3rlpy: recipes, the rows that a learner saw, snapshots
of its policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from koffline.algos.training import own_randomness
from koffline.builders.rollouts import (
    Columns,
    RolloutSettings,
    build_rollouts,
    environment_seed,
)
from koffline.data import import_d3rlpy
from koffline.data.disk.block_sampler import DRAWN
from koffline.data.replay import mini_batch
from koffline.data.transitions import REQUIRED_COLUMNS, ActionSpace, Discrete
from koffline.envs import make_copies
from koffline.errors import ConfigError
from koffline.fitting import threads
from koffline.policies.base import Policy, PolicySource
from koffline.policies.builtin import Mlp, finite_box, mlp_policy

_EVALUATION_SEED = 20190533


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Settings of an online learner. target_interval: of double DQN, in updates.

    steps: of the environment. random_steps: uniform actions at the start. update_every:
    steps per update. exploration: final share of uniform actions of a discrete learner;
    it decreases linearly from one until ``exploration_steps``. evaluate_every: steps
    between two evaluations of the policy, over ``episodes`` episodes.
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


@dataclass(frozen=True)
class Recipe:
    """Settings that work, and the step at which the learner of the bundled policies
    (seed 0) was medium.

    medium_noise: noise of the medium policy, if the usual noise would lower its return
    too much.
    """

    learning: LearningSettings
    medium_step: int
    medium_noise: float | None = None


_WALKER: dict[str, Any] = {
    "hidden": (128, 128),
    "reward_factor": 0.1,
    "random_steps": 2000,
    "evaluate_every": 2500,
    "episodes": 5,
}
RECIPES = {
    "CartPole-v1": Recipe(
        LearningSettings(
            env="CartPole-v1",
            steps=12_000,
            hidden=(128, 128),
            target_interval=128,
            reward_factor=0.1,
            update_every=2,
            exploration=0.04,
            exploration_steps=10_000,
            evaluate_every=500,
        ),
        medium_step=5500,
    ),
    "Pendulum-v1": Recipe(
        LearningSettings(
            env="Pendulum-v1",
            steps=15_000,
            batch_size=256,
            reward_factor=0.1,
            update_every=2,
            evaluate_every=500,
        ),
        medium_step=5500,
    ),
    "InvertedPendulum-v5": Recipe(
        LearningSettings(
            env="InvertedPendulum-v5", steps=6000, reward_factor=0.1, evaluate_every=25
        ),
        medium_step=5175,
        medium_noise=0.05,
    ),
    "HalfCheetah-v5": Recipe(
        LearningSettings(env="HalfCheetah-v5", steps=50_000, **_WALKER), 20_000, 0.1
    ),
    "Hopper-v5": Recipe(
        LearningSettings(env="Hopper-v5", steps=75_000, **_WALKER), 57_500, 0.1
    ),
    "Walker2d-v5": Recipe(
        LearningSettings(env="Walker2d-v5", steps=120_000, **_WALKER), 115_000, 0.1
    ),
}


def learning_settings(
    env: str, seed: int, steps: int | None = None
) -> LearningSettings:
    """The recipe of an environment with a seed; by default up to the step where its
    learner is medium.

    Raises ConfigError for an environment without a recipe if ``steps`` is not given.
    """
    recipe = RECIPES.get(env)
    if recipe:
        return dataclasses.replace(
            recipe.learning, seed=seed, steps=steps or recipe.medium_step
        )
    if steps is None:
        raise ConfigError(
            f"{env} has no recipe that says how long to learn ({', '.join(RECIPES)}"
            " have); give --train-steps"
        )
    return LearningSettings(
        env=env, steps=steps, seed=seed, evaluate_every=max(1, min(1000, steps // 10))
    )


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The network after some steps, its policy, and its mean return over a few
    episodes.
    """

    step: int
    network: Mlp
    policy: Policy
    mean_return: float


@dataclass(frozen=True, eq=False)
class Learned:
    """All rows in playing order, and the snapshots in time order (the last may not be
    the best).
    """

    rows: Columns
    snapshots: list[Snapshot] = field(default_factory=list)


def medium_and_expert(learned: Learned, random_return: float) -> dict[str, Snapshot]:
    """Snapshots by level: `expert` is the earliest best one.

    `medium` is the snapshot, not later than the expert, whose return is nearest to
    half-way between random and best.
    """
    best = max(learned.snapshots, key=lambda snapshot: snapshot.mean_return)
    half_way = (random_return + best.mean_return) / 2
    before = [snapshot for snapshot in learned.snapshots if snapshot.step <= best.step]
    return {
        "medium": min(
            before, key=lambda snapshot: abs(snapshot.mean_return - half_way)
        ),
        "expert": best,
    }


def learn(
    settings: LearningSettings, progress: Callable[[int], None] = lambda step: None
) -> Learned:
    """Play and learn.

    The same seed gives the same rows on the same machine. Raises ConfigError.
    """
    with (
        contextlib.closing(make_copies(settings.env)) as copies,
        threads(1),
        own_randomness(settings.seed),
    ):
        generator = np.random.default_rng(settings.seed)
        space = copies.action_space
        learner = OnlineLearner(space, copies.observation_shape, settings)
        learned = Learned({})
        rows = learned.rows
        step = 0
        episode = 0
        while step < settings.steps:
            observations = copies.reset([environment_seed(settings.seed, episode)])
            length = 0
            over = False
            while not over and step < settings.steps:
                actions = _uniform_actions(settings, space, step, generator)
                if actions is None:
                    actions = learner.act(observations)
                actions = actions.astype(copies.action_dtype, copy=False)
                here = copies.step([0], actions)
                over = bool(here.terminated[0] | here.truncated[0])
                ends = (here.terminated, here.truncated)
                place = (np.array([episode]), np.array([length]))
                row = (
                    observations,
                    actions,
                    here.rewards,
                    here.observations,
                    *ends,
                    *place,
                )
                for name, values in zip(
                    (*REQUIRED_COLUMNS, "episode_ids", "steps"), row, strict=True
                ):
                    if name not in rows:
                        kind = values.dtype
                        if "observations" in name:
                            kind = np.dtype(np.float32)
                        rows[name] = np.zeros((settings.steps, *values.shape[1:]), kind)
                    rows[name][step] = values[0]
                observations = here.observations
                length = length + 1
                step = step + 1
                if step > settings.random_steps and step % settings.update_every == 0:
                    drawn = generator.integers(step, size=settings.batch_size)
                    learner.update({name: rows[name][drawn] for name in DRAWN})
                if step % settings.evaluate_every == 0 or step == settings.steps:
                    network = learner.policy()
                    policy = mlp_policy(
                        network, "learned", space, copies.observation_shape
                    )
                    returns = policy_returns(
                        settings.env, policy, settings.episodes, _EVALUATION_SEED
                    )
                    learned.snapshots.append(
                        Snapshot(step, network, policy, float(np.mean(returns)))
                    )
            episode += 1
            progress(step)
        return learned


def _uniform_actions(
    settings: LearningSettings,
    space: ActionSpace,
    step: int,
    generator: np.random.Generator,
) -> np.ndarray | None:
    """Uniform actions (1, k) or an index (1,) for exploration; None if the learner is
    to act.

    They are drawn during the first ``random_steps`` and, if actions are discrete, later
    with a probability that decreases with ``step``.
    """
    starts = step < settings.random_steps
    if isinstance(space, Discrete):
        share = max(
            settings.exploration, 1.0 - step / max(1, settings.exploration_steps)
        )
        if starts or generator.random() < share:
            return generator.integers(space.n, size=1)
        return None
    if starts:
        return generator.uniform(space.low, space.high, (1, space.k))
    return None


def policy_returns(
    env: str, policy: PolicySource, episodes: int, seed: int
) -> np.ndarray:
    """Undiscounted returns (episodes,) of a policy: a spec or anything `as_policy`
    takes.
    """
    return build_rollouts(RolloutSettings(env, episodes, seed=seed), [policy]).returns()


class OnlineLearner:
    """Double DQN for discrete actions, SAC for bounded ones; it uses the global random
    generators.

    Raises ConfigError for observations that are not vectors, PolicyError for infinite
    bounds.
    """

    def __init__(
        self,
        action_space: ActionSpace,
        observation_shape: tuple[int, ...],
        settings: LearningSettings,
    ) -> None:
        if len(observation_shape) != 1:
            raise ConfigError(
                f"observations have shape {observation_shape}; the learner takes"
                " vectors: wrap it"
            )
        d3rlpy: Any = import_d3rlpy()
        self._space = action_space
        factor = settings.reward_factor
        rate = settings.learning_rate
        if factor == 1.0:
            scaler = None
        else:
            scaler = d3rlpy.preprocessing.MultiplyRewardScaler(factor)
        common: Any = {
            "gamma": settings.gamma,
            "batch_size": settings.batch_size,
            "reward_scaler": scaler,
        }
        encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=list(settings.hidden))
        if isinstance(action_space, Discrete):
            interval = settings.target_interval
            size = action_space.n
            common |= {"encoder_factory": encoder, "target_update_interval": interval}
            config = d3rlpy.algos.DoubleDQNConfig(learning_rate=rate, **common)
        else:
            self._box = finite_box(action_space, "the learner")
            size = action_space.k
            rates = dict.fromkeys(
                (f"{part}_learning_rate" for part in ("actor", "critic", "temp")), rate
            )
            common |= dict.fromkeys(
                ("actor_encoder_factory", "critic_encoder_factory"), encoder
            )
            box = d3rlpy.preprocessing.MinMaxActionScaler(
                *(side.tolist() for side in self._box)
            )
            config = d3rlpy.algos.SACConfig(**rates, action_scaler=box, **common)
        self._algo: Any = config.create(device="cpu")
        self._algo.create_impl(observation_shape, size)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Actions (n,) or (n, k) while learning: greedy for DQN, sampled for SAC."""
        observations = observations.astype(np.float32)
        if isinstance(self._space, Discrete):
            return self._algo.predict(observations)
        return np.clip(self._algo.sample_action(observations), *self._box)

    def update(self, batch: Mapping[str, np.ndarray]) -> None:
        """Take one gradient step on columns (B, …) named as in Transitions, B the
        learner's batch size.
        """
        # Neither algorithm uses the next actions.
        self._algo.update(
            mini_batch({**batch, "next_actions": batch["actions"]}, lambda _: None)
        )

    def policy(self) -> Mlp:
        """Greedy policy as a network of plain arrays: argmax of the values, or SAC's
        mean.
        """
        if isinstance(self._space, Discrete):
            network = self._algo.impl.q_function[0]
            return Mlp(*_layers(network.encoder, network._fc), output="argmax")
        network = self._algo.impl.policy
        low, high = self._box
        return Mlp(
            *_layers(network._encoder, network._mu),
            output="tanh",
            action_low=low,
            action_high=high,
        )


def _layers(
    encoder: torch.nn.Module, last: torch.nn.Linear
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Weights (in, out) and biases (out,) of the hidden layers and the last one,
    float32.
    """
    linear = [
        *(
            module
            for module in encoder.modules()
            if isinstance(module, torch.nn.Linear)
        ),
        last,
    ]
    weights = tuple(module.weight.detach().numpy().T.copy() for module in linear)
    return weights, tuple(module.bias.detach().numpy().copy() for module in linear)
