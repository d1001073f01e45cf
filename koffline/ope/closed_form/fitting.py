"""What the fits share: folds, the choice of a ridge, and weights for the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from koffline.ope.closed_form.fit import InstrumentPath, LinearFit
from koffline.ope.closed_form.moments import FoldedMoments, Moments, folds_of_units
from koffline.ope.closed_form.ridges import RIDGES, Path, best_ridge, held_out_losses
from koffline.ope.features import FeatureSystem

FOLDS = 5
MakePath = Callable[[Moments], Path]


def kernel_path(system: FeatureSystem) -> MakePath:
    """Fits with the RKHS of the log's kernel as critics, from sums over any rows."""

    def make_path(moments: Moments) -> InstrumentPath:
        projected = moments.projected / moments.weight
        return InstrumentPath(projected[:, :-1], projected[:, -1], system.start_mean, system.free)

    return make_path


def chosen_folds(system: FeatureSystem, folds: int, seed: int, choose: bool) -> Int[np.ndarray, " row"]:
    """Folds where something is to be chosen; a single one where nothing is."""
    return folds_of_units(system, folds, seed) if choose else np.zeros(len(system), dtype=np.int64)


def finish_fit(
    folded: FoldedMoments,
    make_path: MakePath,
    ridge: float | None,
    to_weights: Callable[[Tensor], Tensor],
    scores: Float[Tensor, " ridge"] | None = None,
) -> LinearFit:
    """The fit of all rows with the ridge given, or with the best by its scores (default: held-out loss)."""
    if ridge is None:
        scores = held_out_losses(folded, make_path) if scores is None else scores
        ridge = best_ridge(scores)
    pair = make_path(folded.total).solve(ridge)
    return LinearFit(
        theta=pair.theta,
        weights=to_weights(pair.alpha),
        ridge=ridge,
        degrees_of_freedom=pair.degrees_of_freedom,
        considered=() if scores is None else tuple(zip(RIDGES, scores.tolist(), strict=True)),
    )
