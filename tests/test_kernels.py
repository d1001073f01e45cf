import math

import numpy as np
import pytest
import torch

from koffline import kernels
from koffline.errors import ConfigError, DataError
from tests import reference
from tests.refusals import refused

STATIONARY = [
    (kernels.Gaussian(0.7), reference.gaussian),
    (kernels.Laplacian(0.7), reference.laplacian),
    (kernels.InverseMultiquadric(0.7), reference.inverse_multiquadric),
]
ALL = [kernel for kernel, _ in STATIONARY] + [kernels.Linear()]


def rows(count, width=3, seed=0, dtype=torch.float64):
    return torch.randn(
        count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


@pytest.mark.parametrize(
    ("kernel", "naive"), STATIONARY, ids=lambda part: type(part).__name__
)
def test_gram_agrees_with_the_loop_over_pairs(kernel, naive):
    x = rows(6)
    y = rows(4, seed=1)
    expected = reference.gram(lambda a, b: naive(a, b, 0.7), x.tolist(), y.tolist())
    np.testing.assert_allclose(
        kernel.gram(x, y).numpy(), expected, rtol=1e-12, atol=1e-14
    )
    np.testing.assert_allclose(
        kernel.gram(x).numpy(), kernel.gram(x, x.clone()).numpy(), rtol=1e-12
    )


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: type(kernel).__name__)
def test_diagonal_is_the_grams_diagonal_exactly(kernel):
    x = rows(8, dtype=torch.float32) + 100.0
    gram = kernel.gram(x)
    torch.testing.assert_close(kernel.diagonal(x), gram.diagonal(), rtol=1e-6, atol=0.0)


def test_gaussian_in_single_precision_survives_data_far_from_zero():
    x = rows(50, dtype=torch.float32) + 1000.0
    exact = kernels.Gaussian(1.0).gram(x.double())
    torch.testing.assert_close(
        kernels.Gaussian(1.0).gram(x).double(), exact, rtol=0.0, atol=3e-6
    )


@pytest.mark.parametrize("kernel", [kernels.Gaussian(1.5), kernels.Laplacian(2.0)])
def test_random_features_converge_to_the_kernel(kernel):
    x = rows(10)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for count in (200, 20_000):
        features = kernels.random_fourier_features(kernel, 3, count, generator)(x)
        assert features.shape == (10, count)
        errors.append(
            float((features @ features.T - kernel.gram(x)).square().mean().sqrt())
        )
    # standard error of a mean of count/2 cosines: at most 1/√10 000
    assert errors[1] < 0.02
    # a hundred times the features: a tenth of the error, with room
    assert errors[1] < errors[0] / 4.0


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_median_bandwidth_is_the_median_off_diagonal_distance(count):
    x = rows(count)
    assert kernels.median_bandwidth(x) == pytest.approx(
        reference.median_distance(x.tolist()), rel=1e-12
    )


def test_median_bandwidth_of_a_sample_is_near_that_of_all():
    x = rows(2000)
    # 300 rows give 45 000 distances; the median's relative standard error is about 2 %
    assert kernels.median_bandwidth(x, max_rows=300) == pytest.approx(
        kernels.median_bandwidth(x), rel=0.1
    )


def test_bandwidths_are_positive_numbers():
    assert kernels.median_bandwidth(torch.zeros(5, 2)) == 1e-6
    with refused(DataError, match="at least two rows"):
        kernels.median_bandwidth(torch.zeros(1, 2))
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="bandwidth is"):
            kernels.Laplacian(bandwidth)
