"""Parameters of what is linear in features: last layers, and minimisers of quadratic losses with a ridge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.batches import Table
from koffline.errors import ConfigError
from koffline.replicas import StackedMLP


def kernel_inputs(table: Table) -> Float[Tensor, "row column"]:
    """What the kernel compares."""
    return table.inputs if table.kernel_inputs is None else table.kernel_inputs


def free_parameters(parameters: int, constants: int) -> Bool[Tensor, " parameter"]:
    """(p,) bool: true for the last `constants`."""
    return torch.arange(parameters) >= parameters - constants


def combine_features(
    features: Float[Tensor, "*replica drawn feature"],
    draws: int,
    readout: Float[Tensor, "row output"] | None,
    constant: bool,
) -> Float[Tensor, "*replica row parameter"]:
    """φ (…, N, p) with Σ readout · outputs = φᵀθ, from features (…, N · draws, F) averaged over draws.

    θ is the last layer row by row: a weight of every output for the first feature, for the second, …, and
    with `constant` the outputs' constants last; p = (F + 1) · outputs.
    """
    mean = features if draws == 1 else features.unflatten(-2, (-1, draws)).mean(dim=-2)
    if constant:
        mean = torch.cat([mean, mean.new_ones(*mean.shape[:-1], 1)], dim=-1)
    if readout is None:
        return mean
    return (mean.unsqueeze(-1) * readout.to(mean).unsqueeze(-2)).flatten(-2)


def last_layer_features(
    network: StackedMLP, inputs: Float[Tensor, "row *draw input"], readout: Float[Tensor, "row output"] | None
) -> Float[Tensor, "replica row parameter"]:
    """φ with Σ readout · net(inputs) = φᵀθ for a network's last layer θ, averaged over draws; float64."""
    hidden = network.features(inputs.reshape(-1, inputs.shape[-1])).double()
    return combine_features(hidden, hidden.shape[1] // max(1, len(inputs)), readout, constant=True)


def last_layer(network: StackedMLP) -> Float[Tensor, "replica parameter"]:
    """θ (R, (H + 1) · n) in the order of `last_layer_features`; float64."""
    weight, bias = network.layers(network.flat)[-1]
    return torch.cat([weight, bias], dim=1).double().flatten(1)


def with_last_layer(network: StackedMLP, theta: Float[Tensor, "replica parameter"]) -> StackedMLP:
    """The same networks in float64, the last layer replaced by θ."""
    flat = network.flat.double().clone()
    flat[:, -theta.shape[1] :] = theta  # weight rows, then the bias row: the layout of the flat parameters
    return network.with_flat(flat)


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """A minimiser. degrees_of_freedom: Σ e/(e + λ) over eigenvalues e of the curvature, free ones count one.

    condition: largest over smallest curvature of what was minimised, infinite where the data leave a
    direction open. weights are NaN where there is no minimum.
    """

    weights: Float[Tensor, " parameter"]
    degrees_of_freedom: float
    condition: float


class RidgePath:
    """Minimisers of θᵀCθ − 2 sᵀθ + λ‖θ‖² over the parameters that are not free, for any relative λ.

    λ = ridge · (mean curvature). One eigendecomposition of C serves all ridges; free parameters are
    eliminated first. With ridge 0, directions that the data leave open stay at zero.
    """

    def __init__(
        self,
        curvature: Float[Tensor, "parameter parameter"],
        slope: Float[Tensor, " parameter"],
        free: Bool[Tensor, " parameter"],
    ) -> None:
        bound, self._free = ~free, free
        self._finite = bool(torch.isfinite(curvature).all()) and bool(torch.isfinite(slope).all())
        if not self._finite:
            curvature = torch.zeros_like(curvature)  # a decomposition that fails must not stop other fits
        self._cross, self._free_slope = curvature[free][:, bound], slope[free]
        self._inverse = torch.linalg.pinv(curvature[free][:, free], hermitian=True)
        outer = curvature[bound][:, bound] - self._cross.mT @ self._inverse @ self._cross
        self._values, self._vectors = torch.linalg.eigh(0.5 * (outer + outer.mT))
        diagonal = curvature.diagonal()
        size = torch.maximum(self._values.abs().amax(), diagonal[bound].abs().amax())
        self._tiny = float(torch.finfo(curvature.dtype).eps * curvature.shape[-1] * size)
        pull = slope[bound] - self._cross.mT @ self._inverse @ self._free_slope
        self._pull, self._scale = self._vectors.mT @ pull, mean_curvature(diagonal, free)

    def solve(self, ridge: float) -> RidgeSolution:
        """The minimiser for one ridge."""
        check_ridge(ridge)
        values = torch.where(self._values.abs() <= self._tiny, 0.0, self._values)
        total = values + ridge * self._scale
        is_open = total <= self._tiny
        safe = torch.where(is_open, 1.0, total)
        outer = self._vectors @ torch.where(is_open, 0.0, self._pull / safe)
        weights = outer.new_full((len(self._free),), math.nan)
        if self._finite and not bool((total < -self._tiny).any()):
            weights[~self._free] = outer
            weights[self._free] = self._inverse @ (self._free_slope - self._cross @ outer)
        freedom = float(torch.where(is_open, 0.0, values / safe).sum()) + int(self._free.sum())
        least = float(total.amin())
        condition = math.inf if least <= self._tiny else float(total.amax()) / least
        return RidgeSolution(weights, freedom, condition)


def mean_curvature(diagonal: Float[Tensor, " parameter"], free: Bool[Tensor, " parameter"]) -> Tensor:
    """Mean absolute entry over the parameters that are not free: the unit of a relative ridge."""
    return diagonal[~free].abs().mean()


def check_ridge(ridge: float) -> None:
    """Raise ConfigError for a negative or infinite ridge."""
    if not (math.isfinite(ridge) and ridge >= 0.0):
        raise ConfigError(f"ridge is {ridge}; give a number that is not negative")
