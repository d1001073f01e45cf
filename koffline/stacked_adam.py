"""Adam for all replicas at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError


class StackedAdam:
    """Adam on flat (R, P) parameters, a handful of operations for all replicas, a learning rate for each.

    epsilon: one number, or one for each replica, (R, 1).
    """

    def __init__(
        self, flat: Tensor, betas: tuple[float, float] = (0.9, 0.999), epsilon: float | Tensor = 1e-8
    ) -> None:
        if not (
            0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0 and bool(torch.as_tensor(epsilon > 0.0).all())
        ):
            raise ConfigError(
                f"Adam received betas {betas}, epsilon {epsilon}; give [0, 1) and a positive one"
            )
        self._betas, self._epsilon = betas, epsilon
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._scratch = torch.empty_like(flat)
        self._steps = 0

    def update(self, flat: Tensor, gradient: Tensor, rates: Float[Tensor, "replica 1"]) -> None:
        """Move `flat` in place against `gradient`; bias corrections are folded into the step's scalars."""
        self._steps += 1
        first, second = self._betas
        root = math.sqrt(1.0 - second**self._steps)
        self._mean.lerp_(gradient, 1.0 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        torch.sqrt(self._square, out=self._scratch).add_(self._epsilon * root)
        torch.div(self._mean, self._scratch, out=self._scratch)
        flat.addcmul_(self._scratch, rates, value=-root / (1.0 - first**self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count."""
        return {"mean": self._mean, "square": self._square, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps = int(state["steps"])
