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
from d3rlpy.constants import ActionSpace as D3ActionSpace
from d3rlpy.torch_utility import convert_to_torch, unwrap_ddp_model
from torch import Tensor

from koffline.algos.model_files import algo_of, check_acts
from koffline.data.transitions import Continuous, Discrete
from koffline.policies.base import (
    ActionSpace,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    chunk_rows_for,
)
from koffline.policies.builtin import gaussian_log_density, squashed_gaussian_log_density
from koffline.policies.files import D3File

# Algorithm types as in config files; the density of other continuous algorithms is unknown here.
_DETERMINISTIC = (
    "bc", "ddpg", "td3", "td3_plus_bc", "kloss_td3_plus_bc", "rebrac", "kloss_rebrac", "prdc", "plas",
    "plas_with_perturbation",
)  # fmt: skip
_SQUASHED = ("sac", "cql", "cal_ql", "bear", "kloss_sac", "kloss_cql", "kloss_cal_ql")
_CUT = ("awac", "kloss_awac", "crr", "iql", "kloss_iql", "trust_pcl")
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
        act = probabilities if _has_probabilities(algo) else algo.predict
        return DiscretePolicy(action_space.n, act, name, shape, rows)
    if acts_deterministically(algo):
        return ContinuousPolicy(action_space.k, algo.predict, None, name, shape, rows)

    def drawn(seed: int, method: Callable[[np.ndarray], np.ndarray], observations: np.ndarray) -> np.ndarray:
        """Call a method with torch's global generators seeded, and restore them afterwards."""
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
    """Whether the policy is deterministic.

    An unknown continuous algorithm counts as stochastic, which is correct in either case.
    """
    return algo.config.get_type() in _DETERMINISTIC


def _has_probabilities(algo: Any) -> bool:
    return algo.config.get_type() == "discrete_sac" or hasattr(algo.impl, "action_probabilities")


def action_probabilities(algo: Any, observations: Tensor) -> Tensor:
    """Probabilities (N, n) of the policy, one on the greedy action if it has none.

    observations: in the units of the log.
    """
    scaled = scaled_observations(algo, observations)
    if _has_probabilities(algo):
        algo.impl.modules.set_eval()
        ours = getattr(algo.impl, "action_probabilities", None)
        return algo.impl.policy(scaled).probs if ours is None else ours(scaled)
    greedy = algo.impl.predict_best_action(scaled).reshape(-1).long()
    return F.one_hot(greedy, algo.action_size).float()


def scaled_observations(algo: Any, observations: Tensor) -> Tensor:
    """Observations in the units of the log, scaled for the algorithm's networks."""
    scaler = algo.observation_scaler
    return observations if scaler is None else scaler.transform(observations)


def action_density(algo: Any) -> tuple[Density | None, Box | None]:
    """Log density of what `sample_action` draws, and the bounds at which its draws are cut off.

    AWAC, CRR, IQL, KLossIQL and TrustPCL draw from a Gaussian and cut it off; SAC, CQL, CalQL, BEAR and the
    kernel versions squash theirs. None, None for any other algorithm (BCQ picks among candidates).
    """
    is_cut = algo.config.get_type() in _CUT
    if not is_cut and algo.config.get_type() not in _SQUASHED:
        return None, None
    policy, size = unwrap_ddp_model(algo.impl.policy), algo.action_size
    centre, half = np.zeros(size), np.ones(size)  # action = centre + half · (the networks' action)
    if algo.action_scaler is not None:  # an affine one
        ends = torch.stack([torch.zeros(size), torch.ones(size)]).to(algo.impl.device)
        centre, end = _array(algo.action_scaler.reverse_transform(ends))
        half = end - centre
    low, high = -np.ones(size), np.ones(size)
    if hasattr(policy, "low"):  # Trust-PCL's, with limits of its own
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
