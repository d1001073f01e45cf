"""Replay of sub-episodes: what is kept, what is drawn and how often."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from koffline.data.spaces import Continuous, Discrete
from koffline.online.networks import Shape
from koffline.online.paths import PathReplay, Paths, draw_ages
from tests.online.reference_trust_pcl import successive_inclusion

LENGTH = 3
STATE = 2
ACTION = 1


def numbered(numbers, actions=ACTION):
    """Paths that carry their number everywhere, all of different length."""
    n = np.asarray(numbers, dtype=np.int64)
    shape = (len(n), LENGTH) if actions is None else (len(n), LENGTH, actions)
    here = n.reshape(-1, 1, 1)
    return Paths(
        observations=np.arange(LENGTH + 1)[:, None] * 0.125
        + np.tile(here, (1, LENGTH + 1, STATE)),
        actions=np.broadcast_to(n.reshape(-1, *(1,) * (len(shape) - 1)), shape) + 0,
        rewards=np.tile(n[:, None] + 0.5, (1, LENGTH)),
        lengths=1 + n % LENGTH,
        terminated=n % 3 == 0,
        truncated=n % 3 == 1,
        environments=n % 2,
        episodes=n // 4,
        first_steps=n * 10,
    )


def numbers_of(paths):
    """The number of every path, after checking that no column belongs to another."""
    n = paths.first_steps // 10
    expected = numbered(
        n.reshape(-1), None if paths.actions.ndim == n.ndim + 1 else ACTION
    )
    for name, column in vars(paths).items():
        np.testing.assert_array_equal(
            column.reshape(getattr(expected, name).shape), getattr(expected, name)
        )
    return n


def make_replay(runs=1, capacity=5, actions=ACTION):
    space = Discrete(2) if actions is None else Continuous(actions)
    return PathReplay(runs, capacity, LENGTH, Shape(STATE, space, ()), np.float32)


def generators(count, seed=0):
    return [np.random.default_rng([seed, run]) for run in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.sampled_from([1, 4, 7, 100]),
    appended=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6),
    discrete=st.booleans(),
)
def test_each_run_keeps_its_last_paths_in_order(capacity, appended, discrete):
    replay = make_replay(3, capacity, None if discrete else ACTION)
    kept = [[], [], []]
    count = 0
    for runs in appended:
        numbers = list(range(count, count + len(runs)))
        count += len(runs)
        replay.append(
            np.asarray(runs, dtype=np.int64),
            numbered(numbers, None if discrete else ACTION),
        )
        for run, number in zip(runs, numbers, strict=True):
            kept[run].append(number)
    for run, numbers in enumerate(kept):
        last = numbers[-capacity:]
        assert replay.sizes[run] == len(last)
        assert numbers_of(replay.held(run)).tolist() == last


CASES = [
    (5, 2, 0.0, False),
    (5, 2, 0.7, False),
    (4, 4, 0.3, False),  # all of them: only the order is random
    (8, 2, 0.0, True),
    (8, 2, 0.05, True),
    (12, 3, 0.02, True),
    (7, 1, 0.2, True),
]


@pytest.mark.parametrize(("size", "count", "recency", "inversion"), CASES)
def test_draws_follow_successive_sampling(size, count, recency, inversion):
    """Both ways of drawing, against the exact law of ordered draws (chi-square at a
    fixed seed).
    """
    weights = np.exp(-recency * np.arange(size))
    assert (weights.sum() > 3.3 * count) == inversion, (
        "the case does not take the way it is meant for"
    )
    runs = 500
    rounds = 60
    sources = generators(runs)
    ages = np.concatenate(
        [
            draw_ages(sources, np.full(runs, size), count, [recency] * runs)
            for _ in range(rounds)
        ]
    )
    exact = successive_inclusion(weights.tolist(), count)
    assert sum(exact.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(exact, 0)
    for order in map(tuple, ages.tolist()):
        counts[order] += 1  # a repeated or impossible age is a KeyError
    expected = np.array(list(exact.values())) * len(ages)
    assert stats.chisquare(list(counts.values()), expected).pvalue > 1e-3


@pytest.mark.parametrize("capacity", [6, 10])
def test_a_path_is_drawn_by_its_age(capacity):
    """Through the ring: the newest is drawn most often, what was overwritten never."""
    runs = 60
    rounds = 100
    recency = 0.5
    replay = make_replay(runs, capacity)
    sources = generators(runs, seed=2)
    for number in range(10):  # the ring has gone round
        replay.append(np.arange(runs), numbered([number] * runs))
    drawn = np.stack(
        [numbers_of(replay.sample(sources, 1, [recency] * runs)) for _ in range(rounds)]
    )
    oldest = 10 - capacity
    weights = np.exp(recency * (np.arange(oldest, 10) - 9))
    assert drawn.min() >= oldest
    counts = np.bincount(drawn.reshape(-1) - oldest, minlength=len(weights))
    assert stats.chisquare(counts, weights / weights.sum() * drawn.size).pvalue > 1e-3
