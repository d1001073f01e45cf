"""Metrics of a choice, each on a case worked out by hand."""

import numpy as np
import pytest

from koffline.errors import ConfigError, DataError
from koffline.ope.selection.metrics import (
    kendall,
    mean_relative_error,
    regret_at_k,
    relative_regret_at_k,
    score_selection,
    spearman,
    type_errors,
)

TRUTHS = np.array([10.0, 7.0, 4.0, 2.0])
ESTIMATES = np.array([5.0, 8.0, 6.0, 1.0])  # ranks the policies 1, 2, 0, 3


@pytest.mark.parametrize(("k", "regret"), [(1, 3.0), (2, 3.0), (3, 0.0), (4, 0.0)])
def test_regret_at_k(k, regret):
    assert regret_at_k(ESTIMATES, TRUTHS, k) == regret
    assert relative_regret_at_k(ESTIMATES, TRUTHS, k) == regret / 8.0


def test_ties_go_to_the_earlier_policy():
    assert regret_at_k(np.array([1.0, 1.0]), np.array([0.0, 5.0]), 1) == 5.0
    assert regret_at_k(np.array([1.0, 1.0]), np.array([5.0, 0.0]), 1) == 0.0


def test_rank_correlations_by_hand():
    # Ranks of the estimates 2, 4, 3, 1; of the truths 4, 3, 2, 1: squared differences 4 + 1 + 1 + 0 = 6.
    assert spearman(ESTIMATES, TRUTHS) == pytest.approx(1.0 - 6.0 * 6.0 / (4 * 15))
    # Of 6 pairs (0, 1) and (0, 2) are discordant.
    assert kendall(ESTIMATES, TRUTHS) == pytest.approx((4 - 2) / 6)
    # One tie among the estimates: τ_b = (5 − 0) / sqrt(5 · 6).
    assert kendall(np.array([3.0, 2.0, 2.0, 1.0]), TRUTHS) == pytest.approx(5.0 / np.sqrt(30.0))


def test_rank_correlations_do_not_change_under_monotone_maps():
    generator = np.random.default_rng(0)
    values, true = generator.normal(size=(2, 12))
    for metric in (spearman, kendall):
        assert metric(np.exp(values), 3.0 * true - 100.0) == pytest.approx(metric(values, true))
        assert metric(-values, true) == pytest.approx(-metric(values, true))


@pytest.mark.parametrize("metric", [spearman, kendall])
def test_no_number_where_none_is_defined(metric):
    assert metric(np.ones(3), TRUTHS[:3]) is None
    assert metric(ESTIMATES[:1], TRUTHS[:1]) is None
    assert relative_regret_at_k(ESTIMATES, np.ones(4), 1) is None
    assert mean_relative_error(ESTIMATES, np.array([1.0, 0.0, 1.0, 1.0])) is None


def test_type_errors_by_hand():
    found = type_errors(np.array([True, False, True, False]), TRUTHS, threshold=5.0)
    assert (found.false_accepts, found.false_rejects) == (0.5, 0.5)
    assert type_errors(np.array([True] * 4), TRUTHS, threshold=0.0).false_accepts is None
    at = type_errors(np.array([True] * 4), TRUTHS, threshold=2.0)  # as much as the threshold is not more
    assert at.false_accepts == 1.0


def test_all_metrics_at_once():
    intervals = [(4.0, 10.0), (6.0, 9.0), (5.0, 7.0), (0.0, 2.0)]
    found = score_selection(ESTIMATES, TRUTHS, intervals, threshold=5.5, most=3)
    assert found.regret_at_k == (3.0, 3.0, 0.0)
    assert found.relative_regret_at_1 == 3.0 / 8.0
    assert found.mean_absolute_error == (5 + 1 + 2 + 1) / 4
    assert found.mean_relative_error == pytest.approx((0.5 + 1 / 7 + 0.5 + 0.5) / 4)
    assert found.coverage == 0.75
    assert found.type_errors is not None
    assert (found.type_errors.false_accepts, found.type_errors.false_rejects) == (0.0, 0.5)
    assert found.as_dict()["regret_at_k"] == [3.0, 3.0, 0.0]
    assert score_selection(ESTIMATES, TRUTHS).coverage is None


def test_bad_columns_are_refused():
    with pytest.raises(DataError, match="one of each per policy"):
        score_selection([1.0], [1.0, 2.0])
    with pytest.raises(DataError, match="NaN"):
        score_selection([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(ConfigError, match="k is 5 for 4 policies"):
        regret_at_k(ESTIMATES, TRUTHS, 5)
