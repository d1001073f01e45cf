"""log π(a|s) of stacked policies, Gaussian or categorical, and its gradients in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koffline.online.networks import LOG_TWO_PI


class Density:
    """log π(a|s) of rows (K, N) from the policy network's outputs, and its gradients in closed form."""

    def __init__(self, outputs: Tensor, log_std: Tensor, actions: Tensor) -> None:
        self._continuous = actions.is_floating_point()
        if self._continuous:
            self._inverse = torch.exp(-log_std).unsqueeze(1)  # (K, 1, k)
            self._scaled = (actions - outputs).mul_(self._inverse)
            constant = log_std.sum(dim=1, keepdim=True) + 0.5 * LOG_TWO_PI * actions.shape[2]
            self.log_probability = self._scaled.square().sum(dim=2).mul_(-0.5) - constant
            self.mean_std = log_std.exp().mean(dim=1)
        else:
            self._log = outputs.log_softmax(dim=2)
            self._actions = actions.unsqueeze(2)
            self.log_probability = self._log.gather(2, self._actions).squeeze(2)
            self.mean_std = torch.full_like(outputs[:, 0, 0], torch.nan)

    def gradients(self, slope: Tensor, pull: Any) -> tuple[Tensor, Tensor]:
        """From the gradient in log π (K, N) to those in the policy's network and in the log deviations."""
        if not self._continuous:
            outwards = -self._log.exp() * slope.unsqueeze(2)
            outwards.scatter_add_(2, self._actions, slope.unsqueeze(2))
            return pull(outwards), slope[:, :0]
        weighted = self._scaled * slope.unsqueeze(2)
        deviations = (weighted * self._scaled).sum(dim=1) - slope.sum(dim=1, keepdim=True)
        return pull(weighted.mul_(self._inverse)), deviations
