"""A result on a terminal, and as a folder: its JSON, figures as PNG, and a
self-contained HTML page.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from koffline.errors import escaped_json, without_controls
from koffline.store.files import atomic_folder, parents_made
from koffline.store.run_record import FILE, check_results, result_files, shown_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_WIDTH = 116
Row = Sequence[str]


@dataclass(frozen=True)
class Report:
    """How a result is shown.

    marker: the name of its JSON file and, with another ending, of its page's template.
    result: has ``to_json`` and the fields that the last part of
    ``base.html.j2`` shows. figures: functions that draw them, by name. show: prints the
    part before warnings and notes. context: further values for the template.
    """

    marker: str
    result: Any
    figures: Mapping[str, Callable[[], Figure]]
    show: Callable[[Console], None]
    context: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: Path, force: bool, run: Mapping[str, Any]) -> Path:
        """Write ``marker``, ``plots/*.png``, ``report.html`` and run.json to ``out``;
        return the page's path.

        An earlier report is replaced only with ``force``, and only when the new one is
        complete. run: content of run.json, which holds everything that varies between
        runs; the other files should always be the same bytes. A figure that cannot be
        drawn is left out, with a warning.
        """

        with parents_made(out):
            check_results(out, force, self.marker)
            self._write_all(out, run)
        return out / "report.html"

    def _write_all(self, out: Path, run: Mapping[str, Any]) -> None:
        from koffline import figures
        from koffline.report import plots

        with atomic_folder(out, True, result_files(self.marker)) as folder:
            (folder / self.marker).write_text(
                self.result.to_json(timing=False) + "\n", encoding="utf-8"
            )
            text = escaped_json(json.dumps(run, indent=2, ensure_ascii=False)) + "\n"
            (folder / FILE).write_text(text, encoding="utf-8")
            (folder / "plots").mkdir()
            shown: dict[str, str] = {}
            for name, draw in self.figures.items():
                images = figures.saved(name, draw, _images, plots.STYLE)
                if images is not None:
                    (folder / "plots" / f"{name}.png").write_bytes(images.png)
                    shown[name] = images.svg
            (folder / "report.html").write_text(self.render(shown), encoding="utf-8")

    def render(self, figures: Mapping[str, str]) -> str:
        """The page as text, from the template of this folder named after ``marker``.

        In a template ``figures.name`` is an SVG element (mark it safe), and the
        functions of `koffline.report.words` are filters: ``| number`` shows four
        digits, ``| setting`` a setting's description.
        """
        from jinja2 import Environment, FileSystemLoader

        # tables of commands that need no results are printed without it
        from koffline.report import words

        places = FileSystemLoader(Path(__file__).parent)
        environment = Environment(
            loader=places,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finished,  # of every value before it is escaped
        )
        environment.filters |= {
            name: value for name, value in vars(words).items() if callable(value)
        }
        template = environment.get_template(self.marker.replace(".json", ".html.j2"))
        return template.render(
            result=self.result, figures=figures, command=shown_command(), **self.context
        )

    def print(self, page: Path | None = None) -> None:
        """Print the result, other warnings than the verdict, notes, the verdict and the
        path of the page.
        """
        console = make_console()
        notes = getattr(self.result, "notes", ())
        self.show(console)
        sentence = ""
        if hasattr(self.result, "verdict"):
            sentence = self.result.verdict.sentence
        for warning in self.context.get("warnings", self.result.warnings):
            if warning.removeprefix("No interval: ") not in sentence:
                print_labelled(console, "warning", warning)
        for note in notes:
            console.print(f"note: {note}", style="dim", soft_wrap=True)
        if sentence:
            console.print(sentence, style="bold", soft_wrap=True)
        if page is not None:
            console.print(f"report: {page}", soft_wrap=True)


def _finished(value: Any) -> Any:
    """A value as it is shown: texts without control characters; what is HTML already
    is made of such texts.
    """
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return without_controls(value)
    return value


class _Images(NamedTuple):
    """A figure as the content of a PNG file, and as an inline element of a page."""

    png: bytes
    svg: str


def _images(figure: Figure) -> _Images:
    """Both images of a figure; the element has no XML prologue and no metadata."""
    png = io.BytesIO()
    svg = io.StringIO()
    figure.savefig(png, format="png", dpi=144)
    figure.savefig(
        svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = svg.getvalue()
    return _Images(png.getvalue(), text[text.index("<svg") :])


def make_console(width: int = _WIDTH) -> Console:
    """Console as wide as the terminal, or wide enough not to break numbers; without
    markup.

    It prints texts without control characters.
    """
    from rich.console import Console

    class CleanConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*map(_finished, objects), **options)

    console = CleanConsole(emoji=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def print_table(
    console: Console,
    title: str,
    columns: Row,
    *parts: Iterable[Row],
    right: Sequence[str] = (),
) -> None:
    """Print a table with its title on the left and a line between its parts.

    columns: their headings; empty for lines of name and value. right: the columns of
    numbers.
    """
    from rich.table import Table

    table = Table(
        title=without_controls(title), title_justify="left", show_header=bool(columns)
    )
    if not columns:
        table.add_column(style="bold")
    for name in columns or ("",):
        side: Literal["left", "right"] = "left"
        if name in right:
            side = "right"
        table.add_column(without_controls(name), justify=side, overflow="fold")
    for rows in parts:
        for row in rows:
            table.add_row(*map(without_controls, row))
        table.add_section()
    console.print(table)


def print_labelled(
    console: Console, label: str, text: str, style: str = "yellow"
) -> None:
    """Print one long line after a coloured label."""
    from rich.text import Text

    heading = without_controls(f"{label}:")
    console.print(
        Text.assemble((heading, style), without_controls(f" {text}")), soft_wrap=True
    )
