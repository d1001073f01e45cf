"""What figures and tables of the experiments share: names, colours, curves with bands, numbers, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped
from scipy import stats

from koffline.runs.figures import INK, STYLE
from koffline.spread import LEVEL
from koffline.store.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


LABELS = {
    "td0": "TD(0)",
    "fvi": "FVI",
    "rg": "RG",
    "gtd2": "GTD2",
    "sbeed": "SBEED",
    "kloss": "K-loss",
}
LOSSES = {"kloss": "K-loss", "l2": "L2 loss"}
METHODS = tuple(LABELS)  # the order in which they stand
# Okabe and Ito's palette, safe for colour-blind readers, and a marker each for those who print in grey.
COLOURS = {
    "td0": "#56B4E9",
    "fvi": "#0072B2",
    "rg": "#009E73",
    "gtd2": "#7F7F7F",
    "sbeed": "#CC79A7",
    "kloss": "#D55E00",
}
MARKERS = {"td0": "v", "fvi": "^", "rg": "s", "gtd2": "D", "sbeed": "P", "kloss": "o"}
_FEW_DECADES = 40.0  # ratio of the ends of an axis
SOFT = "#9aa5b1"
WORLD_NAMES = {
    "chain": "Chain",
    "puddle_world": "Puddle World",
    "cart_pole": "CartPole",
    "mountain_car": "Mountain Car",
}
_DPI, _TALLEST = 200, 2600.0  # dots an inch; dots of a figure's height, above which it is drawn coarser
_STYLE: dict[Any, Any] = {
    **STYLE,
    "axes.titlelocation": "left",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.dpi": _DPI,
    "svg.fonttype": "path",
}


def house_style() -> AbstractContextManager[None]:
    """The settings of matplotlib inside the block; its global state is left as it was."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``path`` as .png and .svg; the same figure gives the same bytes (no dates, no versions)."""
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
    }
    with house_style():
        _settle_layout(figure)
        for kind, fixed in metadata.items():
            target = path.with_name(f"{path.name}.{kind}")
            with atomic_file(target, force=True) as temporary:
                dpi = min(_TALLEST / float(figure.get_size_inches()[1]), float(_DPI))
                figure.savefig(temporary, format=kind, metadata=fixed, dpi=dpi)


