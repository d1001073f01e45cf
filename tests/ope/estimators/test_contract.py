"""What every registered estimator keeps: its listing, equivariance, a known answer,
weights as copies, and reasons where it does not apply.
"""

import dataclasses
import functools

import numpy as np
import pytest

import koffline
from koffline.ope import names
from koffline.ope.estimators.contract import Estimator
from koffline.ope.estimators.registry import find_estimator
from koffline.ope.evaluation import estimate_all
from koffline.ope.results import EstimateTable

ALL = tuple(names.ESTIMATORS)
OVER_EPISODES = names.OVER_EPISODES
BY_NETWORKS = tuple(name for name in ALL if name not in OVER_EPISODES)
GAMMA = 0.8
SCALE = 4.0  # a power of two: rounding scales with the rewards
QUICK = {
    "steps": 150,
    "hidden_units": (16,),
    "full_replicas": 2,
    "resampled_replicas": 4,
    "instruments": 60,
}


def walk(episodes: int = 60, length: int = 4) -> koffline.Transitions:
    """Noisy steps left or right by a uniform behavior policy; the world ends the
    episode.
    """
    generator = np.random.default_rng(5)
    n = episodes * length
    position = np.tile(np.arange(length, dtype=float), episodes)
    actions = generator.integers(2, size=n)
    moves = (actions - 0.5).reshape(episodes, length)
    starts = generator.normal(size=(episodes, 1))
    place = (starts + np.cumsum(moves, axis=1) - moves).ravel()
    states = np.column_stack([position, place])
    following = states + np.column_stack([np.ones(n), actions - 0.5])
    return koffline.Transitions(
        observations=states,
        actions=actions,
        rewards=states[:, 1] + actions,
        next_observations=following,
        terminated=position == length - 1,
        truncated=np.zeros(n, bool),
        episode_ids=np.repeat(np.arange(episodes), length),
        behavior_log_probabilities=np.full(n, np.log(0.5)),
        action_space=koffline.Discrete(2),
    )


def mostly_right(observations: np.ndarray) -> np.ndarray:
    """The target policy: right with probability 0.7, (N, 2)."""
    return np.tile([0.3, 0.7], (len(observations), 1))


@functools.cache
def table(version: str) -> EstimateTable:
    """All estimators on a version of the log."""
    log = walk()
    if version == "scaled":
        log = log.replace(rewards=SCALE * log.rewards)
    elif version == "permuted":
        log = log.select_episodes(np.random.default_rng(1).permutation(log.n_episodes))
    elif version == "shifted":
        log = log.replace(rewards=log.rewards + 1.0)
    elif version == "copied":
        log = log.select_episodes([*range(60), *range(20)])
    elif version == "weighted":
        weights = np.where(np.asarray(log.episode_ids) < 20, 2.0, 1.0)
        log = log.replace(weights=weights)
    return estimate_all(log, mostly_right, GAMMA, bounds=False, **QUICK)


def value(version: str, name: str) -> float:
    row = table(version)[name]
    assert row.estimate is not None, row.reason
    return row.estimate.value


@pytest.mark.parametrize("name", ALL)
def test_it_keeps_the_contract_and_its_listing(name: str) -> None:
    estimator = find_estimator(name)
    listed = names.find(name)
    assert isinstance(estimator, Estimator)
    assert estimator.name == name
    assert estimator.family == listed.family == names.ESTIMATORS[name]
    assert estimator.interval_kinds == listed.interval_kinds
    assert estimator.needs == listed.needs <= set(names.NEEDS)
    assert estimator.interval_kinds[0] == names.DEFAULT
    assert set(estimator.interval_kinds) <= set(names.KINDS)


@pytest.mark.parametrize("name", ALL)
def test_value_and_interval_scale_with_rewards(name: str) -> None:
    plain = table("plain")[name].estimate
    scaled = table("scaled")[name].estimate
    assert scaled.value == pytest.approx(SCALE * plain.value, rel=1e-6)
    assert scaled.interval.low == pytest.approx(SCALE * plain.interval.low, rel=1e-5)
    assert scaled.interval.high == pytest.approx(SCALE * plain.interval.high, rel=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_reward_more_each_step_is_worth_the_discounted_steps(name: str) -> None:
    """Every episode has four steps, so the shift is Σ γ^t of four."""
    shift = (1.0 - GAMMA**4) / (1.0 - GAMMA)
    gained = value("shifted", name) - value("plain", name)
    if name in ("wis", "wpdis"):  # normalised weights: nothing is left to chance
        assert gained == pytest.approx(shift, rel=1e-9)
    else:
        assert gained == pytest.approx(shift, rel=0.25)


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_episodes_does_not_matter(name: str) -> None:
    if name in names.WITHOUT_MODEL:
        tolerance = 1e-9
    else:  # resampling is by the number of the episode
        interval = table("plain")[name].estimate.interval
        tolerance = interval.width / abs(value("plain", name))
    assert value("permuted", name) == pytest.approx(value("plain", name), rel=tolerance)


@pytest.mark.parametrize("name", ALL)
def test_weight_two_is_an_episode_twice(name: str) -> None:
    if name in names.WITHOUT_MODEL:
        tolerance = 1e-9
    else:  # networks draw other mini-batches
        interval = table("weighted")[name].estimate.interval
        tolerance = interval.width / abs(value("weighted", name))
    assert value("copied", name) == pytest.approx(
        value("weighted", name), rel=tolerance
    )


@functools.cache
def one_state() -> EstimateTable:
    """A single state and two actions, worth 0 and 1; half of the rows each."""
    n = 400
    actions = np.arange(n) % 2
    log = koffline.Transitions(
        observations=np.zeros((n, 1)),
        actions=actions,
        rewards=actions.astype(float),
        next_observations=np.zeros((n, 1)),
        terminated=np.ones(n, bool),
        truncated=np.zeros(n, bool),
        episode_ids=np.arange(n),
        behavior_log_probabilities=np.full(n, np.log(0.5)),
        action_space=koffline.Discrete(2),
    )
    return estimate_all(
        log, mostly_right, GAMMA, bounds=False, sample_rows=1000, **QUICK
    )


@pytest.mark.parametrize("name", ALL)
def test_one_state_has_the_known_value(name: str) -> None:
    """0.7: exactly by weights, of which the log holds every one as often as due."""
    estimate = one_state()[name].estimate
    assert estimate is not None, one_state()[name].reason
    tolerance = 1e-9 if name in names.WITHOUT_MODEL else 0.03
    assert estimate.value == pytest.approx(0.7, abs=tolerance)


@functools.cache
def rows_alone() -> EstimateTable:
    """The log without episodes, and so without their weights."""
    log = walk().replace(episode_ids=None, steps=None, behavior_log_probabilities=None)
    return estimate_all(log, mostly_right, GAMMA, bounds=False, **QUICK)


@pytest.mark.parametrize("name", ALL)
def test_it_says_why_it_does_not_apply(name: str) -> None:
    row = rows_alone()[name]
    if names.EPISODES in find_estimator(name).needs:
        assert row.estimate is None
        assert "episodes" in row.reason
    else:
        assert row.estimate is not None
        assert np.isfinite(row.estimate.value)


def test_tables_are_of_frozen_records() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        names.find("is").family = "other"
