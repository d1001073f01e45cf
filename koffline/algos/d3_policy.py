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

from koffline.algos.acting import action_probabilities, acts_deterministically
from koffline.algos.action_density import action_density
from koffline.algos.loading import create_algo, put_network_states
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import (
    ActionSpace,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    chunk_rows_for,
)
from koffline.policies.d3 import D3File


def policy_from_d3(file: D3File, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """Rebuild the networks from the file's JSON and put its weights in. Raises PolicyError."""
    import torch

    with torch.random.fork_rng(devices=[]):
        algo = create_algo(file)
        _check_spaces(
            algo, file.name, file.observation_shape, file.action_size, action_space, observation_shape
        )
        put_network_states(file, algo)  # optimisers do not matter for acting
    return policy_from_algo(algo, file.name, action_space, observation_shape)


def policy_from_algo(
    algo: Any, name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """The policy of a d3rlpy algorithm that has been built or trained. Raises PolicyError."""
    if not hasattr(algo, "predict") or not hasattr(algo, "sample_action"):
        raise PolicyError(
            f"{name}: {type(algo).__name__} does not act on one observation; "
            "give a Q-learning algorithm of d3rlpy"
        )
    if algo.impl is None:
        raise PolicyError(
            f"{name}: the {type(algo).__name__} has no networks yet; fit it or load its weights first"
        )
    _check_spaces(algo, name, algo.observation_shape, algo.action_size, action_space, observation_shape)
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


def _check_spaces(
    algo: Any,
    name: str,
    own_shape: Any,
    action_size: int,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
) -> None:
    from d3rlpy.constants import ActionSpace as D3ActionSpace

    is_discrete = algo.get_action_type() == D3ActionSpace.DISCRETE
    own_space = Discrete(action_size) if is_discrete else Continuous(action_size)
    check_spaces(name, own_space, own_shape, action_space, observation_shape)
    for scaler in (algo.observation_scaler, algo.action_scaler):
        if scaler is not None and not scaler.built:
            raise PolicyError(
                f"{name}: its {type(scaler).__name__} holds no ranges; fit the model before saving it"
            )


def _discrete_function(algo: Any) -> Callable[[np.ndarray], Any]:
    from d3rlpy.algos import DiscreteSAC

    if not isinstance(algo, DiscreteSAC) and not hasattr(algo.impl, "action_probabilities"):
        return algo.predict
    import torch
    from d3rlpy.torch_utility import convert_to_torch

    def probabilities(observations: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return action_probabilities(algo, convert_to_torch(observations, algo.impl.device))

    return probabilities


def _seeded(
    algo: Any, seed: int, method: Callable[[np.ndarray], np.ndarray], observations: np.ndarray
) -> np.ndarray:
    """Call a method that draws from torch's global generators, seeded, and leave those as they were."""
    import torch

    device = torch.device(algo.impl.device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        return method(observations)
