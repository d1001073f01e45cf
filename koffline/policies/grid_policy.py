"""A policy on a grid: softmax of action values that are interpolated between the centres of its cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from koffline.envs.grids import bilinear_weights, places


@dataclass(frozen=True, eq=False)
class GridPolicy:
    """π(a|s) ∝ exp(Q(s, a) / temperature), Q bilinear between cell centres and constant beyond them.

    low, high: the box in native units. action_values: (n1, n2, A).
    """

    low: tuple[float, float]
    high: tuple[float, float]
    action_values: Float[np.ndarray, "first second action"]
    temperature: float = 1.0

    @property
    def n(self) -> int:
        """Number of actions."""
        return self.action_values.shape[-1]

    def __call__(self, observations: Shaped[np.ndarray, "row 2"]) -> Float[np.ndarray, "row action"]:
        """Probabilities (N, A) of observations (N, 2) in native units."""
        shape = self.action_values.shape[0], self.action_values.shape[1]
        cells, weights = bilinear_weights(places(observations, self.low, self.high, shape), shape)
        corners = self.action_values.reshape(-1, self.n)[cells]  # (N, 4, A)
        scaled = np.einsum("nc,nca->na", weights, corners) / self.temperature
        raised = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)
