"""Exact solvers of the kernel Bellman loss, which is quadratic in the last layer: faster than a gradient."""

from koffline.solvers.closed_form import LinearValue, solve_kernel_loss, solve_lstd
from koffline.solvers.features import FeatureMap, RandomFourierFeatures, UnitBox
from koffline.solvers.front import SolverSettings, solve
from koffline.solvers.selection import Candidate, CandidateGrid, Selection, select
from koffline.solvers.variable_projection import ProjectedNetworks, fit_variable_projection, reduced_loss

__all__ = [
    "Candidate",
    "CandidateGrid",
    "FeatureMap",
    "LinearValue",
    "ProjectedNetworks",
    "RandomFourierFeatures",
    "Selection",
    "SolverSettings",
    "UnitBox",
    "fit_variable_projection",
    "reduced_loss",
    "select",
    "solve",
    "solve_kernel_loss",
    "solve_lstd",
]
