"""The page of one estimate, and the folder with everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.estimate import Estimate
from koffline.report import plots
from koffline.report.folder import write_folder
from koffline.report.html import render, save_figures
from koffline.report.interval_plots import plot_norm_sensitivity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKER = "estimate.json"


def write_report(
    estimate: Estimate,
    out: Path,
    truth: float | None,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """``estimate.json``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    An earlier report is replaced only with ``force`` and only once the new one is complete. run: the
    content of run.json.
    """

    def fill(folder: Path) -> None:
        figures = _figures(estimate, truth)
        save_figures(figures, folder)
        (folder / MARKER).write_text(estimate.to_json(timing=False) + "\n", encoding="utf-8")
        (folder / "report.html").write_text(render_page(estimate, figures, truth, command), encoding="utf-8")

    write_folder(out, fill, MARKER, force, run)
    return out / "report.html"


def render_page(estimate: Estimate, figures: dict[str, Figure], truth: float | None, command: str) -> str:
    """The page as text."""
    return render("page.html.j2", figures, estimate=estimate, truth=truth, command=command)


def _figures(estimate: Estimate, truth: float | None) -> dict[str, Figure]:
    figures = {"estimate": plots.plot_estimate(estimate, truth)}
    if estimate.sensitivity is not None:
        figures["sensitivity"] = plot_norm_sensitivity(estimate.sensitivity, truth)
    evidence = estimate.evidence
    if evidence is not None:
        figures["values"] = plots.plot_values(evidence, estimate.value, truth)
        figures["objective"] = plots.plot_objective(evidence)
        figures["residuals"] = plots.plot_residuals(evidence)
        figures["initial_values"] = plots.plot_initial_values(evidence, estimate.value)
        figures["coverage"] = plots.plot_coverage(evidence)
    return figures
