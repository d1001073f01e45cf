"""Episodes of a policy, or of a mixture of policies, in any Gymnasium environment.

Episodes are played in batches of parallel copies: the policy is called once for all
copies. Each episode has its own random numbers, so that a build can be interrupted
between batches and continued, and batches can be played in several processes or on a
Ray cluster. Rows do not depend on the batch size, except that the last bits of a
network's outputs may. A long build stores its finished batches as files.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from koffline.data.transitions import Discrete, Metadata, Transitions
from koffline.envs import BLOCK, Copies, make_copies
from koffline.errors import ConfigError, DataError
from koffline.jobs import PassSettings
from koffline.policies.base import DiscretePolicy, Policy, PolicySource, pick_actions
from koffline.policy_specs import as_policy
from koffline.store.files import atomic_file
from koffline.store.run_record import digests_of, versions
from koffline.untrusted.arrays import read_arrays

Columns = dict[str, np.ndarray]

_HERE = PassSettings()
_LARGEST_SEED = 2**31 - 1  # largest seed of environments that store it as a C int


@dataclass(frozen=True)
class RolloutSettings:
    """Everything besides the policies that determines a build of rollouts.

    env: a Gymnasium id, or the name of one of our worlds. weights: shares of the
    policies; every episode is played by one policy. time_limit: steps after which an
    episode is truncated; None: the environment's own. num_envs: parallel copies; None:
    a suitable number.
    """

    env: str
    episodes: int
    weights: tuple[float, ...] = (1.0,)
    time_limit: int | None = None
    num_envs: int | None = None
    seed: int = 0
    gamma: float | None = None

    def __post_init__(self) -> None:
        for name, least in {
            "episodes": 1,
            "num_envs": 1,
            "time_limit": 1,
            "seed": 0,
        }.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ConfigError(
                    f"{name} is {number}; give a whole number from {least} on"
                )
        if self.gamma is not None and not 0.0 < self.gamma < 1.0:
            raise ConfigError(
                f"gamma is {self.gamma}; give a discount strictly between 0 and 1"
            )
        good = all(math.isfinite(weight) and weight >= 0.0 for weight in self.weights)
        if not good or not 0.0 < sum(self.weights) < math.inf:
            raise ConfigError(
                f"weights are {self.weights}; give finite shares that are not all zero"
            )


def build_rollouts(
    settings: RolloutSettings,
    policies: Sequence[PolicySource],
    *,
    workers: int = 1,
    ray: str | None = None,
) -> Transitions:
    """Play whole episodes; log-probabilities are those of each episode's policy.

    policies: anything `koffline.load_policy` takes, or callables, one per weight.
    Log-probabilities are stored for discrete actions only. Continuous actions outside
    the space are clipped to it, stored as played, and counted in ``metadata.notes``.
    workers, ray: play in several processes or on a Ray cluster, as in
    `koffline.jobs.PassSettings`; the rows are the same. Raises ConfigError, and
    PolicyError for a policy that does not fit.
    """
    with RolloutPlayer(settings, policies, PassSettings(workers, ray)) as player:
        return player.join(list(player.play(range(player.batches))))


def environment_seed(seed: int, episode: int) -> int:
    """Seed for resetting an episode's environment, from the build's seed and the
    episode's number only.

    So rows do not depend on the number of parallel copies or of requested episodes.
    """
    return (
        int(np.random.SeedSequence(seed, spawn_key=(episode, 0)).generate_state(1)[0])
        & _LARGEST_SEED
    )


class RolloutPlayer(contextlib.AbstractContextManager["RolloutPlayer"]):
    """Copies of an environment, and the policies that act in them; use it as a context
    manager.

    where: the processes or the cluster that play.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        policies: Sequence[PolicySource],
        where: PassSettings = _HERE,
    ) -> None:
        if len(policies) != len(settings.weights):
            raise ConfigError(
                f"{len(policies)} policies, {len(settings.weights)} weights; give one"
                " for each"
            )
        self._settings = settings
        self._given = policies
        self._where = where
        self._clipped = 0
        self._copies = make_copies(settings.env, settings.time_limit)
        self._batch_size = settings.num_envs or self._copies.usual_number
        self.action_space = self._copies.action_space
        shape = self._copies.observation_shape
        self.policies: list[Policy] = [
            as_policy(policy, self.action_space, shape) for policy in policies
        ]
        self.batches = math.ceil(settings.episodes / self._batch_size)

    def __exit__(self, *error: object) -> None:
        self._copies.close()

    def __reduce__(
        self,
    ) -> tuple[type[RolloutPlayer], tuple[RolloutSettings, tuple[PolicySource, ...]]]:
        """Workers make their own copies and policies, and read policy files from the
        shared disk.
        """
        return RolloutPlayer, (self._settings, tuple(self._given))

    def episodes_until(self, number: int) -> int:
        """Number of episodes in the batches up to and including the given one."""
        return min((number + 1) * self._batch_size, self._settings.episodes)

    def play(self, numbers: Iterable[int]) -> Iterator[Columns]:
        """Yield the batches with the given numbers in order, wherever they are played.

        Raises JobError if workers keep dying.
        """
        return self._where.map(
            RolloutPlayer.play_batch, numbers, self, "batch {} of episodes".format
        )

    def play_batch(self, number: int) -> Columns:
        """The episodes of a batch, sorted by episode and step and numbered as in the
        build.
        """
        episodes = np.arange(number * self._batch_size, self.episodes_until(number))
        actor = _PolicyMixture(self, self._settings, episodes.tolist())
        seeds = [
            environment_seed(self._settings.seed, episode)
            for episode in episodes.tolist()
        ]
        observations = self._copies.reset(seeds)
        running = np.arange(len(episodes))
        parts: list[Columns] = []
        while len(running):
            acted = actor.act(len(parts), running, observations)
            acted["actions"] = acted["actions"].astype(
                self._copies.action_dtype, copy=False
            )
            step = self._copies.step(running.tolist(), acted["actions"])
            after = step._asdict()
            seen = {
                "observations": observations,
                "next_observations": after.pop("observations"),
            }
            place = {
                "episode_ids": episodes[running],
                "steps": np.full(len(running), len(parts)),
            }
            parts.append({**seen, **after, **place, **acted})
            on = ~(step.terminated | step.truncated)
            running = running[on]
            observations = step.observations[on]
        columns = _joined(parts)
        order = np.lexsort((columns["steps"], columns["episode_ids"]))
        return {name: column[order] for name, column in columns.items()}

    def join(self, parts: Sequence[Columns]) -> Transitions:
        """Join batches to one log; its notes count the clipped actions of all batches
        joined so far.
        """
        columns = _joined(parts)
        clipped = columns.pop("clipped")
        log_probabilities = columns.pop("log_probabilities")
        self._clipped += int(clipped.sum())
        if isinstance(self.action_space, Discrete):
            columns["behavior_log_probabilities"] = log_probabilities
        notes: tuple[str, ...] = ()
        if self._clipped:
            notes = (
                f"{self._clipped} actions were outside the action space; they are"
                " stored as clipped",
            )
        return Transitions(
            **columns,
            action_space=self.action_space,
            metadata=world_metadata(self._copies, self._settings.gamma, notes),
        )


