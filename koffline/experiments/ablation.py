"""What the K-loss depends on: one change at a time from a base, on all three worlds.

Groups: bandwidth, kernel family, statistic (U, V, mixtures, residual gradient), batch size, reward scale,
output offset, the best of these combined, GTD2's second learning rate, transition noise (K-loss beside RG),
and the pole's reward. Three seeds, two learning rates, half the epochs of the figures. The figure has a panel
per group and world, with errors as shares of the variance of V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from koffline.dual_objectives import DualObjective, GradientTD2
from koffline.envs.boxes import make_world
from koffline.experiments.cells import Cell, Scale, TrainingSettings
from koffline.experiments.results import Curves, Results, Row
from koffline.experiments.style import (
    COLOURS,
    INK,
    MARKERS,
    METHODS,
    WORLD_NAMES,
    house_style,
    method_legend,
    tidy_log_ticks,
)
from koffline.kernel_loss import mixture_diag_weight
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian
from koffline.objectives import (
    FittedIteration,
    KernelLoss,
    Objective,
    ResidualGradient,
    default_kernel_loss,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WORLDS = ("puddle_world", "cart_pole", "mountain_car")
BASE_BANDWIDTH = 0.25
MEDIAN_DISTANCE = 0.512  # of two points uniform in the unit square
BANDWIDTHS: dict[str, float] = {
    **{str(value): value for value in (0.05, 0.1, 0.25, 0.5, 1.0)},
    "median": MEDIAN_DISTANCE,
}
NOISE_FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
_RATES, _SEEDS = (0.003, 0.001), 3
_TITLES = {
    "statistic": "weight of the diagonal",
    "offset": "output offset",
    "gtd2_rate": "second learning rate of GTD2",
    "noise": "transition noise",
    "reward": "reward of the pole",
    "solver": "exact solver, chosen by",
}
_NAMES = {
    "residual gradient": "1 (residual gradient)",
    "scaled_by_10_more": "scaled by 10 more",
    "inverse_multiquadric": "inverse multiquadric",
}
_WIDEST = 10.0  # shares of the variance; what is worse stands at the edge


@dataclass(frozen=True)
class Variant:
    """One cell of the ablation and where it stands in it."""

    group: str
    name: str
    cell: Cell


def ablation_variants(scale: Scale) -> list[Variant]:
    """All cells, group by group; variants that equal the base share its cell."""
    return [variant for world in WORLDS for variant in _variants_of(world, scale)]


def _variants_of(world: str, scale: Scale) -> Iterator[Variant]:
    problem = replace(scale.problem(world), truth_repeats=20 if scale.quick else 50)
    whole = scale.training(world)
    training = replace(whole, learning_rates=_RATES, seeds=_SEEDS, epochs=max(1, whole.epochs // 2))
    base = KernelLoss(Gaussian(BASE_BANDWIDTH))

    def cell(
        objective: Objective | DualObjective, training: TrainingSettings = training, method: str = "kloss"
    ) -> Cell:
        return Cell(problem, method, objective, training)

    for name, bandwidth in BANDWIDTHS.items():
        yield Variant("bandwidth", name, cell(KernelLoss(Gaussian(bandwidth))))
    kernels: dict[str, Kernel] = {
        "gaussian": Gaussian(BASE_BANDWIDTH),
        "laplacian": Laplacian(BASE_BANDWIDTH),
        "inverse_multiquadric": InverseMultiquadric(BASE_BANDWIDTH),
    }
    for name, kernel in kernels.items():
        yield Variant("kernel", name, cell(KernelLoss(kernel)))
    for name, weight in _statistics(problem.rows, training.batch_size).items():
        yield Variant("statistic", name, cell(KernelLoss(Gaussian(0.5), weight)))
    for size in (50, 150, 500):
        yield Variant("batch_size", str(size), cell(base, replace(training, batch_size=size)))
    unscaled = 1.0 / make_world(world).reward_scale
    for name, factor in (("unscaled", unscaled), ("scaled", 1.0), ("scaled_by_10_more", 10.0)):
        yield Variant("reward_scale", name, cell(base, replace(training, reward_factor=factor)))
    yield Variant("offset", "none", cell(base))
    yield Variant("offset", "learned", cell(base, replace(training, offset=True)))
    for name, combined in _combined(problem.rows).items():
        yield Variant("combined", name, cell(combined))
    for factor in (0.1, 1.0, 10.0):
        yield Variant("gtd2_rate", f"{factor:g}x", cell(GradientTD2(factor), method="gtd2"))
    own_noise = make_world(world).noise  # type: ignore[attr-defined]
    for factor in NOISE_FACTORS:
        noisy = problem if factor == 1.0 else replace(problem, noise=factor * own_noise)
        pair: dict[str, Objective] = {"kloss": base, "rg": ResidualGradient()}
        for method, objective in pair.items():
            yield Variant("noise", f"{factor:g}x {method}", Cell(noisy, method, objective, training))
    if world == "cart_pole":
        for reward in ("fall", "balance"):
            paid = problem if reward == "fall" else replace(problem, overrides=(("reward", reward),))
            methods: dict[str, Objective] = {
                "kloss": base,
                "rg": ResidualGradient(),
                "fvi": FittedIteration(),
            }
            for method, objective in methods.items():
                yield Variant("reward", f"{reward} {method}", Cell(paid, method, objective, training))


def _combined(rows: int) -> dict[str, Objective]:
    """The best parts together, and the default that comes out of it."""
    square = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0))  # where the states are
    return {
        "default": default_kernel_loss(square),
        "laplacian": KernelLoss(Laplacian(BASE_BANDWIDTH)),
        "laplacian, weight 0.05": KernelLoss(Laplacian(BASE_BANDWIDTH), 0.05),
        "gaussian, weight 0.05": KernelLoss(Gaussian(BASE_BANDWIDTH), 0.05),
    }


def _statistics(rows: int, batch_size: int) -> dict[str, float | None]:
    """diag_weight of the paper's statistics and of some between V and the residual gradient."""
    return {
        "U": 0.0,
        "mixture 0.5": mixture_diag_weight(0.5, rows),
        "L_KV": mixture_diag_weight(1.0, rows),
        f"V of {batch_size} rows": None,
        "0.05": 0.05,
        "0.25": 0.25,
        "residual gradient": 1.0,
    }


