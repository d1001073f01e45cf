"""Online Trust-PCL once more: loops over windows, float64, autograd on ordinary
modules.

Written from the algorithm's description; shares nothing with the library.
"""

import copy
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from torch import nn

from tests import reference


@dataclass(frozen=True)
class Path:
    """T steps and T + 1 observations."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool = False
    truncated: bool = False

    def __len__(self):
        return len(self.rewards)


@dataclass(frozen=True)
class Settings:
    critic: str = "kloss"
    gamma: float = 0.9
    window_length: int = 3
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    clip_adv: float = 1.0
    diag_weight: float | None = 0.1  # None: 1 / m, the V-statistic
    bandwidth_scale: float = 1.0
    kernel_inputs: str = "state_action"


class Agent:
    """Policy and value with their slow copies; inputs are standardised by a fixed mean
    and spread.
    """

    def __init__(
        self,
        observation_dim,
        actions,
        discrete,
        seed=0,
        hidden=(7, 5),
        mean=0.0,
        std=1.0,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.discrete = discrete
        self.n_actions = actions
        self.mean = torch.as_tensor(
            np.broadcast_to(np.asarray(mean, float), (observation_dim,)).copy()
        )
        self.std = torch.as_tensor(
            np.broadcast_to(np.asarray(std, float), (observation_dim,)).copy()
        )
        self.policy = make_network((observation_dim, *hidden, actions), generator)
        self.slow_policy = make_network((observation_dim, *hidden, actions), generator)
        self.value = make_network((observation_dim, *hidden, 1), generator)
        self.slow_value = make_network((observation_dim, *hidden, 1), generator)
        self.log_std = None if discrete else nn.Parameter(small(generator, actions))
        self.slow_log_std = None if discrete else small(generator, actions)

    def inputs(self, observation):
        return (
            torch.as_tensor(observation, dtype=torch.float64) - self.mean
        ) / self.std

    def log_probability(self, observation, action):
        return log_density(self.policy(self.inputs(observation)), self.log_std, action)

    def slow_log_probability(self, observation, action):
        with torch.no_grad():
            return log_density(
                self.slow_policy(self.inputs(observation)), self.slow_log_std, action
            )

    def policy_parameters(self):
        return [*self.policy.parameters(), *([] if self.discrete else [self.log_std])]

    def value_parameters(self):
        return list(self.value.parameters())

    def copy(self):
        return copy.deepcopy(self)


def small(generator, size):
    return 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)


def make_network(sizes, generator):
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        with torch.no_grad():
            for part in layer.parameters():
                part.copy_(
                    torch.randn(part.shape, generator=generator, dtype=torch.float64)
                    / fan_in**0.5
                )
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def log_density(outputs, log_std, action):
    """log N(a; outputs, exp(log_std)²) written out, or the logarithm of a softmax."""
    if log_std is None:
        return outputs[int(action)] - torch.log(torch.exp(outputs).sum())
    total = torch.zeros((), dtype=torch.float64)
    for index, number in enumerate(np.atleast_1d(action)):
        z = (float(number) - outputs[index]) / torch.exp(log_std[index])
        total = total - 0.5 * z * z - log_std[index] - 0.5 * math.log(2.0 * math.pi)
    return total


def window_end(path, start, length):
    return min(start + length, len(path))


def residual(agent, path, start, settings):
    """R of one window: V at the ends carries the gradient the critic lets through, log
    π never does.
    """
    s = settings
    end = window_end(path, start, settings.window_length)
    total = -agent.value(agent.inputs(path.observations[start]))[0]
    for t in range(end - start):
        observation = path.observations[start + t]
        action = path.actions[start + t]
        here = agent.log_probability(observation, action).detach()
        slow = agent.slow_log_probability(observation, action)
        soft = (
            path.rewards[start + t]
            - (s.entropy_coef + s.kl_coef) * here
            + s.kl_coef * slow
        )
        total = total + s.gamma**t * soft
    if end == len(path) and path.terminated:
        return total
    return total + s.gamma ** (end - start) * bootstrap(
        agent, path.observations[end], settings.critic
    )


def bootstrap(agent, observation, critic):
    if critic in ("fvi", "kloss_slow"):
        with torch.no_grad():
            return agent.slow_value(agent.inputs(observation))[0]
    value = agent.value(agent.inputs(observation))[0]
    return value.detach() if critic == "td0" else value


def residuals_of(agent, windows, settings):
    """R of every window, (m,), with the critic's gradient."""
    return torch.stack(
        [residual(agent, path, start, settings) for path, start in windows]
    )


