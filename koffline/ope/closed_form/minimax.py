"""Minimax Q-learning, minimax weight learning, LSTD-Q: the kernel loss, its dual, its linear kernel."""

from __future__ import annotations

import torch

from koffline.ope.closed_form.fit import LinearFit
from koffline.ope.closed_form.fitting import (
    CURVATURE_POWER,
    FOLDS,
    TEMPORAL_POWER,
    Considered,
    choose_ridge,
    finish_fit,
    kernel_path,
    temporal_path,
)
from koffline.ope.closed_form.ridges import usual_ridge
from koffline.ope.features import FeatureSystem


@torch.no_grad()
def fit_mql(
    system: FeatureSystem, ridge: float | None = None, *, folds: int = FOLDS, seed: int = 0
) -> LinearFit:
    """Minimax Q-learning with critics in an RKHS: the kernel loss minimised exactly over Q = φᵀθ.

    ridge: relative to the mean curvature; None: the one with the least kernel loss on held-out episodes.
    (Feng et al. 2019, equ:vstat)
    """
    make_path = kernel_path(system)
    considered: Considered = ()
    if ridge is None:
        ridge, considered = choose_ridge(system, make_path, CURVATURE_POWER, folds, seed)
    return finish_fit(system, make_path, ridge, system.instruments, considered)


@torch.no_grad()
def fit_lstdq(
    system: FeatureSystem, ridge: float | None = None, *, folds: int = FOLDS, seed: int = 0
) -> LinearFit:
    """LSTD-Q on the same features: its critics are the features themselves.

    ridge: relative to the mean |diagonal| of its matrix; None: the one with the least held-out loss, that of
    the Gaussian kernel as for `fit_mql`.
    (Feng et al. 2019, cor:same_as_td)
    """
    make_path = temporal_path(system)
    considered: Considered = ()
    if ridge is None:
        ridge, considered = choose_ridge(system, make_path, TEMPORAL_POWER, folds, seed)
    return finish_fit(system, make_path, ridge, None, considered)


@torch.no_grad()
def fit_mwl(system: FeatureSystem, ridge: float | None = None) -> LinearFit:
    """Minimax weight learning: ω in the RKHS that balances n⁻¹ Σ w ω Z against c; no reward is read.

    The dual of the kernel loss: with one ridge for both, cᵀθ of `fit_mql` and (1/n) Σ w ω r are one number.
    ridge: None: `ridges.usual_ridge`, so that not even the ridge has seen a reward.
    (Uehara, Huang & Jiang 2020, Minimax Weight and Q-Function Learning)
    """
    ridge = usual_ridge(system.log_rows, CURVATURE_POWER) if ridge is None else ridge
    return finish_fit(system, kernel_path(system), ridge, system.instruments)
