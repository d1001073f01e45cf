"""Metrics as d3rlpy writes them, whatever state a run has left them in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koffline.errors import DataError
from koffline.runs.metrics import describe, metric_files, moving_average, read_metric


def written(folder: Path, text: str, name: str = "loss.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_rows_without_a_header(tmp_path: Path) -> None:
    metric = read_metric(written(tmp_path, "1,100,0.5\n2,200,0.25\n"))
    np.testing.assert_array_equal(metric.epochs, [1, 2])
    np.testing.assert_array_equal(metric.steps, [100, 200])
    np.testing.assert_array_equal(metric.values, [0.5, 0.25])
    assert (metric.name, metric.low, metric.high) == ("loss", None, None)


def test_gradients_have_a_header_and_a_range(tmp_path: Path) -> None:
    metric = read_metric(written(tmp_path, "epoch,step,min,max,mean,std\n1,10,-2,3,0.5,1\n", "a.0_grad.csv"))
    assert (metric.values[0], metric.low[0], metric.high[0]) == (0.5, -2.0, 3.0)
    assert metric.name == "a.0_grad"


@pytest.mark.parametrize("text", ["1,100,0.5", "1,100,0.5\n2,2", "1,100,0.5\n2,200,", "\n1,100,0.5\n\n"])
def test_one_row_and_a_last_line_that_is_being_written(tmp_path: Path, text: str) -> None:
    np.testing.assert_array_equal(read_metric(written(tmp_path, text)).values, [0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows yet"),
        ("epoch,step,min,max,mean,std\n", "holds no rows yet"),
        ("1,100,0.5\n2,2\n", r"line 2 is not 3 numbers \('2,2'\)"),
        ("1,100,0.5\nhello\n3,300,0.5\n", "line 2 is not 3 numbers"),
        ("name,value\n1,2\n", "line 1 is not 3 numbers"),
        ("epoch,step,mean\n1,2,3,4\n", "line 2 is not 3 numbers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_metric(written(tmp_path, text))


def test_paths_that_are_no_metric(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_metric(tmp_path / "loss.csv")
    with pytest.raises(DataError, match=r"is a folder; .* plot-all"):
        read_metric(tmp_path)
    (tmp_path / "model.csv").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(DataError, match="is no text"):
        read_metric(tmp_path / "model.csv")


def test_statistics_by_hand(tmp_path: Path) -> None:
    metric = read_metric(written(tmp_path, "1,100,1\n2,200,nan\n3,300,5\n4,400,inf\n"))
    assert describe(metric)[1:] == [
        "EPOCH      : 4",
        "TOTAL STEPS: 400",
        "LAST VALUE : inf",
        "MAX VALUE  : 5",
        "MIN VALUE  : 1",
        "MEAN VALUE : 3",
        "STD VALUE  : 2",
        "NOT FINITE : 2 of 4 values, left out above",
    ]


def test_statistics_without_a_finite_value(tmp_path: Path) -> None:
    lines = describe(read_metric(written(tmp_path, "1,1000000000,nan\n")))
    assert "TOTAL STEPS: 1000000000" in lines
    assert "MAX VALUE  : nan" in lines


@given(st.lists(st.floats(-100, 100) | st.just(np.nan) | st.just(np.inf), min_size=1), st.integers(1, 9))
def test_moving_average_is_the_mean_of_the_window(values: list[float], window: int) -> None:
    found = moving_average(np.array(values), window)
    for row, value in enumerate(values):
        recent = [v for v in values[max(0, row - window + 1) : row + 1] if np.isfinite(v)]
        wanted = np.mean(recent) if np.isfinite(value) else np.nan
        np.testing.assert_allclose(found[row], wanted, rtol=1e-12, atol=1e-12)


def test_moving_average_by_hand() -> None:
    """d3rlpy averages window + 1 values."""
    np.testing.assert_array_equal(moving_average(np.array([1.0, 3.0, 8.0]), 1), [1.0, 3.0, 8.0])
    np.testing.assert_array_equal(moving_average(np.array([1.0, 3.0, 8.0]), 2), [1.0, 2.0, 5.5])


def test_files_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no metrics .* give the folder of a run"):
        metric_files(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        metric_files(tmp_path / "nothing")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("b.csv", "a_grad.csv", "a.csv", "params.json"):
        written(run, "1,1,1\n", name)
    assert [path.name for path in metric_files(run)] == ["a.csv", "b.csv", "a_grad.csv"]
    with pytest.raises(DataError, match="give one of its runs, such as run"):
        metric_files(tmp_path)
    with pytest.raises(DataError, match=r"is a file; .* plot for one metric"):
        metric_files(run / "a.csv")
