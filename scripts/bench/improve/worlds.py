"""Logs whose truth is known: a world, who wrote the log, and the value of any policy.

Values are discounted and without a time limit, from the world's start distribution.
Those of finite worlds are exact; those of bandits are means of exact mean rewards over
one and the same large sample of contexts, so that differences are as good as exact; the
others are means over rollouts, with a standard error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import koffline
from koffline import Transitions
from koffline.builders.control import (
    ControlSettings,
    build_control,
    bundled_policy,
    noisy,
)
from koffline.builders.rollouts import RolloutSettings, build_rollouts
from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.envs import closed_copies
from koffline.policies import DiscretePolicy, Policy
from koffline.policy_specs import as_policy
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.improve.spibb import best_policy
from scripts.bench.rollouts import as_transitions, log_episodes, monte_carlo_value
from scripts.bench.specs import cache_directory, policy_of

Array = np.ndarray
_CONTEXTS = 100_000
_TRUTH_SEED = 20190911
_PRECISE = 2000  # start states
_ROUGH = 300
_PRECISE_EPISODES = 200
_ROUGH_EPISODES = 40
_ROLLOUT_STEPS = 1000
_NEGLIGIBLE = 1e-3  # weight γ^t at which rollouts end


class Value(NamedTuple):
    """A policy's true value and its standard error, 0 where it is exact."""

    value: float
    error: float


class World(Protocol):
    """What the benchmark asks of a world."""

    @property
    def gamma(self) -> float:
        """The discount."""
        ...

    def log(self) -> Transitions:
        """The log: the same rows whenever it is called."""
        ...

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """The true value. precise: by many rollouts, where it is by rollouts."""
        ...

    def behavior_value(self) -> Value:
        """The true value of who wrote the log."""
        ...

    def behavior_policy(self) -> Policy | None:
        """Who wrote the log; None if that is not one policy."""
        ...

    def best_value(self) -> float | None:
        """The value of an optimal policy; None if it is not known."""
        ...


def generator_of(name: str, seed: int = 0) -> np.random.Generator:
    """Random numbers that depend on a name and a seed alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:4], "little")])


@dataclass(frozen=True, eq=False)
class FiniteWorld:
    """A finite process seen as points. behavior (S, A): who writes the log."""

    name: str
    world: EmbeddedMDP
    behavior: Array
    rows: int
    gamma: float = 0.99
    time_limit: int = 50

    def log(self) -> Transitions:
        """Episodes with the probabilities of the logged actions."""
        settings = LogSettings(self.rows, self.gamma, self.time_limit)
        return board_log(self.name, self.world, self._policy, settings)

    @property
    def _policy(self) -> Any:
        return self.world.policy(self.behavior)

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """Exact."""
        del precise
        assert isinstance(policy, DiscretePolicy), "finite processes have such actions"
        points = self.world.coordinates.astype(np.float32)
        table = policy.probabilities(points)
        return Value(self.world.mdp.policy_value(table, self.gamma), 0.0)

    def behavior_value(self) -> Value:
        """Exact."""
        return Value(self.world.mdp.policy_value(self.behavior, self.gamma), 0.0)

    def behavior_policy(self) -> Policy:
        """The table as koffline's policy."""
        return policy_of(self.world, self._policy, "behavior")

    def best_value(self) -> float:
        """By policy iteration."""
        best = best_policy(self.world.mdp, self.gamma)
        return self.world.mdp.policy_value(best, self.gamma)


@dataclass(frozen=True)
class LogSettings:
    """Size of a log, its discount, and the steps after which an episode is cut."""

    rows: int
    gamma: float
    time_limit: int


