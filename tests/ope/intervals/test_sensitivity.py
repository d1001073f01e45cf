"""Dependence on the assumed norm, and the figures."""

import json

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.intervals.sensitivity import norm_sensitivity
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.names import KERNEL_CALIBRATED, KERNEL_SIMULTANEOUS
from koffline.report.interval_plots import plot_norm_sensitivity
from scripts.bench.interval_coverage import plot_coverage_evidence
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


def test_default_norms_surround_the_one_in_use() -> None:
    exact, system = finite_system("chain_tuples", rows=800)
    record = norm_sensitivity(system, kind=KERNEL_SIMULTANEOUS, settings=_SETTINGS)
    assert record.norms[0] < record.fitted < record.chosen < record.norms[-1]
    widths = (record.highs - record.lows)[np.isfinite(record.lows)]
    assert np.all(np.diff(widths) >= -1e-9)
    figure = plot_norm_sensitivity(record, exact.value)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["kernel-simultaneous 95%", "fitted value", "ρ in use", "norm of the fit", "truth"]
    figure.canvas.draw()


@pytest.mark.parametrize(
    ("norms", "kind", "message"),
    [
        ((), KERNEL_SIMULTANEOUS, "norms is empty"),
        ((1.0, -1.0), KERNEL_SIMULTANEOUS, "norm_bound is -1.0"),
        ((1.0,), KERNEL_CALIBRATED, "received 'kernel-calibrated'"),
    ],
)
def test_bad_requests(norms: tuple[float, ...], kind: str, message: str) -> None:
    _, system = finite_system("chain_tuples", rows=50)
    with pytest.raises(ConfigError, match=message):
        norm_sensitivity(system, norms, kind, _SETTINGS)


def test_figure_of_the_evidence() -> None:
    rows = [
        {
            "problem": problem,
            "features": "one-hot",
            "kind": kind,
            "rows": rows,
            "coverage": 0.95,
            "coverage_low": 0.93,
            "coverage_high": 0.97,
            "median_width": width,
            "truth": -2.0,
        }
        for problem in ("a", "b")
        for kind, width in (("kernel-calibrated", 0.5), ("dual", None))
        for rows in (1000, 250)
    ]
    figure = plot_coverage_evidence(rows)
    assert len(figure.axes) == 4
    coverage, width = figure.axes[:2]
    assert len(coverage.containers) == 2
    (line, empty) = (one for one in width.lines)
    assert list(line.get_xdata()) == [250, 1000]
    assert list(line.get_ydata()) == [0.25, 0.25]
    assert len(empty.get_xdata()) == 0
    figure.canvas.draw()
