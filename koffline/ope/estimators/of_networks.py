"""Estimators by the trained networks: the mean over networks, with the spread of the
resampled ones. What `value` and `marginal` share.

A closed form determines the last layer θ by critics: minimise ‖v − Bθ‖² + λ‖θ‖², where
B is the mean of critics · Zᵀ and v that of critics · r. Its value cᵀθ, with c the mean
features of start states, is linear in the rewards: the mean of ω r with ω = criticsᵀ B
(BᵀB + λ)⁻¹ c. The same ω minimises ‖Bᵀα − c‖² + λ‖α‖² over ω = criticsᵀα: these are the
marginalised importance weights that balance Z against c. So one fit is both a value
function (minimax Q-learning) and a density ratio d^π/μ (minimax weight learning). Each
form is solved for every network, on its own units: one network's spread over rows does
not show what its features cannot express.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.estimators.contract import ListedEstimator
from koffline.ope.networks.fitted_values import FittedValues, uplift_of
from koffline.ope.networks.last_layer import least_squares, mean_values
from koffline.ope.results import Diagnostics, PointEstimate

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace

# Bounds of the ridges that follow from the number of rows.
_LEAST_RIDGE = 1e-10
_LARGEST_RIDGE = 0.1


@torch.no_grad()
def solve_closed_form(
    fitted: FittedValues, system: Float[Tensor, "replica critic column"], ridge: float
) -> Float[np.ndarray, "replica 2"]:
    """J of every network by the θ that minimises ‖v − Bθ‖² + ridge ‖θ‖², in units of
    the return.

    system: [B v] of each network, the last column being v. Column 0 of the result
    weighs start states as the replica's sample does, column 1 as the log does.
    """
    outputs = fitted.record.network.sizes[-1]
    theta = least_squares(system[..., :-1], system[..., -1], ridge, outputs)
    return mean_values(fitted.start_features, theta, fitted.problem.reward_scale)


def ridge_of_rows(fitted: FittedValues, power: float) -> float:
    """n^(−power) for n rows, within [1e-10, 0.1]; the powers were found by
    measurement.
    """
    rows = float(fitted.systems.weight[0])
    return min(max(rows**-power, _LEAST_RIDGE), _LARGEST_RIDGE)


@dataclass(frozen=True)
class ClosedForm(ListedEstimator):
    """An estimator that solves for the last layer of every network.

    values: J (R, 2) of the networks, from their features (`solve_closed_form`).
    describe: diagnostics and warnings of the estimate.
    """

    name: str
    values: Callable[[FittedValues], Float[np.ndarray, "replica 2"]]
    describe: Callable[[Workspace], tuple[Diagnostics, tuple[str, ...]]] | None = None

    def estimate(self, workspace: Workspace) -> PointEstimate:
        """The estimate with its bootstrap interval. Raises KofflineError."""
        values = self.values(workspace.fitted)
        diagnostics: Diagnostics = {}
        warnings: tuple[str, ...] = ()
        if self.describe is not None:
            diagnostics, warnings = self.describe(workspace)
        return mean_of_networks(
            self.name, workspace.fitted, values, diagnostics, warnings
        )


def mean_of_networks(
    name: str,
    fitted: FittedValues,
    values: Float[np.ndarray, "replica 2"],
    diagnostics: Diagnostics,
    warnings: tuple[str, ...],
) -> PointEstimate:
    """The mean over networks, its interval, and the uplift over the behavior policy.

    values: J of each network, as `solve_closed_form` returns it.
    """
    summary = fitted.summarise(values)
    return PointEstimate(
        name=name,
        value=summary.value,
        standard_error=summary.deviation,
        interval=fitted.interval(values),
        uplift=uplift_of(fitted, values),
        effective_sample_size=diagnostics.get("effective_units"),
        warnings=warnings,
        diagnostics=diagnostics,
    )
