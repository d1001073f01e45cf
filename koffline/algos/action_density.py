"""Densities of the actions that a d3rlpy algorithm draws, in the units of the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from koffline.algos.kloss_iql import KLossIQLImpl
from koffline.algos.kloss_sac import KLossSACImpl
from koffline.algos.linear_gaussian import LinearGaussianPolicy
from koffline.algos.trust_pcl_impl import TrustPCLImpl
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.policies.densities import gaussian_log_density, squashed_gaussian_log_density

import_d3rlpy()

from d3rlpy.algos.qlearning.torch.awac_impl import AWACImpl  # noqa: E402
from d3rlpy.algos.qlearning.torch.crr_impl import CRRImpl  # noqa: E402
from d3rlpy.algos.qlearning.torch.iql_impl import IQLImpl  # noqa: E402
from d3rlpy.algos.qlearning.torch.sac_impl import SACImpl  # noqa: E402
from d3rlpy.torch_utility import convert_to_torch, unwrap_ddp_model  # noqa: E402

Density = Callable[[np.ndarray, np.ndarray], np.ndarray]
Box = tuple[np.ndarray, np.ndarray]


def action_density(algo: Any) -> tuple[Density | None, Box | None]:
    """Log density of what `sample_action` draws, and the bounds at which its draws are cut off.

    AWAC, CRR, IQL, KLossIQL and TrustPCL draw from a Gaussian and cut it off; SAC, CQL, CalQL, BEAR and the
    kernel versions squash theirs. None, None for any other algorithm (BCQ picks among candidates).
    """
    policy = getattr(algo.impl.modules, "policy", None)
    if policy is None:
        return None, None
    policy = unwrap_ddp_model(policy)
    if isinstance(policy, LinearGaussianPolicy):
        low, high = (side.detach().cpu().numpy().reshape(-1) for side in (policy.low, policy.high))
        return _cut_gaussian(algo, policy, low.astype(np.float64), high.astype(np.float64))
    if isinstance(algo.impl, (AWACImpl, CRRImpl, IQLImpl, KLossIQLImpl, TrustPCLImpl)):
        ones = np.ones(algo.action_size)
        return _cut_gaussian(algo, policy, -ones, ones)
    if isinstance(algo.impl, (SACImpl, KLossSACImpl)):
        return _squashed_gaussian(algo, policy), None
    return None, None


def _cut_gaussian(algo: Any, policy: Any, low: np.ndarray, high: np.ndarray) -> tuple[Density, Box]:
    """Mean, deviation and bounds moved to the log's units, where the density is taken."""
    centre, half = _action_units(algo)
    box = (centre + half * low, centre + half * high)

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        output = _policy_output(algo, policy, observations)
        mean, deviation = _array(output.squashed_mu), _array(output.logstd.exp())
        return gaussian_log_density(actions, centre + half * mean, half * deviation, *box)

    return log_density, box


def _squashed_gaussian(algo: Any, policy: Any) -> Density:
    centre, half = _action_units(algo)

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        output = _policy_output(algo, policy, observations)
        scaled = (actions - centre) / half
        inside = squashed_gaussian_log_density(scaled, _array(output.mu), _array(output.logstd.exp()))
        return inside - float(np.log(half).sum())

    return log_density


def _policy_output(algo: Any, policy: Any, observations: np.ndarray) -> Any:
    algo.impl.modules.set_eval()
    scaler = algo.observation_scaler
    with torch.no_grad():
        given = convert_to_torch(observations, algo.impl.device)
        return policy(given if scaler is None else scaler.transform(given))


def _action_units(algo: Any) -> tuple[np.ndarray, np.ndarray]:
    """centre and half-width (k,): action = centre + half · (the networks' action); scalers are affine."""
    size, scaler = algo.action_size, algo.action_scaler
    if scaler is None:
        return np.zeros(size), np.ones(size)
    ends = torch.stack([torch.zeros(size), torch.ones(size)])
    centre, end = _array(scaler.reverse_transform(ends.to(algo.impl.device)))
    return centre, end - centre


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
