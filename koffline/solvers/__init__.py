"""Exact solvers of the kernel Bellman loss, which is quadratic in the last layer: faster than a gradient."""

from koffline.solvers.closed_form import LinearValue, solve_kernel_loss, solve_lstd
from koffline.solvers.features import FeatureMap, RandomFourierFeatures, TileCoding, UnitBox
from koffline.solvers.front import solve
from koffline.solvers.held_out import Candidate, CandidateGrid
from koffline.solvers.selection import Selection, select
from koffline.solvers.settings import SolverSettings
from koffline.solvers.variable_projection import (
    ProjectedNetworks,
    ProjectionSettings,
    fit_variable_projection,
    reduced_loss,
)

__all__ = [
    "Candidate",
    "CandidateGrid",
    "FeatureMap",
    "LinearValue",
    "ProjectedNetworks",
    "ProjectionSettings",
    "RandomFourierFeatures",
    "Selection",
    "SolverSettings",
    "TileCoding",
    "UnitBox",
    "fit_variable_projection",
    "reduced_loss",
    "select",
    "solve",
    "solve_kernel_loss",
    "solve_lstd",
]
