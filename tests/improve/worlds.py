"""Logs of finite worlds with known values, and settings that take seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import koffline
from koffline.envs.finite import value_iteration
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import chain
from scripts.bench.rollouts import as_transitions, log_episodes

GAMMA = 0.9
QUICK = {
    "candidates": ("clone_mode", "kernel_policy_iteration-1"),
    "shares": (0.5, 1.0),
    "finalists": 2,
    "training_steps": 300,
    "choosing_steps": 300,
    "certifying_steps": 300,
    "full_replicas": 2,
    "resampled_replicas": 6,
}


@dataclass(frozen=True, eq=False)
class ExactLog:
    """A log of a chain of states; the table of the policy that wrote it."""

    log: koffline.Transitions
    world: EmbeddedMDP
    behavior: np.ndarray

    def value(self, policy: object) -> float:
        """J of a policy, or of the table of one."""
        table = policy
        if not isinstance(policy, np.ndarray):
            observations = self.world.coordinates.astype(np.float32)
            table = policy.probabilities(observations)
        return self.world.mdp.policy_value(table, GAMMA)

    @property
    def best_value(self) -> float:
        """J of the optimal policy."""
        values = value_iteration(self.world.mdp, GAMMA)
        return self.value(np.eye(values.shape[1])[values.argmax(axis=1)])


def chain_log(
    right: float, rows: int = 1200, seed: int = 0, **changes: object
) -> ExactLog:
    """A walk that pays 1 at its right end and −1 at its left end, by a policy that
    goes right with probability ``right`` everywhere.
    """
    mdp = chain(5, slip=0.1, end_rewards=(-1.0, 1.0))
    world = EmbeddedMDP(mdp, np.linspace(-1.0, 1.0, 5)[:, None], jitter=0.1)
    table = np.tile([1.0 - right, right], (5, 1))
    generator = np.random.default_rng(seed)
    rows_of_log = log_episodes(world, world.policy(table), rows, 1000, generator)
    log = as_transitions(rows_of_log, world)
    if changes:
        log = log.replace(**changes)
    return ExactLog(log, world, table)
