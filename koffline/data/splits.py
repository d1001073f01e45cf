"""A log in two parts, whole episodes each."""

from __future__ import annotations

import numpy as np

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError


def split_log(log: Transitions, held_out: float, seed: int) -> tuple[Transitions, Transitions | None]:
    """Training part and held-out part, whole episodes each; rows where there are no episodes.

    At least one episode is on either side. Raises ConfigError where there are too few.
    """
    if held_out == 0.0:
        return log, None
    count = log.n_episodes if log.has_episodes else len(log)
    if count < 2:
        raise ConfigError(f"data.split.held_out is {held_out:g}, but the log has one episode; leave it out")
    kept_out = min(max(1, round(held_out * count)), count - 1)
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(count)[:kept_out]] = True
    rows = np.repeat(chosen, log.episode_lengths) if log.has_episodes else chosen
    return log.select(np.flatnonzero(~rows)), log.select(np.flatnonzero(rows))
