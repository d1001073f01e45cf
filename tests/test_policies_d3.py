"""d3rlpy models: what their policy is, and that their scalers are honoured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from koffline.data.transitions import Discrete
from koffline.errors import PolicyError
from koffline.policy_specs import as_policy, load_policy
from tests.d3_models import BOX, SHAPE, action_scaler, build, d3rlpy, raw_observations, saved, standard_scaler

DISCRETE = ["DQN", "DoubleDQN", "NFQ", "DiscreteCQL", "DiscreteBC", "DiscreteBCQ", "DiscreteSAC"]
DETERMINISTIC = ["DDPG", "TD3", "TD3PlusBC", "ReBRAC", "PRDC", "PLAS", "PLASWithPerturbation", "BC"]
STOCHASTIC = ["SAC", "CQL", "CalQL", "AWAC", "IQL"]
PREDICT_DRAWS = ["BCQ", "BEAR", "CRR"]


@pytest.mark.parametrize("algorithm", DISCRETE)
def test_discrete_models_act_as_predict_on_raw_observations(algorithm, tmp_path):
    algo = build(algorithm, 3, observation_scaler=standard_scaler())
    policy = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE)
    observations = raw_observations()
    probabilities = policy.probabilities(observations)
    np.testing.assert_array_equal(probabilities.argmax(axis=1), algo.predict(observations))
    expected = np.eye(3)[probabilities.argmax(axis=1)]
    if algorithm == "DiscreteSAC":
        with torch.no_grad():
            batch = algo.observation_scaler.transform(torch.tensor(observations))
            expected = torch.softmax(algo.impl.policy(batch).logits, dim=1).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)


@pytest.mark.parametrize("algorithm", DETERMINISTIC + STOCHASTIC)
def test_continuous_models_have_predict_as_mean_with_both_scalers(algorithm, tmp_path):
    algo = build(algorithm, 2, observation_scaler=standard_scaler(), action_scaler=action_scaler())
    policy = load_policy(saved(algo, tmp_path), BOX, SHAPE)
    observations = raw_observations()
    np.testing.assert_array_equal(policy.mean(observations), algo.predict(observations))
    assert policy.deterministic == (algorithm in DETERMINISTIC)
    draws = policy.sample(observations, np.random.default_rng(0))
    assert (draws == policy.mean(observations)).all() == policy.deterministic
    assert (draws >= BOX.low).all()
    assert (draws <= BOX.high).all()


@pytest.mark.parametrize("algorithm", [*STOCHASTIC, *PREDICT_DRAWS])
def test_draws_belong_to_the_generator(algorithm, tmp_path):
    policy = load_policy(saved(build(algorithm, 2), tmp_path), BOX, SHAPE)
    observations = raw_observations()
    state = torch.random.get_rng_state()
    generator = np.random.default_rng(7)
    first, second = policy.sample(observations, generator), policy.sample(observations, generator)
    np.testing.assert_array_equal(first, policy.sample(observations, np.random.default_rng(7)))
    np.testing.assert_array_equal(policy.mean(observations), policy.mean(observations))
    assert (first != second).any()
    assert torch.equal(state, torch.random.get_rng_state()), "torch's global generator is left as it was"


def test_an_algorithm_in_memory_is_a_policy():
    algo = build("SAC", 2, action_scaler=action_scaler())
    policy = as_policy(algo, BOX, SHAPE)
    np.testing.assert_array_equal(policy.mean(raw_observations()), algo.predict(raw_observations()))
    with pytest.raises(PolicyError, match="no networks yet; fit it"):
        as_policy(d3rlpy.algos.SACConfig().create(), BOX, SHAPE)
