"""The trust region's coefficient, against a root finder of scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.online.collector import TrustRegion, solve_coefficients
from koffline.online.config import OnlineConfig
from tests.online import reference_trust_pcl as reference

HALVED = 1000.0 / 2**14  # width of the last interval


def solve(returns, allowed):
    return float(solve_coefficients(np.asarray(returns)[None], np.array([allowed]))[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(9, 20),
    spread=st.sampled_from([0.1, 5.0, 300.0, 1e4]),
    shift=st.sampled_from([-1e4, 0.0, 1e5]),
    allowed=st.sampled_from([1e-3, 0.02, 0.5, 2.0, 10.0]),
)
def test_coefficient_is_the_root(seed, count, spread, shift, allowed):
    returns = (shift + spread * np.random.default_rng(seed).normal(size=count)).tolist()
    found = solve(returns, allowed)
    assert 0.0 <= found <= 1000.0
    # The answer is the middle of the last interval; rounding of 1e5-large returns adds a little.
    assert found == pytest.approx(
        reference.root(returns, allowed), abs=0.51 * HALVED + 1e-6 * abs(shift) ** 0.5
    )


@pytest.mark.parametrize(("count", "expected"), [(0, 500.0), (8, 500.0), (9, 0.0)])
def test_few_or_equal_returns(count, expected):
    """Up to eight episodes say nothing; equal ones allow any step."""
    assert solve(np.full(count, 7.0), 0.01) == pytest.approx(expected, abs=HALVED)


@pytest.mark.parametrize(("length", "inert"), [(20, False), (400, True)])
def test_a_region_wider_than_episodes_can_diverge_is_known(length, inert):
    """Twenty weighted episodes diverge by ln 20 = 3 at most; 0.05 a step allows 1 in 20 steps, 20 in 400."""
    region = TrustRegion([OnlineConfig("none", divergence_per="step", max_divergence=0.05)])
    region.update([[(float(k), length) for k in range(20)]], np.array([True]))
    assert region.is_inert.tolist() == [inert]
    assert (region.wanted[0] < 0.1) == inert
