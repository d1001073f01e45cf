"""A policy on a grid: softmax of action values that are interpolated between the centres of its cells.

Its file is an .npz of plain arrays (see `policy_file`): `format` = "koffline-grid-policy", `version` = 1,
`low` (2,), `high` (2,), `action_values` (n1, n2, A), `temperature`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped

from koffline.data.transitions import ActionSpace, Discrete
from koffline.envs.grids import bilinear_weights, places
from koffline.errors import PolicyError
from koffline.policies.base import DiscretePolicy, check_spaces
from koffline.policies.policy_file import check_version, write_arrays

FORMAT = "koffline-grid-policy"
VERSION = 1
_NAMES = ("low", "high", "action_values", "temperature")


@dataclass(frozen=True, eq=False)
class GridPolicy:
    """π(a|s) ∝ exp(Q(s, a) / temperature), Q bilinear between cell centres and constant beyond them.

    low, high: the box in native units. action_values: (n1, n2, A). Raises PolicyError.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    action_values: np.ndarray  # (n1, n2, A)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        values = np.asarray(self.action_values, dtype=np.float64)
        if values.ndim != 3 or min(values.shape) < 1 or not np.isfinite(values).all():
            raise PolicyError(f"action_values has shape {values.shape}; give finite numbers (n1, n2, A)")
        corners = np.asarray([self.low, self.high], dtype=np.float64)
        if corners.shape != (2, 2) or not np.isfinite(corners).all() or np.any(corners[0] >= corners[1]):
            raise PolicyError(f"low is {self.low}, high {self.high}; give two corners, low below high")
        if not 0.0 < self.temperature < float("inf"):
            raise PolicyError(f"temperature is {self.temperature}; give a positive number")
        object.__setattr__(self, "action_values", values)

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


def save_grid_policy(path: str | Path, policy: GridPolicy) -> None:
    """Write a policy file; the same policy gives the same bytes, and the file appears whole or not at all."""
    write_arrays(Path(path), FORMAT, VERSION, {name: getattr(policy, name) for name in _NAMES})


def grid_of_file(path: Path, arrays: dict[str, np.ndarray]) -> GridPolicy:
    """The policy in the arrays of a file of this format. Raises PolicyError naming the file."""
    check_version(path, arrays, VERSION)
    if set(arrays) != set(_NAMES) or any(array.dtype.kind not in "iuf" for array in arrays.values()):
        raise PolicyError(
            f"{path}: the arrays are {', '.join(sorted(arrays))}; {', '.join(_NAMES)} are needed"
        )
    if arrays["low"].shape != (2,) or arrays["high"].shape != (2,) or arrays["temperature"].shape != ():
        raise PolicyError(
            f"{path}: low and high need two numbers each, temperature one; write the file again"
        )
    low, high = ((float(a), float(b)) for a, b in (arrays["low"], arrays["high"]))
    try:
        return GridPolicy(low, high, arrays["action_values"], float(arrays["temperature"]))
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


def grid_policy(
    grid: GridPolicy, name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> DiscretePolicy:
    """The policy for a log with these spaces. Raises PolicyError where it does not fit."""
    check_spaces(name, Discrete(grid.n), (2,), action_space, observation_shape)
    return DiscretePolicy(grid.n, grid, name, (2,))
