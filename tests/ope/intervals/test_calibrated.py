"""The calibrated interval: influences by finite differences, the inverted test by
search, its quantile.
"""

import dataclasses
import math

import pytest
import torch

from koffline.ope.intervals import base
from tests.ope.intervals.systems import small_system

_SETTINGS = base.KernelIntervalSettings(draws=199)


def test_influences_and_leverage_are_derivatives_in_the_rewards() -> None:
    """η̂ is linear in r: η̂(r) − η̂(r − δ̂) = Σ w_i ω_i δ̂_i/n, row by row, and so is
    each fitted value.
    """
    system = small_system(2)
    profile = base.make_profile(system, ridge=0.0)
    delta = system.residuals(profile.theta)
    scale = profile.residuals / delta  # (1 − leverage)^(−1/2)
    leverage = 1.0 - scale**-2
    for i in range(len(system)):
        changed = system.rewards.clone()
        changed[i] -= delta[i]
        moved = base.make_profile(
            dataclasses.replace(system, rewards=changed), ridge=0.0
        )
        assert float(profile.influences[i] / scale[i]) == pytest.approx(
            profile.value - moved.value, abs=1e-9
        )
        fitted = system.difference[i] @ (profile.theta - moved.theta)
        assert float(leverage[i] * delta[i]) == pytest.approx(float(fitted), abs=1e-9)


def test_inverted_test_agrees_with_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(30, generator=generator, dtype=torch.float64)
    slopes = 0.05 * torch.randn(30, generator=generator, dtype=torch.float64) + 0.02 * a
    low, high = base.invert_test(a, slopes, 2.0)
    grid = torch.linspace(-40.0, 40.0, 80_001, dtype=torch.float64)
    holds = grid.square() <= 4.0 * (a + grid[:, None] * slopes).square().sum(dim=1)
    assert float(grid[holds].min()) == pytest.approx(low, abs=2e-3)
    assert float(grid[holds].max()) == pytest.approx(high, abs=2e-3)
    assert bool(holds[(grid > low + 1e-3) & (grid < high - 1e-3)].all())
    reach = 2.0 * float(a.norm())
    assert base.invert_test(a, torch.zeros_like(a), 2.0) == pytest.approx(
        (-reach, reach)
    )
    # the noise grows as fast as the distance
    assert base.invert_test(a, a, 2.0) == (
        -math.inf,
        math.inf,
    )


def test_quantile_is_normal_for_many_and_of_signs_for_few() -> None:
    many = base.studentised_quantile(torch.ones(5000, dtype=torch.float64), _SETTINGS)
    assert many == pytest.approx((1.959964, 5000.0), abs=1e-5)
    assert base.studentised_quantile(
        torch.tensor([3.0, 0.0], dtype=torch.float64), _SETTINGS
    ) == (1.0, 1.0)
    none, counted = base.studentised_quantile(
        torch.zeros(4, dtype=torch.float64), _SETTINGS
    )
    assert counted == 0.0
    assert math.isfinite(none)
