"""Training objectives of value functions: the kernel loss and the baselines, with one
interface.

An objective is a frozen record. It says which network gives the next value, with or
without gradients (`next_from`), and which kernel it needs (`kernel`, or None).
``compute_gradients`` returns the loss of each replica and its gradients in the
residual's two values in closed form; the replica engine propagates them to the
parameters (no autograd through the kernel). `next_from` is "nothing" where no row has
a next one.

GTD2 and SBEED train a second function beside the value, and also give its descent
directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError
from koffline.kernel_loss import check_diag_weight
from koffline.kernels import (
    Gaussian,
    Kernel,
    Laplacian,
    median_bandwidth,
    random_fourier_features,
)

Rows = Float[Tensor, "replica row"]
Own = Float[Tensor, "*replica row"]  # per replica, or shared by all
NextFrom = Literal["network", "network_detached", "target", "nothing"]


@dataclass(frozen=True, eq=False)
class ValueGradients:
    """Loss per replica and its gradients in value and next value; `next_value` None: no
    gradient.
    """

    loss: Float[Tensor, " replica"]
    value: Rows
    next_value: Rows | None


@dataclass(frozen=True)
class CopyTarget:
    """The target network copies the trained one every `every` steps; None: at the end
    of each epoch.
    """

    every: int | None = None

    def update(
        self, target: Tensor, trained: Tensor, step: int, steps_per_epoch: int
    ) -> None:
        """Copy the `trained` parameters into the target's after `step` steps, if one of
        `every` (of an epoch: `steps_per_epoch`) ends there.
        """
        if step % (self.every or steps_per_epoch) == 0:
            target.copy_(trained)


@dataclass(frozen=True)
class FollowTarget:
    """The target network moves towards the trained one at each step: target += rate ·
    (network − target).
    """

    rate: float = 0.01

    def update(
        self, target: Tensor, trained: Tensor, step: int, steps_per_epoch: int
    ) -> None:
        """Move the target's parameters towards the `trained` ones, at every `step`;
        `steps_per_epoch` does not matter.
        """
        target.lerp_(trained, self.rate)


@runtime_checkable
class Objective(Protocol):
    """An objective, as described in the module's docstring."""

    @property
    def kernel(self) -> Any:
        """The kernel over rows, or a feature map; or None."""

    @property
    def next_from(self) -> NextFrom:
        """The network that gives the next value, and whether gradients reach it."""


@runtime_checkable
class ResidualObjective(Objective, Protocol):
    """An objective whose gradients depend on the residuals of a mini-batch alone.

    One with a second function (`GradientTD2`, `SaddlePoint`, `MemoryLoss`) has
    gradients of its own, and a step that also updates that function
    (`koffline.steps.make_step`).
    """

    def compute_gradients(
        self, residual: Rows, discount: Own, gram: Tensor | None = None
    ) -> ValueGradients:
        """Loss and gradients in closed form.

        residual: δ (R, N). discount: (R, N) or (N,). gram: the kernel matrix of the
        rows, (N, N) or (G, N, N); None without a kernel.
        """
        ...


@dataclass(frozen=True)
class KernelLoss:
    """The kernel Bellman loss of a mini-batch; gradients flow through both values, no
    target network.

    diag_weight: w of kernel_loss; None means 1/n, the plain V-statistic of the
    mini-batch. (Feng et al. 2019, sec:batch_lv)
    """

    kernel: Kernel
    diag_weight: float | None = None
    next_from: ClassVar[NextFrom] = "network"

    def __post_init__(self) -> None:
        if self.diag_weight is not None:
            check_diag_weight(self.diag_weight)

    def compute_gradients(
        self, residual: Rows, discount: Own, gram: Tensor | None = None
    ) -> ValueGradients:
        """Loss and its gradient 2 K δ / n², from one product K δ.

        residual: δ (R, N). discount: (R, N) or (N,). gram: (N, N), or (G, N, N) if
        replicas g·R/G … (g+1)·R/G − 1 share the g-th.
        """
        assert gram is not None
        rows = residual.shape[-1]
        if self.diag_weight is None:
            weight = 1.0 / rows
        else:
            weight = self.diag_weight
        weighted = gram_product(residual, gram)
        if weight * rows != 1.0:  # the plain V-statistic needs no extra diagonal
            off = (1.0 - weight) / (rows * (rows - 1))
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            if diagonal.ndim == 2:
                diagonal = diagonal.repeat_interleave(
                    len(residual) // len(diagonal), dim=0
                )
            weighted = weighted * off + (weight / rows - off) * diagonal * residual
        else:
            weighted = weighted.div_(rows**2)
        loss = (weighted * residual).sum(dim=-1)
        return ValueGradients(loss, -2.0 * weighted, 2.0 * weighted * discount)


