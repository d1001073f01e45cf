"""A result's folder, whole or not at all: its JSON, figures as PNG, and a self-contained HTML page."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.errors import ConfigError
from koffline.ope.results import percent
from koffline.report.table import count_of, describe_lines, describe_log, number, promise
from koffline.store.files import atomic_folder, remove_abandoned, temporary_beside
from koffline.store.run_record import FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_output_directory(out: Path, force: bool, marker: str) -> None:
    """ConfigError before any work when ``out`` is a file, holds something, or cannot be made.

    marker: the file without which a folder is not ours to replace, even with ``force``.
    """
    remove_abandoned(out)
    occupied = out.is_dir() and any(out.iterdir())
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    refusal = None
    if out.exists() and not out.is_dir():
        refusal = " is a file; name a directory"
    elif occupied and not force:
        refusal = " is not empty; name another directory or add --force to replace it"
    elif occupied and not (out / marker).is_file():
        refusal = f" holds no {marker}, so --force will not replace it; name another directory"
    elif not parent.is_dir():
        refusal = f": {parent} is a file; name a directory"
    else:
        try:  # permissions alone do not tell (as in /proc)
            probe = temporary_beside(parent / out.name)
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            reason = error.strerror or str(error)
            refusal = f": {parent} is not writable ({reason}); name a directory that is"
    if refusal is not None:
        raise ConfigError(f"--out {out}{refusal}")


def write_page(
    marker: str,
    found: Any,
    draw: Callable[[], dict[str, Figure]],
    out: Path,
    force: bool,
    run: Any,
    **context: Any,
) -> Path:
    """``marker``, ``plots/*.png``, ``report.html`` and run.json in ``out``; returns the page's path.

    An earlier report is replaced only with ``force`` and only once the new one is complete. marker: the name
    of the JSON file. found: a result with ``to_json``, and with what the last part of ``base.html.j2`` shows.
    run: the content of run.json, where all that differs from one day to the next belongs: all else should be
    the same bytes every time. context: what the marker's template needs besides.
    """
    check_output_directory(out, force, marker)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out, True, lambda _: True) as folder:  # what may not be replaced was refused above
        figures = draw()
        (folder / "plots").mkdir()
        for name, figure in figures.items():
            figure.savefig(folder / "plots" / f"{name}.png", dpi=144)
        (folder / marker).write_text(found.to_json(timing=False) + "\n", encoding="utf-8")
        inline = {name: _svg(figure) for name, figure in figures.items()}
        page = render_page(marker.replace(".json", ".html.j2"), inline, found, context)
        (folder / "report.html").write_text(page, encoding="utf-8")
        if run is not None:
            text = json.dumps(run, indent=2, ensure_ascii=False) + "\n"
            (folder / FILE).write_text(text, encoding="utf-8")
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
    words = {"count_of": count_of, "log_words": describe_log, "lines": describe_lines}
    environment.filters.update(number=number, percent=percent, promise=promise, **words)
    return environment.get_template(template).render(found=found, figures=figures, **context)


def _svg(figure: Figure) -> str:
    """The figure as an inline element, without the XML prologue and metadata."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "koffline"}):  # names inside by content, not by chance
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
