"""Metrics of a run as d3rlpy writes them, one CSV each: read, described in words, and drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from koffline.errors import ConfigError, DataError
from koffline.store.files import atomic_file, check_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
# Okabe and Ito's palette, safe for colour-blind readers; further lines repeat it in other strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4d4d4d")
_STROKES = ("-", "--", ":", "-.")
_DPI = 150
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "font.size": 9,
    "legend.frameon": False,
    "figure.dpi": 120,
    "svg.hashsalt": "koffline",
}


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric over a run: columns by name (epoch, step, value …), rows in the order of the file.

    Values may be NaN or infinite. shown: the column to draw, "mean" where there is a range (gradients).
    """

    path: Path
    columns: Mapping[str, Float[np.ndarray, " row"]]
    shown: str = "value"

    @property
    def values(self) -> Float[np.ndarray, " row"]:
        """The column to draw."""
        return self.columns[self.shown]

    @property
    def finite(self) -> Float[np.ndarray, " finite"]:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]


def read_metric(path: str | Path) -> Metric:
    """Read a metric's CSV; a last line that is still being written is left out. Raises DataError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise DataError(
            f"{path} cannot be read ({reason}); give a metric's CSV, such as loss.csv of a run"
        ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    names = ["epoch", "step", "value"]  # d3rlpy gives a header to gradients only
    if lines and lines[0].startswith("epoch,step,"):
        names = lines.pop(0).split(",")
    rows = [_numbers(line, len(names)) for line in lines]
    if rows and rows[-1] is None and not text.endswith("\n"):
        rows.pop()  # the run writes it at this moment, or was killed while it did
    if None in rows:
        wrong = f"a line is not {len(names)} numbers ({lines[rows.index(None)][:40]!r})"
        raise DataError(f"{path}: {wrong}; give a metric's CSV as d3rlpy writes it (epoch,step,value)")
    if not rows:
        raise DataError(f"{path} holds no rows yet; wait for the first epoch to end")
    columns = dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))
    return Metric(path, columns, "mean" if "mean" in names else names[2])


def _numbers(line: str, count: int) -> list[float] | None:
    try:
        cells = [float(cell) for cell in line.split(",")]
    except ValueError:
        return None
    return cells if len(cells) == count else None


def metric_files(folder: str | Path) -> list[Path]:
    """The CSV files of a run by name, gradients last. Raises DataError where there are none."""
    found = sorted(Path(folder).glob("*.csv"), key=lambda path: (path.stem.endswith("_grad"), path.name))
    if not found:
        raise DataError(f"{folder} is no folder with metrics (*.csv); give the folder of a run")
    return found


def describe(metric: Metric) -> list[str]:
    """The lines of ``koffline stats``: d3rlpy's, and the last value, the mean, and what is not finite."""
    finite, count = metric.finite, len(metric.values)
    lines = [f"FILE NAME  : {metric.path}", f"EPOCH      : {metric.columns['epoch'][-1]:.15g}"]
    lines += [f"TOTAL STEPS: {metric.columns['step'][-1]:.15g}", f"LAST VALUE : {metric.values[-1]:.10g}"]
    for label, compute in (("MAX", np.max), ("MIN", np.min), ("MEAN", np.mean), ("STD", np.std)):
        lines.append(f"{label + ' VALUE':<11}: {compute(finite) if len(finite) else math.nan:.10g}")
    if len(finite) < count:
        lines.append(f"NOT FINITE : {count - len(finite)} of {count} values, left out above")
    return lines


def moving_average(values: Float[np.ndarray, " row"], window: int) -> Float[np.ndarray, " row"]:
    """(N,) mean of each value and the window − 1 before it, fewer at the start.

    Values that are not finite are left out of the means of others, and are NaN themselves.
    """
    means = np.full(len(values), np.nan)
    for row in np.flatnonzero(np.isfinite(values)):
        recent = values[max(0, row - window + 1) : row + 1]
        means[row] = recent[np.isfinite(recent)].mean()
    return means


def draw_metrics(
    figure: Figure,
    metrics: Sequence[Metric],
    window: int = 1,
    show_steps: bool = False,
    labels: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """One line per metric, with d3rlpy's options of plot. labels: one per metric, or none."""
    axes = figure.add_subplot()
    for index, metric in enumerate(metrics):
        row, column = divmod(index, len(_COLOURS))
        look: dict[str, Any] = {"color": _COLOURS[column], "ls": _STROKES[row % len(_STROKES)]}
        label = labels[index] if labels else "/".join(metric.path.parts[-2:])
        x = metric.columns["step" if show_steps else "epoch"]
        axes.plot(x, moving_average(metric.values, window), marker=".", ms=4, lw=1.6, label=label, **look)
    names = {metric.path.stem for metric in metrics}
    axes.set_xlabel("steps" if show_steps else "epochs")
    axes.set_ylabel(names.pop() if len(names) == 1 else "value")
    axes.set_title(title or "", loc="left")
    _count_whole(axes)
    axes.legend()


def draw_grid(figure: Figure, metrics: Sequence[Metric], title: str | None = None) -> None:
    """A panel for each metric."""
    columns = math.ceil(math.sqrt(len(metrics)))
    panels = figure.subplots(math.ceil(len(metrics) / columns), columns, squeeze=False)
    for axes, metric in zip(panels.flat, metrics, strict=False):
        held = metric.columns
        axes.plot(held["epoch"], metric.values, ".-", ms=4, lw=1.6, color=_COLOURS[0])
        if "min" in held and "max" in held:
            axes.fill_between(held["epoch"], held["min"], held["max"], color=_COLOURS[0], alpha=0.15, lw=0)
        axes.set_title(textwrap.fill(metric.path.stem, 32), loc="left")
        axes.set_xlabel("epochs")
        _count_whole(axes)
    for axes in panels.flat[len(metrics) :]:
        axes.remove()
    figure.suptitle(title or "")


def grid_size(count: int) -> tuple[float, float]:
    """Inches of a grid of panels."""
    columns = math.ceil(math.sqrt(count))
    return max(5.0, 3.4 * columns), max(3.4, 2.5 * math.ceil(count / columns))


def _count_whole(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def check_picture(path: Path) -> None:
    """Raise ConfigError for an ending that is no picture's, DataError where no file can be written."""
    _file_format(path)
    check_target(path, force=True)


def save(draw: Callable[[Figure], None], size: tuple[float, float], path: Path) -> None:
    """Draw a figure of `size` inches into a file, which replaces an older picture.

    Raises ConfigError for an unknown ending, DataError for a file that cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        format_ = _file_format(path)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format_)
        with atomic_file(path, force=True) as temporary:
            figure.savefig(temporary, format=format_, dpi=_DPI, metadata=metadata)


def _file_format(path: Path) -> str:
    from matplotlib.backend_bases import FigureCanvasBase

    ending, known = path.suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if ending not in known:
        endings = ", ".join(f".{format_}" for format_ in sorted(known))
        raise ConfigError(f"--save {path}: the ending says the format; give one of {endings}")
    return ending
