"""What turns rows into columns: fixed before a pass, sent to every worker once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.problem import EvaluationProblem
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.replicas import StackedMLP
from koffline.solvers.features import FeatureMap
from koffline.solvers.last_layer import last_layer
from koffline.stacked_products import Workspace

_PHASE_ROWS = 2048


@runtime_checkable
class FeatureStack(Protocol):
    """R feature maps of one shape."""

    @property
    def replicas(self) -> int:
        """R."""
        ...

    @property
    def count(self) -> int:
        """F."""
        ...

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Float[Tensor, "replica row feature"]:
        """(R, N, F) of standardised rows (N, d) in float64."""
        ...


@dataclass(frozen=True, eq=False)
class NetworkFeatures:
    """What the last layers of R trained networks read; computed in their own precision."""

    sizes: tuple[int, ...]
    flat: np.ndarray  # (R, P)
    activation: str = "relu"

    @classmethod
    def of(cls, network: StackedMLP) -> NetworkFeatures:
        """Of trained networks, wherever they are."""
        return cls(network.sizes, network.flat.cpu().numpy().copy(), network.activation)

    @property
    def replicas(self) -> int:
        """R."""
        return len(self.flat)

    @property
    def count(self) -> int:
        """F."""
        return self.sizes[-2]

    @property
    def network(self) -> StackedMLP:
        """The networks themselves."""
        return StackedMLP(self.sizes, torch.from_numpy(self.flat), self.activation)

    @property
    def last_layers(self) -> Float[Tensor, "replica parameter"]:
        """As they were trained, (R, (F + 1) · outputs)."""
        return last_layer(self.network)

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Float[Tensor, "replica row feature"]:
        """(R, N, F)."""
        return self.network.features(inputs.to(torch.from_numpy(self.flat).dtype)).to(dtype)


@dataclass(frozen=True, eq=False)
class OneFeatureMap:
    """Any feature map as a stack of one."""

    features: FeatureMap
    count: int
    replicas: int = 1

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Float[Tensor, "replica row feature"]:
        """(1, N, F)."""
        return self.features(inputs.to(dtype)).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Frame:
    """How rows are seen.

    ``units`` standardises (its rows are left out). ``next_draws`` and ``start_draws``: actions drawn of a
    continuous policy, 1 where nothing is drawn. ``instruments``: ψ, a function of kernel inputs. ``critics``:
    how many of them DualDICE needs the second moment of, 0 for none. ``own_starts``: start states are the
    log's own. ``ratios``: episodes are weighed by importance, capped at ``clip``, and nothing else is summed.
    """

    policy: DiscretePolicy | ContinuousPolicy
    gamma: float
    units: EvaluationProblem
    features: FeatureStack
    instruments: FourierFeatures
    next_draws: int
    start_draws: int
    own_starts: bool
    seed: int
    groups: int
    weight_scale: float
    critics: int = 0
    dtype: torch.dtype = torch.float32
    ratios: bool = False
    clip: float | None = None

    @property
    def outputs(self) -> int:
        """Length of a readout: n actions, 1 for continuous ones."""
        return self.units.n_actions or 1

    @property
    def parameters(self) -> int:
        """p."""
        return (self.features.count + 1) * self.outputs

    @property
    def instrument_count(self) -> int:
        """m."""
        return 2 * self.instruments.frequencies.shape[1]

    def psi(self, kernel_inputs: Tensor, workspace: Workspace) -> Float[Tensor, "row instrument"]:
        """Instruments (B, m) of kernel inputs (B, k), in an array that the next call overwrites.

        Fresh arrays of this size would cost as much as the products: the system clears each page first.
        """
        frequencies = self.instruments.frequencies.to(self.dtype)
        half = frequencies.shape[1]
        inputs = kernel_inputs.to(self.dtype)
        psi = workspace.take("psi", (len(inputs), 2 * half), inputs)
        for start in range(0, len(inputs), _PHASE_ROWS):
            rows = slice(start, start + _PHASE_ROWS)
            phases = inputs[rows] @ frequencies
            torch.cos(phases, out=psi[rows, :half])
            torch.sin(phases, out=psi[rows, half:])
        return psi.mul_(1.0 / math.sqrt(half))
