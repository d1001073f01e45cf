from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.builders.uniform import build_chain, build_uniform
from koffline.data.transitions import Discrete
from koffline.envs.boxes import GYMNASIUM_IDS, make_world
from koffline.envs.finite import TSITSIKLIS_FEATURES

DATASETS = Path(__file__).parents[2] / "datasets"


@pytest.mark.parametrize("name", GYMNASIUM_IDS)
def test_rows_are_steps_of_the_world(name):
    world = make_world(GYMNASIUM_IDS[name])
    path = DATASETS / "policies" / f"{name}.npz"
    policy = koffline.load_policy(path, Discrete(world.n_actions), (2,)).probabilities
    log = build_uniform(name, policy, 3000, np.random.default_rng(0))
    assert not log.has_episodes
    assert not log.truncated.any()
    assert not world.is_terminal(log.observations.astype(np.float64)).any()
    np.testing.assert_array_equal(
        log.terminated, world.is_terminal(log.next_observations.astype(np.float64))
    )
    chances = policy(log.observations)[np.arange(3000), log.actions]
    np.testing.assert_allclose(
        np.exp(log.behavior_log_probabilities), chances, rtol=1e-5
    )
    assert chances.mean() == pytest.approx(
        (policy(log.observations) ** 2).sum(axis=1).mean(), abs=0.03
    )


def test_the_chain_moves_as_drawn():
    log = build_chain(4000, np.random.default_rng(0))
    features = np.asarray(TSITSIKLIS_FEATURES)
    at = (log.observations[:, None] == features[None]).all(axis=2).argmax(axis=1)
    to = (log.next_observations[:, None] == features[None]).all(axis=2).argmax(axis=1)
    counts = np.zeros((5, 5))
    np.add.at(counts, (at, to), 1)
    # four standard deviations
    np.testing.assert_allclose(counts.sum(axis=1)[:4], 1000, atol=110)
    shares = counts[:4] / counts[:4].sum(axis=1, keepdims=True)
    expected = [
        [0, 0.8, 0.2, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0.95, 0.05],
    ]
    np.testing.assert_allclose(shares, expected, atol=0.05)
    np.testing.assert_array_equal(log.rewards, at == 1)
    np.testing.assert_array_equal(log.terminated, to == 4)