def board_log(
    name: str, world: Any, behavior: Any, settings: LogSettings
) -> Transitions:
    """Rows of a vectorised world; probabilities or densities are logged where they are
    known.
    """
    rows = log_episodes(
        world, behavior, settings.rows, settings.time_limit, generator_of(name)
    )
    log = as_transitions(rows, world, metadata=Metadata(gamma=settings.gamma))
    density = None
    if hasattr(behavior, "log_density"):
        density = np.asarray(behavior.log_density(log.observations, log.actions))
    elif not hasattr(behavior, "sample"):
        chances = behavior(log.observations)
        density = np.log(chances[np.arange(len(log)), log.actions])
    return log.replace(behavior_log_probabilities=density)


@dataclass(frozen=True, eq=False)
class VectorWorld:
    """A vectorised world of the leaderboard; values by Monte Carlo.

    best: a policy that is known to be optimal; None if there is none.
    """

    name: str
    world: Any
    behavior: Any
    rows: int
    gamma: float
    time_limit: int

    def log(self) -> Transitions:
        """Episodes, cut after ``time_limit`` steps."""
        settings = LogSettings(self.rows, self.gamma, self.time_limit)
        return board_log(self.name, self.world, self.behavior, settings)

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """By two rollouts from each of the same start states."""
        return self._rolled_out(policy, precise)

    def _rolled_out(self, target: Any, precise: bool) -> Value:
        count = _ROUGH
        if precise:
            count = _PRECISE
        starts = self.world.reset(count, np.random.default_rng(_TRUTH_SEED - 1))
        horizon = math.ceil(math.log(_NEGLIGIBLE) / math.log(self.gamma))
        answer = monte_carlo_value(
            self.world,
            target,
            self.gamma,
            starts,
            np.random.default_rng(_TRUTH_SEED),
            horizon=horizon,
        )
        # Start states are shared by all policies: their draw is no error of a
        # difference.
        return Value(answer.value, answer.error_given_starts)

    def behavior_value(self) -> Value:
        """From the same start states."""
        return self._rolled_out(self.behavior, True)

    def behavior_policy(self) -> Policy:
        """As koffline's policy."""
        return policy_of(self.world, self.behavior, "behavior")

    def best_value(self) -> None:
        """Not known."""
        return


@dataclass(frozen=True, eq=False)
class Bandit:
    """One decision a row: contexts are standard normal.

    behavior: a callable to probabilities (N, n). rewards: contexts (N, d) to mean
    rewards (N, n). spread: deviation of the reward's noise; None: rewards are 0 or 1.
    """

    name: str
    dimensions: int
    behavior: Callable[[Array], Array]
    rewards: Callable[[Array], Array]
    rows: int
    spread: float | None = None
    gamma: float = 0.99

    def log(self) -> Transitions:
        """Independent rows, each an episode."""
        generator = generator_of(self.name)
        contexts = generator.standard_normal((self.rows, self.dimensions))
        contexts = contexts.astype(np.float32)
        chances = self.behavior(contexts)
        means = self.rewards(contexts)
        cumulative = chances.cumsum(axis=1)
        threshold = generator.random(self.rows)[:, None] * cumulative[:, -1:]
        actions = (cumulative[:, :-1] <= threshold).sum(axis=1)
        index = np.arange(self.rows)
        mean = means[index, actions]
        if self.spread is None:
            rewards = (generator.random(self.rows) < mean).astype(np.float64)
        else:
            rewards = mean + self.spread * generator.standard_normal(self.rows)
        return one_step_log(
            contexts,
            actions,
            rewards,
            Discrete(chances.shape[1]),
            np.log(chances[index, actions]),
            self.gamma,
        )

    @cached_property
    def _contexts(self) -> Array:
        generator = np.random.default_rng(_TRUTH_SEED)
        shape = (_CONTEXTS, self.dimensions)
        return generator.standard_normal(shape).astype(np.float32)

    def _mean(self, chances: Array) -> Value:
        rewards = self.rewards(self._contexts)
        return Value(float((chances * rewards).sum(axis=1).mean()), 0.0)

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """Mean reward over 100,000 contexts."""
        del precise
        assert isinstance(policy, DiscretePolicy), "actions are numbered"
        return self._mean(policy.probabilities(self._contexts))

    def behavior_value(self) -> Value:
        """On the same contexts."""
        return self._mean(self.behavior(self._contexts))

    def behavior_policy(self) -> Policy:
        """As koffline's policy."""
        actions = self.behavior(self._contexts[:1]).shape[1]
        return DiscretePolicy(actions, self.behavior, "behavior")

    def best_value(self) -> float:
        """The best action of every context."""
        return float(self.rewards(self._contexts).max(axis=1).mean())


