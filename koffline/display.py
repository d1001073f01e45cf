"""Tables and labelled lines as texts: on a terminal, in a string, in a notebook.

Texts come from logs, so control characters never reach a terminal, and nothing in them
is markup: HTML is escaped.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from koffline.errors import without_controls

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 116
Row = Sequence[str]


def finished(value: object) -> object:
    """A value as it is shown: texts without control characters; what is HTML already
    is made of such texts.
    """
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return without_controls(value)
    return value


def make_console(width: int = _WIDTH, file: Any = None) -> Console:
    """Console as wide as the terminal, or wide enough not to break numbers; without
    markup.

    It prints texts without control characters. file: where it prints, if not to stdout.
    """
    from rich.console import Console

    class CleanConsole(Console):
        def print(self, *objects: object, **options: Any) -> None:
            super().print(*map(finished, objects), **options)

    console = CleanConsole(emoji=False, markup=False, file=file)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def as_text(show: Callable[[Console], None], width: int = _WIDTH) -> str:
    """What ``show`` prints on a console, as a text without colours."""
    file = io.StringIO()
    console = make_console(file=file)
    console.width = width
    show(console)
    lines = file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


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


# colours of their own, because a notebook may be dark
_BOX = (
    "font:14px/1.5 system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    "background:#fff;color:#1f2933;padding:.6rem .9rem;overflow-x:auto"
)
_CELL = "text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0;color:#1f2933"


def html_box(content: str) -> str:
    """HTML in a box for a notebook, with styles that reach nothing else."""
    return f'<div style="{_BOX}">{content}</div>'


def html_table(title: str, columns: Row, rows: Iterable[Row]) -> str:
    """A table as HTML with all texts escaped."""
    heads = "".join(_html_cell("th", name) for name in columns)
    lines = []
    for row in rows:
        cells = "".join(_html_cell("td", cell) for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return (
        f"<p><b>{html_text(title)}</b></p>"
        '<table style="border-collapse:collapse">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def html_list(lines: Iterable[str]) -> str:
    """Lines as a list in HTML, escaped; empty without lines."""
    items = "".join(f"<li>{html_text(line)}</li>" for line in lines)
    if not items:
        return ""
    return f'<ul style="margin:.5rem 0">{items}</ul>'


def html_text(text: str) -> str:
    """A text as HTML: escaped, and without control characters."""
    return html.escape(without_controls(text))


def _html_cell(tag: str, text: str) -> str:
    return f'<{tag} style="{_CELL}">{html_text(text)}</{tag}>'
