"""Online Trust-PCL as one would write it for one run: modules, autograd,
torch.optim.Adam, no stacking.

The other side of ``scripts/bench/online.py``. It is plain, not wasteful: windows are
cut before the networks see them, V is evaluated at both ends of a window only, replay
lies in arrays, no gradient is kept while acting.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

DISCOUNT = 0.995
WINDOW = 10
BATCH = 64
PATH = 10
STEPS_PER_ITERATION = 10
CAPACITY = 5000
RECENCY = 0.001
LEARNING_STARTS = 64
TARGET_DECAY = 0.99
MAX_GRAD_NORM = 40.0
CLIP_ADVANTAGE = 1.0
FIRST_KL_COEF = 500.0
HIDDEN = 64


@dataclass(frozen=True)
class PlainSettings:
    """What the two sides of the benchmark agree on."""

    env: str = "InvertedPendulum-v5"
    critic: str = "kloss"
    learning_rate: float = 3e-3
    adam_epsilon: float = 1e-8
    max_divergence: float = 0.05
    kl_coef: float = 1.0
    bandwidth_scale: float = 1.0
    reward_scale: float = 1.0


class Replay:
    """Sub-episodes in arrays, the oldest overwritten."""

    def __init__(self, observation_dim: int, action_dim: int) -> None:
        self.observations = np.zeros((CAPACITY, PATH + 1, observation_dim), np.float32)
        self.actions = np.zeros((CAPACITY, PATH, action_dim), np.float32)
        self.rewards = np.zeros((CAPACITY, PATH), np.float32)
        self.lengths = np.zeros(CAPACITY, np.int64)
        self.terminated = np.zeros(CAPACITY, bool)
        self.inserted = np.zeros(CAPACITY, np.int64)
        self.count = 0

    def append(
        self,
        observations: list[Any],
        actions: list[Any],
        rewards: list[Any],
        terminated: bool,
    ) -> None:
        """One sub-episode of T steps and T + 1 observations."""
        slot = self.count % CAPACITY
        length = len(rewards)
        self.observations[slot, : length + 1] = observations
        self.actions[slot, :length] = actions
        self.rewards[slot, :length] = rewards
        self.lengths[slot] = length
        self.terminated[slot] = terminated
        self.inserted[slot] = self.count
        self.count += 1

    def sample(self, generator: np.random.Generator) -> np.ndarray:
        """Slots, recent ones more often, without replacement."""
        size = min(self.count, CAPACITY)
        weights = np.exp(RECENCY * (self.inserted[:size] - (self.count - 1)))
        return generator.choice(size, BATCH, replace=False, p=weights / weights.sum())


@dataclass
class RunningMoments:
    """Mean and spread of the observations so far."""

    count: float = 0.0
    mean: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0

    def update(self, observation: np.ndarray) -> None:
        """One more observation (Welford)."""
        self.count += 1.0
        difference = observation - self.mean
        self.mean = self.mean + difference / self.count
        self.squares = self.squares + difference * (observation - self.mean)

    @property
    def scale(self) -> np.ndarray:
        """Standard deviation, floored."""
        return np.sqrt(
            np.maximum(np.asarray(self.squares) / max(self.count, 1.0), 1e-8)
        )


@dataclass
class Window:
    """B windows, padded to one length."""

    observations: Tensor  # (B, d, n)
    actions: Tensor  # (B, d, k)
    rewards: Tensor  # (B, d)
    mask: Tensor  # (B, d)
    ends: Tensor  # (B, n)
    discounts: Tensor  # (B,)


@dataclass
class _Running:
    """The sub-episode being collected."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[Any] = field(default_factory=list)


