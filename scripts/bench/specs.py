"""What an evaluation problem of the benchmark is, and how its true value is found and kept."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.transitions import Continuous, Discrete, Metadata, Transitions
from koffline.envs.boxes import draw_actions
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy
from scripts.bench.rollouts import MonteCarloValue, log_episodes, monte_carlo_value, play


@dataclass(frozen=True, eq=False)
class Problem:
    """A log, the policy to evaluate, and the answer. ``n_actions`` or ``low``/``high`` is None."""

    name: str
    observations: np.ndarray  # (N, d) float32
    actions: np.ndarray  # (N,) int64 | (N, k) float64
    rewards: np.ndarray  # (N,)
    next_observations: np.ndarray  # (N, d) float32
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool: time limit or end of the log
    episode_ids: np.ndarray  # (N,) int64
    steps: np.ndarray  # (N,) int64
    n_actions: int | None
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None
    target: (
        Any  # discrete: observations -> (N, n); else .sample(observations, generator), .mean, .deterministic
    )
    gamma: float
    truth: float  # value over the world's start distribution, no time limit
    truth_se: float
    truth_at_starts: float  # value given the log's own start states: what the log can be asked for
    truth_at_starts_se: float
    start_deviation: (
        float  # of V over start states; start_deviation / sqrt(episodes) is the unavoidable error
    )
    behavior: Any

    @property
    def n_episodes(self) -> int:
        return int(self.episode_ids[-1] - self.episode_ids[0]) + 1

    def transitions(self) -> Transitions:
        """The log as koffline's record, with γ as its hint."""
        if self.n_actions is not None:
            space: Discrete | Continuous = Discrete(self.n_actions)
        else:
            space = Continuous(len(self.low), self.low, self.high)
        columns = {f.name: getattr(self, f.name) for f in fields(Transitions) if hasattr(self, f.name)}
        return Transitions(**columns, action_space=space, metadata=Metadata(gamma=self.gamma))

    def policy(self) -> Policy:
        """The target as koffline's policy."""
        if self.n_actions is not None:
            return DiscretePolicy(self.n_actions, self.target, name=self.name)
        sample = None if self.target.deterministic else self.target.sample
        return ContinuousPolicy(len(self.low), self.target.mean, sample, name=self.name)

    @property
    def behavior_return(self) -> float:
        """Mean discounted return of the logged episodes as they were cut."""
        return float(np.sum(self.rewards * self.gamma**self.steps) / self.n_episodes)


@dataclass(frozen=True)
class Spec:
    """How to build a problem: the world, who wrote the log, who is evaluated."""

    name: str
    world: Any
    behavior: Any
    target: Any
    gamma: float
    time_limit: int = 200
    n_starts: int = 20_000

    def truth(self) -> MonteCarloValue:
        """The target policy's value over the world's start distribution, cached on disk."""
        starts = self.world.reset(self.n_starts, np.random.default_rng(20190910))
        return self.value_from(starts, repeats=2)

    def value_from(self, starts: np.ndarray, repeats: int) -> MonteCarloValue:
        """The target policy's value from these states (n, d), cached on disk."""
        path = cache_directory() / f"{self.name}-{self._fingerprint(starts, repeats)}.json"
        if path.exists():
            return MonteCarloValue(**json.loads(path.read_text()))
        generator = np.random.default_rng(20190911)
        value = monte_carlo_value(self.world, self.target, self.gamma, starts, generator, repeats)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(value)))
        part.replace(path)
        return value

    def __call__(self, seed: int = 0, n_rows: int = 20_000) -> Problem:
        name_key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "little")
        generator = np.random.default_rng([seed, name_key])
        log = log_episodes(self.world, self.behavior, n_rows, self.time_limit, generator)
        truth = self.truth()
        at_starts = self.value_from(log.start_states, repeats=20)
        columns = {name: column for name, column in vars(log).items() if name != "start_states"}
        low, high = self.world.bounds or (None, None)
        return Problem(
            name=self.name,
            **columns,
            n_actions=self.world.n_actions,
            low=low,
            high=high,
            target=self.target,
            gamma=self.gamma,
            truth=truth.value,
            truth_se=truth.standard_error,
            truth_at_starts=at_starts.value,
            truth_at_starts_se=at_starts.error_given_starts,
            start_deviation=truth.start_deviation,
            behavior=self.behavior,
        )

    def _fingerprint(self, starts: np.ndarray, repeats: int) -> str:
        """Changes whenever the starts, the world, the target policy or the Monte-Carlo code does."""
        text = [repr((self.world, self.target, self.gamma, repeats)), starts.tobytes().hex()]
        text += [inspect.getsource(function) for function in (monte_carlo_value, play, draw_actions)]
        text += [inspect.getsource(kind) for kind in sorted(_classes(self.world, self.target), key=repr)]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _classes(*records: Any) -> set[type]:
    """The classes of these dataclass instances and of the dataclasses inside them."""
    found: set[type] = set()
    for record in records:
        if is_dataclass(record):
            found |= {type(record)} | _classes(*(getattr(record, field.name) for field in fields(record)))
    return found


def cache_directory() -> Path:
    return Path(os.environ.get("KOFFLINE_BENCH_CACHE") or Path(tempfile.gettempdir()) / "koffline-bench")
