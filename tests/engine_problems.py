"""Small tables of every form the engine knows, and its objectives."""

from __future__ import annotations

import torch

from koffline.batches import Table
from koffline.kernels import Gaussian, InverseMultiquadric
from koffline.objectives import (
    CopyTarget,
    FittedIteration,
    KernelLoss,
    ResidualGradient,
    TemporalDifference,
    fitted_q,
)

OBJECTIVES = {
    "kloss": KernelLoss(Gaussian(1.0)),
    "kloss_u": KernelLoss(Gaussian(1.0), 0.0),
    "kloss_multiquadric": KernelLoss(InverseMultiquadric(1.0), 0.1),
    "rg": ResidualGradient(),
    "td0": TemporalDifference(),
    "fvi": FittedIteration(),
    "fvi_steps": FittedIteration(CopyTarget(3)),
    "fqe": fitted_q(0.2),
    "fqe_bounded": fitted_q(0.2, (-0.05, 0.1)),
}
FORMS = ("state", "discrete", "continuous", "continuous_all")
SIZES = {"state": (3, 12, 1), "discrete": (3, 8, 6, 4), "continuous": (5, 12, 1), "continuous_all": (5, 7, 1)}


def draws_of(form: str) -> str:
    return "all" if form == "continuous_all" else "one"


def make_table(form: str, rows: int = 40, dtype: torch.dtype = torch.float64) -> Table:
    """Random rows; four discrete actions, or two-dimensional ones with three continuations."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    readout = next_readout = None
    inputs, following = draw(rows, 3), draw(rows, 3)
    if form == "discrete":
        actions = torch.randint(4, (rows,), generator=generator)
        readout = torch.nn.functional.one_hot(actions, 4).to(dtype)
        next_readout = torch.softmax(draw(rows, 4), dim=1)
    elif form.startswith("continuous"):
        inputs = torch.cat((inputs, draw(rows, 2)), dim=1)
        following = torch.cat((following[:, None].expand(rows, 3, 3), draw(rows, 3, 2)), dim=2).contiguous()
    discounts = torch.full((rows,), 0.9, dtype=dtype)
    discounts[::7] = 0.0
    return Table(inputs, following, draw(rows), discounts, readout, next_readout, inputs.clone())
