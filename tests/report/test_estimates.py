"""The table of estimators in a terminal, on a page and as a forest plot; words; folders of results."""

from pathlib import Path

import pytest

from koffline.ope.estimate import BoundRow, EstimateRow, EstimateTable
from koffline.ope.results import Interval, PointEstimate
from koffline.report.estimates import write_estimates
from koffline.report.interval_plots import plot_forest

_GUESS = "What stands in for the bounds was read off the log."


def _row(name: str, low: float, high: float, warnings: tuple[str, ...] = ()) -> EstimateRow:
    interval = Interval(low, high, 0.9999, "bootstrap")
    found = PointEstimate(name, (low + high) / 2.0, interval=interval, warnings=warnings)
    return EstimateRow(name, "value function", found, None, 0.1)


def _missing(name: str) -> EstimateRow:
    return EstimateRow(name, "importance sampling", None, "no densities", 0.0)


@pytest.fixture
def table() -> EstimateTable:
    certified = Interval(-900.0, 900.0, 0.9999, "kernel-certified", "many")
    return EstimateTable(
        rows=(_row("kloss", -118.5, 321.0, ("Beware.",)), _row("mql", 0.0, 0.00039), _row("mwl", 0.0, 1.0),
              _row("drl", 0.0, 2.0), _missing("is"), _missing("wis")),
        bounds=(BoundRow("kernel-certified", certified, _GUESS), BoundRow("dual", None, "no class")),
        gamma=0.9, level=0.9999, n_transitions=10, n_episodes=1, policy="uniform", source=None, seed=0,
        seconds=0.1, data_sha256="00", diagnostics={"behavior_return": 1.0},
    )  # fmt: skip


def test_page(table: EstimateTable, tmp_path: Path) -> None:
    page = write_estimates(table, tmp_path / "out", None, "koffline evaluate").read_text(encoding="utf-8")
    for text in ("99.99% interval", "<td>kloss ! ", "<td>mql <", "<td>calibrated</td>", "<td>certified</td>",
                 "<td>kernel-certified !</td>", "is, wis</td>", "1 episode\n"):  # fmt: skip
        assert text in page
    assert page.count("no densities") == 1


def test_the_forest_holds_the_default_interval_and_tells_promises_apart(table: EstimateTable) -> None:
    axes = plot_forest(table).axes[0]
    low, high = axes.get_xlim()
    assert -900.0 < low < -118.5  # a certified one may go on
    assert high > 321.0
    legend = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"calibrated interval", "certified interval"} <= legend
    assert len({str(lines.get_linestyle()) for lines in axes.collections}) == 2