def one_step_log(
    contexts: Array,
    actions: Array,
    rewards: Array,
    space: Discrete | Continuous,
    log_probabilities: Array | None,
    gamma: float,
) -> Transitions:
    """Rows that terminate at once."""
    count = len(rewards)
    return Transitions(
        observations=contexts,
        actions=actions,
        rewards=rewards,
        next_observations=contexts,
        terminated=np.ones(count, dtype=bool),
        truncated=np.zeros(count, dtype=bool),
        action_space=space,
        episode_ids=np.arange(count),
        behavior_log_probabilities=log_probabilities,
        metadata=Metadata(gamma=gamma),
    )


@dataclass(frozen=True, eq=False)
class DoseBandit:
    """One dose of two numbers in [−1, 1] a row, written by a linear rule with normal
    noise; the reward falls with the squared distance from a target.

    weight: of that distance; 0: the reward does not depend on the dose.
    """

    name: str
    rows: int
    weight: float = 1.0
    behavior_noise: float = 0.4
    spread: float = 0.5
    gamma: float = 0.99

    @cached_property
    def _slopes(self) -> Array:
        return generator_of(self.name, 1).standard_normal((2, 4, 2)) / 2.0

    def _target(self, contexts: Array) -> Array:
        return np.tanh(contexts.astype(np.float64) @ self._slopes[0])

    def _usual(self, contexts: Array) -> Array:
        mixed = 0.5 * self._slopes[0] + 0.5 * self._slopes[1]
        return 0.7 * np.tanh(contexts.astype(np.float64) @ mixed)

    def _rewards(self, contexts: Array, doses: Array) -> Array:
        distance = np.square(np.clip(doses, -1.0, 1.0) - self._target(contexts))
        return 0.3 * contexts[:, 0] - self.weight * distance.sum(axis=1)

    def _doses(self, contexts: Array, generator: np.random.Generator) -> Array:
        noise = self.behavior_noise * generator.standard_normal((len(contexts), 2))
        return np.clip(self._usual(contexts) + noise, -1.0, 1.0)

    def log(self) -> Transitions:
        """Independent rows, each an episode; densities are not logged."""
        generator = generator_of(self.name)
        contexts = generator.standard_normal((self.rows, 4)).astype(np.float32)
        doses = self._doses(contexts, generator)
        noise = self.spread * generator.standard_normal(self.rows)
        rewards = self._rewards(contexts, doses) + noise
        space = Continuous(2, (-1.0, -1.0), (1.0, 1.0))
        return one_step_log(contexts, doses, rewards, space, None, self.gamma)

    @cached_property
    def _contexts(self) -> Array:
        generator = np.random.default_rng(_TRUTH_SEED)
        return generator.standard_normal((_CONTEXTS, 4)).astype(np.float32)

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """Over 100,000 contexts, the same for every policy."""
        del precise
        doses = policy.sample(self._contexts, np.random.default_rng(_TRUTH_SEED))
        return Value(float(self._rewards(self._contexts, doses).mean()), 0.0)

    def behavior_value(self) -> Value:
        """Over the same contexts."""
        doses = self._doses(self._contexts, np.random.default_rng(_TRUTH_SEED))
        return Value(float(self._rewards(self._contexts, doses).mean()), 0.0)

    def behavior_policy(self) -> None:
        """Its density is not written down."""
        return

    def best_value(self) -> float:
        """The target itself."""
        best = self._target(self._contexts)
        return float(self._rewards(self._contexts, best).mean())


