"""Logs for the tests of the replay buffer, and which of their rows a batch holds."""

import numpy as np

from koffline.data.transitions import Transitions
from tests.data.logs import roll_out

ENDS = ("truncated", "terminated", "truncated", "terminated", "neither")
LENGTHS = (4, 3, 5, 1, 2)


def make_log(discrete=True, **changes) -> Transitions:
    return roll_out(ENDS, LENGTHS, discrete=discrete).transitions(**changes)


def long_log(discrete=True, episodes=True) -> Transitions:
    rollout = roll_out(("terminated", "truncated") * 10, (12, 9) * 10, discrete=discrete)
    return rollout.transitions(**({} if episodes else {"episode_ids": None, "steps": None}))


def rows_of(batch, log) -> np.ndarray:
    """Which rows a batch holds, told by the rewards, all of them different."""
    assert len(np.unique(log.rewards.astype(np.float32))) == len(log)
    order = np.argsort(log.rewards.astype(np.float32))
    return order[np.searchsorted(log.rewards.astype(np.float32)[order], batch.rewards.reshape(-1))]
