"""The policy of a d3rlpy algorithm: rebuilt from the data of a .d3 file, or of an algorithm in memory.

What the policy is, by algorithm (observation and action scalers of the model are applied as its `predict`
does):

- value-based discrete (DQN, DoubleDQN, NFQ, DiscreteCQL): greedy, the first best action;
- DiscreteBC, DiscreteBCQ: greedy, what `predict` returns (DiscreteBCQ among the actions its imitator allows);
- DiscreteSAC, KLossDiscreteSAC, DiscreteTrustPCL: the probabilities of their categorical policy;
- KLossDQN with a temperature: softmax of its values;
- DDPG, TD3, TD3PlusBC, KLossTD3PlusBC, ReBRAC, PRDC, PLAS, PLASWithPerturbation, BC (whatever its
  policy_type): deterministic, `predict`;
- SAC, CQL, CalQL, AWAC, IQL, CRR, BEAR and any other continuous algorithm: stochastic, draws from
  `sample_action`, mean `predict` (for CRR and BEAR, whose `predict` draws candidates itself, with a fixed
  seed);
- BCQ: draws and mean are `predict`, which draws candidates; the mean with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from d3rlpy.algos import BC, DDPG, PLAS, PRDC, TD3, DiscreteSAC, ReBRAC, TD3PlusBC
from d3rlpy.algos.qlearning.torch.awac_impl import AWACImpl
from d3rlpy.algos.qlearning.torch.crr_impl import CRRImpl
from d3rlpy.algos.qlearning.torch.iql_impl import IQLImpl
from d3rlpy.algos.qlearning.torch.sac_impl import SACImpl
from d3rlpy.constants import ActionSpace as D3ActionSpace
from d3rlpy.torch_utility import convert_to_torch, unwrap_ddp_model
from torch import Tensor

from koffline.algos.actor_critic import KLossSACImpl
from koffline.algos.export import check_acts
from koffline.algos.iql import KLossIQLImpl
from koffline.algos.loading import create_algo, put_network_states
from koffline.algos.trust_pcl_impl import LinearGaussianPolicy, TrustPCLImpl
from koffline.data.transitions import Continuous, Discrete
from koffline.policies.base import (
    ActionSpace,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    chunk_rows_for,
)
from koffline.policies.d3 import D3File
from koffline.policies.densities import gaussian_log_density, squashed_gaussian_log_density

Density = Callable[[np.ndarray, np.ndarray], np.ndarray]
Box = tuple[np.ndarray, np.ndarray]


def policy_from_d3(file: D3File, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """Rebuild the networks from the file's JSON and put its weights in. Raises PolicyError."""
    with torch.random.fork_rng(devices=[]):
        algo = create_algo(file)
        put_network_states(file, algo)  # optimisers do not matter for acting
    return policy_from_algo(algo, file.name, action_space, observation_shape)


def policy_from_algo(
    algo: Any, name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """The policy of a d3rlpy algorithm that has been built or trained. Raises PolicyError."""
    check_acts(algo, name)
    is_discrete = algo.get_action_type() == D3ActionSpace.DISCRETE
    own_space = Discrete(algo.action_size) if is_discrete else Continuous(algo.action_size)
    check_spaces(name, own_space, algo.observation_shape, action_space, observation_shape)
    shape = tuple(observation_shape)
    repeats = int(getattr(algo.config, "n_action_samples", 1))
    rows = chunk_rows_for(shape, max(1, repeats))
    if isinstance(action_space, Discrete):
        return DiscretePolicy(action_space.n, _discrete_function(algo), name, shape, rows)
    if acts_deterministically(algo):
        return ContinuousPolicy(action_space.k, algo.predict, None, name, shape, rows)

    def mean(observations: np.ndarray) -> np.ndarray:
        return _seeded(algo, 0, algo.predict, observations)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return _seeded(algo, int(generator.integers(2**63)), algo.sample_action, observations)

    density, cut_to = action_density(algo)
    return ContinuousPolicy(action_space.k, mean, sample, name, shape, rows, density, cut_to)


def _discrete_function(algo: Any) -> Callable[[np.ndarray], Any]:
    if not isinstance(algo, DiscreteSAC) and not hasattr(algo.impl, "action_probabilities"):
        return algo.predict

    def probabilities(observations: np.ndarray) -> Tensor:
        with torch.no_grad():
            return action_probabilities(algo, convert_to_torch(observations, algo.impl.device))

    return probabilities


def _seeded(
    algo: Any, seed: int, method: Callable[[np.ndarray], np.ndarray], observations: np.ndarray
) -> np.ndarray:
    """Call a method that draws from torch's global generators, seeded, and leave those as they were."""
    device = torch.device(algo.impl.device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        return method(observations)


def acts_deterministically(algo: Any) -> bool:
    """Whether acting involves no draw; an unknown continuous algorithm is taken to draw, right either way."""
    stock = isinstance(algo, (BC, DDPG, PLAS, PRDC, TD3, ReBRAC, TD3PlusBC))
    return stock or getattr(algo, "is_deterministic", False)


def action_probabilities(algo: Any, observations: Tensor) -> Tensor:
    """(N, n), observations in the units of the log: the policy's, or all on the greedy action."""
    scaled = scaled_observations(algo, observations)
    if isinstance(algo, DiscreteSAC):
        algo.impl.modules.set_eval()
        return algo.impl.policy(scaled).probs
    if hasattr(algo.impl, "action_probabilities"):
        algo.impl.modules.set_eval()
        return algo.impl.action_probabilities(scaled)
    greedy = algo.impl.predict_best_action(scaled).reshape(-1).long()
    return F.one_hot(greedy, algo.action_size).float()


def scaled_observations(algo: Any, observations: Tensor) -> Tensor:
    """Observations in the units of the log, as the algorithm's networks see them."""
    scaler = algo.observation_scaler
    return observations if scaler is None else scaler.transform(observations)


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
    with torch.no_grad():
        return policy(scaled_observations(algo, convert_to_torch(observations, algo.impl.device)))


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
