"""Common style of the experiments' figures and tables: names, colours, curves with
bands, text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Shaped
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from koffline.experiments.seed_statistics import SeedInterval, band, mean_over_seeds
from koffline.report.plots import INK, STYLE

Numbers = Shaped[np.ndarray, "time seed"]
Series = Mapping[str, tuple[np.ndarray, Numbers]]  # by method, with their x (T,)
LABELS = {
    "td0": "TD(0)",
    "fvi": "FVI",
    "rg": "RG",
    "gtd2": "GTD2",
    "sbeed": "SBEED",
    "kloss": "K-loss",
}
METHODS = tuple(LABELS)  # in the order of the legend
LABELS |= {"memory": "K-loss with memory", "kloss_slow": "K-loss with a slow copy"}
LABELS |= {"kloss_mixture": "K-loss, diagonal 1/5000"}
# Okabe and Ito's palette, safe for colour-blind readers, and a marker each for those
# who print in grey.
_PALETTE = (
    "#56B4E9",
    "#0072B2",
    "#009E73",
    "#7F7F7F",
    "#CC79A7",
    "#D55E00",
    "#1F1F1F",
    "#E69F00",
    "#8C510A",
)
COLOURS = dict(zip(LABELS, _PALETTE, strict=True))
MARKERS = dict(zip(LABELS, "v^sDPo*Xh", strict=True))
WORLD_NAMES = {
    "puddle_world": "Puddle World",
    "cart_pole": "CartPole",
    "gymnasium_pole": "Gymnasium's pole",
    "mountain_car": "Mountain Car",
}
LONG_NAMES = WORLD_NAMES | {
    "chain": "Chain of Tsitsiklis and Van Roy",
    "cart_pole": "CartPole (noisy pole)",
    "gymnasium_pole": "CartPole (Gymnasium's pole, noisy)",
    "mountain_car": "Mountain Car (noisy)",
}
SOFT = "#9aa5b1"
Look: TypeAlias = dict[str, Any]  # matplotlib's options of a line
# levels: the best constant, "solved"
DOTTED: Look = {
    "ls": (0, (1, 2)),
    "lw": 1.0,
}
# coordinates of a path, of which hundredths of a point are kept
_LONG_FRACTION = re.compile(rb"(?<= )(-?\d+\.\d\d)\d+(?=[ \"\n])")
_FEW_DECADES = 40.0  # ratio of the ends of an axis that spans few decades
# dots per inch; height in dots above which a figure gets fewer dots per inch
_DPI = 200
_TALLEST = 2600.0
_SHARE_OF_DOTS = 0.6  # of the points that an SVG holds as pictures
HOUSE_STYLE: dict[str, object] = {  # for matplotlib.rc_context
    **STYLE,
    "axes.titlelocation": "left",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.dpi": _DPI,
    "font.size": 9,
    # all texts are ours; ticks of logarithmic axes are formulas
    "text.parse_math": True,
}


def place_words(place: str) -> str:
    """A world, or a world at a temperature of the target policy ("puddle_world T 3"),
    for people.
    """
    world, _, temperature = place.partition(" ")
    name = LONG_NAMES.get(world, world)
    if temperature.startswith("T ") or temperature == "random":
        return f"{name}, {temperature}"
    return LONG_NAMES.get(place, place)


def images_of(figure: Figure) -> dict[str, bytes]:
    """Contents of the files of a figure by their endings.

    Equal figures give equal bytes (no dates).
    """
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    # Round the positions of the layout, because the last bits
    # of its solver differ between runs.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())
    dpi = min(_TALLEST / float(figure.get_size_inches()[1]), float(_DPI))
    images: dict[str, bytes] = {}
    for kind, fixed in metadata.items():
        share = 1.0
        if kind == "svg":
            share = _SHARE_OF_DOTS
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=fixed, dpi=dpi * share)
        images[kind] = content.getvalue()
    images["png"] = _with_palette(images["png"])
    images["svg"] = _LONG_FRACTION.sub(rb"\1", images["svg"])
    return images


def _with_palette(png: bytes) -> bytes:
    """The picture in 256 colours, which makes the file a third as large."""
    content = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        colours = picture.convert("RGB").quantize(
            256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        colours.save(content, format="PNG", optimize=True, dpi=picture.info["dpi"])
    return content.getvalue()


def draw_errors(axes: Axes, shown: Series, most: float = np.inf) -> None:
    """Draw the methods' curves, x (T,) and errors (T, S), on a log axis up to ``most``;
    mark divergences.
    """
    for method, (x, values) in shown.items():
        _draw_curve(axes, method, x, values, most)
        _mark_divergences(axes, method, x, values)
    means = np.concatenate(
        [mean_over_seeds(values).value for _, values in shown.values()]
    )
    positive = means[np.isfinite(means) & (means > 0.0)]
    axes.set_yscale("log")
    if len(positive):
        low = float(positive.min())
        high = max(min(float(positive.max()), most), 2.0 * low)
        room = (high / low) ** 0.06
        axes.set_ylim(low / room, high * room)
        tidy_log_ticks(axes.yaxis)


def _draw_curve(
    axes: Axes, method: str, x: np.ndarray, values: Numbers, most: float
) -> None:
    """Draw a method's mean and band until a seed diverges or the mean reaches
    ``most``.
    """
    mean, low, high = mean_over_seeds(values)
    look = line_look(method)
    mean = np.where(mean > 0.0, mean, np.nan)
    floor = 0.1 * np.nanmin(mean, initial=np.inf)  # replaces values at or below zero
    shown = np.isfinite(low) & (mean < most)
    low = np.maximum(low, floor)
    high = np.maximum(high, floor)
    axes.fill_between(x, low, high, where=shown, color=look["color"], alpha=0.18, lw=0)
    # About eight markers, at different positions for each method.
    step = max(1, len(x) // 8)
    first = (METHODS.index(method) * step // len(METHODS)) % max(len(x), 1)
    width = 1.2
    order = 3
    if method == "kloss":  # above the others
        width = 2.0
        order = 4
    axes.plot(x, mean, **look, ms=4, markevery=(first, step), lw=width, zorder=order)


def draw_returns(axes: Axes, shown: Series, threshold: float | None) -> None:
    """Curves of critics, steps (T,) and returns (R, T): interquartile means with
    bootstrap intervals.

    threshold: return that solves the environment; not drawn if far above the curves.
    """
    axes.set_xlabel("thousand environment steps", fontsize=8)
    highest = -np.inf
    for critic, (steps, returns) in shown.items():
        x = steps / 1000.0
        look = line_look(critic)
        width = 1.1
        order = 3
        if critic == "kloss":  # above the others
            width = 1.8
            order = 4
        mean, low, high = band(returns.astype(np.float64))
        highest = max(highest, float(mean.max()))
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.plot(
            x, mean, **look, ms=3, markevery=max(1, len(x) // 6), lw=width, zorder=order
        )
    if threshold is not None and highest > 0.5 * threshold:
        axes.axhline(threshold, color=SOFT, **DOTTED, zorder=1)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8, colors=INK)


def line_look(method: str) -> Look:
    """Colour and marker of a method."""
    return {"color": COLOURS[method], "marker": MARKERS[method]}


def _mark_divergences(axes: Axes, method: str, x: np.ndarray, values: Numbers) -> None:
    """Mark the first divergence by a cross near the upper edge, with the number of
    diverged seeds.

    x (T,): epochs or iterations. values (T, S): not finite after a divergence.
    """
    gone = ~np.isfinite(values)
    if not gone.any():
        return
    # Methods have different heights, so that crosses at the same x do not overlap.
    first = float(x[gone.any(axis=1).argmax()])
    height = 0.975 - 0.07 * METHODS.index(method)
    transform = axes.get_xaxis_transform()
    axes.plot(
        first,
        height,
        "X",
        color=COLOURS[method],
        zorder=6,
        ms=8,
        mec="white",
        mew=0.7,
        transform=transform,
        clip_on=False,
    )
    axes.annotate(
        f"{gone.any(axis=0).sum()}/{values.shape[1]}",
        xy=(first, height),
        xytext=(6, 0),
        xycoords=transform,
        color=COLOURS[method],
        zorder=6,
        textcoords="offset points",
        va="center",
        fontsize=7,
    )


def tidy_log_ticks(axis: Axis) -> None:
    """Label 1, 2, 5 if a logarithmic axis spans few decades, else powers of ten; labels
    do not overlap.
    """
    low, high = axis.get_view_interval()
    axis.set_minor_formatter(NullFormatter())
    if high / low < _FEW_DECADES:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def method_legend(
    figure: Figure, methods: Sequence[str], extra: Mapping[str, Look]
) -> None:
    """One legend below all panels: methods in fixed order, then the other lines."""
    handles = []
    for method, label in LABELS.items():
        if method not in methods:
            continue
        width = 1.4
        if method == "kloss":
            width = 2.0
        handles.append(Line2D([], [], **line_look(method), ms=5, lw=width, label=label))
    handles += [Line2D([], [], label=label, **look) for label, look in extra.items()]
    shape = {
        "ncols": min(len(handles), 10),
        "frameon": False,
        "handlelength": 2.0,
        "columnspacing": 1.6,
    }
    figure.legend(handles=handles, loc="outside lower center", **shape)


def section(title: str, note: str, header: str, rows: Iterable[Sequence[str]]) -> str:
    """A part of ``NAME.md``: title, note and a Markdown table. header: column names
    separated by " | ".
    """
    names = header.split(" | ")
    lines = []
    for row in (names, ["---"] * len(names), *rows):
        # a bar inside a cell would end it
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    return "\n\n".join(part for part in (title, note, table) if part)


def number_text(value: float | None) -> str:
    """Number with three digits; a dash for None or NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}"


def interval_text(
    interval: SeedInterval, text: Callable[[float], str] = number_text
) -> str:
    """Text "0.12 [0.1, 0.14]"; only the number without finite ends; 'not finite' after
    a divergence.
    """
    if interval.value is None or math.isnan(interval.value):
        return "not finite"
    if any(
        end is None or not math.isfinite(end) for end in (interval.low, interval.high)
    ):
        return text(interval.value)
    return f"{text(interval.value)} [{text(interval.low)}, {text(interval.high)}]"
