"""Episodes of a policy, or of a mixture of policies, in any Gymnasium environment.

Episodes are played in batches of copies side by side: the policy is asked once for all copies. Each has
random numbers of its own, so that a build can be cut between two batches and continued, and batches may be
played in several processes or on a Ray cluster. Rows do not depend on the size of batches, except that a
network's outputs may differ in their last bits with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders.actors import Actor
from koffline.builders.copies import environment_seed, make_copies
from koffline.data.transitions import Discrete, Metadata, Transitions
from koffline.errors import ConfigError
from koffline.jobs.mapping import PassSettings
from koffline.policies.base import Policy
from koffline.policy_specs import as_policy

Columns = dict[str, np.ndarray]
_EPSILON = "epsilon:"


@dataclass(frozen=True)
class RolloutSettings:
    """What a build of rollouts depends on besides the policies.

    env: a Gymnasium id, or the name of one of our worlds. weights: shares of the policies; every episode is
    played by one of them. time_limit: steps after which an episode is truncated; None: the environment's own.
    num_envs: copies played side by side; None: a number that suits the environment.
    """

    env: str
    episodes: int
    weights: tuple[float, ...] = (1.0,)
    time_limit: int | None = None
    num_envs: int | None = None
    seed: int = 0
    gamma: float | None = None

    def __post_init__(self) -> None:
        for name in ("episodes", "num_envs"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; give a positive whole number")
        if self.time_limit is not None and self.time_limit < 1:
            raise ConfigError(f"time_limit is {self.time_limit}; give a positive number of steps")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give a number that is not negative")
        if self.gamma is not None and not 0.0 < self.gamma < 1.0:
            raise ConfigError(f"gamma is {self.gamma}; give a discount between 0 and 1")
        good = all(math.isfinite(weight) and weight >= 0.0 for weight in self.weights)
        if not good or not 0.0 < sum(self.weights) < math.inf:
            raise ConfigError(f"weights are {self.weights}; give finite shares that are not all zero")


def build_rollouts(
    settings: RolloutSettings,
    policies: Sequence[Any],
    progress: Callable[[int], None] | None = None,
    *,
    workers: int = 1,
    ray: str | None = None,
) -> Transitions:
    """Whole episodes, with the log-probability that the policy of each episode gave to each action.

    policies: what `koffline.load_policy` takes, or callables, one per weight. Log-probabilities are stored
    for discrete actions; policies with continuous ones tell no density. Continuous actions outside the space
    are clipped to it, stored as played, and counted in ``metadata.notes``.
    progress hears how many episodes are done. workers, ray: play in several processes, or on a Ray cluster,
    as of `koffline.jobs.PassSettings`; the rows are the same.
    Raises ConfigError, and PolicyError for a policy that does not fit.
    """
    with RolloutPlayer(settings, policies, PassSettings(workers, ray)) as player:
        parts = []
        for columns in player.play(range(player.batches)):
            parts.append(columns)
            if progress is not None:
                progress(player.episodes_until(len(parts) - 1))
        return player.join(parts)


class RolloutPlayer:
    """Copies of an environment and the policies that act in them; use it as a context manager.

    where: the processes or the cluster whose workers play; None: this process.
    """

    def __init__(
        self, settings: RolloutSettings, policies: Sequence[Any], where: PassSettings | None = None
    ) -> None:
        if len(policies) != len(settings.weights):
            raise ConfigError(
                f"there are {len(policies)} policies and {len(settings.weights)} weights; give one for each"
            )
        self._settings, self._given, self._where = settings, policies, where
        self._copies = make_copies(settings.env, settings.time_limit)
        self._batch_size = settings.num_envs or self._copies.usual_number
        self.action_space, shape = self._copies.action_space, self._copies.observation_shape
        try:
            self.policies: list[Policy] = [as_policy(policy, self.action_space, shape) for policy in policies]
        except BaseException:
            self._copies.close()
            raise
        self.batches = math.ceil(settings.episodes / self._batch_size)

    def __enter__(self) -> RolloutPlayer:
        return self

    def __exit__(self, *error: object) -> None:
        self._copies.close()

    def episodes_until(self, number: int) -> int:
        """Episodes of the batches up to and with a batch."""
        return min((number + 1) * self._batch_size, self._settings.episodes)

    def play(self, numbers: Iterable[int]) -> Iterator[Columns]:
        """The batches of given numbers, in their order, wherever they are played.

        Raises JobError for workers that keep dying.
        """
        where = self._where
        if where is None or (where.ray is None and where.workers == 1):
            return map(self.play_batch, numbers)
        work = RolloutWork(self._settings, tuple(_packed(policy) for policy in self._given))
        mapped = where.map(play_batch, numbers, work, name=lambda number: f"batch {number} of episodes")
        return (batch.value for batch in mapped)

    def play_batch(self, number: int) -> Columns:
        """The episodes of a batch, sorted by episode and step; their numbers are the build's own."""
        seed = self._settings.seed
        episodes = np.arange(number * self._batch_size, self.episodes_until(number))
        actor = Actor(self.policies, self._settings.weights, seed, episodes.tolist(), self._copies)
        observations = self._copies.reset([environment_seed(seed, episode) for episode in episodes.tolist()])
        running = np.arange(len(episodes))
        parts: list[Columns] = []
        while len(running):
            acted = actor.act(len(parts), running, observations)
            step = self._copies.step(running.tolist(), acted.actions)
            parts.append(
                {
                    "observations": observations,
                    "next_observations": step.observations,
                    "rewards": step.rewards,
                    "terminated": step.terminated,
                    "truncated": step.truncated,
                    "episode_ids": episodes[running],
                    "steps": np.full(len(running), len(parts)),
                    **acted._asdict(),
                }
            )
            on = ~(step.terminated | step.truncated)
            running, observations = running[on], step.observations[on]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.lexsort((columns["steps"], columns["episode_ids"]))
        columns = {name: column[order] for name, column in columns.items()}
        _check_numbers(self._copies.name, columns)
        return columns

    def join(self, parts: Sequence[Columns]) -> Transitions:
        """All batches as one record."""
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return self.record(columns, self.metadata(int(columns["clipped"].sum())))

    def record(self, part: Columns, metadata: Metadata | None = None) -> Transitions:
        """The episodes of one batch, or of several joined, as a record."""
        columns = {name: column for name, column in part.items() if name != "clipped"}
        log_probabilities = columns.pop("log_probabilities")
        return Transitions(
            **columns,
            action_space=self.action_space,
            behavior_log_probabilities=log_probabilities if isinstance(self.action_space, Discrete) else None,
            metadata=metadata or Metadata(),
        )

    def metadata(self, clipped: int) -> Metadata:
        """What is said of the whole build, in which so many actions were clipped."""
        notes = self._copies.notes
        if clipped:
            notes = (*notes, f"{clipped} actions were outside the action space; they are stored as clipped")
        limit = {} if self._copies.time_limit is None else {"time_limit": self._copies.time_limit}
        return Metadata(gamma=self._settings.gamma, extra={"task": self._copies.name, **limit}, notes=notes)


