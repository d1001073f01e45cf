"""Episodes of a policy, or of a mixture of policies, in any Gymnasium environment.

Episodes are played in batches of ``num_envs`` copies side by side: the policy is asked once for all copies. A
batch depends on the seed and its own number alone, so that a build can be cut anywhere and continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.builders.copies import make_copies
from koffline.data.transitions import Continuous, Metadata, Transitions
from koffline.envs.rollouts import draw_actions
from koffline.errors import ConfigError
from koffline.policies.base import DiscretePolicy, Policy
from koffline.policies.loading import as_policy

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class RolloutSettings:
    """What a build of rollouts depends on besides the policies.

    weights: shares of the policies; every episode is played by one of them. time_limit: steps after which an
    episode is truncated; None: the environment's own.
    """

    env: str
    episodes: int
    weights: tuple[float, ...] = (1.0,)
    time_limit: int | None = None
    num_envs: int = 16
    seed: int = 0
    gamma: float | None = None

    def __post_init__(self) -> None:
        for name in ("episodes", "num_envs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive whole number")
        if self.time_limit is not None and self.time_limit < 1:
            raise ConfigError(f"time_limit is {self.time_limit}; give a positive number of steps")
        good = all(math.isfinite(weight) and weight >= 0.0 for weight in self.weights)
        if not good or not sum(self.weights) > 0.0:
            raise ConfigError(f"weights are {self.weights}; give finite shares that are not all zero")

    @property
    def batches(self) -> int:
        """How many batches of episodes there are."""
        return math.ceil(self.episodes / self.num_envs)


def build_rollouts(
    settings: RolloutSettings,
    policies: Sequence[Any],
    progress: Callable[[int], None] | None = None,
) -> Transitions:
    """Whole episodes, with the log-probability that the policy of each episode gave to each action.

    policies: what `koffline.load_policy` takes, or callables, one per weight. Log-probabilities are stored
    where all policies have discrete actions; continuous actions are clipped to the action space.
    progress hears how many episodes are done.
    Raises ConfigError, and PolicyError for a policy that does not fit.
    """
    with RolloutPlayer(settings, policies) as player:
        parts = []
        for number in range(settings.batches):
            parts.append(player.play_batch(number))
            if progress is not None:
                progress(min((number + 1) * settings.num_envs, settings.episodes))
        return player.join(parts)


class RolloutPlayer:
    """Copies of an environment and the policies that act in them; use it as a context manager."""

    def __init__(self, settings: RolloutSettings, policies: Sequence[Any]) -> None:
        if len(policies) != len(settings.weights):
            raise ConfigError(
                f"there are {len(policies)} policies and {len(settings.weights)} weights; give one for each"
            )
        self._settings = settings
        self._copies = make_copies(settings.env, settings.time_limit)
        self.action_space, shape = self._copies.action_space, self._copies.observation_shape
        self.policies: list[Policy] = [as_policy(policy, self.action_space, shape) for policy in policies]

    def __enter__(self) -> RolloutPlayer:
        return self

    def __exit__(self, *error: object) -> None:
        self._copies.close()

    def play_batch(self, number: int) -> Columns:
        """The episodes of a batch, sorted by episode and step; numbers of episodes are the build's own."""
        first = number * self._settings.num_envs
        count = min(self._settings.num_envs, self._settings.episodes - first)
        seeds = np.random.SeedSequence([self._settings.seed, number])
        generator = np.random.default_rng(seeds)
        shares = np.asarray(self._settings.weights) / sum(self._settings.weights)
        chosen = generator.choice(len(self.policies), size=count, p=shares)
        observations = self._copies.reset(seeds.generate_state(count).tolist())
        running = np.arange(count)
        parts: list[Columns] = []
        while len(running):
            actions, log_probabilities = self._act(observations, chosen[running], generator)
            step = self._copies.step(running.tolist(), actions)
            parts.append(
                {
                    "observations": observations,
                    "actions": actions,
                    "rewards": step.rewards,
                    "next_observations": step.observations,
                    "terminated": step.terminated,
                    "truncated": step.truncated,
                    "log_probabilities": log_probabilities,
                    "episode_ids": first + running,
                    "steps": np.full(len(running), len(parts)),
                }
            )
            on = ~(step.terminated | step.truncated)
            running, observations = running[on], step.observations[on]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.lexsort((columns["steps"], columns["episode_ids"]))
        return {name: column[order] for name, column in columns.items()}

    def join(self, parts: Sequence[Columns]) -> Transitions:
        """All batches as one record."""
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        log_probabilities = columns.pop("log_probabilities")
        known = all(isinstance(policy, DiscretePolicy) for policy in self.policies)
        limit = {} if self._settings.time_limit is None else {"time_limit": self._settings.time_limit}
        return Transitions(
            **columns,
            action_space=self.action_space,
            behavior_log_probabilities=log_probabilities if known else None,
            metadata=Metadata(gamma=self._settings.gamma, extra={"task": self._settings.env, **limit}),
        )

    def _act(
        self, observations: np.ndarray, chosen: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions of all running copies, each by its own policy, and their log-probabilities."""
        log_probabilities = np.zeros(len(observations))
        actions: np.ndarray | None = None
        for index in np.unique(chosen):
            mine, policy = chosen == index, self.policies[index]
            drawn: np.ndarray
            if isinstance(policy, DiscretePolicy):
                table = policy.probabilities(observations[mine])
                drawn = draw_actions(lambda _, table=table: table, observations[mine], generator)
                log_probabilities[mine] = np.log(table[np.arange(len(table)), drawn])
            else:
                assert isinstance(self.action_space, Continuous)
                drawn = np.clip(
                    policy.sample(observations[mine], generator),
                    self.action_space.low,
                    self.action_space.high,
                )
            if actions is None:
                actions = np.zeros((len(observations), *drawn.shape[1:]), dtype=drawn.dtype)
            actions[mine] = drawn
        assert actions is not None
        return actions, log_probabilities


def batch_names(settings: RolloutSettings) -> Iterator[str]:
    """File names of the parts of a resumable build."""
    for number in range(settings.batches):
        yield f"part-{number:06d}.npz"
