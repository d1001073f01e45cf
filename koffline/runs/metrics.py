"""Metrics of a run as d3rlpy writes them: <name>.csv without a header, <name>_grad.csv with one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from koffline.errors import DataError

_VALUE_NAMES = ("value", "mean")  # the column to draw, where a header names the columns


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric over a run; rows in the order of the file. Values may be NaN or infinite.

    low, high: the range around the value, where the file holds one (gradients).
    """

    path: Path
    epochs: Float[np.ndarray, " row"]
    steps: Float[np.ndarray, " row"]
    values: Float[np.ndarray, " row"]
    low: Float[np.ndarray, " row"] | None = None
    high: Float[np.ndarray, " row"] | None = None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def finite(self) -> Float[np.ndarray, " finite"]:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]


def read_metric(path: str | Path) -> Metric:
    """Read a metric's CSV; a last line that is still being written is left out. Raises DataError."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a metric's CSV in it, or use plot-all")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is no text; give a metric's CSV, such as loss.csv of a run") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = _header(lines[0][1]) if lines else None
    columns = _read_rows(path, lines[1:] if header else lines, header, text.endswith("\n"))
    if not len(columns):
        raise DataError(f"{path} holds no rows yet; wait for the first epoch to end")
    if header is None:
        return Metric(path, columns[:, 0], columns[:, 1], columns[:, 2])
    named = dict(zip(header, columns.T, strict=True))
    value = next((name for name in _VALUE_NAMES if name in named), header[2])
    return Metric(path, columns[:, 0], columns[:, 1], named[value], named.get("min"), named.get("max"))


def metric_files(folder: str | Path) -> list[Path]:
    """The CSV files of a run by name, gradients last. Raises DataError where there are none."""
    folder = Path(folder)
    if not folder.exists():
        raise DataError(f"{folder}: there is no such folder; check the path")
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; give the folder of a run, or use plot for one metric")
    found = sorted(folder.glob("*.csv"), key=lambda path: (path.stem.endswith("_grad"), path.name))
    if not found:
        runs = sorted({path.parent.name for path in folder.glob("*/*.csv")})
        hint = f"give one of its runs, such as {runs[-1]}" if runs else "give the folder of a run"
        raise DataError(f"{folder} holds no metrics (*.csv); {hint}")
    return found


def moving_average(values: Float[np.ndarray, " row"], window: int) -> Float[np.ndarray, " row"]:
    """(N,) mean of each value and the window − 1 before it, fewer at the start.

    Values that are not finite are left out of the means of others, and are NaN themselves.
    """
    means = np.full(len(values), np.nan)
    for row in np.flatnonzero(np.isfinite(values)):
        recent = values[max(0, row - window + 1) : row + 1]
        means[row] = recent[np.isfinite(recent)].mean()
    return means


def describe(metric: Metric) -> list[str]:
    """The lines of ``koffline stats``: d3rlpy's, and the last value, the mean, and what is not finite."""
    finite = metric.finite
    lines = [f"FILE NAME  : {metric.path}", f"EPOCH      : {metric.epochs[-1]:.15g}"]
    lines += [f"TOTAL STEPS: {metric.steps[-1]:.15g}", f"LAST VALUE : {_number(metric.values[-1])}"]
    for label, compute in (("MAX", np.max), ("MIN", np.min), ("MEAN", np.mean), ("STD", np.std)):
        value = float(compute(finite)) if len(finite) else math.nan
        lines.append(f"{label + ' VALUE':<11}: {_number(value)}")
    if len(finite) < len(metric.values):
        missing = len(metric.values) - len(finite)
        lines.append(f"NOT FINITE : {missing} of {len(metric.values)} values, left out above")
    return lines


def _number(value: float) -> str:
    return f"{value:.10g}"


def _header(line: str) -> list[str] | None:
    cells = [cell.strip() for cell in line.split(",")]
    return cells if cells[:2] == ["epoch", "step"] and len(cells) > 2 else None


def _read_rows(
    path: Path, lines: list[tuple[int, str]], header: list[str] | None, is_whole: bool
) -> np.ndarray:
    width = len(header) if header else 3
    rows: list[list[float]] = []
    for number, line in lines:
        try:
            cells = [float(cell) for cell in line.split(",")]
        except ValueError:
            cells = []
        if len(cells) != width:
            if number == lines[-1][0] and not is_whole:
                break  # the run writes it at this moment, or was killed while it did
            raise DataError(
                f"{path}: line {number} is not {width} numbers ({line[:40]!r}); give a metric's CSV as "
                "d3rlpy writes it (epoch,step,value)"
            )
        rows.append(cells)
    return np.array(rows, dtype=np.float64).reshape(-1, width)
