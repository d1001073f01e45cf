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

from koffline.algos.actor_critic import KLossIQLImpl, KLossSACImpl
from koffline.algos.model_files import algo_of, check_acts
from koffline.algos.trust_pcl import LinearGaussianPolicy, TrustPCLImpl
from koffline.data.transitions import Continuous, Discrete
from koffline.policies.base import (
    ActionSpace,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    chunk_rows_for,
)
from koffline.policies.distributions import gaussian_log_density, squashed_gaussian_log_density
from koffline.policies.files import D3File

Density = Callable[[np.ndarray, np.ndarray], np.ndarray]
Box = tuple[np.ndarray, np.ndarray]


def policy_from_d3(file: D3File, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """Rebuild the networks from the file's JSON and put its weights in. Raises PolicyError."""
    return policy_from_algo(algo_of(file, optimisers=False), file.name, action_space, observation_shape)


def policy_from_algo(
    algo: Any, name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """The policy of a d3rlpy algorithm that has been built or trained. Raises PolicyError."""
    check_acts(algo, name)
    is_discrete = algo.get_action_type() == D3ActionSpace.DISCRETE
    own_space = Discrete(algo.action_size) if is_discrete else Continuous(algo.action_size)
    check_spaces(name, own_space, algo.observation_shape, action_space, observation_shape)
    shape, device = tuple(observation_shape), torch.device(algo.impl.device)
    rows = chunk_rows_for(shape, max(1, int(getattr(algo.config, "n_action_samples", 1))))

    def probabilities(observations: np.ndarray) -> Tensor:
        with torch.no_grad():
            return action_probabilities(algo, convert_to_torch(observations, algo.impl.device))

    if isinstance(action_space, Discrete):
        is_greedy = not isinstance(algo, DiscreteSAC) and not hasattr(algo.impl, "action_probabilities")
        return DiscretePolicy(action_space.n, algo.predict if is_greedy else probabilities, name, shape, rows)
    if acts_deterministically(algo):
        return ContinuousPolicy(action_space.k, algo.predict, None, name, shape, rows)

    def drawn(seed: int, method: Callable[[np.ndarray], np.ndarray], observations: np.ndarray) -> np.ndarray:
        """Methods draw from torch's global generators, which are left as they were."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            return method(observations)

    def mean(observations: np.ndarray) -> np.ndarray:
        return drawn(0, algo.predict, observations)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return drawn(int(generator.integers(2**63)), algo.sample_action, observations)

    density, cut_to = action_density(algo)
    return ContinuousPolicy(action_space.k, mean, sample, name, shape, rows, density, cut_to)


def acts_deterministically(algo: Any) -> bool:
    """Whether acting involves no draw; an unknown continuous algorithm is taken to draw, right either way."""
    stock = isinstance(algo, (BC, DDPG, PLAS, PRDC, TD3, ReBRAC, TD3PlusBC))
    return stock or getattr(algo, "is_deterministic", False)


def action_probabilities(algo: Any, observations: Tensor) -> Tensor:
    """(N, n), observations in the units of the log: the policy's, or all on the greedy action."""
    scaled = scaled_observations(algo, observations)
    is_stock_sac = isinstance(algo, DiscreteSAC)
    if is_stock_sac or hasattr(algo.impl, "action_probabilities"):
        algo.impl.modules.set_eval()
        return algo.impl.policy(scaled).probs if is_stock_sac else algo.impl.action_probabilities(scaled)
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
    is_cut = isinstance(algo.impl, (AWACImpl, CRRImpl, IQLImpl, KLossIQLImpl, TrustPCLImpl))
    if not is_cut and not isinstance(algo.impl, (SACImpl, KLossSACImpl)):
        return None, None
    policy, size = unwrap_ddp_model(algo.impl.policy), algo.action_size
    centre, half = np.zeros(size), np.ones(size)  # action = centre + half · (the networks' action)
    if algo.action_scaler is not None:  # an affine one
        ends = torch.stack([torch.zeros(size), torch.ones(size)]).to(algo.impl.device)
        centre, end = _array(algo.action_scaler.reverse_transform(ends))
        half = end - centre
    low, high = -np.ones(size), np.ones(size)
    if isinstance(policy, LinearGaussianPolicy):
        low, high = _array(policy.low).reshape(-1), _array(policy.high).reshape(-1)
    box = (centre + half * low, centre + half * high)

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        algo.impl.modules.set_eval()
        with torch.no_grad():
            output = policy(scaled_observations(algo, convert_to_torch(observations, algo.impl.device)))
        deviation = _array(output.logstd.exp())
        if is_cut:  # in the log's units, where the bounds are
            mean = centre + half * _array(output.squashed_mu)
            return gaussian_log_density(actions, mean, half * deviation, *box)
        inside = squashed_gaussian_log_density((actions - centre) / half, _array(output.mu), deviation)
        return inside - float(np.log(half).sum())

    return log_density, box if is_cut else None


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
