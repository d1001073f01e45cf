"""Objectives with a second function beside the value: GTD2's weights w and SBEED's test function f.

Both estimate the Bellman error by regression instead of a second sample. As with `objectives.Objective`, each
record gives a differentiable ``loss`` and the same in closed form: ``compute_gradients`` for the value,
``compute_auxiliary_gradient`` for the second function, both as directions of descent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from koffline.bellman import state_value_residual
from koffline.errors import ConfigError
from koffline.kernels import Kernel
from koffline.objectives import NextFrom, ValueGradients

Rows = Float[Tensor, "replica row"]


@dataclass(frozen=True)
class GradientTD2:
    """Nonlinear GTD2: w regresses the residual on the gradient φ = ∇V(s), V follows against g = φᵀw.

    w ← w + β (δ − g) φ;  θ ← θ + α {(φ − discount·φ') g − h},  h = (δ − g) ∇²V(s) w.
    auxiliary_rate: β as a multiple of the value's learning rate.
    (Maei et al. 2009, "Convergent temporal-difference learning with arbitrary smooth function approximation")
    """

    auxiliary_rate: float = 1.0
    kernel: Kernel | None = field(default=None, init=False)
    next_from: NextFrom = field(default="network", init=False)

    def __post_init__(self) -> None:
        _check_rate(self.auxiliary_rate)

    def loss(self, reward: Rows, discount: Rows, value: Rows, next_value: Rows, correction: Rows) -> Tensor:
        """A number per replica whose gradient is the descent direction, (R,).

        correction: g = φᵀw with w held still; its own gradient in the value's parameters is ∇²V(s) w.
        """
        residual = state_value_residual(reward, discount, value, next_value)
        along = (value - discount * next_value) * correction.detach()
        bend = (residual - correction).detach() * correction  # the Hessian term
        return (bend - along).mean(dim=-1)

    def compute_gradients(self, residual: Rows, discount: Rows, correction: Rows) -> ValueGradients:
        """−g/n through the value, discount·g/n through the next one; the loss is `projected_error`.

        The Hessian term reaches the parameters through g: see `compute_correction_gradient`.
        """
        slope = correction / residual.shape[-1]
        return ValueGradients(projected_error(residual, correction), -slope, slope * discount)

    def compute_correction_gradient(self, residual: Rows, correction: Rows) -> Rows:
        """Gradient of the loss in g, (R, N): (δ − g)/n."""
        return (residual - correction) / residual.shape[-1]

    def compute_auxiliary_gradient(self, residual: Rows, correction: Rows) -> Rows:
        """Gradient of mean (δ − g)²/2 in g, (R, N): what w descends."""
        return (correction - residual) / residual.shape[-1]


@dataclass(frozen=True)
class SaddlePoint:
    """SBEED for evaluation: min over V, max over f of mean 2δf − f², f a small network.

    ascent_steps: gradient steps of f on a mini-batch before V's step on it.
    auxiliary_rate: learning rate of f as a multiple of the value's.
    (Feng et al. 2019, equ:sbeed)
    """

    hidden: tuple[int, ...] = (10,)
    ascent_steps: int = 10
    auxiliary_rate: float = 1.0
    kernel: Kernel | None = field(default=None, init=False)
    next_from: NextFrom = field(default="network", init=False)

    def __post_init__(self) -> None:
        _check_rate(self.auxiliary_rate)
        if self.ascent_steps < 1 or any(width < 1 for width in self.hidden):
            raise ConfigError(
                f"SBEED has {self.ascent_steps} ascent steps and hidden layers {self.hidden}; "
                "give positive whole numbers"
            )

    def loss(self, reward: Rows, discount: Rows, value: Rows, next_value: Rows, test: Rows) -> Tensor:
        """mean 2δf − f², (R,); V descends it, f ascends it."""
        return projected_error(state_value_residual(reward, discount, value, next_value), test)

    def compute_gradients(self, residual: Rows, discount: Rows, test: Rows) -> ValueGradients:
        """−2f/n through the value, 2 discount·f/n through the next one."""
        slope = test * (2.0 / residual.shape[-1])
        return ValueGradients(projected_error(residual, test), -slope, slope * discount)

    def compute_auxiliary_gradient(self, residual: Rows, test: Rows) -> Rows:
        """Gradient of −mean(2δf − f²) in f, (R, N)."""
        return (test - residual) * (2.0 / residual.shape[-1])


DualObjective = GradientTD2 | SaddlePoint


def projected_error(residual: Rows, estimate: Rows) -> Float[Tensor, " replica"]:
    """mean 2δf − f², (R,): at its maximum over a family of f the Bellman error projected on it, squared.

    (Feng et al. 2019, equ:sbeed)
    """
    return (estimate * (2.0 * residual - estimate)).mean(dim=-1)


def _check_rate(rate: float) -> None:
    if not 0.0 < rate < float("inf"):
        raise ConfigError(f"auxiliary_rate is {rate}; give a positive multiple of the learning rate")
