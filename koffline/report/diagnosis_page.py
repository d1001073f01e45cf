"""The page of one diagnosis, and the folder with everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from koffline.ope.diagnose.diagnosis import Diagnosis
from koffline.ope.diagnose.findings import Z_NOTE, describe_action, describe_place
from koffline.report.diagnosis_plots import draw_diagnosis
from koffline.report.folder import write_folder
from koffline.report.html import render, save_figures

MARKER = "diagnosis.json"


def write_diagnosis(
    diagnosis: Diagnosis,
    out: Path,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """``diagnosis.json``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    An earlier report is replaced only with ``force`` and only once the new one is complete. run: the
    content of run.json.
    """

    def fill(folder: Path) -> None:
        figures = draw_diagnosis(diagnosis)
        save_figures(figures, folder)
        (folder / MARKER).write_text(diagnosis.to_json(timing=False) + "\n", encoding="utf-8")
        page = render(
            "diagnosis_page.html.j2",
            figures,
            diagnosis=diagnosis,
            command=command,
            z_note=Z_NOTE,
            regions=[
                (region, describe_place(region.center), describe_action(region.action))
                for region in diagnosis.regions
            ],
        )
        (folder / "report.html").write_text(page, encoding="utf-8")

    write_folder(out, fill, MARKER, force, run)
    return out / "report.html"