class _NoKernel:
    kernel: ClassVar[None] = None
    next_from: ClassVar[NextFrom] = "network"


@dataclass(frozen=True)
class _SquaredError(_NoKernel):
    """mean δ²; a subclass determines the values through which its gradient 2δ/n
    flows.
    """

    def compute_gradients(
        self, residual: Rows, discount: Own, gram: Tensor | None = None
    ) -> ValueGradients:
        """Gradients −2δ/n in the value and, unless it is detached, discount · 2δ/n in
        the next value.

        residual: δ (R, N). discount: (R, N) or (N,). gram: not used.
        """
        rows = residual.shape[-1]
        slope = residual * (2.0 / rows)
        if self.next_from == "network":
            following = slope * discount
        else:
            following = None
        return ValueGradients(residual.square().sum(dim=-1) / rows, -slope, following)


@dataclass(frozen=True)
class ResidualGradient(_SquaredError):
    """Mean squared residual with gradients through both values; biased if transitions
    are random.

    (Feng et al. 2019, equ:rg)
    """


@dataclass(frozen=True)
class TemporalDifference(_SquaredError):
    """TD(0): the target is the current network without gradient; no objective is
    minimised.

    (Feng et al. 2019, sec:background)
    """

    next_from: ClassVar[NextFrom] = "network_detached"


@dataclass(frozen=True)
class FittedIteration(_SquaredError):
    """Fitted value iteration (V) and fitted Q evaluation (Q): regression on targets
    from a second network.

    target: CopyTarget() copies at the end of each epoch, as the paper's FVI;
    FollowTarget(rate) follows at every step. next_bounds: range to which the target
    network's values are clipped. If it contains all possible returns, the regression
    cannot diverge. (Feng et al. 2019, equ:fvi)
    """

    target: CopyTarget | FollowTarget = CopyTarget()
    next_bounds: tuple[float, float] | None = None
    next_from: ClassVar[NextFrom] = "target"


@dataclass(frozen=True)
class RewardRegression(_SquaredError):
    """Regression on rewards: fitted Q evaluation where nothing follows any row.

    Next rows are not read. Its parameters equal those of `FittedIteration` on the same
    rows to the digit, because there every discount is zero.
    """

    next_from: ClassVar[NextFrom] = "nothing"


