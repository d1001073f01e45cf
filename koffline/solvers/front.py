"""One call for the exact solvers: `solve(data, solver="closed-form" | "variable-projection", …)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from koffline.batches import ReplicaPlan, Table
from koffline.bellman import discount
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, nearest_name
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
from koffline.replicas import StackedMLP
from koffline.solvers.closed_form import LinearValue, solve_kernel_loss
from koffline.solvers.features import FeatureMap, RandomFourierFeatures, UnitBox
from koffline.solvers.linear import as_double, kernel_inputs
from koffline.solvers.selection import CandidateGrid, default_grid, select
from koffline.solvers.variable_projection import ProjectedNetworks, fit_variable_projection

SOLVERS = ("closed-form", "variable-projection")
_EXACT_ROWS = 10_000  # above, kernels go through random features unless the settings say otherwise
_MANY_FEATURES, _FEW_FEATURES = 2000, 500


class SolverSettings(BaseModel):
    """What the solvers need to know; lengths are in units of the kernel inputs (the unit box, for a log).

    Both: bandwidth of the Gaussian kernel, relative ridge, diag_weight (None: the V-statistic),
    kernel_features (None: the exact kernel up to 10,000 rows, 2000 random features above; 500 for networks),
    seed.
    Closed form: feature_width and feature_count of random Fourier features. Bandwidth, ridge and
    feature_width left None are chosen by `rule` over `folds` folds.
    Networks: bandwidth None is a fifth of the median distance, ridge None 1e-4; hidden_units, steps,
    batch_size, learning_rate, replicas (seeds from `seed` up).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    bandwidth: float | None = Field(None, gt=0.0)
    ridge: float | None = Field(None, ge=0.0)
    diag_weight: float | None = Field(None, ge=0.0, le=1.0)
    kernel_features: int | None = Field(None, ge=2, multiple_of=2)
    seed: int = Field(0, ge=0)
    feature_width: float | None = Field(None, gt=0.0)
    feature_count: int = Field(400, ge=2, multiple_of=2)
    rule: Literal["lstd-tournament", "held-out-loss"] = "lstd-tournament"
    folds: int = Field(5, ge=2)
    hidden_units: tuple[Annotated[int, Field(ge=1)], ...] = Field((80,), min_length=1)
    steps: int = Field(500, ge=1)
    batch_size: int = Field(1000, ge=2)
    learning_rate: float = Field(0.01, gt=0.0)
    replicas: int = Field(1, ge=1)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table, and what a log knows beside it."""

    table: Table
    scale: UnitBox | None = None
    row_weights: Tensor | None = None
    groups: Tensor | None = None


def solve(
    data: Table | Transitions,
    solver: str = "closed-form",
    *,
    gamma: float | None = None,
    box: UnitBox | None = None,
    features: FeatureMap | None = None,
    **settings: Any,
) -> LinearValue | ProjectedNetworks:
    """The value function that minimises the kernel Bellman loss; ``.values(states)`` of the result.

    data: a `Table`, solved as it is, or a log whose actions are the evaluated policy's own, with `gamma`; its
    observations are scaled to `box` (default: the range of the data), and results take unscaled ones.
    features: any callable (N, d) -> (N, F) in place of random Fourier features (closed form only).
    settings: fields of `SolverSettings`. Raises ConfigError, DataError.
    """
    if solver not in SOLVERS:
        raise ConfigError(f"there is no solver '{solver}'; {nearest_name(str(solver), SOLVERS)}")
    chosen, prepared = _checked(settings), prepare(data, gamma, box)
    if solver == "closed-form":
        return _solve_closed_form(prepared, chosen, features)
    if features is not None:
        raise ConfigError("variable-projection learns its features; leave features out")
    return _solve_networks(prepared, chosen)


def _checked(settings: Mapping[str, Any]) -> SolverSettings:
    plain = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }
    try:
        return SolverSettings(**plain)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = nearest_name(name, SolverSettings.model_fields)
            raise ConfigError(f"there is no setting '{name}'; {known}") from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{name} is {plain[name]!r}: {message}") from None


def prepare(data: Table | Transitions, gamma: float | None, box: UnitBox | None) -> Prepared:
    """A table as it is, or V-form rows of a log in float64: observations flattened and in units of the box.

    Raises ConfigError for arguments that do not belong to this kind of data, DataError for other kinds.
    """
    if isinstance(data, Table):
        if gamma is not None or box is not None:
            raise ConfigError("a Table holds discounts and scaled inputs; leave gamma and box out")
        return Prepared(data)
    if not isinstance(data, Transitions):
        raise DataError(f"data is a {type(data).__name__}; give a Table or Transitions")
    if gamma is None:
        raise ConfigError("gamma is missing; give the discount factor, as in gamma=0.99")
    states, following = (as_double(part).flatten(1) for part in (data.observations, data.next_observations))
    if box is None:  # the smallest and largest observation; a constant column keeps the unit 1
        low, high = torch.cat([states, following]).aminmax(dim=0)
        high = torch.where(high > low, high, low + 1.0)
        box = UnitBox(tuple(low.tolist()), tuple(high.tolist()))
    discounts = discount(gamma, as_double(data.terminated))
    return Prepared(
        Table(box(states), box(following), as_double(data.rewards), discounts, kernel_inputs=box(states)),
        scale=box,
        row_weights=None if data.weights is None else as_double(data.weights),
        groups=torch.from_numpy(np.array(data.episode_ids)) if data.has_episodes else None,
    )


def _solve_closed_form(
    prepared: Prepared, settings: SolverSettings, features: FeatureMap | None
) -> LinearValue:
    inputs = kernel_inputs(prepared.table).double()
    grid = default_grid(inputs, settings.feature_count, settings.seed)
    if features is None and settings.feature_width is not None:
        features = RandomFourierFeatures(settings.feature_width, settings.feature_count, settings.seed)
    grid = CandidateGrid(  # what the settings fix in place of their axis
        feature_maps=grid.feature_maps if features is None else (features,),
        bandwidths=grid.bandwidths if settings.bandwidth is None else (settings.bandwidth,),
        ridges=grid.ridges if settings.ridge is None else (settings.ridge,),
    )
    candidate = grid.candidates[0]
    if len(grid.candidates) > 1:
        candidate = select(
            prepared.table,
            grid,
            torch.Generator().manual_seed(settings.seed + 1),
            rule=settings.rule,
            folds=settings.folds,
            groups=prepared.groups,
            diag_weight=settings.diag_weight,
            row_weights=prepared.row_weights,
        ).best
    count = settings.kernel_features or (_MANY_FEATURES if len(prepared.table) > _EXACT_ROWS else 0)
    kernel = Gaussian(candidate.bandwidth)
    generator = torch.Generator().manual_seed(settings.seed)
    value = solve_kernel_loss(
        prepared.table,
        candidate.features,
        random_fourier_features(kernel, inputs.shape[1], count, generator) if count else kernel,
        diag_weight=settings.diag_weight,
        ridge=candidate.ridge,
        row_weights=prepared.row_weights,
    )
    return replace(value, scale=prepared.scale)


def _solve_networks(prepared: Prepared, settings: SolverSettings) -> ProjectedNetworks:
    if prepared.row_weights is not None:
        raise ConfigError("variable-projection takes no row weights; resample the log by its weights first")
    table, inputs = prepared.table, kernel_inputs(prepared.table).double()
    seeds = range(settings.seed, settings.seed + settings.replicas)
    outputs = 1 if table.readout is None else table.readout.shape[1]
    sizes = (table.inputs.shape[1], *settings.hidden_units, outputs)
    kernel = Gaussian(settings.bandwidth or 0.2 * median_bandwidth(inputs))
    count, generator = settings.kernel_features or _FEW_FEATURES, torch.Generator().manual_seed(settings.seed)
    fitted = fit_variable_projection(
        table,
        StackedMLP.initialise(sizes, seeds, dtype=torch.float64, device=table.inputs.device),
        random_fourier_features(kernel, inputs.shape[1], count, generator),
        ReplicaPlan.of_seeds(seeds, settings.learning_rate),
        steps=settings.steps,
        batch_size=settings.batch_size,
        ridge=1e-4 if settings.ridge is None else settings.ridge,
        diag_weight=settings.diag_weight,
    )
    return replace(fitted, scale=prepared.scale)
