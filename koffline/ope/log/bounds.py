"""Bounds of rewards, and of the discounted sums that they allow."""

from __future__ import annotations

from koffline.errors import ConfigError


def value_bounds(
    going_on: tuple[float, float], final: tuple[float, float], gamma: float
) -> tuple[float, float]:
    """Smallest and largest possible discounted sum of rewards in the given ranges.

    going_on: range of rewards of steps after which the episode goes on; final: of steps
    that end it. The largest value solves V = max(final, going_on + γV).
    """
    least, most = (reward / (1.0 - gamma) for reward in going_on)
    return min(final[0], least), max(final[1], most)


def check_reward_bounds(
    stated: tuple[float, float] | None, seen: tuple[float, float], slack: float = 0.0
) -> tuple[float, float]:
    """Bounds of every reward: those stated by the user, else the range seen in the log.

    slack: by how much a reward may exceed the stated bounds through rounding. Raises
    ConfigError if the log exceeds them.
    """
    if stated is None:
        return seen
    if seen[0] < stated[0] - slack or seen[1] > stated[1] + slack:
        raise ConfigError(
            f"reward_bounds is {list(stated)}, but the log has rewards from"
            f" {seen[0]:.4g} to {seen[1]:.4g}; give bounds that hold every reward"
        )
    return stated
