"""The table of estimators in a terminal, on a page and as a forest plot; words; folders of results."""

from pathlib import Path

import pytest

from koffline.errors import ConfigError
from koffline.ope.estimate import BoundRow, EstimateRow, EstimateTable
from koffline.ope.results import Interval, PointEstimate, percent
from koffline.report.estimates import collected_reasons, collected_warnings, print_estimates, write_estimates
from koffline.report.folder import check_output_directory
from koffline.report.interval_plots import plot_forest
from koffline.report.table import count_of, describe_lines, labelled, promise

_GUESS = "What stands in for the bounds was read off the log."
_INTERVAL = {"low": 1.23456, "high": 2.0, "level": 0.9999, "kind": "hoeffding", "assumptions": "long"}


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


def test_each_reason_and_warning_once(table: EstimateTable) -> None:
    assert collected_reasons(table) == {"no densities": ["is", "wis"]}
    assert collected_warnings(table) == {"Beware.": ["kloss"], _GUESS: ["kernel-certified"]}


def test_terminal(table: EstimateTable, capsys: pytest.CaptureFixture[str]) -> None:
    print_estimates(table)
    shown = capsys.readouterr().out
    for text in ("99.99% interval", "kloss !", "-118.5 … 321", "calibrated", "is, wis do not apply: no",
                 "(99.99% kernel-certified, certified)", "dual: none: no class"):  # fmt: skip
        assert text in shown
    assert "mql !" not in shown


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


def test_where_results_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good place stays as it was; one that takes no directory is refused, as on a read-only mount."""
    check_output_directory(tmp_path / "a" / "b", force=False, marker="estimate.json")
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"not writable \(Read-only file system\); name a directory"):
        check_output_directory(tmp_path / "a", force=False, marker="estimate.json")


def test_words() -> None:
    assert [percent(share) for share in (0.95, 0.9999, 1.0 - 0.9999)] == ["95%", "99.99%", "0.01%"]
    assert [count_of(1, "episode"), count_of(2000, "row")] == ["1 episode", "2,000 rows"]
    for kind in ("bootstrap", "kernel-simultaneous", "episodes-t"):
        assert promise(kind) == "calibrated"
    for kind in ("kernel-certified", "dual", "hoeffding"):
        assert promise(kind) == "certified"
    assert labelled("Reader: 1 row was left out") == ("note", "1 row was left out")
    assert labelled("coverage is low") == ("warning", "coverage is low")


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (0.123456, ["0.1235"]),
        (None, ["–"]),
        (True, ["yes"]),
        ([], ["–"]),
        ([1, 2.34567], ["1, 2.346"]),
        ([0.5] * 50, ["50 values"]),
        ([{"a": 1}], ["1 record"]),
        ({}, ["–"]),
        ({"kloss": 1.23456, "missing": None}, ["kloss 1.235"]),
        ({"details": {"tau_low": 1e-7, "x": [0.1] * 9}}, ["details tau low 1e-07", "details x 9 values"]),
        (_INTERVAL, ["1.235 … 2 (99.99% hoeffding)"]),
        ({"hoeffding": _INTERVAL, "n": 3}, ["1.235 … 2 (99.99% hoeffding)", "n 3"]),
        ({"other": _INTERVAL}, ["other 1.235 … 2 (99.99% hoeffding)"]),
    ],
)
def test_diagnostics_line_by_line(value: object, lines: list[str]) -> None:
    assert describe_lines(value) == lines
