"""A careful plain FQE on the leaderboard: semi-gradient, one network, a slow target,
nothing of koffline's.

Standardised observations, returns scaled to one, time limits bootstrapped through,
expectations over discrete actions and fresh draws of continuous ones. The settings were
chosen on the development half. (Le, Voloshin & Yue 2019; the target's slow average as
in Fu et al. 2021)
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from koffline.data.transitions import Discrete, Transitions
from koffline.policies import DiscretePolicy, Policy

_HIDDEN = 64
_RATE = 1e-3
_BATCH = 256
_SLOW = 0.05
# of continuous actions: kept for each next state, for each start
_DRAWS = 4
_START_DRAWS = 16


def fqe_value(
    log: Transitions, policy: Policy, gamma: float, seed: int, steps: int = 18_000
) -> float:
    """The mean value of the log's start states."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    raw = np.asarray(log.observations, dtype=np.float64).reshape(len(log), -1)
    mean = raw.mean(axis=0)
    spread = raw.std(axis=0)
    spread = np.where(spread > 1e-8, spread, 1.0)
    scale = float(np.sqrt(np.mean(log.returns_to_go(gamma) ** 2))) or 1.0
    starts = log.initial_observations()
    following = log.next_observations

    def tensor(numbers: Any) -> torch.Tensor:
        return torch.as_tensor(np.array(numbers, dtype=np.float32))

    def scaled(observations: np.ndarray) -> torch.Tensor:
        return tensor(
            (
                np.asarray(observations, dtype=np.float64).reshape(
                    len(observations), -1
                )
                - mean
            )
            / spread
        )

    states = scaled(raw)
    later = scaled(following)
    first = scaled(starts)
    rewards = tensor(log.rewards) / scale
    discounts = tensor(gamma * ~np.asarray(log.terminated))
    is_discrete = isinstance(log.action_space, Discrete)
    if is_discrete:
        assert isinstance(policy, DiscretePolicy)
        taken = torch.as_tensor(np.array(log.actions, dtype=np.int64))
        next_chances, first_chances = (
            tensor(policy.probabilities(o)) for o in (following, starts)
        )
        width = states.shape[1]
        outputs = next_chances.shape[1]
    else:
        taken = tensor(log.actions)
        drawn = [tensor(policy.sample(following, generator)) for _ in range(_DRAWS)]
        first_drawn = [
            tensor(policy.sample(starts, generator)) for _ in range(_START_DRAWS)
        ]
        width = states.shape[1] + taken.shape[1]
        outputs = 1
    network = nn.Sequential(
        *(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()),
        nn.Linear(_HIDDEN, outputs),
    )
    target = copy.deepcopy(network)
    optimiser = torch.optim.Adam(network.parameters(), lr=_RATE)

    def next_value(rows: torch.Tensor) -> torch.Tensor:
        if is_discrete:
            return (target(later[rows]) * next_chances[rows]).sum(dim=1)
        action = drawn[int(generator.integers(_DRAWS))][rows]
        return target(torch.cat([later[rows], action], dim=1)).squeeze(1)

    def start_value() -> float:
        if is_discrete:
            return float((target(first) * first_chances).sum(dim=1).mean())
        return float(
            torch.stack(
                [target(torch.cat([first, a], dim=1)).mean() for a in first_drawn]
            ).mean()
        )

    values = []
    for step in range(steps):
        rows = torch.as_tensor(generator.integers(len(log), size=_BATCH))
        with torch.no_grad():
            goal = rewards[rows] + discounts[rows] * next_value(rows)
        if is_discrete:
            value = network(states[rows]).gather(1, taken[rows, None]).squeeze(1)
        else:
            value = network(torch.cat([states[rows], taken[rows]], dim=1)).squeeze(1)
        loss = (value - goal).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(
                target.parameters(), network.parameters(), strict=True
            ):
                slow.lerp_(fast, _SLOW)
            if step == steps - 1 or (step >= 0.9 * steps and step % 100 == 0):
                values.append(start_value())
    return scale * float(np.mean(values))
