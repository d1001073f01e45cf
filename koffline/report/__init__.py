"""A result on a terminal, and as a folder: its JSON, figures as PNG, and a
self-contained HTML page.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from koffline.display import finished, make_console, print_labelled, print_table
from koffline.errors import escaped_json
from koffline.json_types import JsonObject
from koffline.store.files import atomic_file, atomic_folder, parents_made
from koffline.store.run_record import FILE, check_results, result_files, shown_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from koffline.improvement.outcome import Improvement
    from koffline.ope.diagnosis import Diagnosis
    from koffline.ope.ranking import PolicyRanking
    from koffline.ope.results import Estimate, EstimateTable
    from koffline.report.plots import Drawing

# further values for a page's template, by name
Context: TypeAlias = Mapping[str, Any]
_PIXELS_PER_INCH = 100  # of a figure in a notebook

__all__ = ["Report", "make_console", "print_labelled", "print_table"]


@dataclass(frozen=True)
class Report:
    """How a result is shown.

    marker: the name of its JSON file and, with another ending, of its page's template;
    the template of the page's top is named after it, too. result: has ``to_json`` and
    the fields that the last part of ``base.html.j2`` shows. figures: functions that
    draw them, by name. show: prints the part before warnings and notes. top_figure: the
    name of the figure that notebooks show; drawing: makes it for any axes. context:
    further values for the template. call: how the result was made in Python; None: by
    the running command. further: writes further files into the folder.
    record: further entries of run.json.
    """

    marker: str
    result: Estimate | EstimateTable | PolicyRanking | Diagnosis | Improvement
    figures: Mapping[str, Callable[[], Figure]]
    show: Callable[[Console], None]
    top_figure: str
    drawing: Callable[[], Drawing]
    context: Context = field(default_factory=dict)
    call: str | None = None
    further: Callable[[Path], None] | None = None
    shown_files: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: Path, force: bool, run: JsonObject) -> Path:
        """Write ``marker``, ``plots/*.png``, ``report.html`` and run.json to ``out``;
        return the page's path.

        An earlier report is replaced only with ``force``, and only when the new one is
        complete. run: content of run.json, which holds everything that varies between
        runs; the other files should always be the same bytes. A figure that cannot be
        drawn is left out, with a warning.
        """

        with parents_made(out):
            check_results(out, force, self.marker)
            self._write_all(out, {**run, **self.record})
        return out / "report.html"

    def _write_all(self, out: Path, run: JsonObject) -> None:
        with atomic_folder(out, True, result_files(self.marker)) as folder:
            (folder / self.marker).write_text(
                self.result.to_json(timing=False) + "\n", encoding="utf-8"
            )
            text = escaped_json(json.dumps(run, indent=2, ensure_ascii=False)) + "\n"
            (folder / FILE).write_text(text, encoding="utf-8")
            (folder / "plots").mkdir()
            shown: dict[str, str] = {}
            for name, images in self._drawn(self.figures):
                (folder / "plots" / f"{name}.png").write_bytes(images.png)
                shown[name] = images.svg
            (folder / "report.html").write_text(self.render(shown), encoding="utf-8")
            if self.further is not None:
                self.further(folder)

    def write_page(self, page: Path, force: bool) -> Path:
        """Write the page alone, which needs no other file; return its path.

        Raises DataError if the path is in use, without ``force``.
        """
        with parents_made(page), atomic_file(page, force) as temporary:
            shown = {name: images.svg for name, images in self._drawn(self.figures)}
            temporary.write_text(self.render(shown), encoding="utf-8")
        return page

    def top(self) -> str:
        """The top of the page, as an element for a notebook: no scripts, no other
        files, and styles that reach nothing else.
        """
        shown: dict[str, str] = {}
        for name, images in self._drawn([self.top_figure]):
            data = base64.b64encode(images.png).decode("ascii")
            shown[name] = (
                f'<img alt="{name}" width="{images.width}"'
                f' src="data:image/png;base64,{data}">'
            )
        name = self.marker.replace(".json", "_top.html.j2")
        return self._rendered("notebook.html.j2", shown, top=name)

    def _drawn(self, names: Iterable[str]) -> Iterator[tuple[str, _Images]]:
        """Figures by name as images, without those that cannot be drawn."""
        from koffline import figures
        from koffline.report import plots

        for name in names:
            images = figures.saved(name, self.figures[name], _images, plots.STYLE)
            if images is not None:
                yield name, images

    def render(self, figures: Mapping[str, str]) -> str:
        """The page as text, from the template of this folder named after ``marker``.

        In a template ``figures.name`` is an SVG element (mark it safe), and the
        functions of `koffline.report.words` are filters: ``| number`` shows four
        digits, ``| setting`` a setting's description.
        """
        return self._rendered(self.marker.replace(".json", ".html.j2"), figures)

    def _rendered(
        self, template: str, figures: Mapping[str, str], top: str | None = None
    ) -> str:
        """A template as text. top: the template of the page's top, for a notebook."""
        from jinja2 import Environment, FileSystemLoader

        # tables of commands that need no results are printed without it
        from koffline.report import words

        places = FileSystemLoader(Path(__file__).parent)
        environment = Environment(
            loader=places,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=finished,  # of every value before it is escaped
        )
        environment.filters |= {
            name: value for name, value in vars(words).items() if callable(value)
        }
        return environment.get_template(template).render(
            result=self.result,
            figures=figures,
            command=self.call or shown_command(),
            top=top,
            **self.context,
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
            for kind, name in self.shown_files.items():
                console.print(f"{kind}: {page.parent / name}", soft_wrap=True)
            console.print(f"report: {page}", soft_wrap=True)
        elif self.shown_files:
            names = " and ".join(self.shown_files)
            console.print(
                f"note: {names} were not written; the same command with --out DIR"
                " writes them",
                soft_wrap=True,
            )


class _Images(NamedTuple):
    """A figure as the content of a PNG file, and as an inline element of a page.

    width: in a notebook, in pixels.
    """

    png: bytes
    svg: str
    width: int


def _images(figure: Figure) -> _Images:
    """Both images of a figure; the element has no XML prologue and no metadata."""
    png = io.BytesIO()
    svg = io.StringIO()
    figure.savefig(png, format="png", dpi=144)
    figure.savefig(
        svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = svg.getvalue()
    width = round(_PIXELS_PER_INCH * figure.get_figwidth())
    return _Images(png.getvalue(), text[text.index("<svg") :], width)
