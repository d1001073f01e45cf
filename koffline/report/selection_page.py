"""The page of one ranking, and the folder with everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.selection.ranking import PolicyRanking
from koffline.report.folder import write_folder
from koffline.report.html import render, save_figures
from koffline.report.selection_plots import plot_differences, plot_ranking, plot_truths
from koffline.report.selection_table import describe_differences, describe_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKER = "ranking.json"


def write_ranking(
    ranking: PolicyRanking,
    out: Path,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """``ranking.json``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    run: the content of run.json.
    """

    def fill(folder: Path) -> None:
        figures = _figures(ranking)
        save_figures(figures, folder)
        (folder / MARKER).write_text(ranking.to_json(timing=False) + "\n", encoding="utf-8")
        page = render(
            "selection_page.html.j2",
            figures,
            ranking=ranking,
            command=command,
            sentences=describe_differences(ranking),
            quality=None if ranking.metrics is None else describe_metrics(ranking.metrics),
        )
        (folder / "report.html").write_text(page, encoding="utf-8")

    write_folder(out, fill, MARKER, force, run)
    return out / "report.html"


def _figures(ranking: PolicyRanking) -> dict[str, Figure]:
    figures = {"ranking": plot_ranking(ranking)}
    if ranking.comparisons:
        figures["differences"] = plot_differences(ranking)
    if ranking.metrics is not None:
        figures["truths"] = plot_truths(ranking)
    return figures