def draw_ablation(results: Results, curves: Curves) -> Figure:
    """Small multiples: groups down, worlds across; against Monte Carlo at the best learning rate."""
    from matplotlib.figure import Figure

    rows = results.select(truth="monte_carlo", best_by_truth=True)
    worlds = [world for world in WORLD_NAMES if any(row.world == world for row in rows)]
    groups: dict[str | None, list[str]] = {}
    for row in rows:
        names = groups.setdefault(row.group, [])
        if row.variant_name not in names:
            names.append(row.variant_name)
    lines = [_height(rows, group, len(names)) for group, names in groups.items()]
    with house_style():
        figure = Figure(figsize=(3.3 * len(worlds) + 1.6, 0.185 * sum(lines) + 1.0), layout="constrained")
        panels = figure.subplots(
            len(groups), len(worlds), squeeze=False, sharex="col", sharey="row", height_ratios=lines
        )
        for line, (group, names) in zip(panels, groups.items(), strict=True):
            for axes, world in zip(line, worlds, strict=True):
                chosen = [row for row in rows if (row.world, row.group) == (world, group)]
                _draw_group(axes, chosen, names)
            line[0].set_title(_TITLES.get(str(group), str(group).replace("_", " ")), fontsize=9)
            line[0].set_yticks(range(len(names)), [_NAMES.get(name, name) for name in names], fontsize=8)
            line[0].set_ylim(len(names) - 0.4, -0.6)
        for column, world in zip(panels.T, worlds, strict=True):
            column[0].set_title(WORLD_NAMES[world], loc="center", fontweight="bold")
            axes = column[-1]
            _set_limits(axes, [row for row in rows if row.world == world])
            axes.set_xlabel("MSE / Var V")
        methods = list(dict.fromkeys(row.method for row in rows))
        method_legend(figure, methods, {"best constant": {"color": INK, "ls": (0, (1, 2)), "lw": 1.0}})
        return figure


def _height(rows: Sequence[Row], group: str | None, variants: int) -> float:
    """Lines of text that a group needs, its title included."""
    methods = {row.method for row in rows if row.group == group}
    return 1.2 + variants * (1.0 + 0.35 * (len(methods) - 1))


def _draw_group(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Errors with intervals, one line per variant; a panel without rows stays empty."""
    if not rows:
        axes.grid(visible=False)
        axes.tick_params(which="both", left=False, bottom=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        return
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    axes.axvline(1.0, color=INK, ls=(0, (1, 2)), lw=1.0, zorder=1)
    for row in rows:
        # Methods at the same variant stand one below the other.
        shift = 0.24 * (methods.index(row.method) - (len(methods) - 1) / 2)
        _draw_point(axes, row, names.index(row.variant_name) + shift)


def _draw_point(axes: Axes, row: Row, y: float) -> None:
    """A point with its interval; an open one at the right edge for what diverged or lies beyond the axis."""
    colour, marker = COLOURS[row.method], MARKERS[row.method]
    share, low, high = row.shares
    if share is None or share > _WIDEST:
        text = f"{row.diverged}/{row.seeds} diverged" if share is None else f"{share:.0f}"
        place = axes.get_yaxis_transform()
        axes.plot(0.97, y, marker, color=colour, mfc="white", ms=5, transform=place)
        axes.annotate(
            text, (0.97, y), xycoords=place, xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center", fontsize=7, color=colour,
        )  # fmt: skip
        return
    # Intervals may reach below zero, and a single seed has none.
    mean, *ends = (max(share if end is None else end, 1e-6) for end in (share, low, high))
    axes.plot(ends, [y, y], color=colour, lw=1.6, alpha=0.45, solid_capstyle="butt")
    axes.plot(mean, y, marker, color=colour, ms=4.5)


def _set_limits(axes: Axes, rows: Sequence[Row]) -> None:
    """A logarithmic axis per world, from half the smallest error."""
    means = [share for row in rows if (share := row.shares[0]) is not None and share > 0.0]
    axes.set_xscale("log")
    axes.set_xlim(0.5 * min(means, default=0.1), _WIDEST)
    tidy_log_ticks(axes.xaxis)
