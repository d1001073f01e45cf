"""Dependence on the assumed norm."""

import json

import numpy as np
import pytest

from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.intervals.sensitivity import norm_sensitivity
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.names import KERNEL_SIMULTANEOUS
from tests.ope.intervals.systems import finite_system

_SETTINGS = KernelIntervalSettings(draws=199)


def test_each_norm_gives_the_interval_of_that_norm() -> None:
    _, system = finite_system("chain_tuples", rows=800)
    record = norm_sensitivity(system, (3.0, 0.001, 8.0), KERNEL_SIMULTANEOUS, _SETTINGS)
    assert list(record.norms) == [0.001, 3.0, 8.0]
    assert np.isnan(record.lows[0])  # almost constant values cannot explain the rewards
    assert record.least_norm == 3.0
    for norm, low, high in list(zip(record.norms, record.lows, record.highs, strict=True))[1:]:
        options = KernelIntervalSettings(draws=199, norm_bound=norm)
        interval = feature_interval(system, KERNEL_SIMULTANEOUS, options).interval
        assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    json.dumps(record.as_dict(), allow_nan=False)
