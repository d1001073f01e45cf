"""Residuals in bins."""

import numpy as np
import pytest

from koffline.ope.diagnose.profiles import make_profile


def test_bins_by_hand() -> None:
    numbers = np.array([3.0, 1.0, 2.0, 0.0] * 8)
    residuals = np.where(numbers < 2.0, -1.0, 2.0) + np.tile([0.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5], 4)
    found = make_profile("x", numbers, residuals, np.ones(32), bins=2)
    np.testing.assert_allclose(found.center, [0.5, 2.5])
    np.testing.assert_allclose(found.mean, [-1.0, 2.0])
    np.testing.assert_array_equal(found.rows, [16, 16])
    np.testing.assert_allclose(found.standard_error, np.full(2, 0.5 / np.sqrt(15)))
    assert (found.z_scores[0] < 0.0) & (found.z_scores[1] > 0.0)


def test_equal_numbers_are_never_cut_and_weightless_rows_say_nothing() -> None:
    numbers = np.repeat([0.0, 1.0], [90, 10])
    weights = np.ones(100)
    weights[99] = 0.0
    residuals = np.zeros(100)
    residuals[99] = 1e6
    found = make_profile("x", numbers, residuals, weights)
    np.testing.assert_array_equal(found.rows, [90, 9])
    np.testing.assert_array_equal(found.mean, [0.0, 0.0])
    np.testing.assert_array_equal(found.z_scores, [0.0, 0.0])


def test_weights_count_as_copies() -> None:
    generator = np.random.default_rng(0)
    numbers, residuals = generator.normal(size=40), generator.normal(size=40)
    counts = generator.integers(1, 4, size=40)
    weighted = make_profile("x", numbers, residuals, counts.astype(np.float64), bins=1)
    copied = make_profile(
        "x", np.repeat(numbers, counts), np.repeat(residuals, counts), np.ones(counts.sum()), bins=1
    )
    np.testing.assert_allclose(weighted.mean, copied.mean)
    np.testing.assert_allclose(weighted.center, copied.center)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_few_rows_make_one_bin(n) -> None:
    found = make_profile("x", np.arange(float(n)), np.ones(n), np.ones(n))
    assert len(found.mean) == 1
    assert np.isfinite(found.standard_error).all()
    assert found.as_dict()["rows"] == [n]


def test_equal_residuals_have_no_spread() -> None:
    """Residuals that are 0.2 in every row, up to rounding, are as clear as can be; one row is not."""
    residuals = np.where(np.arange(33) % 2, 0.1 + 0.1, 0.3 - 0.1)
    found = make_profile("x", np.zeros(33), residuals, np.random.default_rng(0).uniform(1.0, 2.0, 33))
    assert found.standard_error[0] == 0.0
    assert found.z_scores[0] == np.inf
    assert make_profile("x", np.zeros(1), np.ones(1), np.ones(1)).z_scores[0] == 0.0
