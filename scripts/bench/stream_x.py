"""Learning from each step once: stream AC(λ) beside Trust-PCL with `koffline online
--streaming`.

    python -m scripts.bench.stream_x --env InvertedPendulum-v5 --steps 40000 --seeds 3

Stream AC(λ) bounds its steps so that no prediction overshoots (Elsayed, Vasan & Mahmood
2024: eligibility traces, layer normalisation without parameters, sparse initialisation,
running normalisation of observations and rewards; their settings). Printed are greedy
returns, a mean over the curve and the last one, and microseconds per step and run.
``--out FILE`` keeps them as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from koffline.fitting import threads
from koffline.online.config import CRITICS, OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep

GAMMA = 0.99
LAMBDA = 0.8
ENTROPY = 0.01
KAPPA = {"policy": 3.0, "value": 2.0}
_HIDDEN = 128
_ZEROS = 0.9
_EVALUATIONS = 8
_EPISODES = 3


def sparse_linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer whose units have nine tenths of their weights at zero."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.uniform_(-1.0, 1.0).mul_(1.0 / math.sqrt(inputs))
        for row in layer.weight:
            row[torch.randperm(inputs)[: math.ceil(_ZEROS * inputs)]] = 0.0
        layer.bias.zero_()
    return layer


def body(inputs: int) -> nn.Sequential:
    """Two hidden layers."""
    parts = [
        part
        for width in (inputs, _HIDDEN)
        for part in (
            sparse_linear(width, _HIDDEN),
            nn.LayerNorm(_HIDDEN, elementwise_affine=False),
            nn.LeakyReLU(),
        )
    ]
    return nn.Sequential(*parts)


class Moments:
    """Running mean and variance of numbers that come one by one."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)

    def update(self, x: np.ndarray) -> None:
        """Take in one row."""
        self.count += 1
        before = x - self.mean
        self.mean = self.mean + before / self.count
        self.squares = self.squares + before * (x - self.mean)

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviations, 1 before the second row."""
        if self.count > 1:
            return np.sqrt(self.squares / (self.count - 1) + 1e-8)
        return np.ones_like(self.mean)


class BoundedSteps:
    """Gradient steps along traces, shortened so that the error cannot overshoot."""

    def __init__(self, parameters: Any, kappa: float) -> None:
        self._parameters = list(parameters)
        self._kappa = kappa
        self._traces = [torch.zeros_like(part) for part in self._parameters]

    @torch.no_grad()
    def step(self, error: float, ends: bool) -> None:
        """Move by the error along the traces, into which the parameters' gradients go
        first.
        """
        for trace, part in zip(self._traces, self._parameters, strict=True):
            trace.mul_(GAMMA * LAMBDA).add_(part.grad)
            part.grad = None
        length = float(sum(trace.abs().sum() for trace in self._traces))
        rate = 1.0 / max(max(abs(error), 1.0) * length * self._kappa, 1.0)
        for trace, part in zip(self._traces, self._parameters, strict=True):
            part.add_(trace, alpha=rate * error)
            if ends:
                trace.zero_()


class StreamActorCritic:
    """Stream AC(λ) for continuous actions."""

    def __init__(self, environment: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.env = environment
        self._seed = seed
        inputs = environment.observation_space.shape[0]
        outputs = environment.action_space.shape[0]
        self._policy = body(inputs)
        self._value = nn.Sequential(body(inputs), sparse_linear(_HIDDEN, 1))
        self._heads = nn.ModuleList([sparse_linear(_HIDDEN, outputs) for _ in range(2)])
        policy = [*self._policy.parameters(), *self._heads.parameters()]
        self._policy_steps = BoundedSteps(policy, KAPPA["policy"])
        self._value_steps = BoundedSteps(self._value.parameters(), KAPPA["value"])
        self._seen = Moments(inputs)
        self._returns = Moments(1)
        self._return = np.zeros(1)
        self._observation: np.ndarray | None = None

    def inputs(self, observation: np.ndarray) -> torch.Tensor:
        """Standardised observation."""
        shown = (observation - self._seen.mean) / self._seen.deviation
        return torch.from_numpy(shown.astype(np.float32))

    def act(self, observation: np.ndarray) -> np.ndarray:
        """The mean action."""
        with torch.no_grad():
            return self._clipped(self._heads[0](self._policy(self.inputs(observation))))

    def _clipped(self, action: torch.Tensor) -> np.ndarray:
        space = self.env.action_space
        return np.clip(action.detach().numpy(), space.low, space.high)

    def learn(self, steps: int) -> None:
        """Play and learn from each step."""
        for _ in range(steps):
            if self._observation is None:
                self._observation, _ = self.env.reset(seed=self._seed)
                self._seen.update(self._observation)
            inputs = self.inputs(self._observation)
            hidden = self._policy(inputs)
            law = torch.distributions.Normal(
                self._heads[0](hidden),
                nn.functional.softplus(self._heads[1](hidden)) + 1e-6,
            )
            action = law.sample()
            observation, reward, terminated, truncated, _ = self.env.step(
                self._clipped(action)
            )
            ends = bool(terminated or truncated)
            self._return = self._return * GAMMA + float(reward)
            self._returns.update(self._return)
            self._seen.update(observation)
            scaled = float(reward) / float(self._returns.deviation[0])
            value = self._value(inputs)
            with torch.no_grad():
                if terminated:
                    following = 0.0
                else:
                    following = GAMMA * float(self._value(self.inputs(observation)))
            error = scaled + following - float(value.detach())
            value.sum().backward()
            gained = (
                law.log_prob(action).sum()
                + ENTROPY * math.copysign(1.0, error) * law.entropy().sum()
            )
            gained.backward()
            self._value_steps.step(error, ends)
            self._policy_steps.step(error, ends)
            self._observation = observation
            if ends:
                self._observation = self.env.reset()[0]
                self._return = np.zeros(1)


def greedy_return(agent: StreamActorCritic, env: Any) -> float:
    """Mean return of the mean action."""
    returns = []
    for episode in range(_EPISODES):
        observation, _ = env.reset(seed=10_000 + episode)
        total = 0.0
        ends = False
        while not ends:
            observation, reward, terminated, truncated, _ = env.step(
                agent.act(observation)
            )
            total = total + float(reward)
            ends = bool(terminated or truncated)
        returns.append(total)
    return float(np.mean(returns))


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Curves of all methods, summed up."""
    every = arguments.steps // _EVALUATIONS
    summary = {}
    curves = []
    started = time.perf_counter()
    for seed in range(arguments.seeds):
        agent = StreamActorCritic(gymnasium.make(arguments.env), seed)
        trial = gymnasium.make(arguments.env)
        curve = []
        for _ in range(_EVALUATIONS):
            agent.learn(every)
            curve.append(greedy_return(agent, trial))
        curves.append(curve)
    summary["stream AC(λ)"] = _summed(np.array(curves), started, arguments)
    rates = {
        "evaluation_interval": every,
        "evaluation_episodes": _EPISODES,
        "streaming": True,
    }
    config = OnlineConfig(arguments.env, steps=arguments.steps, **rates)
    for critic in CRITICS:
        runs = [
            OnlineRun(config.with_changes(critic=critic), seed)
            for seed in range(arguments.seeds)
        ]
        shown = []
        started = time.perf_counter()
        with contextlib.closing(LockStep(runs)) as stack:
            while stack.steps < config.steps:
                stack.iterate()
                if stack.steps % every < config.steps_per_iteration:
                    shown.append(stack.evaluate()["return"].tolist())
        summary[critic] = _summed(np.array(shown).T, started, arguments)
    return summary


def _summed(
    curves: np.ndarray, started: float, arguments: argparse.Namespace
) -> dict[str, float]:
    seconds = time.perf_counter() - started
    return {
        "mean": float(curves.mean()),
        "last": float(curves[:, -1].mean()),
        "microseconds": 1e6 * seconds / (arguments.steps * arguments.seeds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--env", default="InvertedPendulum-v5", help="continuous actions"
    )
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    with threads(1):
        summary = measure(arguments)
    for name, numbers in summary.items():
        print(f"{name:14s}", *(f"{key} {value:8.1f}" for key, value in numbers.items()))
    if arguments.out is not None:
        choices = {name: getattr(arguments, name) for name in ("env", "steps", "seeds")}
        text = json.dumps({**choices, "found": summary}, indent=2, ensure_ascii=False)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
