"""K runs of online Trust-PCL in lock-step: seeds, critics and settings of equal shape as one stack.

    config = OnlineConfig("InvertedPendulum-v5", steps=50_000)
    runs = [OnlineRun(config.with_changes(critic=c), seed) for c in CRITICS for seed in range(6)]
    with contextlib.closing(LockStep(runs)) as stack:
        while stack.steps < config.steps:
            stack.iterate()
        print(stack.evaluate())

A run has its own environments, replay, parameters and generators: its numbers do not depend on the others in
the stack, up to the rounding of stacked products. Use one thread (`koffline.fitting.threads(1)`): the
matrices are small; for more cores run more stacks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from koffline.data.paths import PathReplay
from koffline.errors import ConfigError
from koffline.online.collector import Collector
from koffline.online.config import OnlineConfig, OnlineRun, check_equal
from koffline.online.environments import (
    Environments,
    Evaluation,
    LocalEnvironments,
    clip_actions,
    play_episodes,
)
from koffline.online.learner import Learner
from koffline.online.networks import Actor, AgentArrays, InputMoments, Shape, Streams
from koffline.online.trust_region import TrustRegion
from koffline.online.vector_environments import make_vector_environments

_DECAY_ITERATIONS = 2500  # of the entropy coefficient (Feng et al. 2019, sec:exp_detail)


class LockStep:
    """K runs side by side. Raises ConfigError where their settings cannot share a stack."""

    def __init__(
        self,
        runs: Sequence[OnlineRun],
        environments: Environments | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.runs = tuple(runs)
        self._configs = [run.config for run in runs]
        common = check_equal(self._configs)
        self._dtype = np.float64 if dtype == torch.float64 else np.float32
        copies = len(runs) * common.n_environments
        self._environments = environments or _make_environments(common, copies)
        if self._environments.n != copies:
            raise ConfigError(
                f"environments has {self._environments.n} copies; {len(runs)} runs of "
                f"{common.n_environments} need {copies}"
            )
        self.shape = Shape(self._environments.observation_dim, self._environments.action_space, common.hidden)
        streams = [Streams.of(run.seed) for run in runs]
        self._replay_generators = [s.replay for s in streams]
        self._play_generators = [s.play for s in streams]
        self.learner = Learner.initialise(self._configs, self.shape, streams, dtype)
        self._actor = Actor(self.learner.online)
        self.moments = InputMoments(
            len(runs), self.shape.observation_dim, [c.standardise for c in self._configs]
        )
        self.replay = PathReplay(
            len(runs),
            common.capacity,
            common.path_length,
            self.shape.observation_dim,
            self.shape.outputs if self.shape.continuous else None,
            self._dtype,
        )
        self._collector = Collector(
            self._environments,
            self.shape,
            self._play_generators,
            common.steps_per_iteration // common.n_environments,
            common.path_length,
        )
        self._prefilled = self._fill(common.initial_log)
        self.iterations = 0
        self.steps = 0
        self._trust_region = TrustRegion(self._configs)
        self._sums: dict[str, np.ndarray] = {}
        self._summed = 0
        self._learning_seconds = self._evaluation_seconds = 0.0
        self._evaluators: LocalEnvironments | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time spent on each part."""
        parts = {"learning": self._learning_seconds, "evaluation": self._evaluation_seconds}
        return {**self._collector.seconds, **parts}

    @property
    def diverged(self) -> np.ndarray:
        """Which runs (K,) met a gradient that is not finite and have stood still since."""
        return self.learner.diverged

    @property
    def kl_coef(self) -> np.ndarray:
        """(K,), the trust region's."""
        return self._trust_region.kl_coef

    @property
    def entropy_coef(self) -> np.ndarray:
        """(K,), decayed to this iteration."""
        return np.array(
            [
                c.entropy_coef
                * (1.0 if c.entropy_decay is None else c.entropy_decay)
                ** (self.iterations / _DECAY_ITERATIONS)
                for c in self._configs
            ]
        )

    def iterate(self) -> None:
        """Collect ``steps_per_iteration`` steps per run, then take one gradient step."""
        started = time.perf_counter()
        self.learner.move_targets()
        moved = time.perf_counter()
        collected = self._collector.collect(self._act)
        after = time.perf_counter()
        self.moments.update(collected.observations, collected.valid)
        self.replay.append(collected.runs, collected.paths)
        self.iterations += 1
        self.steps += self._configs[0].steps_per_iteration
        self._trust_region.update(self._collector.recent, self._collector.take_changed())
        if self._may_learn():
            self._learn()
        self._learning_seconds += time.perf_counter() - after + moved - started

    def evaluate(self) -> list[Evaluation]:
        """Full episodes of the mean action in separate environments with fixed seeds; one record per run."""
        started = time.perf_counter()
        common = self._configs[0]
        if self._evaluators is None:
            self._evaluators = LocalEnvironments(
                common.environment, common.environment_options, len(self.runs)
            )
        played = [
            play_episodes(
                self._evaluators, self.act, common.evaluation_seed + episode, common.evaluation_limit
            )
            for episode in range(common.evaluation_episodes)
        ]
        returns, lengths = np.mean(played, axis=0)
        found = []
        for run in range(len(self.runs)):
            finished = self._collector.since[run] or list(self._collector.recent[run])[-1:]
            sampled = float(np.mean([episode.total for episode in finished])) if finished else float("nan")
            self._collector.since[run] = []
            found.append(Evaluation(self.steps, float(returns[run]), float(lengths[run]), sampled))
        self._evaluation_seconds += time.perf_counter() - started
        return found

    def take_metrics(self) -> list[dict[str, float]]:
        """Means of each run's diagnostics since the last call; empty where nothing was learned."""
        names, count = list(self._sums), max(self._summed, 1)
        runs = range(len(self.runs))
        found = [{name: float(self._sums[name][run] / count) for name in names} for run in runs]
        self._sums, self._summed = {}, 0
        return found

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Mean or most probable actions (K, E, k) or (K, E), inside the box, for observations (K, E, d)."""
        inputs = self.moments.standardised(observations, self._dtype)
        return clip_actions(self._actor.best(inputs), self.shape.action_space)

    def agent(self, k: int) -> AgentArrays:
        """Run k's networks, copied."""
        policy, deviations, value = self.learner.online.layers(k)
        slow_policy, slow_deviations, slow_value = self.learner.target.layers(k)
        return AgentArrays(
            self.shape, policy, deviations, value, slow_policy, slow_deviations, slow_value,
            self.moments.mean[k].copy(), self.moments.std[k].copy(),
            float(self.kl_coef[k]), float(self.entropy_coef[k]),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the runs depends on."""
        return {
            "iterations": self.iterations,
            "steps": self.steps,
            "kl_coef": self.kl_coef.copy(),
            "wanted_kl_coef": self._trust_region.wanted.copy(),
            "learner": self.learner.state_dict(),
            "moments": self.moments.state_dict(),
            "replay": self.replay.state_dict(),
            "collector": self._collector.state_dict(),
            "generators": [
                [generator.bit_generator.state for generator in kind]
                for kind in (self._replay_generators, self._play_generators)
            ],
            "sums": {name: part.copy() for name, part in self._sums.items()},
            "summed": self._summed,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from ``state_dict``. False where running episodes could not be taken up and began anew."""
        self.iterations, self.steps = state["iterations"], state["steps"]
        self._trust_region.kl_coef = state["kl_coef"].copy()
        self._trust_region.wanted = state["wanted_kl_coef"].copy()
        self.learner.load_state_dict(state["learner"])
        self.moments.load_state_dict(state["moments"])
        self.replay.load_state_dict(state["replay"])
        self._sums = {name: part.copy() for name, part in state["sums"].items()}
        self._summed = state["summed"]
        for kind, states in zip(
            (self._replay_generators, self._play_generators), state["generators"], strict=True
        ):
            for generator, saved in zip(kind, states, strict=True):
                generator.bit_generator.state = saved
        seconds = dict(state["seconds"])
        self._learning_seconds, self._evaluation_seconds = seconds.pop("learning"), seconds.pop("evaluation")
        self._collector.seconds.update(seconds)
        return self._collector.load_state_dict(state["collector"])

    def close(self) -> None:
        """Close all environments."""
        self._environments.close()
        if self._evaluators is not None:
            self._evaluators.close()

    def _act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        inputs = self.moments.standardised(observations, self._dtype)
        return self._actor.sample(inputs, noise)

    def _may_learn(self) -> bool:
        common = self._configs[0]
        # Every iteration gives each copy a path: counting those keeps runs in step whatever episodes do.
        counted = self._prefilled + self.iterations * common.n_environments
        needed = max(common.learning_starts, common.batch_size)
        return counted >= needed and int(self.replay.sizes.min()) >= common.batch_size

    def _learn(self) -> None:
        common = self._configs[0]
        paths = self.replay.sample(
            self._replay_generators, common.batch_size, [c.recency for c in self._configs]
        )
        batch = self.learner.minibatch(paths, self._replay_generators, self.moments)
        entropy_coef = self.entropy_coef
        found = self.learner.update(batch, entropy_coef, self.kl_coef)
        for name, part in {**found, "kl_coef": self.kl_coef, "entropy_coef": entropy_coef}.items():
            self._sums[name] = self._sums.get(name, 0.0) + part
        self._summed += 1

    def _fill(self, source: str | None) -> int:
        if source is None:
            return 0
        from koffline.data.sources import open_transitions
        from koffline.online.replay_log import fill_from_log

        fill_from_log(self.replay, open_transitions(source), self.shape.action_space)
        for run in range(len(self.runs)):
            held = self.replay.held(run)
            inside = np.arange(self.replay.path_length) < held.lengths[:, None]
            rows = held.observations[:, :-1][inside]
            alone = np.zeros((len(self.runs), len(rows)), dtype=bool)
            alone[run] = True
            self.moments.update(np.broadcast_to(rows, (len(self.runs), *rows.shape)), alone)
        return int(self.replay.sizes.min())


def _make_environments(config: OnlineConfig, copies: int) -> Environments:
    named = config.environment, config.environment_options, copies
    if config.vectorization == "local":
        return LocalEnvironments(*named)
    return make_vector_environments(*named, config.vectorization)
