"""Full episodes of the mean action, all runs side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from koffline.online.environments import LocalEnvironments

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """After ``step`` environment steps: mean return and length of full episodes of the mean action.

    sampled_return: of the training episodes that ended since the last evaluation (of the latest one where
    none did; NaN before the first), which the sampled policy played.
    """

    step: int
    mean_return: float
    length: float
    sampled_return: float


def play_episodes(
    environments: LocalEnvironments, act: Callable[[np.ndarray], np.ndarray], seed: int, limit: int
) -> np.ndarray:
    """One episode of every run by act, (K, 1, d) to actions (K, 1, …): returns and lengths, (2, K)."""
    runs = environments.n
    observations = environments.reset([seed] * runs)
    found = np.zeros((2, runs))
    active = list(range(runs))
    for _ in range(limit):
        actions = act(observations[:, None])[:, 0]
        still = []
        for run in active:
            observations[run], reward, terminated, truncated = environments.step_copy(run, actions[run])
            found[:, run] += reward, 1.0
            if not (terminated or truncated):
                still.append(run)
        active = still
        if not active:
            return found
    _LOG.warning(
        "an episode of an evaluation was cut after %d steps; "
        "give the environment a time limit or change evaluation_limit",
        limit,
    )
    return found
