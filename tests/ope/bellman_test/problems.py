"""Small logs whose Q^π is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import koffline
from koffline.policies import DiscretePolicy
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp
from scripts.bench.rollouts import as_transitions, log_episodes


@dataclass(frozen=True, eq=False)
class Known:
    """A log, a policy and Q^π as a function of observations and actions."""

    transitions: koffline.Transitions
    policy: DiscretePolicy
    gamma: float
    q: Callable[[np.ndarray, np.ndarray], np.ndarray]


def known_problem(seed: int, n: int, kind: str = "iid", gamma: float = 0.9, states: int = 20) -> Known:
    """A random MDP of 20 states in the plane; kind: ``iid``, ``trajectory`` or ``episodes`` (50 steps)."""
    generator = np.random.default_rng(seed)
    mdp = random_mdp(states, 2, generator)
    world = EmbeddedMDP(mdp, generator.uniform(-1.0, 1.0, size=(states, 2)))
    target, _ = (generator.dirichlet(np.full(2, 2.0), size=states) for _ in range(2))
    if kind == "iid":
        log = world.log_tuples(target, n, generator)
    else:
        limit = n if kind == "trajectory" else 50
        log = log_episodes(world, world.policy(target), n, limit, generator)
    rows = as_transitions(log, world, with_episodes=kind != "iid")
    q = mdp.action_values(target, gamma)
    return Known(
        rows,
        DiscretePolicy(2, world.policy(target), name="target"),
        gamma,
        lambda s, a: q[world.states_of(s), a],
    )


ONLY_ACTION = DiscretePolicy(1, lambda s: np.ones((len(s), 1)), name="only action")


def simple_q(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return np.sin(observations[:, 0]) + 0.3 * np.asarray(actions).reshape(len(observations), -1)[:, 0]
