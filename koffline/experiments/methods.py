"""The six methods of the paper's policy evaluation with its settings."""

from __future__ import annotations

from koffline.dual_objectives import DualObjective, GradientTD2, SaddlePoint
from koffline.kernels import Gaussian
from koffline.objectives import FittedIteration, KernelLoss, Objective, ResidualGradient, TemporalDifference

METHODS: dict[str, Objective | DualObjective] = {
    "td0": TemporalDifference(),
    "fvi": FittedIteration(),
    "rg": ResidualGradient(),
    "gtd2": GradientTD2(),
    "sbeed": SaddlePoint(),
    "kloss": KernelLoss(Gaussian(0.5)),  # (Feng et al. 2019, sec:exp_eval)
}
LABELS = {
    "td0": "TD(0)",
    "fvi": "FVI",
    "rg": "RG",
    "gtd2": "GTD2",
    "sbeed": "SBEED",
    "kloss": "K-loss",
}
