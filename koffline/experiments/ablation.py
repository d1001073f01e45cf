"""Ablation of the K-loss: one change at a time from a base, on all three worlds.

Groups: bandwidth, kernel family, statistic (U, V, mixtures, residual gradient), batch size, reward scale,
output offset, the best of these combined, GTD2's second learning rate, transition noise (K-loss beside RG),
and the pole's reward. Three seeds (ten for the statistic), two learning rates, half the epochs of the
figures. The figure has a panel per group and world, with errors as shares of the variance of V.

The experiment `memory` compares the remembered kernel loss with that of mini-batches, at the usual and at
four times the noise of transitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from koffline import objectives
from koffline.envs.boxes import make_world
from koffline.experiments import style
from koffline.experiments.cells import Cell, Run, Scale, TrainingSettings
from koffline.experiments.evaluation import rows_of
from koffline.experiments.problem import ProblemSettings
from koffline.experiments.results import Curves, Results, Row, grouped, interval_text, section
from koffline.kernel_loss import mixture_diag_weight
from koffline.kernels import Gaussian, InverseMultiquadric, Kernel, Laplacian
from koffline.objectives import DualObjective, GradientTD2, MemoryLoss

WORLDS = ("puddle_world", "cart_pole", "mountain_car")
BASE_BANDWIDTH = 0.25
_KERNELS: dict[str, Kernel] = {
    "gaussian": Gaussian(BASE_BANDWIDTH),
    "laplacian": Laplacian(BASE_BANDWIDTH),
    "inverse_multiquadric": InverseMultiquadric(BASE_BANDWIDTH),
}
MEDIAN_DISTANCE = 0.512  # between two uniform points in the unit square
NOISE_FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
_RATES, _SEEDS, _MEMORY_SEEDS = (0.003, 0.001), 3, 10
_TITLES = {
    "statistic": "weight of the diagonal",
    "offset": "output offset",
    "gtd2_rate": "second learning rate of GTD2",
    "noise": "transition noise",
    "reward": "reward of the pole",
}
_NARROWEST, _WIDEST = 0.02, 10.0  # axis limits, as shares of the variance; worse errors are drawn at the edge


class Variant(NamedTuple):
    """One cell of the ablation, with its group and name."""

    group: str
    name: str
    cell: Cell


def collect_ablation(run: Run) -> tuple[dict[str, Any], Curves]:
    """Rows of all variants; there are no curves."""
    variants = memory_variants(run.scale) if run.name == "memory" else ablation_variants(run.scale)
    finished = run.train([variant.cell for variant in variants])
    rows = (
        row
        for variant, (cell, result) in zip(variants, finished, strict=True)
        for row in rows_of(cell, result, variant.group, variant.name)
    )
    return {"rows": tuple(rows)}, {}


def ablation_variants(scale: Scale) -> list[Variant]:
    """All cells, group by group; variants that equal the base share its cell."""
    return [Variant(*variant) for world in WORLDS for variant in _variants_of(world, scale)]


def _shortened(world: str, scale: Scale, seeds: int) -> tuple[ProblemSettings, TrainingSettings]:
    """A coarser truth, two learning rates and half the epochs of the figures."""
    whole = scale.training(world)
    problem = replace(scale.problem(world), truth_repeats=20 if scale.quick else 50)
    epochs = max(1, whole.epochs // 2)
    return problem, replace(whole, learning_rates=_RATES, seeds=seeds, epochs=epochs)


def _variants_of(world: str, scale: Scale) -> Iterator[tuple[str, str, Cell]]:
    (problem, training), made = _shortened(world, scale, _SEEDS), make_world(world)
    base, residual_gradient = objectives.KernelLoss(Gaussian(BASE_BANDWIDTH)), objectives.ResidualGradient()

    def cell(objective: objectives.Objective | DualObjective, method: str = "kloss", **changes: Any) -> Cell:
        return Cell(problem, method, objective, replace(training, **changes))

    for bandwidth in (0.05, 0.1, 0.25, 0.5, 1.0):
        yield "bandwidth", str(bandwidth), cell(objectives.KernelLoss(Gaussian(bandwidth)))
    yield "bandwidth", "median", cell(objectives.KernelLoss(Gaussian(MEDIAN_DISTANCE)))
    for name, kernel in _KERNELS.items():
        yield "kernel", name, cell(objectives.KernelLoss(kernel))
    weights = {  # of the paper's statistics and of some between V and the residual gradient
        "U": 0.0,
        "mixture 0.5": mixture_diag_weight(0.5, problem.rows),
        "L_KV": mixture_diag_weight(1.0, problem.rows),
        f"V of {training.batch_size} rows": None,
        "0.05": 0.05,
        "0.25": 0.25,
        "residual gradient": 1.0,
    }
    seeds = (
        _SEEDS if scale.quick else scale.training(world).seeds
    )  # the claims' verdicts need as many as the figures
    for name, weight in weights.items():
        yield "statistic", name, cell(objectives.KernelLoss(Gaussian(0.5), weight), seeds=seeds)
    for size in (50, 150, 500):
        yield "batch_size", str(size), cell(base, batch_size=size)
    unscaled = 1.0 / made.reward_scale
    for name, factor in (("unscaled", unscaled), ("scaled", 1.0), ("scaled_by_10_more", 10.0)):
        yield "reward_scale", name, cell(base, reward_factor=factor)
    yield "offset", "none", cell(base)
    yield "offset", "learned", cell(base, offset=True)
    # The best parts together, and the default that comes out of it.
    square = torch.rand(problem.rows, 2, generator=torch.Generator().manual_seed(0))  # uniform states
    yield "combined", "default", cell(objectives.default_kernel_loss(square))
    yield "combined", "laplacian", cell(objectives.KernelLoss(_KERNELS["laplacian"]))
    for name in ("laplacian", "gaussian"):
        yield "combined", f"{name}, weight 0.05", cell(objectives.KernelLoss(_KERNELS[name], 0.05))
    for factor in (0.1, 1.0, 10.0):
        yield "gtd2_rate", f"{factor:g}x", cell(GradientTD2(factor), "gtd2")
    for factor in NOISE_FACTORS:
        noisy = problem if factor == 1.0 else replace(problem, noise=factor * made.noise)
        yield "noise", f"{factor:g}x kloss", Cell(noisy, "kloss", base, training)
        yield "noise", f"{factor:g}x rg", Cell(noisy, "rg", residual_gradient, training)
    if world == "cart_pole":
        balance = replace(problem, overrides=(("reward", "balance"),))
        for reward, paid in (("fall", problem), ("balance", balance)):
            yield "reward", f"{reward} kloss", Cell(paid, "kloss", base, training)
            yield "reward", f"{reward} rg", Cell(paid, "rg", residual_gradient, training)
            yield "reward", f"{reward} fvi", Cell(paid, "fvi", objectives.FittedIteration(), training)


def memory_variants(scale: Scale) -> list[Variant]:
    """All cells of the experiment `memory`: a group for each noise."""
    kernel = Laplacian(BASE_BANDWIDTH)
    compared: dict[str, tuple[str, objectives.Objective | DualObjective]] = {
        "mini-batch": ("kloss", objectives.KernelLoss(kernel)),
        "memory 0.9": ("kloss", MemoryLoss(kernel, 0.9)),
        "memory 0.97": ("kloss", MemoryLoss(kernel, 0.97)),
        "memory 0.97, no diagonal": ("kloss", MemoryLoss(kernel, 0.97, 0.0)),
        "fvi": ("fvi", objectives.FittedIteration()),
        "rg": ("rg", objectives.ResidualGradient()),
    }
    found = []
    for world, factor in itertools.product(WORLDS, (1.0, 4.0)):
        seeds = scale.training(world).seeds if scale.quick else _MEMORY_SEEDS
        problem, training = _shortened(world, scale, seeds)
        noisy = problem if factor == 1.0 else replace(problem, noise=factor * make_world(world).noise)
        for name, (method, objective) in compared.items():
            cell = Cell(noisy, method, objective, training)
            found.append(Variant(f"noise {factor:g}x", f"{name} {method}", cell))
    return found


def draw_ablation(results: Results, curves: Curves) -> Figure:
    """Small multiples: groups down, worlds across; against Monte Carlo at the best learning rate."""
    rows = results.select(truth="monte_carlo", best_by_truth=True)
    by_panel, by_group = grouped(rows, "group", "world"), grouped(rows, "group")
    worlds = [world for world in style.WORLD_NAMES if world in grouped(rows, "world")]
    # Height of each group in lines of text, title included.
    lines = [
        1.2 + len(grouped(part, "variant_name")) * (1.0 + 0.35 * (len(grouped(part, "method")) - 1))
        for part in by_group.values()
    ]
    with style.house_style():
        figure = Figure(figsize=(3.3 * len(worlds) + 1.6, 0.185 * sum(lines) + 1.0), layout="constrained")
        panels = figure.subplots(
            len(by_group), len(worlds), squeeze=False, sharex="col", sharey="row", height_ratios=lines
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


def _draw_group(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Errors with intervals, one line per variant; open ones at the edge diverged or lie beyond it."""
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
        y = names.index(row.variant_name) + 0.24 * (methods.index(row.method) - (len(methods) - 1) / 2)
        mean, low, high = (_WIDEST if end is None else min(max(end, 1e-6), _WIDEST) for end in row.shares)
        axes.plot([low, high], [y, y], color=look["color"], lw=1.6, alpha=0.45, solid_capstyle="butt")
        inside = "white" if mean == _WIDEST else look["color"]
        axes.plot(mean, y, **look, mfc=inside, ms=4.5, ls="", clip_on=False)


