"""Paired differences and Holm's correction, against hand-worked cases and long-run error rates."""

import math

import numpy as np
import pytest
from scipy import stats

from koffline.errors import DataError
from koffline.ope.interval import Interval
from koffline.ope.selection.comparisons import (
    ReplicaValues,
    compare_intervals,
    compare_policies,
    holm,
)


def paired(values: np.ndarray, full: int) -> ReplicaValues:
    return ReplicaValues(values, np.isfinite(values), full)


def test_one_pair_by_hand():
    # Full replicas: mean difference (2 + 4) / 2 = 3. Resampled differences 1, 3, 5: deviation 2.
    values = np.array([[3.0, 5.0, 2.0, 2.0, 9.0], [1.0, 1.0, 1.0, -1.0, 4.0]])
    (found,) = compare_policies(("a", "b"), paired(values, 2), level=0.9)
    error = 2.0 * math.sqrt(1.0 + 1.0 / 2.0)
    assert (found.better, found.worse, found.difference) == ("a", "b", 3.0)
    assert found.p_value == pytest.approx(2.0 * stats.t.sf(3.0 / error, df=2))
    assert found.high - 3.0 == pytest.approx(stats.t.ppf(0.95, df=2) * error)
    assert found.low == pytest.approx(6.0 - found.high)
    assert found.adjusted_p_value == found.p_value
    assert not found.significant


def test_what_all_replicas_share_cancels():
    generator = np.random.default_rng(1)
    shared = 100.0 * generator.normal(size=8)
    values = np.array([[1.0], [0.0]]) + shared + 0.01 * generator.normal(size=(2, 8))
    (found,) = compare_policies(("a", "b"), paired(values, 2))
    assert found.significant
    assert found.difference == pytest.approx(1.0, abs=0.05)


def test_the_order_of_policies_does_not_matter():
    values = np.random.default_rng(2).normal(size=(3, 9))
    names = ("a", "b", "c")
    forward = compare_policies(names, paired(values, 3))
    backward = compare_policies(names[::-1], paired(values[::-1], 3))
    assert [c.as_dict() for c in forward] == [pytest.approx(c.as_dict()) for c in backward]
    gaps = [c.difference for c in forward]
    assert gaps == sorted(gaps, reverse=True)


def test_a_diverged_replica_counts_for_neither():
    values = np.array([[3.0, 2.0, 4.0, np.nan, 6.0], [1.0, 1.0, 1.0, 1.0, np.nan]])
    (found,) = compare_policies(("a", "b"), paired(values, 1))
    (clean,) = compare_policies(("a", "b"), paired(values[:, :3], 1))
    assert found == clean
    with pytest.raises(DataError, match="1 networks in common"):
        compare_policies(("a", "b"), paired(values[:, [0, 1, 3]], 1))


def test_equal_policies_do_not_differ():
    same = np.tile(np.arange(6.0), (2, 1))
    (found,) = compare_policies(("a", "b"), paired(same, 2))
    assert (found.difference, found.p_value, found.significant) == (0.0, 1.0, False)
    (sure,) = compare_policies(("a", "b"), paired(same + np.array([[1.0], [0.0]]), 2))
    assert (sure.p_value, sure.significant) == (0.0, True)


def test_intervals_alone_by_hand():
    # Standard errors 1 and 2: a difference of 6 is twice their sum.
    z = stats.norm.ppf(0.975)
    intervals = [Interval(5.0 - z, 5.0 + z, 0.95, "x"), Interval(-1.0 - 2 * z, -1.0 + 2 * z, 0.95, "x")]
    (found,) = compare_intervals("ab", [5.0, -1.0], intervals)
    assert found.p_value == pytest.approx(2.0 * stats.norm.sf(2.0))
    assert found.high - found.low == pytest.approx(6.0 * z)
    assert found.significant
    (same,) = compare_intervals("ab", [1.0, 1.0], [Interval(1.0, 1.0, 0.95, "x")] * 2)
    assert same.p_value == 1.0


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.6 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.6; steps never go down.
    assert holm(np.array([0.6, 0.01, 0.03, 0.02])) == pytest.approx([0.6, 0.04, 0.06, 0.06])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1.0, 1.0])
    assert holm(np.array([0.5])) == pytest.approx([0.5])


def test_family_wise_errors_keep_to_their_level():
    # Four equal policies, Gaussian replicas: in 400 draws any significant pair at 5 % is wrong; the rate
    # of draws with one may exceed 5 % by chance up to 0.05 + 4 * sqrt(0.05 * 0.95 / 400) = 0.094.
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        estimate = generator.normal(size=(4, 1))  # the error of the log, of which the replicas know the size
        resampled = estimate + generator.normal(size=(4, 12))
        values = np.hstack([estimate, resampled])
        wrong += any(c.significant for c in compare_policies("abcd", paired(values, 1)))
    assert wrong / 400 <= 0.094
