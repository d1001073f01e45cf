"""A problem in features: the columns that every kernel interval reads.

A value function linear in p features, Q(s, a) = φ(s, a)ᵀθ, has the residual r − Zθ with
Z = φ(x) − discount · E_{a'~π} φ(s', a'), and the value cᵀθ with c = E_{s0, a~π} φ(s0,
a).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from koffline.data.columns import blocks
from koffline.kernels import (
    FourierFeatures,
    Gaussian,
    median_bandwidth,
    random_fourier_features,
)
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.networks.last_layer import draw_instruments

# map from rows (N, d) to features (N, F), both float64
FeatureMap = Callable[[Tensor], Tensor]
_BLOCK = 8192
_NOISE_ROWS = 256


@dataclass(frozen=True, eq=False)
class FeatureSystem:
    """N rows and E start states in p features; float64, values and rewards in the
    user's units.

    ``now (N, p)``: φ(s, a) of logged rows. ``later (N, p)``: E_{a'~π} φ(s', a').
    ``starts (E, p)``: E_{a~π} φ(s0, a). ``discounts (N,)``: γ, or 0 for terminal rows.
    ``row_weights (N,)`` (mean one) and ``start_weights (E,)`` are the log's own.
    ``instruments``: ψ with ψ(x)ᵀψ(y) ≈ k(x, y) and ψ(x)ᵀψ(x) = 1, a function of
    ``kernel_inputs (N, k)``. ``unit_starts (U,)``: first row of each unit; units are
    resampled by ``clusters (U,)``, else by their own numbers; ``kind``: what is
    resampled. ``fixed_starts``: start states were given, not sampled with the log.
    ``start_noise (k, p)``: rows whose outer products sum to the covariance of c that
    comes from drawing the policy's actions at given start states; None if nothing is
    drawn, or if start states are sampled too, whose variation then includes it.
    ``start_draws``: actions drawn per start state.
    """

    now: Float[Tensor, "row parameter"]
    later: Float[Tensor, "row parameter"]
    starts: Float[Tensor, "start parameter"]
    rewards: Float[Tensor, " row"]
    discounts: Float[Tensor, " row"]
    row_weights: Float[Tensor, " row"]
    start_weights: Float[Tensor, " start"]
    kernel_inputs: Float[Tensor, "row column"]
    instruments: FourierFeatures
    unit_starts: np.ndarray
    fixed_starts: bool
    value_bounds: tuple[float, float]
    reward_scale: float
    gamma: float
    start_noise: Float[Tensor, "noise parameter"] | None = None
    start_draws: int = 1
    clusters: np.ndarray | None = None
    kind: str = "episodes"
    # number of last parameters that are constants, which no ridge penalises
    constants: int = 0

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def parameters(self) -> int:
        """Number p of parameters."""
        return self.now.shape[1]

    @cached_property
    def difference(self) -> Float[Tensor, "row parameter"]:
        """Z = φ(x) − discount · E φ(x'), (N, p)."""
        return self.now - self.discounts[:, None] * self.later

    @cached_property
    def start_mean(self) -> Float[Tensor, " parameter"]:
        """c = E φ(s0, a), (p,): the value of θ is cᵀθ."""
        return self.start_weights @ self.starts / self.start_weights.sum()

    @cached_property
    def projected(self) -> Float[Tensor, "instrument column"]:
        """ΨᵀW[Z, r]/n, (m, p + 1): with B = Ψᵀ W Z/n and v = Ψᵀ W r/n, V̂(θ) = ‖v −
        Bθ‖².
        """
        columns = (
            torch.cat((self.difference, self.rewards[:, None]), dim=1)
            * self.row_weights[:, None]
        )
        total = columns.new_zeros(
            self.instruments.frequencies.shape[1] * 2, columns.shape[1]
        )
        for rows in blocks(len(self), _BLOCK):
            total.addmm_(self.instruments(self.kernel_inputs[rows]).mT, columns[rows])
        return total / len(self)

    @property
    def free(self) -> Tensor:
        """Mask (p,) of the parameters without a ridge: the constants."""
        return torch.arange(self.parameters) >= self.parameters - self.constants

    def residuals(self, theta: Float[Tensor, " parameter"]) -> Float[Tensor, " row"]:
        """Residuals δ = r − Zθ, (N,)."""
        return self.rewards - self.difference @ theta

    def value(self, theta: Float[Tensor, " parameter"]) -> float:
        """Value cᵀθ."""
        return float(self.start_mean @ theta)


def default_features(
    problem: EvaluationProblem, count: int = 100, width: float = 1.0, seed: int = 0
) -> FeatureMap:
    """Random Fourier features chosen from inputs alone, never from rewards.

    width: a multiple of the median distance between rows.
    """
    inputs = torch.as_tensor(problem.inputs[problem.row_weights > 0.0])
    kernel = Gaussian(width * median_bandwidth(inputs))
    generator = torch.Generator().manual_seed(seed)
    return random_fourier_features(kernel, inputs.shape[1], count, generator)


@torch.no_grad()
def make_feature_system(
    problem: EvaluationProblem,
    features: FeatureMap | None = None,
    *,
    gamma: float,
    constant: bool = True,
    bandwidth: float = 0.6,
    instruments: int | None = None,
    seed: int = 0,
) -> FeatureSystem:
    """Make the system of a problem. features: of standardised inputs (N, d); None:
    `default_features`.

    With discrete actions every action has its own weights. bandwidth: of the kernel
    behind the instruments, as a multiple of the median distance between rows. Raises
    DataError.
    """
    if features is None:
        mapping = default_features(problem, seed=seed)
    else:
        mapping = features
    columns = partial(_columns, mapping, constant)
    scale = problem.reward_scale
    now = columns(problem.inputs[:, None], problem.readout)
    return FeatureSystem(
        now=now,
        later=columns(problem.next_inputs, problem.next_probabilities),
        starts=columns(problem.start_inputs, problem.start_probabilities),
        rewards=torch.as_tensor(problem.rewards) * scale,
        discounts=torch.as_tensor(problem.discounts),
        row_weights=torch.as_tensor(problem.row_weights),
        start_weights=torch.as_tensor(problem.start_weights),
        kernel_inputs=torch.as_tensor(problem.kernel_inputs, dtype=torch.float64),
        instruments=draw_instruments(
            problem, bandwidth, instruments, now.shape[1], seed
        )[0],
        unit_starts=problem.episode_starts,
        clusters=problem.clusters,
        kind=problem.kind,
        fixed_starts=problem.fixed_starts,
        start_draws=problem.start_inputs.shape[1],
        value_bounds=(problem.value_bounds[0] * scale, problem.value_bounds[1] * scale),
        reward_scale=scale,
        gamma=gamma,
        constants=(problem.n_actions or 1) if constant else 0,
        start_noise=_start_noise(mapping, problem, constant),
    )


def _columns(
    features: FeatureMap, constant: bool, inputs: np.ndarray, readout: np.ndarray | None
) -> Float[Tensor, "row parameter"]:
    """φ (N, p) of inputs (N, m, d), averaged over the m draws, in blocks."""
    parts = []
    for rows in blocks(len(inputs), _BLOCK):
        block = torch.as_tensor(inputs[rows], dtype=torch.float64)
        of_draws = features(block.flatten(0, 1)).double()
        mean = of_draws.unflatten(0, block.shape[:2]).mean(dim=1)
        if constant:
            mean = pad(mean, (0, 1), value=1.0)
        if readout is not None:
            read = torch.as_tensor(readout[rows], dtype=torch.float64)
            mean = (mean.unsqueeze(-1) * read.unsqueeze(-2)).flatten(-2)
        parts.append(mean)
    return torch.cat(parts)


def _start_noise(
    features: FeatureMap, problem: EvaluationProblem, constant: bool
) -> Float[Tensor, "noise parameter"] | None:
    """`FeatureSystem.start_noise`: rows whose outer products sum to Σ_e share_e²
    Cov(φ_e)/m.
    """
    draws = problem.start_inputs.shape[1]
    if not problem.fixed_starts or draws == 1:
        return None
    shares = problem.start_weights / problem.start_weights.sum()
    form: Tensor | None = None
    for share, inputs in zip(shares, problem.start_inputs, strict=True):
        drawn = _columns(features, constant, inputs[:, None], None)  # (m, p)
        drawn = (drawn - drawn.mean(dim=0)) * (share / math.sqrt(draws * (draws - 1)))
        if form is None:
            form = drawn.mT @ drawn
        else:
            form = form.addmm_(drawn.mT, drawn)
    assert form is not None  # a problem has start states
    sizes, directions = torch.linalg.eigh(form)
    root = sizes.clamp(min=0.0).sqrt()[:, None] * directions.mT  # (p, p)
    # Many rows, so that their randomly signed sum is nearly normal.
    generator = torch.Generator().manual_seed(0)
    rows = max(_NOISE_ROWS, 2 * len(root))
    spread, _ = torch.linalg.qr(
        torch.randn(rows, len(root), generator=generator, dtype=root.dtype)
    )
    return spread @ root
