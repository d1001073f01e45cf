"""Self-contained HTML pages: templates of this folder, figures as inline SVG, nothing loaded elsewhere."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.interval import percent
from koffline.report.words import count_of, describe_lines, number, promise

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: str, figures: Mapping[str, Figure], **context: Any) -> str:
    """The page as text. template: a file of this folder that extends ``base.html.j2``.

    In a template ``figures.name`` is an SVG element (mark it safe) and ``| number`` gives four digits,
    ``| percent`` a level, ``| promise`` what a kind of interval is, ``| lines`` a nested record line by line.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=number, percent=percent, promise=promise, lines=describe_lines, count_of=count_of
    )
    drawn = {name: _svg(figure) for name, figure in figures.items()}
    return environment.get_template(template).render(figures=drawn, **context)


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """``folder/plots/NAME.png`` of each."""
    (folder / "plots").mkdir()
    for name, figure in figures.items():
        figure.savefig(folder / "plots" / f"{name}.png", dpi=144)


def _svg(figure: Figure) -> str:
    """The figure as an inline element, without the XML prologue and metadata."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "koffline"}):  # names inside by content, not by chance
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
