"""A result's folder: its JSON, figures as PNG, and a self-contained HTML page with the figures inline."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.results import percent
from koffline.report.folder import write_folder
from koffline.report.table import count_of, describe_lines, describe_log, number, promise

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(
    marker: str,
    found: Any,
    draw: Callable[[], dict[str, Figure]],
    out: Path,
    force: bool,
    run: Any,
    **context: Any,
) -> Path:
    """``marker``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    An earlier report is replaced only with ``force`` and only once the new one is complete. marker: the name
    of the JSON file. found: a result with ``to_json``, and with what the last part of ``base.html.j2`` shows.
    run: the content of run.json. context: what the marker's template needs besides.
    """

    def fill(folder: Path) -> None:
        figures = draw()
        (folder / "plots").mkdir()
        for name, figure in figures.items():
            figure.savefig(folder / "plots" / f"{name}.png", dpi=144)
        (folder / marker).write_text(found.to_json(timing=False) + "\n", encoding="utf-8")
        template = marker.replace(".json", ".html.j2")
        page = render_page(template, {name: _svg(figure) for name, figure in figures.items()}, found, context)
        (folder / "report.html").write_text(page, encoding="utf-8")

    write_folder(out, fill, marker, force, run)
    return out / "report.html"


def render_page(template: str, figures: Mapping[str, str], found: Any, context: Mapping[str, Any]) -> str:
    """The page as text. template: a file of this folder that extends ``base.html.j2``.

    In a template ``figures.name`` is an SVG element (mark it safe) and ``| number`` gives four digits,
    ``| percent`` a level, ``| promise`` what a kind of interval is, ``| lines`` a nested record line by line.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=number,
        percent=percent,
        promise=promise,
        lines=describe_lines,
        count_of=count_of,
        log_words=describe_log,
    )
    return environment.get_template(template).render(found=found, figures=figures, **context)


def _svg(figure: Figure) -> str:
    """The figure as an inline element, without the XML prologue and metadata."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "koffline"}):  # names inside by content, not by chance
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
