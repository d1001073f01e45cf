"""A result in a terminal, and as a folder: its JSON, figures as PNG, and a self-contained HTML page."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.errors import ConfigError
from koffline.report import words
from koffline.store.files import atomic_folder, remove_abandoned
from koffline.store.run_record import FILE, shown_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

_WIDTH = 116
_TWINS = {"estimate.json": "estimates.json", "estimates.json": "estimate.json"}  # result files of one command


def check_output_directory(out: Path, force: bool, marker: str) -> None:
    """ConfigError before any work when ``out`` is a file, or holds something.

    marker: the file without which a folder is not ours to replace, even with ``force``.
    """
    remove_abandoned(out)
    occupied = out.is_dir() and any(out.iterdir())
    refusal = None
    if out.exists() and not out.is_dir():
        refusal = "is a file; name a directory"
    elif occupied and not force:
        refusal = "is not empty; name another directory or add --force to replace it"
    elif occupied and not any((out / name).is_file() for name in (marker, _TWINS.get(marker, marker))):
        refusal = f"holds no {marker}, so --force will not replace it; name another directory"
    if refusal is not None:
        raise ConfigError(f"--out {out} {refusal}")


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
    with atomic_folder(out, True, lambda _: True) as folder:  # others were refused above
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

    In a template ``figures.name`` is an SVG element (mark it safe), and the functions of
    `koffline.report.words` are filters: ``| number`` gives four digits, ``| setting`` what a setting is.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {name: function for name, function in vars(words).items() if callable(function)}
    page = environment.get_template(template)
    return page.render(found=found, figures=figures, command=shown_command(), **context)


def _svg(figure: Figure) -> str:
    """The figure as an inline element, without the XML prologue and metadata."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "koffline"}):  # ids by content, not at random
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def make_console() -> Console:
    """Console as wide as the terminal, else wide enough to break no number. No markup."""
    from rich.console import Console

    console = Console(emoji=False, markup=False)
    if console.is_terminal:
        return console
    return Console(width=max(console.width, _WIDTH), emoji=False, markup=False)


def make_table(title: str, *columns: str, **options: Any) -> Table:
    """A table with its title on the left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for column in columns:
        table.add_column(column)
    return table


def print_record(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Names and values, a line each."""
    table = make_table(title, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_labelled(console: Console, label: str, text: str, style: str = "yellow") -> None:
    """One long line behind a coloured label."""
    from rich.text import Text

    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)


def print_end(
    console: Console, warnings: Iterable[str], page: Path | None, notes: int = 0, sentence: str = ""
) -> None:
    """Warnings, how many notes there are, what was found in a sentence, and the path of the report."""
    for warning in warnings:
        print_labelled(console, "warning", warning)
    if notes:
        them, verb = ("it", "is") if notes == 1 else ("them", "are")
        where = "in the report" if page is not None else f"in --json, and 'koffline data info' shows {them}"
        said = f"{words.count_of(notes, 'note')} on how the log was read {verb} {where}"
        console.print(said, style="dim", soft_wrap=True)
    if sentence:
        console.print(sentence, style="bold", soft_wrap=True)
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True)