@dataclass(frozen=True)
class MemoryLoss:
    """The kernel loss with a memory: streaming, without double samples and without a
    stored data set.

    The loss is (1 − w) ‖E ψδ‖² + w E δ². The first term has the gradient 2 (E ψδ)ᵀ E
    ψ∇δ, a product of two expectations; one mini-batch cannot estimate it without the
    bias of its diagonal. Here the first factor is a moving average m of earlier
    mini-batches, independent of the rows for the second. The parameters change while m
    is averaged. Therefore each step adds the change on its own rows, ψ(δ(θ) − δ(θ
    before)), which leaves no bias for any length of the memory (as in Cutkosky &
    Orabona 2019, STORM).

    memory: β, the share of m that a step keeps, so that m averages about 1/(1 − β)
    mini-batches. diag_weight: w; the loss without a memory has 1/n for n rows.
    features: number of random features ψ, even. (Feng et al. 2019, thm:eigen)
    """

    base: Gaussian | Laplacian
    memory: float = 0.97
    diag_weight: float = 0.003
    features: int = 500
    seed: int = 0
    next_from: ClassVar[NextFrom] = "network"

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory < 1.0:
            raise ConfigError(f"memory is {self.memory}; give a number in [0, 1)")
        check_diag_weight(self.diag_weight)

    @property
    def kernel(self) -> MemoryLoss:
        """The feature map for the rows of a mini-batch, in place of a kernel."""
        return self

    def gram(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """Random features ψ(x), with ψ(x)ᵀψ(y) ≈ k(x, y)."""
        return _feature_map(self.base, x.shape[-1], self.features, self.seed)(x)

    def compute_gradients(
        self, residual: Rows, discount: Rows, remembered: Tensor, psi: Tensor
    ) -> ValueGradients:
        """Loss (1 − w) mᵀψᵀδ/n + w mean δ² and its gradients, unbiased if m is
        independent of the rows.

        residual: δ (R, N). discount (R, N). remembered: m (R, f). psi: ψ (N, f), or
        (G, N, f) as the gram of `KernelLoss`.
        """
        rows = residual.shape[-1]
        weight = self.diag_weight
        slope = (1.0 - weight) * gram_product(remembered, psi.mT) + weight * residual
        slope = slope * (2.0 / rows)
        return ValueGradients(
            (slope * residual).sum(dim=-1) / 2.0, -slope, slope * discount
        )


@dataclass(frozen=True)
class GradientTD2(_NoKernel):
    """Nonlinear GTD2: w regresses the residual on the gradient φ = ∇V(s); V is updated
    with g = φᵀw.

    w ← w + β (δ − g) φ; θ ← θ + α {(φ − discount·φ') g − h}, h = (δ − g) ∇²V(s) w.
    auxiliary_rate: β as a multiple of the value's learning rate.
    (Maei et al. 2009, "Convergent temporal-difference learning with arbitrary smooth
    function approximation")
    """

    auxiliary_rate: float = 1.0

    def compute_gradients(
        self, residual: Rows, discount: Rows, correction: Rows
    ) -> ValueGradients:
        """Gradients −g/n in the value, discount·g/n in the next value; the loss is
        `projected_error`.

        residual: δ (R, N). discount (R, N). correction: g (R, N). The Hessian term h
        reaches the parameters through g, in which the gradient is (δ − g)/n.
        """
        slope = correction / residual.shape[-1]
        return ValueGradients(
            projected_error(residual, correction), -slope, slope * discount
        )

    def compute_auxiliary_gradient(self, residual: Rows, correction: Rows) -> Rows:
        """Gradient of mean (δ − g)²/2 in g, (R, N), for the descent of w."""
        return (correction - residual) / residual.shape[-1]


@dataclass(frozen=True)
class SaddlePoint(_NoKernel):
    """SBEED for evaluation: min over V, max over f of mean 2δf − f², f a small network.

    ascent_steps: gradient steps of f on a mini-batch before V's step on it.
    auxiliary_rate: learning rate of f as a multiple of the value's.
    (Feng et al. 2019, equ:sbeed)
    """

    hidden: tuple[int, ...] = (10,)
    ascent_steps: int = 10
    auxiliary_rate: float = 1.0

    def compute_gradients(
        self, residual: Rows, discount: Rows, test: Rows
    ) -> ValueGradients:
        """Gradients −2f/n in the value, 2 discount·f/n in the next value.

        residual: δ (R, N). discount (R, N). test: f (R, N) at the rows.
        """
        slope = test * (2.0 / residual.shape[-1])
        return ValueGradients(projected_error(residual, test), -slope, slope * discount)

    def compute_auxiliary_gradient(self, residual: Rows, test: Rows) -> Rows:
        """Gradient of −mean(2δf − f²) in f, (R, N)."""
        return (test - residual) * (2.0 / residual.shape[-1])


def projected_error(residual: Rows, estimate: Rows) -> Float[Tensor, " replica"]:
    """mean 2δf − f², (R,): its maximum over a family of f is the squared Bellman error
    projected on it.

    (Feng et al. 2019, equ:sbeed)
    """
    return (estimate * (2.0 * residual - estimate)).mean(dim=-1)


@cache
def _feature_map(
    base: Gaussian | Laplacian, dimension: int, count: int, seed: int
) -> Any:
    """The function x (…, n, d) ↦ ψ(x) (…, n, count); the same for the same
    arguments."""
    return random_fourier_features(
        base, dimension, count, torch.Generator().manual_seed(seed)
    )


def default_kernel_loss(kernel_inputs: Float[Tensor, "row column"]) -> KernelLoss:
    """The kernel loss that was best on average over the worlds of `koffline reproduce
    ablation`.

    It has a Laplacian kernel with half the median distance of the rows as bandwidth,
    and is the plain V-statistic of the mini-batch. The paper's Gaussian of bandwidth 0.5,
    about the median distance, is smoother than its problems. This was found on two-dimensional
    states and is untested for others.
    """
    return KernelLoss(Laplacian(0.5 * median_bandwidth(kernel_inputs)))


def fitted_q(
    rate: float = 0.01, next_bounds: tuple[float, float] | None = None
) -> FittedIteration:
    """Fitted Q evaluation whose target network follows at `rate` per step: the
    objective of `fqe`.
    """
    return FittedIteration(FollowTarget(rate), next_bounds)


def gram_product(
    residual: Rows, gram: Float[Tensor, "*grams row column"]
) -> Float[Tensor, "replica column"]:
    """K δ (or ψᵀδ) per replica as row products; a batched product with one column is
    ten times slower.
    """
    if gram.ndim == 2:
        return residual @ gram
    replicas, rows = residual.shape
    grouped = residual.view(len(gram), replicas // len(gram), rows)
    # (G, R/G, N) @ (G, N, M)
    return torch.bmm(grouped, gram).view(replicas, gram.shape[-1])