def _check_numbers(name: str, columns: Columns) -> None:
    """A log holds finite numbers only; better said after the first batch than after the last."""
    for column in ("observations", "next_observations", "rewards"):
        finite = np.isfinite(columns[column]).reshape(len(columns[column]), -1).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            where = f"step {columns['steps'][row]} of episode {columns['episode_ids'][row]}"
            raise ConfigError(f"{name} gave {column} that are not finite in {where}; mend it or wrap it")


@dataclass(frozen=True)
class PolicyFile:
    """A policy in a file, with its content, which other machines do not see. prefix: "epsilon:0.1:" or ""."""

    prefix: str
    name: str
    content: bytes


@dataclass(frozen=True, eq=False)
class RolloutWork:
    """What a worker needs to play any batch. policies: `PolicyFile`, or anything that a player takes."""

    settings: RolloutSettings
    policies: tuple[Any, ...]


_last: tuple[RolloutWork, RolloutPlayer] | None = None


def play_batch(work: RolloutWork, number: int) -> Columns:
    """At the worker: one batch. Its player is made once and kept for the next batches."""
    global _last
    if _last is None or _last[0] is not work:
        with contextlib.ExitStack() as stack:
            policies = [_unpacked(policy, stack) for policy in work.policies]
            _last = work, RolloutPlayer(work.settings, policies)
    return _last[1].play_batch(number)


def _packed(policy: Any) -> Any:
    """A name of a file, also behind "epsilon:…:", with the file's content; anything else as it is."""
    if not isinstance(policy, str | Path):
        return policy
    prefix, name = "", str(policy)
    while name.startswith(_EPSILON) and name.count(":") > 1:
        _, number, name_left = name.split(":", 2)
        prefix, name = f"{prefix}{_EPSILON}{number}:", name_left
    path = Path(os.path.expanduser(name))
    return PolicyFile(prefix, path.name, path.read_bytes()) if path.is_file() else policy


def _unpacked(policy: Any, stack: contextlib.ExitStack) -> Any:
    """The policy for a player; a file lies in a folder of its own until the stack is left."""
    if not isinstance(policy, PolicyFile):
        return policy
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="koffline-"))
    path = Path(folder) / policy.name
    path.write_bytes(policy.content)
    return f"{policy.prefix}{path}"
