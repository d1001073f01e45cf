"""A Gaussian policy whose mean is the network's output itself, with limits for the actions that are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from koffline.data.d3rlpy_import import import_d3rlpy

import_d3rlpy()

from d3rlpy.models.torch import ActionOutput, compute_output_size  # noqa: E402
from d3rlpy.torch_utility import wrap_model_by_ddp  # noqa: E402


class LinearGaussianPolicy(nn.Module):
    """N(mean(s), exp(log_std)²) per action number; log_std (1, k) does not depend on the state.

    Density and gradients are those of the unlimited Gaussian; `low` and `high` (1, k) are what `cut` keeps
    actions within, in the policy's units, and are saved with the weights. (Nachum et al. 2018)
    """

    low: Tensor
    high: Tensor

    def __init__(self, encoder: nn.Module, hidden_size: int, action_size: int) -> None:
        super().__init__()
        self._encoder = encoder
        self._mu = nn.Linear(hidden_size, action_size)
        self._logstd = nn.Parameter(torch.zeros(1, action_size))
        self.register_buffer("low", torch.full((1, action_size), -1.0))
        self.register_buffer("high", torch.ones(1, action_size))

    def forward(self, x: Any) -> ActionOutput:
        """Mean, once more in the place where other policies have theirs squashed, and log-deviation."""
        mean = self._mu(self._encoder(x))
        return ActionOutput(mean, mean, self._logstd.expand_as(mean))

    def cut(self, actions: Tensor) -> Tensor:
        """(N, k) within the limits."""
        return torch.minimum(torch.maximum(actions, self.low), self.high)


def create_linear_gaussian_policy(
    observation_shape: Sequence[int], action_size: int, encoder_factory: Any, device: str, enable_ddp: bool
) -> Any:
    """The policy with a fresh encoder, on the device."""
    encoder = encoder_factory.create(observation_shape)
    hidden_size = compute_output_size([observation_shape], encoder)
    policy: nn.Module = LinearGaussianPolicy(encoder, hidden_size, action_size).to(device)
    return wrap_model_by_ddp(policy) if enable_ddp else policy
