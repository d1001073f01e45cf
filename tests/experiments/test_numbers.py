"""Numbers over seeds: by hand, and how often their intervals cover; and the files that
hold them.
"""

import math

import numpy as np
import pytest

from koffline.experiments.mujoco import MujocoResult
from koffline.experiments.seed_statistics import (
    difference,
    mean_over_seeds,
    ratio_of_means,
    spearman_over_seeds,
)


def test_intervals_are_students() -> None:
    values = np.array([1.0, 2.0, 4.0, 5.0])
    interval = mean_over_seeds(values)
    # t quantile of three degrees of freedom
    half = 3.182446 * np.sqrt(np.sum((values - 3.0) ** 2) / 3) / 2
    assert (interval.value, interval.low, interval.high) == pytest.approx(
        (3.0, 3.0 - half, 3.0 + half), rel=1e-4
    )
    assert np.isnan(mean_over_seeds(np.array([1.0, np.nan])).value)
    assert mean_over_seeds(np.array([1.0])).high == np.inf


@pytest.mark.parametrize("seeds", [3, 10])
def test_the_interval_of_a_ratio_covers_with_few_seeds(seeds: int) -> None:
    """Lognormal errors with ratio 1; nominal 95 %."""
    generator = np.random.default_rng(0)
    draws = (
        ratio_of_means(*np.exp(0.5 * generator.standard_normal((2, seeds))))
        for _ in range(400)
    )
    covered = sum(interval.low <= 1.0 <= interval.high for interval in draws)
    # 380 expected; four standard deviations below, skewed errors cost some
    assert 360 <= covered <= 394


def test_ratio_and_its_ends() -> None:
    assert ratio_of_means(
        np.array([2.0, 4.0]), np.array([1.0, 2.0])
    ).value == pytest.approx(2.0)
    assert ratio_of_means(np.array([1.0, np.nan]), np.ones(2)).value == np.inf
    assert ratio_of_means(np.ones(2), np.array([1.0, np.inf])).value == 0.0


def test_rank_correlation_against_ranks_by_hand() -> None:
    x = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 6.0]])
    y = x**3
    assert spearman_over_seeds(x, -y).value == pytest.approx(-1.0)
    y[0, 0] = np.nan  # a diverged network is left out
    assert spearman_over_seeds(x, y).value == pytest.approx(1.0)
    a, b = np.random.default_rng(0).standard_normal((2, 50, 10))
    rank = spearman_over_seeds(a, b)
    ranks = [np.argsort(np.argsort(part.ravel())) for part in (a, b)]
    assert rank.value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert rank.low < 0.0 < rank.high


def result_of(steps, curves):
    return MujocoResult(
        np.array(steps),
        *[np.array(curves, dtype=float)] * 3,
        np.zeros(len(curves), int),
    )


def test_scores_by_hand() -> None:
    result = result_of([0, 100, 300], [[0, 10, 20], [0, 0, 5]])
    np.testing.assert_allclose(result.final(), [20.0, 5.0])
    np.testing.assert_allclose(
        result.area(), [(5 * 100 + 15 * 200) / 300, (2.5 * 200) / 300]
    )
    np.testing.assert_array_equal(result.reached(10.0), [100.0, math.inf])
    tenth = result_of(np.arange(40) * 10, [np.arange(40)])
    np.testing.assert_allclose(tenth.final(), [np.mean([36, 37, 38, 39])])
    assert np.isinf(tenth.reached(None)).all()
    np.testing.assert_allclose(result_of([0], [[3], [4]]).area(), [3.0, 4.0])


def test_a_difference_has_its_sign_and_turns_with_its_sides() -> None:
    generator = np.random.default_rng(0)
    low = generator.normal(0, 1, 6)
    high = generator.normal(10, 1, 6)
    interval = difference(high, low)
    turned = difference(low, high)
    assert 5.0 < interval.low < interval.value < interval.high < 15.0
    assert turned.value == pytest.approx(-interval.value)
    assert turned.high < 0.0
    assert difference(high[:4], low).low == -math.inf  # four seeds say nothing


@pytest.mark.parametrize("spreads", [(1.0, 1.0), (1.0, 4.0)])
def test_the_interval_of_a_difference_covers(spreads, monkeypatch):
    """Six seeds a side, no true difference: at most a tenth of the intervals may miss
    zero.
    """
    monkeypatch.setattr("koffline.experiments.seed_statistics._DRAWS", 1000)
    generator = np.random.default_rng(1)
    draws = (
        difference(*(generator.normal(0.0, spread, 6) for spread in spreads))
        for _ in range(300)
    )
    missed = sum(not interval.low <= 0.0 <= interval.high for interval in draws)
    assert missed <= 30  # 5 % are 15; three standard deviations above are 26