class PlainRun:
    """One environment, one replay, one policy and one value network."""

    def __init__(self, settings: PlainSettings, seed: int) -> None:
        self.settings = settings
        self.environment = gymnasium.make(settings.env)
        seen = self.environment.observation_space
        box = self.environment.action_space
        assert isinstance(seen, Box)
        assert isinstance(box, Box)
        inputs = seen.shape[0]
        self._box = box
        self.generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.policy = _network(inputs, box.shape[0])
        self.value = _network(inputs, 1)
        self.log_std = nn.Parameter(torch.zeros(box.shape[0]))
        self.slow_policy = copy.deepcopy(self.policy)
        self.slow_value = copy.deepcopy(self.value)
        self.slow_log_std = self.log_std.detach().clone()
        self.parameters = [
            *self.policy.parameters(),
            self.log_std,
            *self.value.parameters(),
        ]
        self.slow_parameters = [
            *self.slow_policy.parameters(),
            self.slow_log_std,
            *self.slow_value.parameters(),
        ]
        self.adam = torch.optim.Adam(
            self.parameters, lr=settings.learning_rate, eps=settings.adam_epsilon
        )
        self.replay = Replay(inputs, box.shape[0])
        self.moments = RunningMoments()
        self.kl_coef = FIRST_KL_COEF
        self.episodes: deque[tuple[float, int]] = deque(maxlen=20)
        self.steps = 0
        self._running = _Running()
        self.observation, _ = self.environment.reset(seed=seed)
        self.episode_return = 0.0
        self.episode_length = 0

    def iterate(self) -> None:
        """Targets move, ten steps are taken, the trust region follows, one gradient
        step.
        """
        with torch.no_grad():
            for slow, fast in zip(self.slow_parameters, self.parameters, strict=True):
                slow.lerp_(fast, 1.0 - TARGET_DECAY)
        for _ in range(STEPS_PER_ITERATION):
            self._step()
        if self._running.rewards:
            self._store(terminated=False)
        returns = [episode_return for episode_return, _ in self.episodes]
        lengths = [length for _, length in self.episodes]
        wanted = solve_kl_coef(returns, lengths, self.settings.max_divergence)
        self.kl_coef = max(0.99 * self.kl_coef + 0.01 * wanted, self.settings.kl_coef)
        if self.replay.count >= LEARNING_STARTS:
            self._learn()

    def _step(self) -> None:
        """One action, one environment step."""
        self.moments.update(self.observation)
        if not self._running.observations:
            self._running.observations.append(self.observation)
        with torch.no_grad():
            inputs = self._standardise(
                torch.as_tensor(self.observation, dtype=torch.float32)
            )
            mean = self.policy(inputs)
            action = (mean + self.log_std.exp() * torch.randn_like(mean)).numpy()
        clipped = np.clip(action, self._box.low, self._box.high)
        self.observation, reward, terminated, truncated, _ = self.environment.step(
            clipped
        )
        self.steps = self.steps + 1
        self.episode_length = self.episode_length + 1
        self.episode_return += float(reward)
        self._running.observations.append(self.observation)
        self._running.actions.append(action)
        self._running.rewards.append(reward)
        if terminated or truncated:
            self._store(terminated)
            self.episodes.append((self.episode_return, self.episode_length))
            self.episode_return = 0.0
            self.episode_length = 0
            self.observation, _ = self.environment.reset()

    def _store(self, terminated: bool) -> None:
        part = self._running
        self._running = _Running()
        self.replay.append(part.observations, part.actions, part.rewards, terminated)

    def _standardise(self, observations: Tensor) -> Tensor:
        mean = torch.as_tensor(np.asarray(self.moments.mean), dtype=torch.float32)
        return (observations - mean) / torch.as_tensor(
            self.moments.scale, dtype=torch.float32
        )

    def draw_windows(self) -> Window:
        """One uniformly drawn window of every sampled sub-episode."""
        replay = self.replay
        slots = self.replay.sample(self.generator)
        lengths = replay.lengths[slots]
        starts = (self.generator.random(BATCH) * lengths).astype(np.int64)
        sizes = np.minimum(WINDOW, lengths - starts)
        steps = starts[:, None] + np.arange(WINDOW)
        steps = np.minimum(steps, PATH - 1)
        rows = slots[:, None]
        ends = starts + sizes
        final = replay.terminated[slots] & (ends == lengths)
        arrays = (
            replay.observations[rows, steps],
            replay.actions[rows, steps],
            replay.rewards[rows, steps] * self.settings.reward_scale,
            np.arange(WINDOW) < sizes[:, None],
            replay.observations[slots, ends],
            DISCOUNT**sizes * ~final,
        )
        return Window(
            *(torch.as_tensor(array, dtype=torch.float32) for array in arrays)
        )

    def _learn(self) -> None:
        """One Adam step."""
        self.adam.zero_grad()
        (self.compute_loss(self.draw_windows())).backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.adam.step()

    def compute_loss(self, window: Window) -> Tensor:
        """The critic's loss plus the policy's surrogate; their gradients reach
        different parameters.
        """
        inputs = self._standardise(window.observations)
        discount = DISCOUNT ** torch.arange(WINDOW) * window.mask  # (B, d)
        log_probability = _log_density(
            self.policy(inputs), self.log_std, window.actions
        )
        with torch.no_grad():
            slow = _log_density(
                self.slow_policy(inputs), self.slow_log_std, window.actions
            )
        reward = window.rewards - self.kl_coef * (log_probability.detach() - slow)
        value, next_value = self._values(inputs[:, 0], self._standardise(window.ends))
        residual = (
            (discount * reward).sum(dim=1) + window.discounts * next_value - value
        )
        advantage = residual.detach().clamp(-CLIP_ADVANTAGE, CLIP_ADVANTAGE)
        surrogate = -(advantage * (discount * log_probability).sum(dim=1)).mean()
        if self.settings.critic != "kloss":
            return surrogate + residual.square().mean()
        points = torch.cat((inputs[:, 0], window.actions[:, 0]), dim=1)
        distance = torch.pdist(points)
        bandwidth = self.settings.bandwidth_scale * distance.median().clamp(min=1e-6)
        gram = torch.exp(-torch.cdist(points, points).square() / bandwidth**2)
        # diag_weight 1/m: the V-statistic
        return surrogate + residual @ gram @ residual / BATCH**2

    def _values(self, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        critic = self.settings.critic
        if critic == "fvi":
            with torch.no_grad():
                next_value = self.slow_value(ends).squeeze(1)
            return self.value(starts).squeeze(1), next_value
        value, next_value = self.value(torch.cat((starts, ends))).squeeze(1).chunk(2)
        if critic == "td0":
            next_value = next_value.detach()
        return value, next_value

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


def solve_kl_coef(
    returns: list[float], lengths: list[int], max_divergence: float
) -> float:
    """λ with D(λ) = max_divergence · mean length, by bisection on [0, 1000]."""
    if len(returns) <= 8:
        return 500.0
    goal = max_divergence * float(np.mean(lengths))
    gains = np.asarray(returns)
    low = 0.0
    high = 1000.0
    for _ in range(14):
        middle = 0.5 * (low + high)
        scaled = gains / middle
        weights = np.exp(scaled - scaled.max())
        log_mean = scaled.max() + math.log(weights.mean())
        divergence = (weights * scaled).sum() / weights.sum() - log_mean
        if divergence > goal:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, outputs),
    )


def _log_density(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log N(a; mean, exp(log_std)), summed over coordinates."""
    return (
        torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        .log_prob(action)
        .sum(dim=-1)
    )
