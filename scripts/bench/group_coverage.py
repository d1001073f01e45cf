"""How often intervals of groups of start states hold all their values at once, on
worlds with exact answers.

``python -m scripts.bench.group_coverage docs/results/groups.json`` takes half an hour
on one core.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import koffline
from koffline.policies import DiscretePolicy
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import chain, grid
from scripts.bench.rollouts import as_transitions, log_episodes

GAMMA = 0.95
ROWS = 2000
DRAWS = 64
STEPS = 700


def worlds() -> dict[str, tuple[EmbeddedMDP, np.ndarray, np.ndarray, np.ndarray, int]]:
    """World, the table that wrote the log, the table to evaluate, the group of each
    state, the time limit.
    """
    line = EmbeddedMDP(
        chain(7, slip=0.2, end_rewards=(-0.5, 1.0)),
        np.linspace(-1, 1, 7)[:, None],
        jitter=0.1,
    )
    points = np.stack([np.arange(16) % 4, np.arange(16) // 4], axis=1) / 3.0
    rooms = EmbeddedMDP(grid(4, 4, goal=3.0), points, jitter=0.1)
    fair = np.full((7, 2), 0.5)
    right = np.tile([0.2, 0.8], (7, 1))
    anywhere = np.full((16, 4), 0.25)
    forward = np.tile([0.4, 0.4, 0.1, 0.1], (16, 1))
    return {
        "chain": (line, fair, right, np.array([0, 0, 0, 1, 2, 2, 2]), 10_000),
        "grid": (rooms, anywhere, forward, np.arange(16) // 4, 20),
    }


def measure(name: str) -> dict[str, Any]:
    """Draws in which all groups' intervals hold the exact values; episodes start in any
    state.
    """
    world, behavior, target, group, limit = worlds()[name]
    initial = ~world.mdp.terminal / np.sum(~world.mdp.terminal)
    world = dataclasses.replace(
        world, mdp=dataclasses.replace(world.mdp, initial=initial)
    )
    values = world.mdp.state_values(target, GAMMA)
    policy = world.policy(target)
    names = np.unique(group[initial > 0.0])
    truth = {
        str(g): float(np.average(values[group == g], weights=initial[group == g]))
        for g in names
    }
    together = 0
    starts = []
    for draw in range(DRAWS):
        log = log_episodes(
            world, world.policy(behavior), ROWS, limit, np.random.default_rng(draw)
        )
        labels = group[log.start_states[:, 0].astype(np.int64)]
        estimate = koffline.evaluate(
            as_transitions(log, world, with_episodes=True),
            DiscretePolicy(world.mdp.n_actions, policy, name=name),
            GAMMA,
            by={"group": labels},
            seed=draw,
            steps=STEPS,
        )
        held = [
            row.interval is not None and row.interval.holds(truth[row.group])
            for row in estimate.groups
        ]
        together += all(held)
        starts += [row.starts for row in estimate.groups]
    return {
        "groups": len(truth),
        "starts": [min(starts), max(starts)],
        "held": together,
        "draws": DRAWS,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        json.dumps({name: measure(name) for name in worlds()}, indent=2) + "\n"
    )
