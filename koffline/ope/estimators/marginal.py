"""Estimators by marginal weights ω = d^π/μ of rows: minimax weight learning and
DualDICE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import DataError
from koffline.ope.estimators.of_networks import (
    ClosedForm,
    ridge_of_rows,
    solve_closed_form,
)
from koffline.ope.networks.fitted_values import FittedValues
from koffline.ope.results import Diagnostics

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace

_CRITIC_RIDGE = 0.1  # of DualDICE


@torch.no_grad()
def minimax_weights(fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """``mwl``: the mean of ω r, with ω in the RKHS that balances Z against c; the dual
    of ``mql``, with the networks' own ridge (Uehara, Huang & Jiang 2020, Minimax Weight
    and Q-Function Learning).

    J of every network, in units of the return (`solve_closed_form`).
    """
    return solve_closed_form(fitted, fitted.systems.system, fitted.settings.ridge)


@torch.no_grad()
def dualdice(fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """``dualdice``: ω = ζ in min_ν max_ζ E ζ(x)(ν(x) − discount ν(x')) − ζ(x)²/2 − E
    ν(x0), both with a ridge (Nachum et al. 2019).

    The inner maximum regresses ν(x) − discount ν(x') on x, then squares it. This equals
    ``mql`` in units in which the critics' second moment is the identity. J of every
    network, in units of the return. Raises DataError if critics cannot be told apart.
    """
    system = _whitened(fitted, fitted.systems.system)
    return solve_closed_form(fitted, system, ridge_of_rows(fitted, power=1.5))


def _whitened(fitted: FittedValues, system: Tensor) -> Tensor:
    """The system after a change of units that makes the ridged second moment of its
    critics the identity.
    """
    second = fitted.critic_moments.to(system)
    ridged = second + _CRITIC_RIDGE * second.diagonal().mean() * torch.eye(
        len(second)
    ).to(second)
    root, failed = torch.linalg.cholesky_ex(ridged)
    if bool(failed):
        raise DataError(
            "DualDICE's critics cannot be told apart on these rows; give more of like"
            " weight"
        )
    return torch.linalg.solve_triangular(root, system, upper=False)


def _of_weights(workspace: Workspace) -> tuple[Diagnostics, tuple[str, ...]]:
    """Diagnostics and warnings of the rows' weights, which are those of ``mql``."""
    return workspace.row_sums.diagnostics(), workspace.row_sums.warnings()


MWL = ClosedForm("mwl", minimax_weights, describe=_of_weights)
DUALDICE = ClosedForm("dualdice", dualdice)
