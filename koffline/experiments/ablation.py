"""Ablation of the K-loss: one change at a time from a base setting, on all three
worlds.

Groups: bandwidth, kernel family, statistic (U, V, mixtures, residual gradient), batch
size, reward scale, the best of these combined, GTD2's second learning rate, transition
noise (K-loss and RG), and the pole's reward. Three seeds (ten for the statistic), two
learning rates, half the epochs of the figures. The figure has a panel per group and
world and shows errors as fractions of the variance of V.

The experiment `memory` compares the kernel loss with memory to the mini-batch one, at
the usual and at four times the transition noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from koffline import objectives
from koffline.experiments import style
from koffline.experiments.cells import Cell, Run, Scale
from koffline.experiments.figure_methods import OBJECTIVES, rows_of
from koffline.experiments.result_files import (
    Collected,
    Curves,
    ErrorRow,
    Results,
    grouped,
)
from koffline.experiments.seed_statistics import SeedInterval
from koffline.kernel_loss import mixture_diag_weight
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian
from koffline.objectives import GradientTD2, KernelLoss, MemoryLoss, Objective

WORLDS = ("puddle_world", "cart_pole", "mountain_car")
_LAPLACIAN = Laplacian(0.25)
_KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(0.25),
    "laplacian": _LAPLACIAN,
    "inverse_multiquadric": InverseMultiquadric(0.25),
}
_OBJECTIVES = {**OBJECTIVES, "kloss": KernelLoss(_KERNELS["gaussian"])}
_MEDIAN_DISTANCE = 0.512  # between two uniform points in the unit square
_RATES = (0.003, 0.001)
_SEEDS = 3
Variant = tuple[str, str, Cell]  # group, name, cell
_TITLES = {
    "statistic": "weight of the diagonal",
    "gtd2_rate": "second learning rate of GTD2",
    "noise": "transition noise",
    "reward": "reward of the pole",
}
# axis limits, as shares of the variance; worse errors are drawn at the edge
_NARROWEST = 0.02
_WIDEST = 10.0


def collect_ablation(run: Run) -> Collected:
    """Rows of all variants; there are no curves."""
    compared = variants(run.name, run.scale)
    finished = zip(compared, run.train([cell for *_, cell in compared]), strict=True)
    rows = [
        rows_of(cell, result, group=group, variant=name)
        for (group, name, _), (cell, result) in finished
    ]
    return {"rows": tuple(itertools.chain.from_iterable(rows))}, {}


def variants(experiment: str, scale: Scale) -> list[Variant]:
    """All cells of `ablation` or `memory`, by group; variants that equal the base share
    its cell.
    """
    compared: list[Variant] = []
    # A coarser truth, two learning rates and half the epochs of the figures.
    truth_repeats = 50
    if scale.quick:
        truth_repeats = 20
    for world in WORLDS:
        problem = replace(scale.problem(world), truth_repeats=truth_repeats)
        whole = scale.training(world)
        training = replace(
            whole, learning_rates=_RATES, epochs=max(1, whole.epochs // 2)
        )
        cell = Cell(problem, "kloss", _OBJECTIVES["kloss"], training)
        if experiment == "memory":
            compared += _memory(cell)
        else:
            compared += _ablation(cell)
    return compared


def _ablation(whole: Cell) -> Iterator[Variant]:
    """Variants with few seeds, except where the claims need as many as the figures."""
    world = whole.problem.build_world()
    rows = whole.problem.rows
    base = _trained(whole, seeds=_SEEDS)
    for width in (0.05, 0.1, 0.25, 0.5, 1.0):
        yield "bandwidth", str(width), _learning(base, KernelLoss(Gaussian(width)))
    yield "bandwidth", "median", _learning(base, KernelLoss(Gaussian(_MEDIAN_DISTANCE)))
    for name, kernel in _KERNELS.items():
        yield "kernel", name, _learning(base, KernelLoss(kernel))
    diagonal_weights = {
        "U": 0.0,
        "mixture 0.5": mixture_diag_weight(0.5, rows),
        "L_KV": mixture_diag_weight(1.0, rows),
        f"V of {whole.training.batch_size} rows": None,
        "0.05": 0.05,
        "0.25": 0.25,
        "residual gradient": 1.0,
    }
    for name, weight in diagonal_weights.items():
        yield "statistic", name, _learning(whole, KernelLoss(Gaussian(0.5), weight))
    for size in (50, 150, 500):
        yield "batch_size", str(size), _trained(base, batch_size=size)
    factors = {
        "unscaled": 1.0 / world.reward_scale,
        "scaled": 1.0,
        "scaled_by_10_more": 10.0,
    }
    for name, factor in factors.items():
        yield "reward_scale", name, _trained(base, reward_factor=factor)
    # The best variants combined, and the resulting default for uniform states.
    square = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0))
    yield "combined", "default", _learning(base, objectives.default_kernel_loss(square))
    yield "combined", "laplacian", _learning(base, KernelLoss(_KERNELS["laplacian"]))
    for name in ("laplacian", "gaussian"):
        yield (
            "combined",
            f"{name}, weight 0.05",
            _learning(base, KernelLoss(_KERNELS[name], 0.05)),
        )
    for factor in (0.1, 1.0, 10.0):
        yield "gtd2_rate", f"{factor:g}x", _learning(base, GradientTD2(factor), "gtd2")
    for factor, method in itertools.product((0.0, 0.5, 1.0, 2.0, 4.0), ("kloss", "rg")):
        yield (
            "noise",
            f"{factor:g}x {method}",
            _learning(_noisy(base, factor), _OBJECTIVES[method], method),
        )
    if base.problem.world == "cart_pole":
        balance = replace(base.problem, overrides=(("reward", "balance"),))
        paid = {"fall": base, "balance": replace(base, problem=balance)}
        for reward, method in itertools.product(paid, ("kloss", "rg", "fvi")):
            yield (
                "reward",
                f"{reward} {method}",
                _learning(paid[reward], _OBJECTIVES[method], method),
            )


def _memory(whole: Cell) -> Iterator[Variant]:
    """One group per noise level."""
    compared: dict[str, Objective] = {
        "mini-batch kloss": KernelLoss(_LAPLACIAN),
        "memory 0.9 kloss": MemoryLoss(_LAPLACIAN, 0.9),
        "memory 0.97 kloss": MemoryLoss(_LAPLACIAN, 0.97),
        "memory 0.97, no diagonal kloss": MemoryLoss(_LAPLACIAN, 0.97, 0.0),
        "fvi fvi": _OBJECTIVES["fvi"],
        "rg rg": _OBJECTIVES["rg"],
    }
    for factor, (name, objective) in itertools.product((1.0, 4.0), compared.items()):
        yield (
            f"noise {factor:g}x",
            name,
            _learning(_noisy(whole, factor), objective, name.split()[-1]),
        )


def _learning(base: Cell, objective: Objective, method: str = "kloss") -> Cell:
    """The cell with another objective, trained under the name of ``method``."""
    return replace(base, objective=objective, method=method)


def _trained(base: Cell, **changes: Any) -> Cell:
    """The cell with other training settings."""
    return replace(base, training=replace(base.training, **changes))


def _noisy(base: Cell, factor: float) -> Cell:
    """The cell with its world's noise multiplied by ``factor``."""
    if factor == 1.0:
        noise = None
    else:
        noise = factor * base.problem.build_world().noise
    return replace(base, problem=replace(base.problem, noise=noise))


