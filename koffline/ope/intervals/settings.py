"""Settings and result of intervals on a feature system."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from koffline.config import Section
from koffline.errors import ConfigError
from koffline.ope.features import FeatureSystem
from koffline.ope.limits import value_bounds
from koffline.ope.results import Interval, Record

DRAWS = 999
_MOST_DRAWS = 200_000


class KernelIntervalSettings(Section):
    """Options of the intervals on a feature system.

    level: the share of logs whose interval should hold the value. seed: of the draws. norm_bound: ρ, the
    largest ‖θ − θ0‖ of a value function in the class, in units of the value; None: twice that of the fit,
    which is a guess about the class and not a theorem. value_bounds: known bounds of every Q^π(s, a), by
    default those that rewards and γ imply. reward_bounds: known bounds of every reward, by default the
    logged ones. draws: of a bootstrap, at least those that the level needs.
    """

    level: float = Field(default=0.95, gt=0.0, lt=1.0)
    norm_bound: float | None = Field(default=None, gt=0.0)
    value_bounds: tuple[float, float] | None = None
    reward_bounds: tuple[float, float] | None = None
    draws: int = DRAWS
    seed: int = 0

    def values_within(self, system: FeatureSystem) -> tuple[float, float]:
        """Bounds of every Q(s, a): given, or what bounds of rewards and γ imply."""
        if self.value_bounds is not None:
            return self.value_bounds
        if self.reward_bounds is None:
            return system.value_bounds
        rewards = self.rewards_within(system)
        may_end = bool((system.discounts == 0.0).any())
        return value_bounds(rewards, rewards if may_end else (math.inf, -math.inf), system.gamma)

    def rewards_within(self, system: FeatureSystem) -> tuple[float, float]:
        """Bounds of every reward: given, or the log's own. Raises ConfigError when the log exceeds them."""
        counted = system.rewards[system.row_weights > 0.0]
        seen = float(counted.min()), float(counted.max())
        slack = 1e-9 * max(map(abs, seen))  # rewards were scaled there and back
        return check_reward_bounds(self.reward_bounds, seen, slack)


def check_reward_bounds(
    given: tuple[float, float] | None, seen: tuple[float, float], slack: float = 0.0
) -> tuple[float, float]:
    """Bounds of every reward: given, or those seen. Raises ConfigError when the log exceeds them."""
    if given is not None and (seen[0] < given[0] - slack or seen[1] > given[1] + slack):
        raise ConfigError(
            f"reward_bounds is {list(given)}, but the log has rewards from {seen[0]:.4g} to {seen[1]:.4g}; "
            "give bounds that hold every reward"
        )
    return seen if given is None else given


def enough_draws(level: float, draws: int = DRAWS) -> int:
    """Number of draws, raised until each tail of the level holds at least one. Raises ConfigError."""
    fewest = math.ceil(2.0 / (1.0 - level) - 1e-9) - 1
    if fewest > _MOST_DRAWS:
        raise ConfigError(
            f"level is {level}, which a bootstrap could only tell by {fewest:,} draws; give a "
            f"level up to {1.0 - 2.0 / _MOST_DRAWS:g}"
        )
    return max(draws, fewest)


@dataclass(frozen=True, eq=False)
class IntervalResult(Record):
    """An interval and the evidence around it; ``interval`` is None where the class cannot explain the log.

    ``value``: the fitted value of the same class (None where the kind has none). ``threshold``: λ, what the
    kernel loss of the true values may be; ``least_loss``: the smallest kernel loss in the class. A class is
    ``misspecified`` when the second exceeds the first: an alarm about the class, not an error of the log.
    """

    kind: str
    interval: Interval | None
    value: float | None = None
    threshold: float | None = None
    least_loss: float | None = None
    misspecified: bool = False
    warnings: tuple[str, ...] = ()


def describe_misspecified(loss: float, threshold: float) -> str:
    """Warning that the class cannot explain the log."""
    return (
        f"the class cannot explain the log: its smallest kernel loss {loss:.3g} exceeds {threshold:.3g}, "
        "what the true values would leave by chance; use richer features or a larger norm_bound"
    )


def describe_starts(fixed: bool, sampled: str) -> str:
    """Assumption on start states; ``sampled``: the text for the log's own start states."""
    return "given start states as they are" if fixed else sampled
