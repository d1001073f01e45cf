"""Learning by playing: the same rows again; policies are the learner's."""

import dataclasses

import numpy as np
import pytest

from koffline.algos.stock_learners import LearnerSettings, OnlineLearner
from koffline.algos.training import own_randomness
from koffline.builders.control_learning import LearningSettings, learn
from koffline.data.transitions import Continuous, Discrete

SMALL = {"hidden": (8,), "batch_size": 16, "random_steps": 40, "evaluate_every": 100, "episodes": 2}
SETTINGS = {
    "CartPole-v1": LearningSettings(
        env="CartPole-v1", steps=160, exploration_steps=80, target_interval=20, **SMALL
    ),
    "Pendulum-v1": LearningSettings(env="Pendulum-v1", steps=401, update_every=20, **SMALL),
}


def test_rows_are_the_environments_own():
    rows = learn(SETTINGS["CartPole-v1"]).rows
    goes_on = ~(rows["terminated"] | rows["truncated"])[:-1]
    np.testing.assert_array_equal(rows["next_observations"][:-1][goes_on], rows["observations"][1:][goes_on])
    np.testing.assert_array_equal(rows["steps"][1:][goes_on], rows["steps"][:-1][goes_on] + 1)
    assert (rows["steps"][1:][~goes_on] == 0).all()
    assert (np.diff(rows["episode_ids"]) == ~goes_on).all()
    assert set(rows["actions"]) == {0, 1}
    pendulum = learn(dataclasses.replace(SETTINGS["Pendulum-v1"], steps=200)).rows
    assert pendulum["truncated"].sum() == 1
    assert (np.abs(pendulum["actions"]) <= 2.0).all()


@pytest.mark.parametrize("space", [Discrete(3), Continuous(2, (-1.0, 0.0), (3.0, 1.0))], ids=str)
def test_the_network_is_what_the_learner_predicts(space):
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(50, 4)).astype(np.float32)
    actions = generator.integers(3, size=50) if isinstance(space, Discrete) else generator.random((50, 2))
    batch = {
        "observations": observations,
        "next_observations": observations[::-1].copy(),
        "actions": actions,
        "rewards": generator.normal(size=50),
        "terminated": generator.random(50) < 0.1,
    }
    with own_randomness(0):
        learner = OnlineLearner(space, (4,), LearnerSettings(hidden=(8, 8), batch_size=50))
        for _ in range(30):
            learner.update(batch)
        policy = learner.policy()
        predicted = learner._algo.predict(observations)
        if isinstance(space, Discrete):
            np.testing.assert_array_equal(policy.discrete(observations), predicted)
            np.testing.assert_array_equal(learner.act(observations), predicted)
        else:
            np.testing.assert_allclose(policy.mean(observations), predicted, atol=1e-5)
            drawn = learner.act(observations)
            assert (drawn >= space.low).all()
            assert (drawn <= space.high).all()
            assert not np.allclose(drawn, predicted)