def draw_ablation(results: Results, curves: Curves) -> Figure:
    """Panels with groups in rows and worlds in columns: error against Monte Carlo, best
    learning rate.
    """
    rows = results.select(truth="monte_carlo", best_by_truth=True)
    by_panel = grouped(rows, "group", "world")
    by_group = grouped(rows, "group")
    worlds = [world for world in style.WORLD_NAMES if world in grouped(rows, "world")]
    # Height of each group in lines of text, title included.
    lines = [
        1.2
        + len(grouped(part, "variant_name"))
        * (1.0 + 0.35 * (len(grouped(part, "method")) - 1))
        for part in by_group.values()
    ]
    figure = Figure(
        figsize=(3.3 * len(worlds) + 1.6, 0.185 * sum(lines) + 1.0),
        layout="constrained",
    )
    panels = figure.subplots(
        len(by_group),
        len(worlds),
        squeeze=False,
        sharex="col",
        sharey="row",
        height_ratios=lines,
    )
    for line, (group, part) in zip(panels, by_group.items(), strict=True):
        names = list(grouped(part, "variant_name"))
        for axes, world in zip(line, worlds, strict=True):
            _draw_group(axes, by_panel.get((group, world), []), names)
        line[0].set_title(_TITLES.get(group, group.replace("_", " ")), fontsize=9)
        line[0].set_yticks(range(len(names)), names, fontsize=8)
        line[0].set_ylim(len(names) - 0.4, -0.6)
    for column, world in zip(panels.T, worlds, strict=True):
        column[0].set_title(style.WORLD_NAMES[world], loc="center", fontweight="bold")
        column[-1].set(xscale="log", xlim=(_NARROWEST, _WIDEST), xlabel="MSE / Var V")
    level = {"best constant": {"color": style.INK, **style.DOTTED}}
    style.method_legend(figure, list(grouped(rows, "method")), level)
    return figure