@dataclass(frozen=True, eq=False)
class PlayedWorld:
    """An environment of Gymnasium and episodes that bundled policies played; values by
    rollouts.

    kind: of `koffline build control`. bundled: the log is a file of datasets/control.
    A replay is written by policies that change: its value is the log's own mean return,
    and policies are compared within the log's time limit.
    """

    env: str
    kind: str
    rows: int | None = None
    bundled: bool = False
    gamma: float = 0.99
    seed: int = 0

    @property
    def _is_replay(self) -> bool:
        return self.kind == "replay"

    def log(self) -> Transitions:
        """From its file; made when it is first asked for."""
        name = self.env.split("-v")[0].lower()
        if self.bundled:
            folder = Path(__file__).resolve().parents[3] / "datasets" / "control"
            return koffline.open_transitions(folder / f"{name}_{self.kind}.hdf5")
        file = f"{name}-{self.kind}-{self.rows}-{self.seed}.hdf5"
        path = cache_directory() / "improve" / file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = ControlSettings(self.env, self.kind, self.rows, seed=self.seed)
            koffline.write_transitions(build_control(settings), path)
        return koffline.open_transitions(path)

    def value(self, policy: Policy, precise: bool = True) -> Value:
        """Mean over episodes of 1000 steps; of a replay, of its time limit."""
        episodes = _ROUGH_EPISODES
        if precise:
            episodes = _PRECISE_EPISODES
        limit = math.ceil(math.log(_NEGLIGIBLE) / math.log(self.gamma))
        if self._is_replay:
            time_limit = closed_copies(self.env).time_limit
            assert time_limit is not None, "all environments of the list have one"
            limit = time_limit
        settings = RolloutSettings(
            self.env,
            episodes,
            time_limit=min(limit, _ROLLOUT_STEPS),
            seed=_TRUTH_SEED,
            gamma=self.gamma,
        )
        returns = build_rollouts(settings, [policy]).returns(self.gamma)
        return _mean_value(returns)

    def behavior_value(self) -> Value:
        """By rollouts of each policy that played; of a replay, the log's own."""
        if self._is_replay:
            return _mean_value(self.log().returns(self.gamma))
        values = [self.value(policy) for policy in self._policies()]
        mean = float(np.mean([value.value for value in values]))
        error = math.sqrt(sum(value.error**2 for value in values)) / len(values)
        return Value(mean, error)

    def _policies(self) -> list[Policy]:
        log = self.log()
        space = log.action_space
        shape = log.observation_shape
        levels = {"medium-expert": ("medium", "expert"), "random": ()}
        names = levels.get(self.kind, (self.kind,))
        if not names:
            return [as_policy("uniform", space, shape)]
        noise = log.metadata.extra["noise"]
        policies = []
        for name, scale in zip(names, noise, strict=True):
            file = str(bundled_policy(self.env, name))
            policies.append(noisy(as_policy(file, space, shape), float(scale), space))
        return policies

    def behavior_policy(self) -> Policy | None:
        """The policy that played, if it was one."""
        if self._is_replay:
            return None
        policies = self._policies()
        if len(policies) > 1:
            return None
        return policies[0]

    def best_value(self) -> None:
        """Not known."""
        return


def _mean_value(returns: Array) -> Value:
    error = float(returns.std(ddof=1)) / math.sqrt(len(returns))
    return Value(float(returns.mean()), error)


def mixed(policy: Policy, behavior: Policy, share: float) -> DiscretePolicy:
    """Each step: with probability ``share`` the policy, else who wrote the log."""
    assert isinstance(policy, DiscretePolicy), "of numbered actions"
    assert isinstance(behavior, DiscretePolicy), "of numbered actions"

    def chances(observations: Array) -> Array:
        kept = (1.0 - share) * behavior.probabilities(observations)
        return share * policy.probabilities(observations) + kept

    return DiscretePolicy(policy.n, chances, f"{share:g} of {policy.name}")
