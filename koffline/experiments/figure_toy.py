"""figure-toy: the chain, and the errors of six methods against iterations.

(Feng et al. 2019, fig:toy_diverge)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from koffline.experiments.results import Curves, Results
from koffline.experiments.style import (
    INK,
    METHODS,
    SOFT,
    Band,
    draw_curve,
    house_style,
    log_limits,
    mark_divergences,
    method_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where the states are drawn and what their values are called.
_STATES = {
    "s1": ((0.0, 1.0), "$w_1$"),
    "s2": ((1.6, 1.75), "$w_2$"),
    "s3": ((1.6, 0.25), "$w_3$"),
    "s4": ((3.2, 0.25), "$2w_3$"),
    "end": ((3.2, 1.75), "0"),
}
_RADIUS = 0.3
_WIDEST = 1e3  # the axes end here; what diverges leaves them


def draw_toy(results: Results, curves: Curves) -> Figure:
    """Panels a–c."""
    from matplotlib.figure import Figure

    with house_style():
        figure = Figure(figsize=(11.5, 3.6), layout="constrained")
        chain, mse, weights = figure.subplots(1, 3, width_ratios=(0.95, 1.0, 1.0))
        _draw_chain(chain)
        _draw_errors(mse, curves, "mse", "mean of $(V - V^*)^2$ over states")
        _draw_errors(weights, curves, "weight_error", "$\\|w - w^*\\|$")
        noise = results.extra.get("lstd_weight_error")
        if noise:
            weights.axhline(noise, color=INK, ls=(0, (4, 3)), lw=0.9, zorder=1)
        square = results.extra.get("lstd_mse")
        if square:
            mse.axhline(square, color=INK, ls=(0, (4, 3)), lw=0.9, zorder=1)
        for axes, title in zip(
            (chain, mse, weights), ("(a) The chain", "(b) MSE", "(c) Weight error"), strict=True
        ):
            axes.set_title(title)
        methods = [method for method in METHODS if f"chain/{method}" in curves]
        method_legend(
            figure,
            methods,
            {
                "LSTD (sampling error)": {"color": INK, "ls": (0, (4, 3)), "lw": 0.9},
                "$\\|w\\|$ passed $10^7$": {"color": SOFT, "marker": "X", "ls": "", "ms": 7},
            },
        )
        return figure


def _draw_errors(axes: Axes, curves: Curves, name: str, label: str) -> None:
    """Curves of the methods that are there, from the first iteration on."""
    groups = {m: curves[f"chain/{m}"] for m in METHODS if f"chain/{m}" in curves}
    for method, group in groups.items():
        draw_curve(axes, method, group["iterations"][1:], group[name][1:], _WIDEST)
    log_limits(axes, [Band.over_seeds(group[name][1:]).mean for group in groups.values()])
    axes.set_xscale("log")
    axes.set_ylim(top=_WIDEST)
    for method, group in groups.items():
        mark_divergences(axes, method, group["iterations"], group[name])
    axes.set_xlabel("iteration")
    axes.set_ylabel(label)


def _draw_chain(axes: Axes) -> None:
    """States as circles with their values, the terminal one as a square, arrows with probabilities."""
    from matplotlib.patches import Circle, Rectangle

    for name, ((x, y), value) in _STATES.items():
        shape = (
            Rectangle((x - _RADIUS, y - _RADIUS), 2 * _RADIUS, 2 * _RADIUS)
            if name == "end"
            else Circle((x, y), _RADIUS)
        )
        shape.set(facecolor="#f5f7fa", edgecolor=INK, lw=1.2, zorder=3)
        axes.add_patch(shape)
        axes.text(x, y, value, ha="center", va="center", fontsize=11, color=INK, zorder=4)
    _arrow(axes, "s1", "s2", "0.8", (-0.12, 0.16))
    _arrow(axes, "s1", "s3", "0.2", (-0.12, -0.16))
    _arrow(axes, "s2", "end", "reward 1", (0.0, 0.14))
    _arrow(axes, "s3", "s4", "", (0.0, 0.0))
    _arrow(axes, "s4", "end", "0.05", (0.24, 0.0))
    # The loop below s4: most of a circle, from its lower left to its lower right.
    angle = np.radians([*range(150, 351, 4), 390])
    x, y = _STATES["s4"][0]
    _draw_path(axes, x + 0.2 * np.cos(angle), y - 0.4 + 0.2 * np.sin(angle))
    axes.text(3.48, -0.3, "0.95", ha="left", va="center", color=INK)
    axes.text(3.2, 2.22, "terminal", ha="center", va="center", color="#52606d", fontsize=8)
    axes.set_xlim(-0.5, 4.1)
    axes.set_ylim(-0.75, 2.6)
    axes.set_aspect("equal", anchor="NW")
    axes.axis("off")


def _arrow(axes: Axes, start: str, end: str, text: str, shift: tuple[float, float]) -> None:
    """A straight arrow from one state's edge to the other's, with a text beside its middle."""
    (x0, y0), (x1, y1) = _STATES[start][0], _STATES[end][0]
    share = (_RADIUS + 0.04) / float(np.hypot(x1 - x0, y1 - y0))
    along = np.array([share, 1.0 - share])
    _draw_path(axes, x0 + along * (x1 - x0), y0 + along * (y1 - y0))
    axes.text((x0 + x1) / 2 + shift[0], (y0 + y1) / 2 + shift[1], text, ha="center", va="center", color=INK)


def _draw_path(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """A line with a head at its end. matplotlib's own arrows differ by some pixels from run to run."""
    tip, before = np.array([x[-1], y[-1]]), np.array([x[-2], y[-2]])
    ahead = (tip - before) / np.hypot(*(tip - before))
    aside = np.array([-ahead[1], ahead[0]])
    back = tip - 0.14 * ahead
    axes.plot(np.append(x[:-1], back[0]), np.append(y[:-1], back[1]), color=INK, lw=1.1)
    corners = np.stack([tip, back + 0.06 * aside, back - 0.06 * aside])
    axes.fill(corners[:, 0], corners[:, 1], color=INK, lw=0)
