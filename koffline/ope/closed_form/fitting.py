"""What the fits share: sums, the choice of a ridge, and weights for the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.closed_form.fit import InstrumentPath, LinearFit
from koffline.ope.closed_form.moments import Moments, folded_moments, whole_moments
from koffline.ope.closed_form.ridges import Path, best_ridge, candidate_ridges, held_out_losses
from koffline.ope.closed_form.temporal import TemporalPath
from koffline.ope.features import FeatureSystem

FOLDS = 5
CURVATURE_POWER, TEMPORAL_POWER = 1.5, 1.0  # see `ridges.usual_ridge`
MakePath = Callable[[Moments], Path]
Considered = tuple[tuple[float, float], ...]


@runtime_checkable
class LinearProblem(Protocol):
    """What a path of fits needs besides sums over rows."""

    @property
    def start_mean(self) -> Float[Tensor, " parameter"]:
        """c: the value of θ is cᵀθ."""
        ...

    @property
    def free(self) -> Tensor:
        """Which parameters a ridge leaves alone, (p,) bool."""
        ...


def kernel_path(system: LinearProblem) -> MakePath:
    """Fits with the RKHS of the log's kernel as critics, from sums over any rows."""

    def make_path(moments: Moments) -> InstrumentPath:
        projected = moments.projected / moments.weight
        return InstrumentPath(projected[:, :-1], projected[:, -1], system.start_mean, system.free)

    return make_path


def temporal_path(system: LinearProblem) -> MakePath:
    """Fits with the features themselves as critics."""

    def make_path(moments: Moments) -> TemporalPath:
        temporal = moments.temporal / moments.weight
        return TemporalPath(temporal[:, :-1], temporal[:, -1], system.start_mean, system.free)

    return make_path


def choose_ridge(
    system: FeatureSystem, make_path: MakePath, power: float, folds: int, seed: int
) -> tuple[float, Considered]:
    """The candidate with the least held-out loss, and all losses."""
    ridges = candidate_ridges(system.log_rows, power)
    losses = held_out_losses(folded_moments(system, folds, seed), make_path, ridges)
    return best_ridge(losses, ridges), pairs(ridges, losses)


def finish_fit(
    system: FeatureSystem,
    pair_of: MakePath,
    ridge: float,
    critics: FourierFeatures | None,
    considered: Considered = (),
    count: int | None = None,
) -> LinearFit:
    """The fit of all rows with one ridge. critics, count: of the weights; see `LinearFit`, `Moments`."""
    pair = pair_of(whole_moments(system, count)).solve(ridge)
    return LinearFit(pair.theta, pair.alpha, critics, ridge, pair.degrees_of_freedom, considered)


def pairs(ridges: Sequence[float], losses: Float[Tensor, " ridge"]) -> Considered:
    """(ridge, loss) of every candidate."""
    return tuple(zip(ridges, losses.tolist(), strict=True))
