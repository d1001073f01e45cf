"""What an evaluation problem of the benchmark is, and how its true value is found and
kept.
"""

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

from koffline.data.transitions import Metadata, Transitions
from koffline.envs.boxes import draw_actions
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy
from scripts.bench.rollouts import (
    EpisodeLog,
    MonteCarloValue,
    as_transitions,
    log_episodes,
    monte_carlo_value,
    play,
)


def policy_of(world: Any, target: Any, name: str) -> Policy:
    """A target as koffline's policy.

    Of discrete actions it maps observations to probabilities (N, n); else it has
    .sample(observations, generator), .mean and .deterministic, and .log_density where
    that is written down.
    """
    if not hasattr(target, "sample"):
        return DiscretePolicy(world.n_actions, target, name=name)
    size = len(world.bounds[0])
    sample = target.sample
    if target.deterministic:
        sample = None
    density = getattr(target, "log_density", None)
    return ContinuousPolicy(
        size, target.mean, sample, name=name, density_function=density
    )


@dataclass(frozen=True, eq=False)
class Problem:
    """A log, the policy to evaluate, and the answer.

    ``truth``: the value over the world's start distribution, no time limit.
    ``at_starts``: given the log's own start states, which is what the log can be asked
    for.
    """

    spec: Spec
    log: EpisodeLog
    truth: MonteCarloValue
    at_starts: MonteCarloValue

    def transitions(self) -> Transitions:
        """The log as koffline's record, with γ as its hint."""
        return as_transitions(
            self.log, self.spec.world, metadata=Metadata(gamma=self.spec.gamma)
        )

    def policy(self) -> Policy:
        """The target as koffline's policy."""
        return policy_of(self.spec.world, self.spec.target, self.spec.name)


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
        """The target policy's value over the world's start distribution, cached on
        disk.
        """
        starts = self.world.reset(self.n_starts, np.random.default_rng(20190910))
        return self.value_from(starts, repeats=2)

    def value_from(self, starts: np.ndarray, repeats: int) -> MonteCarloValue:
        """The target policy's value from these states (n, d), cached on disk."""
        path = (
            cache_directory() / f"{self.name}-{self._fingerprint(starts, repeats)}.json"
        )
        if path.exists():
            return MonteCarloValue(**json.loads(path.read_text()))
        generator = np.random.default_rng(20190911)
        value = monte_carlo_value(
            self.world, self.target, self.gamma, starts, generator, repeats
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(value)))
        part.replace(path)
        return value

    def __call__(self, seed: int = 0, n_rows: int = 20_000) -> Problem:
        name_key = int.from_bytes(
            hashlib.sha256(self.name.encode()).digest()[:4], "little"
        )
        generator = np.random.default_rng([seed, name_key])
        log = log_episodes(
            self.world, self.behavior, n_rows, self.time_limit, generator
        )
        return Problem(
            self, log, self.truth(), self.value_from(log.start_states, repeats=20)
        )

    def _fingerprint(self, starts: np.ndarray, repeats: int) -> str:
        """Changes whenever the starts, the world, the target policy or the Monte-Carlo
        code does.
        """
        text = [
            repr((self.world, self.target, self.gamma, repeats)),
            starts.tobytes().hex(),
        ]
        text += [
            inspect.getsource(function)
            for function in (monte_carlo_value, play, draw_actions)
        ]
        text += [
            inspect.getsource(kind)
            for kind in sorted(_classes(self.world, self.target), key=repr)
        ]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _classes(*records: Any) -> set[type]:
    """The classes of these dataclass instances and of the dataclasses inside them."""
    classes: set[type] = set()
    for record in records:
        if is_dataclass(record):
            classes |= {type(record)} | _classes(
                *(getattr(record, field.name) for field in fields(record))
            )
    return classes


def cache_directory() -> Path:
    return Path(
        os.environ.get("KOFFLINE_BENCH_CACHE")
        or Path(tempfile.gettempdir()) / "koffline-bench"
    )
