"""Width of the features chosen by the kernel loss on episodes that a fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from koffline.ope.closed_form.fitting import CURVATURE_POWER, FOLDS, choose_ridge, kernel_path
from koffline.ope.features import FeatureSystem, default_features, make_feature_system
from koffline.ope.problem import EvaluationProblem

WIDTHS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, eq=False)
class WidthChoice:
    """The chosen system and the least held-out loss of every width, all under one kernel."""

    system: FeatureSystem
    width: float
    losses: tuple[tuple[float, float], ...]


@torch.no_grad()
def choose_width(
    problem: EvaluationProblem,
    *,
    gamma: float,
    widths: Sequence[float] = WIDTHS,
    count: int = 100,
    folds: int = FOLDS,
    seed: int = 0,
    **options: Any,
) -> WidthChoice:
    """Systems of `count` random features of every width, a multiple of the median distance; the best of them.

    options: of `make_feature_system`. Never looks at a value. Raises ConfigError, DataError.
    """
    systems, losses = {}, []
    for width in widths:
        features = default_features(problem, count, width, seed)
        systems[width] = make_feature_system(problem, features, gamma=gamma, seed=seed, **options)
        _, considered = choose_ridge(
            systems[width], kernel_path(systems[width]), CURVATURE_POWER, folds, seed
        )
        losses.append((width, min(loss for _, loss in considered)))
    best = min(losses, key=lambda pair: pair[1])[0]
    return WidthChoice(systems[best], best, tuple(losses))
