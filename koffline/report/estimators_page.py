"""The page of all estimators, and the folder with everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from koffline.ope.estimators.table import EstimateTable
from koffline.report.estimators_plots import plot_forest
from koffline.report.estimators_table import collected_reasons, collected_warnings
from koffline.report.folder import write_folder
from koffline.report.html import render, save_figures
from koffline.report.interval_plots import plot_norm_sensitivity

MARKER = "estimates.json"


def write_estimates(
    table: EstimateTable,
    out: Path,
    truth: float | None,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """``estimates.json``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    An earlier report is replaced only with ``force`` and only once the new one is complete. run: the
    content of run.json.
    """

    def fill(folder: Path) -> None:
        figures = {"forest": plot_forest(table, truth)}
        if table.sensitivity is not None:
            figures["sensitivity"] = plot_norm_sensitivity(table.sensitivity, truth)
        save_figures(figures, folder)
        (folder / MARKER).write_text(table.to_json(timing=False) + "\n", encoding="utf-8")
        warnings = [f"{', '.join(names)}: {text}" for text, names in collected_warnings(table)]
        page = render(
            "estimators_page.html.j2",
            figures,
            table=table,
            truth=truth,
            command=command,
            warnings=warnings,
            reasons=collected_reasons(table),
        )
        (folder / "report.html").write_text(page, encoding="utf-8")

    write_folder(out, fill, MARKER, force, run)
    return out / "report.html"
