"""What decides a Bellman test, besides value function, log and policy; every default lives here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from koffline.errors import ConfigError
from koffline.kernels import Kernel
from koffline.ope.interval import check_level

WILD, SPECTRAL, GAMMA = "wild", "spectral", "gamma"
METHODS = (WILD, SPECTRAL, GAMMA)
STEP, BLOCK = "step", "block"
MULTIPLIERS = (STEP, BLOCK)
EXACT_ROWS = 3000  # the Gram matrix of as many rows takes 72 MB and a second
MOST_EXACT_ROWS = 20_000


@dataclass(frozen=True)
class BellmanSettings:
    """Options of `koffline.bellman_test`.

    level: the test rejects where p ≤ level. method: ``"wild"`` (bootstrap with random signs), ``"spectral"``
    (a weighted sum of chi-squares) or ``"gamma"`` (two moments, fastest). draws: of the wild bootstrap.
    window: steps d over which residuals are summed, within episodes. multipliers: who gets a random sign of
    its own where windows overlap: each ``"step"`` with all windows it is in, which is right because one-step
    residuals are martingale differences; or a ``"block"`` of ``block_length`` consecutive windows (None:
    eight windows' length), which needs no such argument, and many blocks.
    on_policy: the log's actions are the policy's own, so that no importance ratios are needed (for windows
    and for state functions); None: use the log's behaviour probabilities.
    alternative: the departure whose power is reported: values off everywhere by this multiple of the root
    mean square return, or a function (observations, actions) -> (N,) added to the values.
    kernel: over ``kernel_inputs``; None: Gaussian. bandwidth: a multiple of the median distance between rows.
    features: random Fourier features in place of the Gram matrix; 0: the exact one; None: exact up to 3,000
    rows, 1,000 features above. action_draws: actions drawn per next state from a continuous policy.
    """

    level: float = 0.05
    method: str = WILD
    draws: int = 999
    window: int = 1
    multipliers: str = STEP
    block_length: int | None = None
    on_policy: bool | None = None
    alternative: float | Callable[..., Any] = 0.1
    kernel: Kernel | None = None
    bandwidth: float = 0.6
    features: int | None = None
    action_draws: int = 8

    def __post_init__(self) -> None:
        self._check_types()
        check_level(self.level)
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; give one of {', '.join(METHODS)}")
        if self.multipliers not in MULTIPLIERS:
            raise ConfigError(f"multipliers is {self.multipliers!r}; give one of {', '.join(MULTIPLIERS)}")
        for name in ("draws", "window", "block_length", "action_draws"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} is {count!r}; give a whole number of at least 1")
        self._check_draws()
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0.0):
            raise ConfigError(
                f"bandwidth is {self.bandwidth}; give a positive multiple of the median distance"
            )
        if self.features is not None and (self.features < 0 or self.features % 2):
            raise ConfigError(f"features is {self.features}; give an even number, or 0 for the exact kernel")
        if not callable(self.alternative) and not (
            math.isfinite(self.alternative) and self.alternative > 0.0
        ):
            raise ConfigError(
                f"alternative is {self.alternative}; give a positive multiple of the root mean square return"
            )

    def _check_types(self) -> None:
        for name in ("level", "bandwidth", "alternative"):
            value = getattr(self, name)
            if not is_number(value) and not (name == "alternative" and callable(value)):
                raise ConfigError(f"{name} is {value!r}; give a number")
        whole = self.features is None or (is_number(self.features) and self.features == int(self.features))
        if not whole:
            raise ConfigError(
                f"features is {self.features!r}; give an even number, or 0 for the exact kernel"
            )

    def _check_draws(self) -> None:
        """A bootstrap of B draws has no p-value below 1/(B + 1)."""
        least = math.ceil(1.0 / self.level - 1e-9) - 1
        if self.method == WILD and self.draws < least:
            raise ConfigError(
                f"draws is {self.draws}, too few for level {self.level}: the smallest p-value is "
                f"{1.0 / (self.draws + 1):.3g}; give draws={least} or more, or a higher level (--level)"
            )


def is_number(value: Any) -> bool:
    """A finite real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def make_settings(settings: BellmanSettings | None, options: dict[str, Any]) -> BellmanSettings:
    """``settings`` with ``options`` on top. Raises ConfigError for an unknown name or a bad value."""
    known = [field.name for field in dataclasses.fields(BellmanSettings)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean '{near[0]}'?" if near else f"give one of {', '.join(known)}"
            raise ConfigError(f"unknown option '{name}'; {remedy}")
    return dataclasses.replace(settings or BellmanSettings(), **options)