def _draw_group(axes: Axes, rows: Sequence[ErrorRow], names: Sequence[str]) -> None:
    """Draw errors (shares of Var V) with intervals, one line per variant of ``names``.

    Open markers: diverged, or beyond the edge. Without rows the panel is empty.
    """
    if not rows:
        axes.grid(visible=False)
        axes.tick_params(which="both", left=False, bottom=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        return
    methods = [method for method in style.METHODS if method in grouped(rows, "method")]
    axes.axvline(1.0, color=style.INK, **style.DOTTED, zorder=1)
    for row in rows:
        look = style.line_look(row.method)
        # Methods of the same variant are drawn below each other.
        y = names.index(row.variant_name) + 0.24 * (
            methods.index(row.method) - (len(methods) - 1) / 2
        )
        mean, low, high = map(_within_limits, row.shares)
        axes.plot(
            [low, high],
            [y, y],
            color=look["color"],
            lw=1.6,
            alpha=0.45,
            solid_capstyle="butt",
        )
        inside = look["color"]
        if mean == _WIDEST:
            inside = "white"
        axes.plot(mean, y, **look, mfc=inside, ms=4.5, ls="", clip_on=False)


def _within_limits(share: float | None) -> float:
    """A share of the variance, moved into the axis; None (diverged) to its upper
    end."""
    if share is None:
        return _WIDEST
    return min(max(share, 1e-6), _WIDEST)


def ablation_tables(results: Results) -> Iterator[str]:
    """Variants in rows, worlds in columns: MSE over Var V, at each method's best
    learning rate.
    """
    seeds = " and ".join(map(str, sorted({row.seeds for row in results.rows})))
    if results.name == "memory":
        about = (
            "Without a diagonal: w is 0, else 0.003 (`koffline.objectives.MemoryLoss`);"
            " a mini-batch has 1/150."
        )
    else:
        about = (
            "The default that comes out is `koffline.objectives.default_kernel_loss`"
            " (group combined); figure-puddle and figure-bench keep the paper's kernel."
        )
    yield (
        f"Half the epochs of the figures, two learning rates, {seeds} seeds: compare"
        f" within a table. {about}"
    )
    for group, rows in grouped(results.rows, "group").items():
        best = [row for row in rows if row.truth == "monte_carlo" and row.best_by_truth]
        worlds = list(grouped(rows, "world"))
        names = grouped(rows, "variant_name")
        several = len(grouped(rows, "variant_name", "method")) > len(names)
        by_cell = grouped(best, "variant_name", "method", "world")
        lines = []
        for name, method in grouped(best, "variant_name", "method"):
            line = [name]
            if several:
                line = [f"{name}, {style.LABELS[method]}"]
            for world in worlds:
                # Methods are compared at the same variant, variants
                # of one method with each other.
                rivals = [
                    r
                    for r in best
                    if r.world == world and (not several or r.variant_name == name)
                ]
                (row,) = by_cell[name, method, world]
                line.append(_share_cell(row, rivals))
            lines.append(line)
        title = group.replace("_", " ")
        bold = "in bold"
        if several:
            bold = "of the methods in bold"
        note = (
            "MSE / Var V against Monte Carlo at the best learning rate of each; the"
            f" smallest {bold}."
        )
        header = " | ".join((title, *(style.LONG_NAMES[world] for world in worlds)))
        yield style.section(f"## {title.capitalize()}", note, header, lines)


def _share_cell(row: ErrorRow, rivals: Sequence[ErrorRow]) -> str:
    """MSE / Var V with its interval, in bold if it is the smallest of the rivals'."""
    share = row.shares[0]
    if share is None:
        return f"diverged ({row.diverged}/{row.seeds})"
    text = style.interval_text(SeedInterval(*row.shares))
    shares = [rival.shares[0] for rival in rivals]
    if share == min(other for other in shares if other is not None):
        return f"**{text}**"
    return text
