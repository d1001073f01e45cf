"""Sentences say what the figures show."""

import numpy as np
import pytest

from koffline.ope.diagnose.diagnosing import diagnose
from koffline.ope.diagnose.findings import _describe_profile
from koffline.ope.diagnose.profiles import Profile
from koffline.report.diagnosis_plots import plot_maps
from tests.ope.problems import SOFT, discrete_log


def profile(mean: list[float], error: list[float]) -> Profile:
    bins = np.arange(len(mean), dtype=float)
    numbers = np.array(mean)
    rows = np.full(len(mean), 50)
    return Profile("value", bins, numbers, np.array(error), numbers, numbers, rows)


@pytest.mark.parametrize(
    ("mean", "error", "expected"),
    [
        ([0.2, -0.9, 2.0], [0.001, 0.1, 1.5], "around value 1: -0.9 ± 0.1."),  # neither largest z nor chance
        ([0.2, 0.0, 0.0], [0.0, 0.1, 0.1], "around value 0: +0.2 in every row."),
    ],
)
def test_the_largest_mean_beyond_chance_is_named(mean, error, expected) -> None:
    said = _describe_profile(profile(mean, error), 0.05)
    assert said is not None
    assert said.endswith(expected)


def test_nothing_is_said_of_chance() -> None:
    assert _describe_profile(profile([0.1, -0.1, 5.0], [0.1, 0.1, 4.0]), 0.05) is None


def test_sums_over_a_window_are_called_so() -> None:
    def high(states, actions):
        return 30.0 + states[:, 0]

    log = discrete_log(200)
    several, one = (
        diagnose(high, log, SOFT, 0.9, draws=99, on_policy=True, window=window) for window in (5, 1)
    )
    assert "over 5 steps plus the value after them by" in " ".join(several.findings)
    assert "reward plus discounted next value by" in " ".join(one.findings)
    axes = plot_maps(several).axes
    assert "over 5 steps" in axes[-1].get_ylabel()
    assert axes[0].get_facecolor()[:3] != (1.0, 1.0, 1.0)  # white is the colour of zero