def policy_gradient(agent, windows, settings, residuals):
    """Of −Σ sg(clip(R)) Σ_t γ^t log π(a_t|s_t) / B, B counting paths, however many
    windows each has.
    """
    total = torch.zeros((), dtype=torch.float64)
    for (path, start), advantage in zip(windows, residuals.tolist(), strict=True):
        if settings.clip_adv > 0.0:
            advantage = max(-settings.clip_adv, min(settings.clip_adv, advantage))
        for t in range(window_end(path, start, settings.window_length) - start):
            log_probability = agent.log_probability(
                path.observations[start + t], path.actions[start + t]
            )
            total = total - advantage * settings.gamma**t * log_probability
    surrogate = total / len({id(path) for path, _ in windows})
    return torch.autograd.grad(surrogate, agent.policy_parameters())


def kernel_points(agent, windows, settings):
    """z = [s, a] of every window's first step; a as drawn, or as a unit vector."""
    points = []
    for path, start in windows:
        point = agent.inputs(path.observations[start]).tolist()
        if settings.kernel_inputs == "state_action":
            action = path.actions[start]
            if agent.discrete:
                point += [
                    1.0 if index == int(action) else 0.0
                    for index in range(agent.n_actions)
                ]
            else:
                point += [float(a) for a in np.atleast_1d(action)]
        points.append(point)
    return points


def gram(points, bandwidth_scale):
    """exp(−‖z − z'‖² / (scale · med)²), med over distinct pairs."""
    bandwidth = bandwidth_scale * reference.median_distance(points)
    return reference.gram(
        lambda x, y: reference.gaussian(x, y, bandwidth), points, points
    )


def critic_loss(agent, windows, settings, residuals):
    """(1 − w) U + w mean k_ii R_i² of the kernel loss, term by term; mean R² of the
    others.
    """
    m = len(residuals)
    if settings.critic not in ("kloss", "kloss_slow"):
        return sum(r * r for r in residuals) / m
    k = gram(kernel_points(agent, windows, settings), settings.bandwidth_scale)
    w = settings.diag_weight
    w = 1.0 / m if w is None else w
    return (1.0 - w) * reference.u_statistic(
        residuals, k
    ) + w * reference.diagonal_mean(residuals, k)


def critic_gradient(agent, windows, settings, residuals):
    loss = critic_loss(agent, windows, settings, residuals)
    return torch.autograd.grad(loss, agent.value_parameters()), float(loss.detach())


def all_windows(paths):
    """A window begins at every step."""
    return [(path, start) for path in paths for start in range(len(path))]


def random_paths(rng, observation_dim=3, actions=2, discrete=False, longest=10):
    """Long, short and one-step paths, each merely cut, terminated and truncated."""
    paths = []
    for length in (longest, 1, longest // 2):
        for ending in ({}, {"terminated": True}, {"truncated": True}):
            drawn = (
                rng.integers(actions, size=length)
                if discrete
                else rng.normal(size=(length, actions))
            )
            seen = rng.normal(size=(length + 1, observation_dim))
            rewards = rng.normal(size=length)
            paths.append(Path(seen, drawn, rewards, **ending))
    return paths


def divergence(returns, coefficient):
    """KL from uniform weights to w ∝ exp(G/λ): E_w[G/λ] − log mean exp(G/λ)."""
    highest = max(returns) / coefficient
    weights = [math.exp(g / coefficient - highest) for g in returns]
    total = sum(weights)
    expected = (
        sum(w * (g / coefficient) for w, g in zip(weights, returns, strict=True))
        / total
    )
    return expected - (highest + math.log(total / len(returns)))


def root(returns, allowed):
    """λ in [0, 1000] where the divergence is what is allowed."""
    if divergence(returns, 1000.0) >= allowed:
        return 1000.0
    smallest = 1e-9 * max(1.0, max(returns) - min(returns))
    if divergence(returns, smallest) <= allowed:
        return 0.0
    return brentq(
        lambda x: divergence(returns, x) - allowed, smallest, 1000.0, xtol=1e-10
    )


def successive_inclusion(weights, size):
    """Probability of every ordered draw of `size` distinct items, each ∝ weight among
    those left.
    """
    result = {}
    for order in itertools.permutations(range(len(weights)), size):
        left = sum(weights)
        probability = 1.0
        for item in order:
            probability *= weights[item] / left
            left -= weights[item]
        result[order] = probability
    return result