def _settle_layout(figure: Figure) -> None:
    """Keep the places that the layout found, rounded: its solver's last bits differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())


@dataclass(frozen=True, eq=False)
class Band:
    """Mean over the seeds that are finite, and its 95 % t-interval (NaN for fewer than two)."""

    mean: Float[np.ndarray, " time"]
    low: Float[np.ndarray, " time"]
    high: Float[np.ndarray, " time"]
    alive: Shaped[np.ndarray, " time"]  # finite seeds

    @classmethod
    def over_seeds(cls, values: Shaped[np.ndarray, "time seed"]) -> Band:
        """From one curve per seed."""
        finite = np.isfinite(values)
        alive = finite.sum(axis=1)
        kept = np.where(finite, values, 0.0).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = kept.sum(axis=1) / alive
            spread = np.where(finite, values - mean[:, None], 0.0)
            variance = (spread**2).sum(axis=1) / (alive - 1)
            half = stats.t.ppf(0.5 + LEVEL / 2.0, np.maximum(alive - 1, 1)) * np.sqrt(variance / alive)
        half[alive < 2] = np.nan
        return cls(mean, mean - half, mean + half, alive)


def draw_curve(
    axes: Axes,
    method: str,
    x: Shaped[np.ndarray, " time"],
    values: Shaped[np.ndarray, "time seed"],
    most: float = np.inf,
) -> None:
    """A method's mean and band on a logarithmic axis that ends at ``most``.

    Solid while all seeds are alive, dotted for the mean of those left.
    """
    band, colour = Band.over_seeds(values), COLOURS[method]
    whole = band.alive == values.shape[1]
    mean = np.where(band.mean > 0.0, band.mean, np.nan)
    floor = positive_floor(band.mean)
    ours = method == "kloss"
    with np.errstate(invalid="ignore"):
        low, high = np.maximum(band.low, floor), np.maximum(band.high, floor)
    axes.fill_between(
        x, low, high, where=whole & np.isfinite(low) & (mean < most), color=colour, alpha=0.18, lw=0
    )
    axes.plot(
        x,
        np.where(whole, mean, np.nan),
        color=colour,
        marker=MARKERS[method],
        ms=4,
        markevery=_few_markers(len(x), method),
        lw=2.0 if ours else 1.2,
        zorder=4 if ours else 3,
    )
    # The dotted part starts at the last whole record, so that the line does not break.
    left = ~whole | np.append(~whole[1:], False)
    axes.plot(x, np.where(left, mean, np.nan), color=colour, ls=":", lw=1.0, zorder=2)


def divergences(values: Shaped[np.ndarray, "time seed"]) -> Shaped[np.ndarray, " seed"]:
    """Index of the first record that is not finite, per seed; −1 where all are."""
    gone = ~np.isfinite(values)
    return np.where(gone.any(axis=0), gone.argmax(axis=0), -1)


def mark_divergences(
    axes: Axes, method: str, x: Shaped[np.ndarray, " time"], values: Shaped[np.ndarray, "time seed"]
) -> None:
    """A cross near the upper edge where the first seed diverged, and how many did."""
    first = divergences(values)
    gone = first[first >= 0]
    if not len(gone):
        return
    # Methods have heights of their own, so that crosses at the same x stay apart.
    height = 0.975 - 0.07 * METHODS.index(method)
    transform = axes.get_xaxis_transform()
    where = float(x[gone.min()])
    axes.plot(
        where, height, "X", color=COLOURS[method], ms=8, mec="white", mew=0.7,
        transform=transform, clip_on=False, zorder=6,
    )  # fmt: skip
    axes.annotate(
        f"{len(gone)}/{values.shape[1]}", (where, height), xycoords=transform, xytext=(6, 0),
        textcoords="offset points", va="center", fontsize=7, color=COLOURS[method], zorder=6,
    )  # fmt: skip


def mark_beyond(
    axes: Axes, method: str, x: Shaped[np.ndarray, " time"], values: Shaped[np.ndarray, "time seed"]
) -> None:
    """A triangle at the upper edge, and the number, for a method that ends above the axis."""
    mean = Band.over_seeds(values).mean
    finite = mean[np.isfinite(mean)]
    if not len(finite) or finite[-1] <= axes.get_ylim()[1]:
        return
    where = 0.93 - 0.16 * METHODS.index(method)  # of the width: methods do not hide each other
    axes.plot(where, 0.985, "^", color=COLOURS[method], ms=6, transform=axes.transAxes, zorder=6)
    axes.annotate(
        f"{finite[-1]:.1e}", (where, 0.985), xycoords="axes fraction", xytext=(0, -6),
        textcoords="offset points", ha="center", va="top", fontsize=7, color=COLOURS[method], zorder=6,
    )  # fmt: skip


def positive_floor(values: Shaped[np.ndarray, "..."]) -> float:
    """What stands for zero and below on a logarithmic axis: a tenth of the smallest positive value."""
    positive = values[np.isfinite(values) & (values > 0.0)]
    return 0.1 * float(positive.min()) if len(positive) else 1e-12


def log_limits(axes: Axes, series: Sequence[Shaped[np.ndarray, "..."]], most: float = np.inf) -> None:
    """A logarithmic y axis around the positive values of the series, cut at ``most``."""
    joined = np.concatenate([np.ravel(values) for values in series])
    positive = joined[np.isfinite(joined) & (joined > 0.0)]
    axes.set_yscale("log")
    if not len(positive):
        return
    low, high = float(positive.min()), min(float(positive.max()), most)
    high = max(high, 2.0 * low)
    room = (high / low) ** 0.06
    axes.set_ylim(low / room, high * room)
    tidy_log_ticks(axes.yaxis)


def tidy_log_ticks(axis: Axis) -> None:
    """Labels at 1, 2, 5 where a logarithmic axis spans little, else at the powers of ten; none overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_minor_formatter(NullFormatter())
    if high / low < _FEW_DECADES:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def method_legend(figure: Figure, methods: Sequence[str], extra: Mapping[str, Mapping[str, Any]]) -> None:
    """One legend below all panels: methods in their fixed order, then other kinds of lines."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[m],
            marker=MARKERS[m],
            ms=5,
            lw=2.0 if m == "kloss" else 1.4,
            label=LABELS[m],
        )
        for m in METHODS
        if m in methods
    ]
    handles += [Line2D([], [], label=label, **look) for label, look in extra.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 10), frameon=False,
        handlelength=2.0, columnspacing=1.6,
    )  # fmt: skip


def _few_markers(count: int, method: str) -> tuple[int, int]:
    """(start, step): some eight markers, at places of the method's own."""
    step = max(1, count // 8)
    return (METHODS.index(method) * step // len(METHODS)) % max(count, 1), step


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table; a bar inside a cell would end it."""
    for line in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |"


def interval_text(value: float | None, low: float | None, high: float | None) -> str:
    """0.12 [0.1, 0.14]; without the ends where there is a single seed, 'not finite' after a divergence."""
    if value is None or math.isnan(value):
        return "not finite"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number_text(value)
    return f"{number_text(value)} [{number_text(low)}, {number_text(high)}]"


def number_text(value: float | None) -> str:
    """Three digits; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.3g}"
