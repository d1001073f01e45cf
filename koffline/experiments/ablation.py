"""What the K-loss depends on: one change at a time from a base, on all three worlds.

Groups: bandwidth, kernel family, statistic (U, V, mixtures, residual gradient), batch size, reward scale,
output offset, the best of these combined, GTD2's second learning rate, transition noise (K-loss beside RG),
and the pole's reward. Three seeds, two learning rates, half the epochs of the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from koffline.dual_objectives import DualObjective, GradientTD2
from koffline.envs.boxes import make_world
from koffline.experiments.cells import Cell, TrainingSettings
from koffline.experiments.settings import Scale
from koffline.kernel_loss import mixture_diag_weight
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian
from koffline.objectives import (
    FittedIteration,
    KernelLoss,
    Objective,
    ResidualGradient,
    default_kernel_loss,
)

WORLDS = ("puddle_world", "cart_pole", "mountain_car")
BASE_BANDWIDTH = 0.25
MEDIAN_DISTANCE = 0.512  # of two points uniform in the unit square
BANDWIDTHS: dict[str, float] = {
    **{str(value): value for value in (0.05, 0.1, 0.25, 0.5, 1.0)},
    "median": MEDIAN_DISTANCE,
}
NOISE_FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
_RATES, _SEEDS = (0.003, 0.001), 3


@dataclass(frozen=True)
class Variant:
    """One cell of the ablation and where it stands in it."""

    group: str
    name: str
    cell: Cell


def ablation_variants(scale: Scale) -> list[Variant]:
    """All cells, group by group; variants that equal the base share its cell."""
    return [variant for world in WORLDS for variant in _variants_of(world, scale)]


def _variants_of(world: str, scale: Scale) -> Iterator[Variant]:
    problem = replace(scale.problem(world), truth_repeats=20 if scale.quick else 50)
    whole = scale.training(world)
    training = replace(whole, learning_rates=_RATES, seeds=_SEEDS, epochs=max(1, whole.epochs // 2))
    base = KernelLoss(Gaussian(BASE_BANDWIDTH))

    def cell(
        objective: Objective | DualObjective, training: TrainingSettings = training, method: str = "kloss"
    ) -> Cell:
        return Cell(problem, method, objective, training)

    for name, bandwidth in BANDWIDTHS.items():
        yield Variant("bandwidth", name, cell(KernelLoss(Gaussian(bandwidth))))
    kernels: dict[str, Kernel] = {
        "gaussian": Gaussian(BASE_BANDWIDTH),
        "laplacian": Laplacian(BASE_BANDWIDTH),
        "inverse_multiquadric": InverseMultiquadric(BASE_BANDWIDTH),
    }
    for name, kernel in kernels.items():
        yield Variant("kernel", name, cell(KernelLoss(kernel)))
    for name, weight in _statistics(problem.rows, training.batch_size).items():
        yield Variant("statistic", name, cell(KernelLoss(Gaussian(0.5), weight)))
    for size in (50, 150, 500):
        yield Variant("batch_size", str(size), cell(base, replace(training, batch_size=size)))
    unscaled = 1.0 / make_world(world).reward_scale
    for name, factor in (("unscaled", unscaled), ("scaled", 1.0), ("scaled_by_10_more", 10.0)):
        yield Variant("reward_scale", name, cell(base, replace(training, reward_factor=factor)))
    yield Variant("offset", "none", cell(base))
    yield Variant("offset", "learned", cell(base, replace(training, offset=True)))
    for name, combined in _combined(problem.rows).items():
        yield Variant("combined", name, cell(combined))
    for factor in (0.1, 1.0, 10.0):
        yield Variant("gtd2_rate", f"{factor:g}x", cell(GradientTD2(factor), method="gtd2"))
    own_noise = make_world(world).noise  # type: ignore[attr-defined]
    for factor in NOISE_FACTORS:
        noisy = problem if factor == 1.0 else replace(problem, noise=factor * own_noise)
        pair: dict[str, Objective] = {"kloss": base, "rg": ResidualGradient()}
        for method, objective in pair.items():
            yield Variant("noise", f"{factor:g}x {method}", Cell(noisy, method, objective, training))
    if world == "cart_pole":
        for reward in ("fall", "balance"):
            paid = problem if reward == "fall" else replace(problem, overrides=(("reward", reward),))
            methods: dict[str, Objective] = {
                "kloss": base,
                "rg": ResidualGradient(),
                "fvi": FittedIteration(),
            }
            for method, objective in methods.items():
                yield Variant("reward", f"{reward} {method}", Cell(paid, method, objective, training))


def _combined(rows: int) -> dict[str, Objective]:
    """The best parts together, and the default that comes out of it."""
    square = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0))  # where the states are
    return {
        "default": default_kernel_loss(square),
        "laplacian": KernelLoss(Laplacian(BASE_BANDWIDTH)),
        "laplacian, weight 0.05": KernelLoss(Laplacian(BASE_BANDWIDTH), 0.05),
        "gaussian, weight 0.05": KernelLoss(Gaussian(BASE_BANDWIDTH), 0.05),
    }


def _statistics(rows: int, batch_size: int) -> dict[str, float | None]:
    """diag_weight of the paper's statistics and of some between V and the residual gradient."""
    return {
        "U": 0.0,
        "mixture 0.5": mixture_diag_weight(0.5, rows),
        "L_KV": mixture_diag_weight(1.0, rows),
        f"V of {batch_size} rows": None,
        "0.05": 0.05,
        "0.25": 0.25,
        "residual gradient": 1.0,
    }
