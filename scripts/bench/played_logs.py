"""Logs of Gymnasium's environments by policies that `koffline online` trains, or that
somebody wrote down.

Policies, logs and truths (by rollouts) are built when first asked for and kept in
$KOFFLINE_BENCH_CACHE.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from koffline.builders.rollouts import RolloutSettings, build_rollouts
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Transitions
from koffline.policies import Policy
from koffline.policy_specs import load_policy
from scripts.bench.specs import cache_directory

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "online" / "walker2d.yaml"
SEEDS = 3  # trained at once
_TRUTH_EPISODES = 200


@dataclass(frozen=True)
class Skill:
    """What `koffline online` knows after so many steps with a seed, uniform actions
    mixed in by ``epsilon``.

    greedy: its mean action, always.
    """

    steps: int
    seed: int
    epsilon: float = 0.0
    greedy: bool = False

    def spec(self, environment: str) -> str:
        """The policy as koffline names it; trained when it is first asked for."""
        first = self.seed - self.seed % SEEDS
        path = (
            trained(environment, self.steps, first) / f"seed_{self.seed}" / "model.d3"
        )
        if self.greedy:
            return str(_exported(path))
        if self.epsilon:
            return f"epsilon:{self.epsilon}:{path}"
        return str(path)


@dataclass(frozen=True)
class Written:
    """A policy that a user wrote down, by koffline's name for it."""

    policy: str
    greedy: bool = False

    def spec(self, environment: str) -> str:
        """The name."""
        return self.policy


def trained(environment: str, steps: int, first: int) -> Path:
    """The folder of a run of Trust-PCL with TD(0) from a first seed, resumed where it
    was broken off.
    """
    name = f"{environment.removesuffix('-v5')}-{steps}"
    if first:
        name += f"-{first}"
    out = cache_directory() / "policies" / name
    if not (out / "summary.json").exists():
        settings = {"env": environment, "critic": "td0", "steps": steps}
        words = [
            word
            for name, value in settings.items()
            for word in ("--set", f"{name}={value}")
        ]
        options = [
            str(_CONFIG),
            *words,
            "--seed",
            str(first),
            "--seeds",
            str(SEEDS),
            "--out",
            str(out),
        ]
        if out.exists():
            options = ["--resume", str(out)]
        command = [sys.executable, "-m", "koffline", "online", *options]
        subprocess.run(command, check=True)
    return out


def _exported(model: Path) -> Path:
    """The mean action of a model as TorchScript."""
    path = model.with_name("greedy.pt")
    if not path.exists():
        subprocess.run(
            [sys.executable, "-m", "koffline", "export", str(model), str(path)],
            check=True,
        )
    return path


@dataclass(frozen=True)
class PlayedProblem:
    """Episodes of Gymnasium of at most 1000 steps, each played by one of several
    policies.
    """

    name: str
    environment: str
    behavior: tuple[tuple[Skill | Written, float], ...]
    targets: dict[str, Skill | Written]
    episodes: int
    gamma: float = 0.99

    @property
    def greedy(self) -> tuple[str, ...]:
        """Targets that d3rlpy's FQE can evaluate."""
        return tuple(name for name, skill in self.targets.items() if skill.greedy)

    def log(self, seed: int, n_rows: int | None = None) -> Transitions:
        """Whole episodes; a function of the seed and the trained policies."""
        path = cache_directory() / "logs" / f"{self.name}-{seed}.hdf5".replace(" ", "-")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            weights = tuple(weight for _, weight in self.behavior)
            settings = RolloutSettings(
                self.environment, self.episodes, weights, seed=seed, gamma=self.gamma
            )
            policies = [skill.spec(self.environment) for skill, _ in self.behavior]
            write_transitions(build_rollouts(settings, policies), path)
        log = open_transitions(str(path))
        if n_rows is None:
            return log
        return log.select(np.arange(min(n_rows, len(log))))

    def policy(self, name: str) -> Policy:
        """One of the targets as koffline's policy."""
        log = self.log(0)
        spec = self.targets[name].spec(self.environment)
        return load_policy(spec, log.action_space, log.observation_shape)

    def truth(self, name: str) -> tuple[float, float]:
        """Mean discounted return and its standard error; 1000 steps leave γ^1000 of
        what would come.
        """
        path = (
            cache_directory() / "truths" / f"{self.name}-{name}.json".replace(" ", "-")
        )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = RolloutSettings(
                self.environment, _TRUTH_EPISODES, seed=10_000, gamma=self.gamma
            )
            returns = build_rollouts(
                settings, [self.targets[name].spec(self.environment)]
            ).returns(self.gamma)
            path.write_text(
                json.dumps(
                    [float(returns.mean()), float(returns.std() / len(returns) ** 0.5)]
                )
            )
        value, error = json.loads(path.read_text())
        return value, error