def ablation_tables(results: Results) -> Iterator[str]:
    """Variants down, worlds across: error as a share of the variance of V, best learning rate of each."""
    seeds = " and ".join(map(str, sorted({row.seeds for row in results.rows})))
    is_memory = results.name == "memory"
    yield f"Half the epochs of the figures, two learning rates, {seeds} seeds: compare within a table. " + (
        "Without a diagonal: w is 0, else 0.003 (`koffline.objectives.MemoryLoss`); a mini-batch has 1/150."
        if is_memory
        else "The default that comes out is `koffline.objectives.default_kernel_loss` (group combined); "
        "the figures keep the paper's kernel."
    )
    for group, rows in grouped(results.rows, "group").items():
        best = [row for row in rows if row.truth == "monte_carlo" and row.best_by_truth]
        worlds, names = list(grouped(rows, "world")), grouped(rows, "variant_name")
        several = len(grouped(rows, "variant_name", "method")) > len(names)
        found, lines = grouped(best, "variant_name", "method", "world"), []
        for name, method in grouped(best, "variant_name", "method"):
            line = [f"{name}, {style.LABELS[method]}" if several else name]
            for world in worlds:
                # Methods are compared at the same variant, variants of one method with each other.
                rivals = [r for r in best if r.world == world and (not several or r.variant_name == name)]
                line.append(_share_cell(found.get((name, method, world)), rivals))
            lines.append(line)
        title, bold = group.replace("_", " "), "of the methods in bold" if several else "in bold"
        note = f"MSE / Var V against Monte Carlo at the best learning rate of each; the smallest {bold}."
        header = " | ".join((title, *(style.LONG_NAMES[world] for world in worlds)))
        yield section(f"## {title.capitalize()}", note, header, lines)


def _share_cell(found: Sequence[Row] | None, rivals: Sequence[Row]) -> str:
    if not found:
        return "–"
    row, (share, low, high) = found[0], found[0].shares
    if share is None:
        return f"diverged ({row.diverged}/{row.seeds})"
    text = interval_text(share, low, high)
    others = [other for rival in rivals if (other := rival.shares[0]) is not None]
    return f"**{text}**" if share == min(others) else text
