"""How far weights are from being the density ratio, on rows that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.closed_form.moments import BLOCK, FoldedMoments, Moments
from koffline.ope.closed_form.ridges import RIDGES, Path
from koffline.ope.features import FeatureSystem


def held_out_imbalances(
    system: FeatureSystem,
    folded: FoldedMoments,
    make_path: Callable[[Moments], Path],
    ridges: Sequence[float] = RIDGES,
) -> Float[Tensor, " ridge"]:
    """‖E w ω Z − c‖² of each ridge's weights on the fold left out, pairs of equal rows left out.

    Zero for the true ratio: E_μ[ω (φ(x) − discount φ(x'))] = E φ(x0). Unbiased for each fold's weights.
    """
    scores, pairs, c = torch.zeros(len(ridges), dtype=torch.float64), 0.0, system.start_mean
    for fold, (part, rest) in enumerate(zip(folded.parts, folded.without_each(), strict=True)):
        path = make_path(rest)
        alphas = torch.stack([path.solve(ridge).alpha for ridge in ridges], dim=1)  # (m, R)
        sums, own = torch.zeros(len(c), len(ridges), dtype=c.dtype), torch.zeros(len(ridges), dtype=c.dtype)
        rows = torch.as_tensor(np.flatnonzero(folded.fold_of == fold))
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            weights = system.instruments(system.kernel_inputs[block]) @ alphas
            weights *= system.row_weights[block, None]
            difference = system.difference[block]
            sums += difference.mT @ weights
            own += difference.square().sum(dim=1) @ weights.square()
        number = part.weight**2 - part.weight_squares
        cross = sums.square().sum(dim=0) - own - 2.0 * (number / part.weight) * (c @ sums)
        scores, pairs = scores + cross, pairs + number
    return torch.where(torch.isfinite(scores), scores / pairs + c.square().sum(), torch.inf)