def world_metadata(
    copies: Copies, gamma: float | None, notes: tuple[str, ...] = (), **extra: object
) -> Metadata:
    """Metadata of a log played in copies of an environment."""
    if copies.time_limit is None:
        limit = {}
    else:
        limit = {"time_limit": copies.time_limit}
    return Metadata(
        gamma=gamma,
        extra={"task": copies.name, **limit, **extra},
        notes=(*copies.notes, *notes),
    )


class _PolicyMixture:
    """Policies that play a batch of episodes: one per episode, drawn by weight.

    Each episode has its own random stream: its first number selects the policy, the
    others the actions.
    """

    def __init__(
        self, player: RolloutPlayer, settings: RolloutSettings, episodes: Sequence[int]
    ) -> None:
        keys = [
            np.random.SeedSequence(settings.seed, spawn_key=(episode, 1))
            for episode in episodes
        ]
        self._policies = player.policies
        self._space = player.action_space
        self._generators = [np.random.default_rng(key) for key in keys]
        ends = np.cumsum(settings.weights) / sum(settings.weights)
        drawn = np.array([generator.random() for generator in self._generators])
        # The last end may be rounded below one; a policy of weight zero ends where the
        # one before it does.
        last = np.flatnonzero(settings.weights)[-1]
        self._chosen = np.minimum(np.searchsorted(ends, drawn, side="right"), last)

    def act(self, step: int, running: np.ndarray, observations: np.ndarray) -> Columns:
        """Actions of all running copies, each by its own policy; log-probabilities of
        discrete ones.

        A stochastic policy with continuous actions is called row by row, because each
        episode has its own generator; a deterministic one is called once for all
        copies.
        """
        count = len(running)
        is_discrete = isinstance(self._space, Discrete)
        actions: np.ndarray
        if isinstance(self._space, Discrete):
            actions = np.zeros(count, dtype=np.int64)
        else:
            actions = np.zeros((count, self._space.k))
        log_probabilities = np.zeros(count)
        if is_discrete and step % BLOCK == 0:
            self._numbers = np.stack(
                [generator.random(BLOCK) for generator in self._generators]
            )
        for index in np.unique(self._chosen[running]):
            mine = self._chosen[running] == index
            policy = self._policies[index]
            seen = observations[mine]
            if isinstance(policy, DiscretePolicy):
                table = policy.probabilities(seen)
                actions[mine] = pick_actions(
                    table, self._numbers[running[mine], step % BLOCK]
                )
                log_probabilities[mine] = np.log(
                    table[np.arange(len(table)), actions[mine]]
                )
            elif policy.deterministic:
                actions[mine] = policy.mean(seen)
            else:
                rows = zip(running[mine], seen, strict=True)
                drawn = [
                    policy.sample(row[None], self._generators[copy])
                    for copy, row in rows
                ]
                actions[mine] = np.concatenate(drawn)
        inside = self._space.clip(actions)
        clipped = (inside != actions).reshape(count, -1).any(axis=1)
        return {
            "actions": inside,
            "log_probabilities": log_probabilities,
            "clipped": clipped,
        }


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class PartsFolder:
    """Finished batches of a build, identified by settings and policies; other builds'
    files are ignored.

    Raises DataError if the folder's name is used by something else.
    """

    def __init__(
        self, folder: Path, settings: RolloutSettings, policies: Sequence[str]
    ) -> None:
        if os.path.lexists(folder) and not folder.is_dir():
            raise DataError(
                f"{folder} is no unfinished build; move it or name another --out"
            )
        decides = (
            versions().get("koffline"),
            settings,
            list(policies),
            digests_of(policies),
        )
        self.folder = folder
        self._build = hashlib.sha256(repr(decides).encode()).hexdigest()[:12]

    def batches(
        self, player: RolloutPlayer, progress: Callable[[int], None]
    ) -> Iterator[Columns]:
        """Yield all batches in order, read from disk or played and stored; one is in
        memory at a time.

        progress: called with the number of finished episodes.
        """
        played = player.play(n for n in range(player.batches) if self._read(n) is None)
        for number in range(player.batches):
            columns = self._read(number)
            if columns is None:
                columns = next(played)
                self.folder.mkdir(parents=True, exist_ok=True)
                with (
                    atomic_file(self._path(number), force=True) as temporary,
                    temporary.open("wb") as file,
                ):
                    np.savez(file, **columns)  # type: ignore[arg-type]
            yield columns
            progress(player.episodes_until(number))

    def remove(self) -> None:
        """Remove the parts, and the folder if it is then empty."""
        for path in self.folder.glob("*part-*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{self._build}-{number:06d}.npz"

    def _read(self, number: int) -> Columns | None:
        """Read a batch from the disk; None if it is missing or incomplete."""
        try:
            return read_arrays(self._path(number))
        except Exception:  # numpy and zipfile raise many types
            return None
