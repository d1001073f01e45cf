"""The kernel Bellman loss as a module of a d3rlpy algorithm; its buffers hold statistics of the log."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.options import KernelCriticConfig, median_factor
from koffline.errors import DataError
from koffline.kernel_loss import kernel_loss, v_statistic
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian, Linear
from koffline.objectives import MemoryLoss
from koffline.steps import Memory

_KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(1.0),
    "laplacian": Laplacian(1.0),
    "inverse_multiquadric": InverseMultiquadric(1.0),
    "linear": Linear(),
}
_MOST_ROWS = 1000  # half a million distances are enough for a median
_SMALLEST = 1e-6
_FEATURES, _REMEMBERED_WEIGHT = 500, 0.003
_LOG = logging.getLogger(__name__)


class KernelBellmanLoss(nn.Module):
    """(1 − w) U + w mean(k_ii δ_i²) of residuals δ under a kernel over rows (s, a).

    Centre and scale of the rows, bandwidth and the factor of the loss are buffers: fixed once by ``fix``,
    saved and loaded with the model, and the same for every step (no host-side branch on them, so that a
    CUDA graph can hold the loss). n_actions: 0 for continuous actions.
    (Feng et al. 2019, sec:batch_lv)
    """

    mean: Tensor
    inverse_scale: Tensor
    bandwidth: Tensor
    factor: Tensor
    step: Tensor

    def __init__(self, config: KernelCriticConfig, observation_size: int, action_size: int, n_actions: int):
        super().__init__()
        self._config, self._kernel, self.n_actions = config, _KERNELS[config.kernel], n_actions
        columns = observation_size + (action_size if config.action_kernel == "joint" else 0)
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("inverse_scale", torch.ones(columns))
        self.register_buffer("bandwidth", torch.tensor(math.nan))  # NaN: not fixed yet
        self.register_buffer("factor", torch.tensor(1.0))
        self._random_features = MemoryLoss(self._kernel, features=_FEATURES)  # type: ignore[arg-type]
        self._diag_weight = _REMEMBERED_WEIGHT if config.diag_weight is None else config.diag_weight
        self._looks_back = False
        self._memory: Memory | None = None  # not saved with the model
        self._before: Tensor | None = None
        self.register_buffer("step", torch.tensor(0))  # gradient steps so far, which d3rlpy does not save

    def forward(
        self, residual: Float[Tensor, "critic row"], observations: Tensor, actions: Tensor
    ) -> Float[Tensor, " critic"]:
        """One loss per critic. observations (N, d); actions (N, k), or (N, 1) indices."""
        weight = self._config.diag_weight
        if self._config.memory > 0.0:
            return self._remembered(residual, self._features(observations, actions)) * self.factor
        gram = self.gram(observations, actions)
        if weight is None:
            return v_statistic(residual, gram) * self.factor
        return kernel_loss(residual, gram, weight if residual.shape[-1] > 1 else 1.0) * self.factor

    @property
    def remembers(self) -> bool:
        """Whether a memory of earlier mini-batches exists, which must follow changes of the parameters."""
        return self._memory is not None

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """Context in which residuals belong to the previous step's parameters; all losses in it are zero."""
        self._looks_back = True
        try:
            yield
        finally:
            self._looks_back = False

    def _remembered(
        self, residual: Float[Tensor, "critic row"], psi: Float[Tensor, "row feature"]
    ) -> Float[Tensor, " critic"]:
        """(1 − w) mᵀψᵀδ/n + w mean δ², whose gradient is that of (1 − w) ‖E ψδ‖² + w E δ²."""
        now = residual @ psi / residual.shape[-1]
        if self._looks_back:
            self._before = now
            return residual.new_zeros(len(residual))
        if self._memory is None:
            self._memory = Memory(self._config.memory, torch.zeros_like(now))
        remembered, self._before = self._memory.take(now.detach(), self._before), None
        product = (remembered * now).sum(dim=1)
        weight = self._diag_weight
        return (1.0 - weight) * (2.0 * product - product.detach()) + weight * residual.square().mean(dim=1)

    def gram(self, observations: Tensor, actions: Tensor) -> Float[Tensor, "row row"]:
        """Kernel matrix of the rows of a batch, without gradient."""
        with torch.no_grad():
            return self._gram_of(self._rows(observations, actions), actions)

    def _features(self, observations: Tensor, actions: Tensor) -> Float[Tensor, "row feature"]:
        """Random features ψ of the rows; under an indicator kernel each action has features of its own."""
        with torch.no_grad():
            psi = self._random_features.gram(self._rows(observations, actions))
            if self._config.action_kernel != "indicator":
                return psi
            chosen = F.one_hot(actions.reshape(-1).long(), self.n_actions).to(psi)
            return (psi.unsqueeze(1) * chosen.unsqueeze(2)).flatten(1)

    def _rows(self, observations: Tensor, actions: Tensor) -> Tensor:
        return (self._columns(observations, actions) - self.mean) * self.inverse_scale

    def is_fixed(self) -> bool:
        """Whether the bandwidth has been set."""
        return not math.isnan(float(self.bandwidth))

    def fix(self, observations: Tensor, actions: Tensor, batch_size: int) -> None:
        """Take centre, scale, bandwidth and factor from rows of the log. Raises DataError.

        A warning is logged when the kernel of a mini-batch is so narrow that the loss is the
        residual-gradient loss in all but name: mean off-diagonal value below 1/batch_size.
        """
        config = self._config
        rows = self._columns(observations, actions).double()[:_MOST_ROWS]
        if len(rows) < 2 or not bool(torch.isfinite(rows).all()):
            raise DataError(f"the kernel needs at least two finite rows, received {len(rows)}; check the log")
        centre, deviation = rows.mean(dim=0), rows.std(dim=0)
        deviation = torch.where(deviation > _SMALLEST, deviation, torch.ones_like(deviation))
        if not config.standardise:
            centre, deviation = torch.zeros_like(centre), torch.ones_like(deviation)
        scaled, factor = (rows - centre) / deviation, median_factor(config.bandwidth)
        if factor is None:
            bandwidth = float(config.bandwidth)
        else:
            distances = torch.pdist(scaled, p=1.0 if config.kernel == "laplacian" else 2.0)
            bandwidth = max(factor * float(distances.median()), _SMALLEST)
        gram = self._gram_of(scaled / bandwidth, actions[:_MOST_ROWS])
        off_diagonal = float((gram.sum() - gram.diagonal().sum()) / (len(gram) * (len(gram) - 1)))
        weight = self._diag_weight if config.memory > 0.0 else 1.0 / batch_size
        weight = weight if config.diag_weight is None else config.diag_weight
        mean_value = (1.0 - weight) * off_diagonal + weight
        is_bounded = config.kernel != "linear"
        self.mean.copy_(centre)
        self.inverse_scale.copy_(1.0 / (deviation * bandwidth))
        self.factor.fill_(1.0 / mean_value if config.normalise and is_bounded else 1.0)
        self.bandwidth.fill_(bandwidth)
        if is_bounded and off_diagonal < 1.0 / batch_size:
            what = "below 1/batch_size: the loss is nearly that of residual gradient; give a larger bandwidth"
            _LOG.warning("kernel values average %.1e, %s than %.3g", off_diagonal, what, bandwidth)

    def _columns(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Rows (N, columns) that the kernel compares, before scaling."""
        rows = observations.flatten(1)
        if self._config.action_kernel != "joint":
            return rows
        if self.n_actions:
            actions = F.one_hot(actions.reshape(-1).long(), self.n_actions).to(rows)
        return torch.cat((rows, actions), dim=1)

    def _gram_of(self, scaled: Tensor, actions: Tensor) -> Tensor:
        gram = self._kernel.gram(scaled)
        if self._config.action_kernel == "indicator":
            index = actions.reshape(-1)
            gram = gram * (index.unsqueeze(0) == index.unsqueeze(1))
        return gram
