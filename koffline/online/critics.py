"""Residuals of windows, and six critics in closed form; gradients flow through V at the
windows' ends.

R_i = −V(s_i) + γ^{d_i} V(s_{i+d_i})
      + Σ_t γ^t [r_{i+t} − (λ + τ) log π(a_{i+t}|s_{i+t}) + τ log π̃(a_{i+t}|s_{i+t})]
(Feng et al. 2019, alg:kloss_pcl; Nachum et al. 2018)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import Gaussian, random_fourier_features
from koffline.objectives import gram_product
from koffline.online.networks import AgentStack, Density, Networks
from koffline.online.paths import Minibatch, Rows
from koffline.steps import Memory

Windows = Float[Tensor, "run window"]
Gram = Float[Tensor, "run window window"]
Column = Float[Tensor, "run 1"]
_SMALLEST_BANDWIDTH = 1e-6
_FEATURES = 200  # random features of a remembered kernel loss


class ValueEnds:
    """V at both ends of every window, (K, M), and the pullback of their gradients to
    V's parameters.

    slow: the runs whose V(end) comes from the slow copy. With few windows V is
    evaluated only at their ends, otherwise at all T + 1 steps of a path.
    """

    def __init__(self, networks: Networks, slow: Rows | None, batch: Minibatch) -> None:
        online, target = networks
        runs, paths, length, width = batch.inputs.shape
        count = batch.starts.shape[2]
        if 2 * count < length:
            both = torch.cat((batch.starts, batch.ends), dim=2).unsqueeze(3)
            inputs = torch.take_along_dim(batch.inputs, both, dim=2)
            starts = torch.arange(count).expand(runs, paths, count)
            ends = starts + count
            length = 2 * count
        else:
            inputs = batch.inputs
            starts = batch.starts.clamp(max=length - 1)
            ends = batch.ends.clamp(max=length - 1)
        offset = (torch.arange(paths) * length)[None, :, None]
        self._starts = (starts + offset).flatten(1)
        self._ends = (ends + offset).flatten(1)
        inputs = inputs.reshape(runs, paths * length, width)
        outputs, self._pull_value = online.value.forward_with_pullback(inputs)
        values = outputs.squeeze(2)
        self.start = values.gather(1, self._starts)
        self.end = values.gather(1, self._ends)
        if slow is not None:
            flat = target.flat[slow][:, online.shape.parts[2]]
            held = target.value.with_flat(flat).forward(inputs[slow]).squeeze(2)
            self.end[slow] = held.gather(1, self._ends[slow])
        self.discount = batch.discounts.flatten(1)
        self.valid = batch.valid.flatten(1)
        self._shape = values.shape

    def pull(self, slope: Tensor, through_end: Tensor) -> Tensor:
        """Gradient in V's parameters, (K, ·), from half the loss's gradient in R (K,
        M).

        through_end (K, 1): 1 through both ends (RG, and the kernel loss without a target
        network, as in the paper), 0 through the start only.
        """
        inside = slope.new_zeros(self._shape)
        inside.scatter_add_(1, self._starts, -2.0 * slope)
        inside.scatter_add_(1, self._ends, 2.0 * slope * self.discount * through_end)
        return self._pull_value(inside.unsqueeze(2))


class Residual:
    """Residuals ``windows`` (K, M) of all windows, with the pullbacks of their
    gradients.

    slow: the runs that bootstrap from the slow copy of V. coefficients (2, K, 1): τ and
    λ.
    """

    def __init__(
        self,
        networks: Networks,
        slow: Rows | None,
        batch: Minibatch,
        coefficients: Tensor,
    ) -> None:
        online, target = networks
        runs, paths, steps = batch.rewards.shape
        observed = (batch.rows + batch.rows // steps).unsqueeze(2)  # T + 1 a path
        inputs = torch.take_along_dim(batch.inputs.flatten(1, 2), observed, dim=1)
        if batch.actions.ndim == 4:
            acted = batch.rows.unsqueeze(2)
        else:
            acted = batch.rows
        actions = torch.take_along_dim(batch.actions.flatten(1, 2), acted, dim=1)
        outputs, self.pull_policy = online.policy.forward_with_pullback(inputs)
        self.density = Density(outputs, online.log_std, actions)
        slow_density = Density(
            target.policy.forward(inputs), target.log_std, actions
        ).log_probability
        kl_coef, entropy_coef = coefficients
        divergence = (
            entropy_coef + kl_coef
        ) * self.density.log_probability - kl_coef * slow_density
        reward = batch.rewards.flatten(1).scatter_add(
            1, batch.rows, -divergence * batch.covered
        )
        # (K, B, W, T) over T
        gained = (batch.weights * reward.view(runs, paths, 1, steps)).sum(dim=3)
        self.values = values = ValueEnds(networks, slow, batch)
        self.windows = gained.flatten(1) + values.discount * values.end - values.start


class CriticGradient(NamedTuple):
    """loss (R,), and ``slope`` (R, M): half its gradient in R, to be passed to both
    ends of each window.
    """

    loss: Tensor
    slope: Tensor


def squared_error_gradient(residual: Windows, valid: Windows) -> CriticGradient:
    """Mean squared residual over valid windows. (Feng et al. 2019, equ:rg)"""
    count = valid.sum(dim=1, keepdim=True)
    kept = residual * valid
    return CriticGradient(
        (kept * kept).sum(dim=1) / count.squeeze(1), kept * (1.0 / count)
    )


def kernel_gradient(
    residual: Windows, valid: Windows, gram: Gram, diag_weight: Column
) -> CriticGradient:
    """(1 − w) U + w mean δ² over m valid windows; w = ``diag_weight``, NaN for 1/m.

    (Feng et al. 2019, sec:batch_lv)
    """
    count = valid.sum(dim=1, keepdim=True)
    weight = torch.where(diag_weight.isnan(), 1.0 / count, diag_weight)
    kept = residual * valid
    off = (1.0 - weight) / (count * (count - 1.0))
    # the gram's diagonal is one
    weighted = gram_product(kept, gram) * off + (weight / count - off) * kept
    weighted = weighted * valid
    return CriticGradient((weighted * kept).sum(dim=1), weighted)


def gaussian_gram(
    inputs: Float[Tensor, "run window d"], valid: Windows, bandwidth_scale: Column
) -> Gram:
    """exp(−‖x − y‖² / h²), h = bandwidth_scale · the median distance of a run's valid
    windows.

    (Feng et al. 2019, sec:exp_detail)
    """
    centred = inputs - inputs.mean(dim=1, keepdim=True)
    norms = centred.square().sum(dim=2)
    sums = norms.unsqueeze(1) + norms.unsqueeze(2)
    squares = torch.baddbmm(sums, centred, centred.mT, alpha=-2.0).clamp_(min=0.0)
    # Distances of equal rows are rounding errors, which must not become the bandwidth.
    squares.masked_fill_(squares < 8.0 * torch.finfo(squares.dtype).eps * sums, 0.0)
    squares.diagonal(dim1=1, dim2=2).zero_()
    scale = (
        -1.0 / (bandwidth_scale.squeeze(1) * _median_distance(squares, valid)).square()
    )
    return (squares * scale[:, None, None]).exp_()


def _median_distance(squares: Tensor, valid: Tensor) -> Tensor:
    """Median distance of each run's pairs of valid windows, (R,); numpy sorts many
    times faster.
    """
    kept = valid.numpy() > 0.0
    pairs = _upper(squares.shape[1])
    # (R, M(M−1)/2)
    both = (kept[:, :, None] & kept[:, None, :]).reshape(len(kept), -1)[:, pairs]
    ordered = np.sort(
        np.where(both, squares.flatten(1).numpy()[:, pairs], np.inf), axis=1
    )
    count = both.sum(axis=1, keepdims=True)
    middle = np.take_along_axis(
        ordered, np.concatenate(((count - 1) // 2, count // 2), axis=1), axis=1
    )
    return torch.from_numpy(
        np.maximum(np.sqrt(middle).mean(axis=1), _SMALLEST_BANDWIDTH)
    )


@functools.cache
def _upper(rows: int) -> np.ndarray:
    """Positions of the entries above the diagonal in a flattened matrix."""
    return np.flatnonzero(np.triu(np.ones((rows, rows), dtype=bool), 1))


class RememberedLoss:
    """The loss (1 − w) ‖E ψR‖² + w E R² of M runs; one factor E ψR is averaged over
    earlier mini-batches.

    share (M, 1): kept per step. diag_weight (M, 1): w, NaN for 1/m. The features ψ
    approximate the Gaussian kernel over the rows; its bandwidth is bandwidth_scale (M,
    1) times their root mean squared distance. (Feng et al. 2019, thm:eigen;
      `koffline.objectives.MemoryLoss`)
    """

    kept = ("_memory", "_online", "_target", "_coefficients")

    def __init__(
        self,
        share: Tensor,
        diag_weight: Tensor,
        bandwidth_scale: Tensor,
        has_actions: Tensor,
        now: Networks,
    ) -> None:
        shape = now.online.shape
        columns = shape.observation_dim + shape.outputs * has_actions
        self._weight = diag_weight
        self._bandwidth = bandwidth_scale * (2.0 * columns).sqrt()
        generator = torch.Generator().manual_seed(0)
        self._features = random_fourier_features(
            Gaussian(1.0), int(columns.max()), _FEATURES, generator
        )
        self._memory = Memory(share, share.new_zeros(len(share), _FEATURES))
        self._online = AgentStack(shape, now.online.flat.clone())
        self._target = AgentStack(shape, now.target.flat.clone())
        self._coefficients = share.new_zeros(2, len(share), 1)

    def gradient(
        self,
        residual: Tensor,
        batch: Minibatch,
        inputs: Tensor,
        now: Networks,
        coefficients: Tensor,
    ) -> CriticGradient:
        """Loss and gradient of residuals (M, W) with rows (M, W, ·), at the current
        networks.
        """
        valid = batch.valid.flatten(1)
        count = valid.sum(dim=1, keepdim=True)
        psi = self._features(inputs / self._bandwidth.unsqueeze(2)) * (
            valid / count
        ).unsqueeze(2)
        old = None
        if self._memory.count:
            before = Residual(
                Networks(self._online, self._target), None, batch, self._coefficients
            )
            old = gram_product(before.windows, psi)
        remembered = self._memory.take(gram_product(residual, psi), old)
        self._online.flat.copy_(now.online.flat)
        self._target.flat.copy_(now.target.flat)
        self._coefficients.copy_(coefficients)
        weight = torch.where(self._weight.isnan(), 1.0 / count, self._weight)
        slope = (1.0 - weight) * torch.bmm(psi, remembered.unsqueeze(2)).squeeze(2)
        slope = slope + weight * residual * valid / count
        return CriticGradient((slope * residual).sum(dim=1), slope)
