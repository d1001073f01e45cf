"""Certified and simultaneous intervals: parts, alarms, refusals."""

import dataclasses
import json

import pytest
import torch

from koffline.errors import ConfigError
from koffline.ope.intervals.kernel_sets import feature_interval, martingale_threshold, start_deviation
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import feasible_set
from koffline.ope.names import KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS
from tests.ope.intervals.systems import finite_system


def test_parts_add_up() -> None:
    _, system = finite_system("chain_tuples", rows=2000)
    settings = KernelIntervalSettings(
        value_bounds=(-0.5, 1.0), norm_bound=3.0, level=0.9, reward_bounds=(-0.6, 1.0)
    )
    result = feature_interval(system, KERNEL_CERTIFIED, settings)
    length = (1.0 + 0.95 * 1.0) - (-0.6 - 0.95 * 0.5)
    assert result.threshold == pytest.approx(martingale_threshold(length, system.row_weights, 0.05))
    margin = start_deviation((-0.5, 1.0), system.start_weights, 0.05)
    found = feasible_set(system).value_range(result.threshold, 3.0)
    assert result.interval.low == pytest.approx(max(found.low - margin, -0.5))
    assert result.interval.high == pytest.approx(min(found.high + margin, 1.0))
    assert "given" in result.interval.assumptions


def test_a_class_that_cannot_explain_the_log_is_an_alarm() -> None:
    """A reward that depends on what no feature sees: the best constant leaves too large a kernel loss."""
    _, system = finite_system("chain_tuples", rows=2000)
    size = len(system)
    flat = torch.ones(size, 1, dtype=torch.float64)
    poor = dataclasses.replace(
        system, now=flat, later=flat, starts=flat, rewards=system.rewards + 5.0 * system.kernel_inputs[:, 0]
    )
    for kind in (KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS):
        settings = KernelIntervalSettings(draws=99, value_bounds=(-10.0, 10.0))
        result = feature_interval(poor, kind, settings)
        assert result.interval is None
        assert result.misspecified
        assert result.least_loss > result.threshold
        assert "cannot explain" in result.warnings[0]
        json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 1.0}, "level is 1.0"),
        ({"norm_bound": 0.0}, "norm_bound is 0.0"),
        ({"value_bounds": (2.0, 1.0)}, "value_bounds is"),
        ({"reward_bounds": (float("-inf"), 1.0)}, "reward_bounds is"),
        ({"draws": 10}, "give 39 or more"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KernelIntervalSettings(**options)
