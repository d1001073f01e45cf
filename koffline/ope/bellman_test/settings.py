"""What decides a Bellman test, besides value function, log and policy; every default lives here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from koffline.errors import ConfigError, nearest_name

METHODS = WILD, SPECTRAL, GAMMA = "wild", "spectral", "gamma"
STEP, BLOCK = "step", "block"


class BellmanSettings(BaseModel):
    """Options of `koffline.bellman_test`.

    level: the test rejects where p ≤ level. method: ``"wild"`` (bootstrap with random signs), ``"spectral"``
    (a weighted sum of chi-squares) or ``"gamma"`` (two moments, fastest). draws: of the wild bootstrap.
    window: steps d over which residuals are summed, within episodes. multipliers: who gets a random sign of
    its own where windows overlap: each ``"step"`` with all windows it is in, which is right because one-step
    residuals are martingale differences; or a ``"block"`` of consecutive windows (eight windows' length),
    which needs no such argument, and many blocks.
    on_policy: the log's actions are the policy's own, so that no importance ratios are needed (for windows
    and for state functions); None: use the log's behaviour probabilities.
    alternative: the departure whose power is reported: values off everywhere by this multiple of the root
    mean square return, or a function (observations, actions) -> (N,) added to the values.
    kernel: over ``kernel_inputs``; None: Gaussian. bandwidth: a multiple of the median distance between rows.
    features: random Fourier features in place of the Gram matrix; 0: the exact one; None: exact up to 3,000
    rows, 1,000 features above. action_draws: actions drawn per next state from a continuous policy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: float = Field(gt=0.0, lt=1.0)
    seed: int = Field(0, ge=0)
    level: float = Field(0.05, gt=0.0, lt=1.0)
    method: Literal["wild", "spectral", "gamma"] = "wild"
    draws: int = Field(999, ge=1)
    window: int = Field(1, ge=1)
    multipliers: Literal["step", "block"] = "step"
    on_policy: bool | None = None
    alternative: Annotated[float, Field(gt=0.0)] | Callable[..., Any] = 0.1
    kernel: Any = None
    bandwidth: float = Field(0.6, gt=0.0)
    features: int | None = Field(None, ge=0, multiple_of=2)
    action_draws: int = Field(8, ge=1)

    @property
    def signs_per_step(self) -> bool:
        """Each step has a random sign of its own, not each block of windows."""
        return self.window == 1 or self.multipliers == STEP


def make_settings(**options: Any) -> BellmanSettings:
    """Options that are None say nothing. Raises ConfigError in one line."""
    given = {name: value for name, value in options.items() if value is not None}
    known = BellmanSettings.model_fields
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option '{name}'; {nearest_name(name, known)}")
    if "gamma" not in given:
        raise ConfigError("gamma is missing; give the discount factor, as in gamma=0.99")
    try:
        made = BellmanSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(f"{name} is {given[name]!r}; {first['msg'].lower()}") from None
    least = math.ceil(1.0 / made.level - 1e-9) - 1  # B draws give no p-value below 1/(B + 1)
    if made.method == WILD and made.draws < least:
        raise ConfigError(
            f"draws is {made.draws}, too few for level {made.level}: the smallest p-value is "
            f"{1.0 / (made.draws + 1):.3g}; give draws={least} or more, or a higher level (--level)"
        )
    return made
