"""Intervals over episodes against textbook formulas, scipy, exact binomial chances and
their own promises.
"""

import math

import numpy as np
import pytest
from scipy import stats

from koffline.ope.importance import episode_intervals
from koffline.ope.importance.episode_means import plain_mean
from koffline.ope.names import (
    CERTIFIED_EPISODE_KINDS,
    EPISODES_BOOTSTRAP,
    EPISODES_T,
    HOEFFDING,
)
from tests.ope.importance.cases import (
    log_of_steps,
    make_statistic,
    random_case,
    weighed,
)


def test_student_interval_is_the_two_sided_textbook_one() -> None:
    values = np.random.default_rng(0).exponential(size=12)
    mean = plain_mean(values, np.full(12, 1 / 12))
    student = episode_intervals.student_interval(mean.value, mean.deviations, 0.9, 12.0)
    expected = stats.t.interval(0.9, 11, loc=values.mean(), scale=stats.sem(values))
    assert (student.low, student.high) == pytest.approx(expected)
    assert (student.kind, student.level) == (EPISODES_T, 0.9)


def test_bootstrap_is_scipys_bca() -> None:
    """Other draws of the same distribution: the ends agree to a few hundredths of the
    width.
    """
    values = np.random.default_rng(1).exponential(size=40)
    mean = plain_mean(values, np.full(40, 1 / 40))
    interval = episode_intervals.bootstrap_interval(mean, 0.9, 20_000, 2)
    expected = {
        "confidence_level": 0.9,
        "n_resamples": 20_000,
        "method": "BCa",
        "random_state": 3,
    }
    theirs = stats.bootstrap((values,), np.mean, **expected).confidence_interval
    assert (interval.low, interval.high) == pytest.approx(
        (theirs.low, theirs.high), abs=0.03 * interval.width
    )
    assert interval.kind == EPISODES_BOOTSTRAP


def test_one_episode_or_too_few_with_weight_have_none() -> None:
    single = plain_mean(np.ones(1), np.ones(1))
    assert episode_intervals.student_interval(1.0, single.deviations, 0.95, 1.0) is None
    assert episode_intervals.bootstrap_interval(single, 0.95, 10, 0) is None
    log = random_case(1).transitions
    only_first = np.where(np.arange(len(log)) < log.episode_lengths[0], 0.0, -np.inf)
    mean = make_statistic("wis", weighed(log, only_first))
    assert (
        episode_intervals.student_interval(mean.value, mean.deviations, 0.95, 1.0)
        is None
    )
    # A third of the draws leave that episode out, and have no weight at all.
    assert episode_intervals.bootstrap_interval(mean, 0.95, 200, 0) is None


def widths(kind: str, values: np.ndarray, value_range: float, alpha: float) -> float:
    """By hand: Hoeffding 1963, Theorem 2; Maurer and Pontil 2009, Theorem 4."""
    n = len(values)
    log_term = math.log(2.0 / alpha)
    if kind == HOEFFDING:
        return value_range * math.sqrt(math.log(1.0 / alpha) / (2.0 * n))
    bernstein = math.sqrt(2.0 * values.var(ddof=1) * log_term / n)
    return bernstein + 7.0 * value_range * log_term / (3.0 * (n - 1))


@pytest.mark.parametrize("kind", CERTIFIED_EPISODE_KINDS)
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
def test_lower_bound_fails_no_more_often_than_allowed(kind: str, chance: float) -> None:
    """Means of n coin throws: the chance that the bound is above the truth, summed over
    all outcomes.
    """
    n = 60
    alpha = 0.1
    throws = [np.repeat([1.0, 0.0], [heads, n - heads]) for heads in range(n + 1)]
    failing = [
        episode_intervals.mean_lower_bound(values, 1.0, alpha, kind) > chance
        for values in throws
    ]
    assert failing @ stats.binom.pmf(np.arange(n + 1), n, chance) <= alpha


@pytest.mark.parametrize("kind", CERTIFIED_EPISODE_KINDS)
def test_on_policy_bound_is_the_plain_one_at_a_seventh_of_the_level(kind: str) -> None:
    rewards = np.random.default_rng(5).uniform(1.0, 3.0, size=500)
    problem = weighed(log_of_steps(rewards, 1), np.zeros(500))
    interval = episode_intervals.certified_interval(problem, 0.95, kind, (1.0, 3.0))
    width = widths(kind, rewards, 2.0, 0.025 / 7)
    assert (interval.low, interval.high) == pytest.approx(
        (rewards.mean() - width, rewards.mean() + width)
    )
    assert "(given)" in interval.assumptions


@pytest.mark.parametrize("kind", CERTIFIED_EPISODE_KINDS)
@pytest.mark.parametrize("stepwise", [False, True])
def test_certified_interval_holds_off_policy(kind: str, stepwise: bool) -> None:
    """Two steps, coin actions, reward = action; the policy takes 1 with chance 0.9: J =
    0.9 · 1.9.

    At 80 % about 2 of 10 logs may miss it; bounds as wide as these miss none.
    """
    misses = 0
    for seed in range(10):
        actions = np.random.default_rng(seed).integers(2, size=600)
        log = log_of_steps(actions.astype(float), 2, actions)
        problem = weighed(log, np.log(np.where(actions == 1, 0.9, 0.1)) - math.log(0.5))
        interval = episode_intervals.certified_interval(
            problem, 0.8, kind, (0.0, 1.0), stepwise
        )
        assert interval.width < 1.9 if kind == HOEFFDING else interval.width < 2.5
        misses += not interval.holds(0.9 * 1.9)
    assert misses == 0
