"""K runs of online Trust-PCL in lock-step: seeds, critics and settings of equal shape
as one stack.

    config = OnlineConfig("InvertedPendulum-v5", steps=50_000)
    runs = [OnlineRun(config.with_changes(critic=c), seed) for c in CRITICS for seed in
    range(6)] with contextlib.closing(LockStep(runs)) as stack:
        while stack.steps < config.steps:
            stack.iterate()
        print(stack.evaluate())

A run has its own environments, replay, parameters and generators: its numbers do not
depend on other runs of the stack, up to the rounding of stacked products. Use one
thread (`koffline.fitting.threads(1)`), because the matrices are small; use more cores
by more stacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from koffline.checkpoints import State, restored, state_of
from koffline.envs.make import Copies
from koffline.online.collector import Actor, Collector, vectors
from koffline.online.config import OnlineRun, check_equal
from koffline.online.learner import Exploration, Learner
from koffline.online.networks import (
    Agent,
    AgentStack,
    Floats,
    InputMoments,
    Networks,
    Shape,
)
from koffline.online.paths import PathReplay, Paths
from koffline.online.trust_region import TrustRegion

# iterations per decay of the entropy coefficient (Feng et al. 2019, sec:exp_detail)
_DECAY_ITERATIONS = 2500


class LockStep:
    """K runs in one stack.

    Raises ConfigError if their settings cannot share a stack.
    """

    kept = (
        "iterations",
        "steps",
        "learner",
        "moments",
        "replay",
        "trust_region",
        "_exploration",
        "_collector",
        "_generators",
        "_sums",
        "_summed",
    )

    def __init__(
        self, runs: Sequence[OnlineRun], dtype: torch.dtype = torch.float32
    ) -> None:
        self.runs = tuple(runs)
        self._configs = [run.config for run in runs]
        self._common = common = check_equal(self._configs)
        self._dtype: Floats = np.float32
        if dtype == torch.float64:
            self._dtype = np.float64
        self._copies = Copies(common.env, **common.env_options)
        self._evaluators = Copies(common.env, **common.env_options)
        space = self._copies.action_space
        dimension = int(np.prod(self._copies.observation_shape))
        self.shape = shape = Shape(dimension, space, common.hidden)
        seeds, *kinds = zip(
            *(np.random.SeedSequence(run.seed).spawn(3) for run in runs), strict=True
        )
        # Of the replay, and of collection.
        self._generators = tuple(
            tuple(map(np.random.default_rng, kind)) for kind in kinds
        )
        online = AgentStack.initialise(
            shape, [seed.generate_state(2).tolist() for seed in seeds], dtype
        )
        self.learner = Learner(
            self._configs, Networks(online, AgentStack(shape, online.flat.clone()))
        )
        self._actor = Actor(online)
        self.moments = InputMoments(
            len(runs), dimension, [c.standardise for c in self._configs]
        )
        capacity = common.capacity
        if common.streaming:
            capacity = 1
        self.replay = PathReplay(
            len(runs), capacity, common.path_length, shape, self._dtype
        )
        self._collector = Collector(self._copies, shape, self._generators[1], common)
        scales = [c.exploration for c in self._configs]
        self._exploration: Exploration | None = None
        if any(scales):
            self._exploration = Exploration(scales, dimension, dtype)
        self.iterations = 0
        self.steps = 0
        self.trust_region = TrustRegion(self._configs)
        self._sums: dict[str, Tensor] = {}
        self._summed = 0

    @property
    def diverged(self) -> np.ndarray:
        """Mask (K,) of runs that met a non-finite gradient and were stopped."""
        return self.learner.diverged

    @property
    def is_finite(self) -> np.ndarray:
        """Mask (K,) of runs whose networks have only finite weights."""
        return self.learner.online.flat.isfinite().all(dim=1).numpy()

    @property
    def entropy_coef(self) -> np.ndarray:
        """Coefficients λ (K,) at this iteration, after decay."""
        share = self.iterations / _DECAY_ITERATIONS
        coefficients = []
        for config in self._configs:
            coefficient = config.entropy_coef
            if config.entropy_decay is not None:
                coefficient *= config.entropy_decay**share
            coefficients.append(coefficient)
        return np.array(coefficients, dtype=np.float64)

    def iterate(self) -> None:
        """Collect ``steps_per_iteration`` steps per run, and take a gradient step once
        the replay holds enough paths (streaming: on these steps).
        """
        self.learner.move_targets()
        collected = self._collector.collect(
            lambda observations, noise: self._actor.sample(
                self.moments.standardised(observations, self._dtype), noise
            )
        )
        self.moments.update(collected.observations)
        if self._exploration:
            states = self.moments.standardised(collected.observations, self._dtype)
            self._exploration.update(torch.from_numpy(states))
        if not self._common.streaming:
            self.replay.append(collected.runs, collected.paths)
        self.iterations += 1
        self.steps += self._common.steps_per_iteration
        self.trust_region.update(self._collector.recent, collected.changed)
        if self._common.streaming:
            self._learn(collected.by_run(len(self.runs)))
            return
        # Every iteration adds at least one path per copy:
        # counting these keeps all runs in step.
        added = self.iterations * self._common.num_envs
        batch_size = self._common.batch_size
        if (
            added >= max(self._common.learning_starts, batch_size)
            and self.replay.sizes.min() >= batch_size
        ):
            recency = [c.recency for c in self._configs]
            self._learn(self.replay.sample(self._generators[0], batch_size, recency))

    def evaluate(self) -> dict[str, np.ndarray]:
        """Play full episodes of the mean action in each run, with fixed seeds and
        separate environments.

        Returns means (K,): ``return``, ``length``, and ``sampled_return`` over the
        training episodes (played by the sampled policy) that ended since the last
        evaluation; the latest episode if there are none, NaN before the first.
        """
        common = self._common
        played = self._collector
        seeds = range(
            common.evaluation_seed, common.evaluation_seed + common.evaluation_episodes
        )
        returns, lengths = np.mean([self._play_episode(seed) for seed in seeds], axis=0)
        latest = [
            [total for total, _ in recent[-1:]] or [np.nan] for recent in played.recent
        ]
        sampled = [
            np.mean(since or last)
            for since, last in zip(played.since, latest, strict=True)
        ]
        played.since = [[] for _ in self.runs]
        return {
            "return": returns,
            "length": lengths,
            "sampled_return": np.array(sampled),
        }

    def take_metrics(self) -> dict[str, np.ndarray]:
        """Return means (K,) of the diagnostics since the last call; empty without
        gradient steps.
        """
        means = {
            name: (total / self._summed).numpy() for name, total in self._sums.items()
        }
        self._sums = {}
        self._summed = 0
        return means

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Mean or most probable actions (K, E, k) or (K, E), within bounds, for
        observations (K, E, d).
        """
        inputs = self.moments.standardised(observations, self._dtype)
        return self.shape.action_space.clip(self._actor.best(inputs))

    def agent(self, run: int) -> Agent:
        """Copy of a run's networks."""
        networks = self.learner.networks.of(torch.tensor([run]))
        return Agent(
            online=networks.online,
            target=networks.target,
            mean=self.moments.mean[run].copy(),
            std=self.moments.std[run].copy(),
            kl_coef=float(self.trust_region.kl_coef[run]),
            entropy_coef=float(self.entropy_coef[run]),
        )

    def state_dict(self) -> State:
        """State from which the runs continue identically."""
        return dict(state_of(self))

    def load_state_dict(self, state: State) -> bool:
        """Continue from ``state_dict``.

        Return False if running episodes could not be resumed.
        """
        restored(self, state)
        return self._collector.resume()

    def close(self) -> None:
        """Close all environments."""
        self._copies.close()
        self._evaluators.close()

    def _play_episode(self, seed: int) -> np.ndarray:
        """Returns and lengths (2, K) of one episode of each run's mean action."""
        count = len(self.runs)
        observations = vectors(self._evaluators.reset([seed] * count))
        totals = np.zeros((2, count))
        active = np.arange(count)
        for _ in range(self._common.evaluation_limit):
            here = self._evaluators.step(
                active.tolist(), self.act(observations[:, None])[active, 0]
            )
            observations[active] = vectors(here.observations)
            totals[:, active] += here.rewards, np.ones(len(active))
            active = active[~(here.terminated | here.truncated)]
            if not len(active):
                break
        return totals

    def _learn(self, paths: Paths) -> None:
        """Take a gradient step on these paths, and add up its diagnostics."""
        batch = self.learner.windows.sample(paths, self._generators[0], self.moments)
        if self._exploration:
            batch = self._exploration.add(batch)
        region = self.trust_region
        kl_coef = torch.from_numpy(region.kl_coef)
        entropy_coef = torch.from_numpy(self.entropy_coef)
        coefficients = torch.stack([kl_coef, entropy_coef]).unsqueeze(2)  # (2, K, 1)
        metrics = {
            **self.learner.update(batch, coefficients.to(self.learner.online.flat)),
            "kl_coef": kl_coef,
            "entropy_coef": entropy_coef,
            "wanted_kl_coef": torch.from_numpy(region.wanted),
        }
        for name, part in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + part
        self._summed += 1
