"""The ridge chosen without the truth, on rows of episodes that a fit has not seen.

On the twelve exact problems of tests/exact_problems.py the held-out loss alone, free to take any ridge from
1e-8 to 1, is misled by chance in small logs: with 400 rows its median error over problems is a tenth above
that of the fixed ridge n^−1.5, and its worst 116 % against 45 %. So candidates stay within a decade of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import DataError
from koffline.ope.closed_form.fit import PrimalDual
from koffline.ope.closed_form.moments import FoldedMoments, Moments

_HALF_DECADES = (-2, -1, 0, 1, 2)
_SMALLEST, _LARGEST = 1e-10, 0.1


@runtime_checkable
class Path(Protocol):
    """Fits for any ridge."""

    def solve_value(self, ridge: float) -> Tensor:
        """θ for one ridge."""
        ...

    def solve(self, ridge: float) -> PrimalDual:
        """θ and the coefficients of the weights for one ridge."""
        ...


def usual_ridge(rows: int, power: float) -> float:
    """A relative ridge that fits n rows without asking them: n^−power, between 1e-10 and 0.1.

    power: 1.5 for curvatures BᵀB, 1 for LSTD's matrix, found by measurement.
    """
    return min(max(float(rows) ** -power, _SMALLEST), _LARGEST)


def candidate_ridges(rows: int, power: float) -> tuple[float, ...]:
    """A decade to either side of the usual ridge; farther ones win by chance more often than by merit."""
    centre = usual_ridge(rows, power)
    return tuple(sorted({min(max(centre * 10.0 ** (0.5 * h), _SMALLEST), _LARGEST) for h in _HALF_DECADES}))


def held_out_losses(
    folded: FoldedMoments, make_path: Callable[[Moments], Path], ridges: Sequence[float]
) -> Float[Tensor, " ridge"]:
    """Kernel loss of each ridge's fit on the fold left out, as a U-statistic pooled over folds.

    U = (‖ψᵀWδ‖² − Σw²δ²)/((Σw)² − Σw²) with k(x, x) = 1: unbiased for the loss of a value function that has
    not seen the fold, whatever the ridge.
    (Feng et al. 2019, equ:ourloss)
    """
    scores, pairs = torch.zeros(len(ridges), dtype=torch.float64), 0.0
    for part, rest in zip(folded.parts, folded.without_each(), strict=True):
        path = make_path(rest)
        thetas = torch.stack([path.solve_value(ridge) for ridge in ridges])  # (R, p)
        mixing = torch.cat((-thetas, torch.ones_like(thetas[:, :1])), dim=1)  # [Z, r] mixingᵀ = δ
        total = (part.projected @ mixing.mT).square().sum(dim=0)
        own = ((mixing @ part.squares) * mixing).sum(dim=1)
        scores, pairs = scores + total - own, pairs + part.weight**2 - part.weight_squares
    if pairs <= 0.0:
        raise DataError("a held-out loss needs two rows in a fold; give more rows or a ridge of your own")
    return torch.where(torch.isfinite(scores), scores / pairs, torch.inf)


def best_ridge(scores: Float[Tensor, " ridge"], ridges: Sequence[float]) -> float:
    """The ridge with the smallest score. DataError when no fit has one."""
    if not bool(torch.isfinite(scores).any()):
        raise DataError("no ridge gave a fit with finite values; look for outliers in rewards and features")
    return ridges[int(scores.argmin())]
