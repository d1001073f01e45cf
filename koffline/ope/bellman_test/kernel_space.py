"""Where the kernel of the test lives: standardised states, with the action beside them for Q(s, a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError
from koffline.kernels import Gaussian, Kernel, StationaryKernel, median_bandwidth, random_fourier_features
from koffline.ope.bellman_test.settings import BellmanSettings

_FAR = 10.0  # as in `koffline.ope.problem`: one outlier must not hide all else
_MEDIAN_ROWS = 1500  # evenly spaced; the median of as many is right to a percent


@dataclass(frozen=True, eq=False)
class KernelSpace:
    """Coordinates and kernel of the test; the same coordinates as `EvaluationProblem.kernel_inputs`.

    ``location``, ``scale (k,)``: of states and, for Q(s, a), continuous actions. ``n_actions``: discrete
    actions stand beside the state as one-hot columns; None otherwise. ``with_actions``: False for V(s).
    """

    kernel: Kernel
    location: np.ndarray
    scale: np.ndarray
    n_actions: int | None
    with_actions: bool

    @property
    def bandwidth(self) -> float | None:
        """The kernel's bandwidth in standardised coordinates, None where it has none."""
        return getattr(self.kernel, "bandwidth", None)

    def place(self, observations: np.ndarray, actions: np.ndarray | None) -> Float[Tensor, "row k"]:
        """Kernel inputs (N, k) float64 of observations (N, …) and actions (N,) or (N, a)."""
        columns = _flat(observations, actions if self._beside else None)
        placed = np.clip((columns - self.location) / self.scale, -_FAR, _FAR)
        if self.with_actions and self.n_actions is not None:
            placed = np.concatenate([placed, np.eye(self.n_actions)[np.asarray(actions)]], axis=1)
        return torch.as_tensor(placed)

    @property
    def _beside(self) -> bool:
        return self.with_actions and self.n_actions is None


def fit_kernel_space(
    transitions: Transitions, weights: np.ndarray, with_actions: bool, settings: BellmanSettings
) -> KernelSpace:
    """Location, scale and bandwidth from rows of positive weight, never from rewards or residuals."""
    space = transitions.action_space
    n_actions = space.n if isinstance(space, Discrete) else None
    beside = with_actions and n_actions is None
    columns = _flat(transitions.observations, transitions.actions if beside else None)
    share = weights / weights.sum()
    location = share @ columns  # (N,) @ (N, k) = (k,)
    spread = np.sqrt(share @ np.square(columns - location))
    scale = np.where(spread <= 1e-8 * np.abs(location), 1.0, spread)
    made = KernelSpace(Gaussian(1.0), location, scale, n_actions, with_actions)
    if settings.kernel is not None:
        return KernelSpace(settings.kernel, location, scale, n_actions, with_actions)
    rows = np.flatnonzero(weights > 0.0)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MEDIAN_ROWS)).astype(np.int64)]
    median = median_bandwidth(made.place(transitions.observations[rows], transitions.actions[rows]))
    return KernelSpace(Gaussian(settings.bandwidth * median), location, scale, n_actions, with_actions)


def draw_features(kernel: Kernel, dimension: int, count: int, seed: int):  # type: ignore[no-untyped-def]
    """Random Fourier features; ConfigError for a kernel that has none."""
    if not isinstance(kernel, StationaryKernel):
        raise ConfigError(
            f"{kernel} has no random Fourier features; give features=0 (exact) or a stationary kernel"
        )
    return random_fourier_features(kernel, dimension, count, torch.Generator().manual_seed(seed))


def _flat(observations: np.ndarray, actions: np.ndarray | None) -> np.ndarray:
    """(N, k) float64: observations laid flat, actions beside them."""
    flat = np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
    if actions is None:
        return flat
    return np.concatenate([flat, np.asarray(actions, dtype=np.float64).reshape(len(flat), -1)], axis=1)
