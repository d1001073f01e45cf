"""The first real log: a shop's clicks on items drawn at random, and on another policy
in the same week.
"""

import numpy as np
import pytest

from scripts.bench.open_bandit import (
    CAMPAIGNS,
    estimates,
    own_rate,
    random_log,
    thompson,
)

QUICK = {"steps": 150, "hidden_units": (32,), "instruments": 100}


def assert_own_clicks_are_held(campaign: str, **options: object) -> None:
    """The interval of ``dr`` holds the click rate of the policy's own log, and its
    value is that of IPS.
    """
    rate, error = own_rate(campaign)
    table = estimates(campaign, ("dr", "is"), **options)
    robust = table["dr"].estimate
    weighted = table["is"].estimate
    assert robust.interval.low - error <= rate <= robust.interval.high + error
    assert 0.0 < robust.interval.low < robust.interval.high < 0.02
    assert robust.interval.width < 2.0 * weighted.interval.width
    assert abs(robust.value - weighted.value) < 2.0 * weighted.standard_error


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_the_interval_of_dr_holds_the_policys_own_clicks(campaign: str) -> None:
    assert_own_clicks_are_held(campaign, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_so_does_that_of_fully_trained_networks(campaign: str) -> None:
    assert_own_clicks_are_held(campaign)


@pytest.mark.parametrize(
    ("campaign", "items", "clicks", "own_clicks"),
    [("men", 34, 46, 69), ("women", 46, 46, 46)],
)
def test_the_files_are_those_of_the_package(
    campaign: str, items: int, clicks: int, own_clicks: int
) -> None:
    """Numbers of rows, items and clicks, counted in the package's CSV files."""
    log = random_log(campaign)
    policy = thompson(campaign)
    assert (len(log), log.action_space.n, policy.n) == (10_000, items, items)
    assert log.rewards.sum() == clicks
    assert own_rate(campaign)[0] == pytest.approx(own_clicks / 10_000)
    chances = policy.probabilities(log.observations)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0, atol=1e-9)
    assert len(np.unique(chances, axis=0)) == 3  # one for each position
