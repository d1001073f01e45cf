"""Minimax Q-learning, minimax weight learning, LSTD-Q: the kernel loss, its dual, its linear kernel."""

from __future__ import annotations

import torch

from koffline.ope.closed_form.balance import held_out_imbalances
from koffline.ope.closed_form.fit import LinearFit, weights_of_rows
from koffline.ope.closed_form.fitting import FOLDS, chosen_folds, finish_fit, kernel_path
from koffline.ope.closed_form.moments import Moments, fold_moments
from koffline.ope.closed_form.temporal import TemporalPath
from koffline.ope.features import FeatureSystem


@torch.no_grad()
def fit_mql(
    system: FeatureSystem, ridge: float | None = None, *, folds: int = FOLDS, seed: int = 0
) -> LinearFit:
    """Minimax Q-learning with critics in an RKHS: the kernel loss minimised exactly over Q = φᵀθ.

    ridge: relative to the mean curvature; None: the one with the least kernel loss on held-out episodes.
    (Feng et al. 2019, equ:vstat)
    """
    folded = fold_moments(system, chosen_folds(system, folds, seed, ridge is None))
    return finish_fit(
        folded,
        kernel_path(system),
        ridge,
        lambda alpha: weights_of_rows(system, system.instruments, alpha),
    )


@torch.no_grad()
def fit_lstdq(
    system: FeatureSystem, ridge: float | None = None, *, folds: int = FOLDS, seed: int = 0
) -> LinearFit:
    """LSTD-Q on the same features: its critics are the features themselves.

    ridge: as in `fit_mql`; the held-out loss is that of the Gaussian kernel for all.
    (Feng et al. 2019, cor:same_as_td)
    """

    def make_path(moments: Moments) -> TemporalPath:
        temporal = moments.temporal / moments.weight
        return TemporalPath(temporal[:, :-1], temporal[:, -1], system.start_mean, system.free)

    folded = fold_moments(system, chosen_folds(system, folds, seed, ridge is None))
    return finish_fit(folded, make_path, ridge, lambda alpha: system.now @ alpha)


@torch.no_grad()
def fit_mwl(
    system: FeatureSystem, ridge: float | None = None, *, folds: int = FOLDS, seed: int = 0
) -> LinearFit:
    """Minimax weight learning: ω in the RKHS that balances n⁻¹ Σ w ω Z against c; no reward is read.

    The dual of the kernel loss: with one ridge for both, cᵀθ of `fit_mql` and (1/n) Σ w ω r are one number.
    Here the ridge is the one with the least imbalance on held-out episodes.
    (Uehara, Huang & Jiang 2020, Minimax Weight and Q-Function Learning)
    """
    make_path = kernel_path(system)
    folded = fold_moments(system, chosen_folds(system, folds, seed, ridge is None))
    scores = held_out_imbalances(system, folded, make_path) if ridge is None else None
    return finish_fit(
        folded,
        make_path,
        ridge,
        lambda alpha: weights_of_rows(system, system.instruments, alpha),
        scores,
    )
