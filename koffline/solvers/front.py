"""One call for the exact solvers: `solve(data, solver="closed-form" | "variable-projection", …)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch

from koffline.batches import ReplicaPlan, Table
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.fitting import Progress
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
from koffline.replicas import StackedMLP
from koffline.solvers.closed_form import LinearValue, solve_kernel_loss
from koffline.solvers.features import FeatureMap, RandomFourierFeatures, UnitBox
from koffline.solvers.held_out import Candidate, CandidateGrid
from koffline.solvers.prepare import Prepared, prepare
from koffline.solvers.selection import default_grid, select
from koffline.solvers.settings import SolverSettings, make_solver_settings
from koffline.solvers.variable_projection import (
    ProjectedNetworks,
    ProjectionSettings,
    fit_variable_projection,
)

_EXACT_ROWS = 10_000  # above, kernels go through random features unless the settings say otherwise
_MANY_FEATURES, _FEW_FEATURES = 2000, 500


@overload
def solve(
    data: Table | Transitions,
    solver: Literal["closed-form"] = "closed-form",
    *,
    gamma: float | None = None,
    box: UnitBox | None = None,
    features: FeatureMap | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LinearValue: ...


@overload
def solve(
    data: Table | Transitions,
    solver: Literal["variable-projection"],
    *,
    gamma: float | None = None,
    box: UnitBox | None = None,
    features: FeatureMap | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> ProjectedNetworks: ...


def solve(
    data: Table | Transitions,
    solver: str = "closed-form",
    *,
    gamma: float | None = None,
    box: UnitBox | None = None,
    features: FeatureMap | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LinearValue | ProjectedNetworks:
    """The value function that minimises the kernel Bellman loss; ``.values(states)`` of the result.

    data: a `Table`, solved as it is, or a log whose actions are the evaluated policy's own, with `gamma`; its
    observations are scaled to `box` (default: the range of the data), and results take unscaled ones.
    features: any callable (N, d) -> (N, F) in place of random Fourier features (closed form only).
    settings: fields of `SolverSettings`. Raises ConfigError, DataError.
    """
    chosen = make_solver_settings(solver, settings)
    prepared = prepare(data, gamma, box)
    if solver == "closed-form":
        return _solve_closed_form(prepared, chosen, features)
    if features is not None:
        raise ConfigError("variable-projection learns its features; leave features out")
    return _solve_networks(prepared, chosen, progress)


def _solve_closed_form(
    prepared: Prepared, settings: SolverSettings, features: FeatureMap | None
) -> LinearValue:
    candidate = _choose(prepared, settings, _grid(prepared, settings, features))
    count = settings.kernel_features or (_MANY_FEATURES if len(prepared.table) > _EXACT_ROWS else 0)
    kernel = Gaussian(candidate.bandwidth)
    width = prepared.kernel_inputs.shape[1]
    generator = torch.Generator().manual_seed(settings.seed)
    value = solve_kernel_loss(
        prepared.table,
        candidate.features,
        random_fourier_features(kernel, width, count, generator) if count else kernel,
        diag_weight=settings.diag_weight,
        ridge=candidate.ridge,
        row_weights=prepared.row_weights,
    )
    return replace(value, scale=prepared.scale)


def _grid(prepared: Prepared, settings: SolverSettings, features: FeatureMap | None) -> CandidateGrid:
    """The default candidates, what the settings fix in place of their axis."""
    grid = default_grid(prepared.kernel_inputs, settings.feature_count, settings.seed)
    width, bandwidth, ridge = settings.feature_width, settings.bandwidth, settings.ridge
    if features is None and width is not None:
        features = RandomFourierFeatures(width, settings.feature_count, settings.seed)
    return CandidateGrid(
        feature_maps=grid.feature_maps if features is None else (features,),
        bandwidths=grid.bandwidths if bandwidth is None else (bandwidth,),
        ridges=grid.ridges if ridge is None else (ridge,),
    )


def _choose(prepared: Prepared, settings: SolverSettings, grid: CandidateGrid) -> Candidate:
    if len(grid.candidates) == 1:
        return grid.candidates[0]
    selection = select(
        prepared.table,
        grid,
        torch.Generator().manual_seed(settings.seed + 1),
        rule=settings.rule,
        folds=settings.folds,
        groups=prepared.groups,
        diag_weight=settings.diag_weight,
        row_weights=prepared.row_weights,
    )
    return selection.best


def _solve_networks(
    prepared: Prepared, settings: SolverSettings, progress: Progress | None
) -> ProjectedNetworks:
    if prepared.row_weights is not None:
        raise ConfigError("variable-projection takes no row weights; resample the log by its weights first")
    table, inputs = prepared.table, prepared.kernel_inputs
    seeds = range(settings.seed, settings.seed + settings.replicas)
    outputs = 1 if table.readout is None else table.readout.shape[1]
    network = StackedMLP.initialise(
        (table.inputs.shape[1], *settings.hidden_units, outputs),
        seeds,
        dtype=torch.float64,
        device=table.inputs.device,
    )
    kernel = Gaussian(settings.bandwidth or 0.2 * median_bandwidth(inputs))
    generator = torch.Generator().manual_seed(settings.seed)
    fitted = fit_variable_projection(
        table,
        network,
        random_fourier_features(
            kernel, inputs.shape[1], settings.kernel_features or _FEW_FEATURES, generator
        ),
        ReplicaPlan.of_seeds(seeds, settings.learning_rate),
        ProjectionSettings(
            steps=settings.steps,
            batch_size=settings.batch_size,
            ridge=1e-4 if settings.ridge is None else settings.ridge,
            diag_weight=settings.diag_weight,
        ),
        progress=progress,
    )
    return replace(fitted, scale=prepared.scale)
