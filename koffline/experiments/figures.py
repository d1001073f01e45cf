"""Figures of the experiments in the paper's panel layout, as PNG and SVG that are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from koffline.errors import ConfigError
from koffline.experiments.figure_ablation import draw_ablation
from koffline.experiments.figure_claims import draw_claims
from koffline.experiments.figure_evaluation import draw_bench, draw_puddle
from koffline.experiments.figure_mujoco import draw_mujoco, draw_mujoco_paper, draw_mujoco_sampled
from koffline.experiments.figure_style import save_figure
from koffline.experiments.figure_toy import draw_toy
from koffline.experiments.results import Curves, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: dict[str, Callable[[Results, Curves], Figure]] = {
    "figure-toy": draw_toy,
    "figure-puddle": draw_puddle,
    "figure-bench": draw_bench,
    "ablation": draw_ablation,
    "figure-mujoco": draw_mujoco,
    "claims": draw_claims,
}
# Further pages of an experiment, NAME-PAGE.png and .svg; None where there is nothing to show.
PAGES: dict[str, dict[str, Callable[[Results, Curves], Figure | None]]] = {
    "figure-mujoco": {"sampled": draw_mujoco_sampled, "paper": draw_mujoco_paper},
}


def draw(results: Results, curves: Curves, folder: Path) -> None:
    """Write ``NAME.png`` and ``NAME.svg``, and further pages.

    Raises ConfigError for an experiment without a figure.
    """
    if results.name not in FIGURES:
        raise ConfigError(f"there is no figure for '{results.name}'; known are {', '.join(FIGURES)}")
    save_figure(FIGURES[results.name](results, curves), folder / results.name)
    for page, drawn in PAGES.get(results.name, {}).items():
        figure = drawn(results, curves)
        if figure is not None:
            save_figure(figure, folder / f"{results.name}-{page}")
