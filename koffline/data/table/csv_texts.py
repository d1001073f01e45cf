"""What CSV files hold beside plain rows: lines above the header, and lists of numbers
that are written as text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import polars as pl

from koffline.errors import DataError

_COMMENT = "#"
_DELIMITERS = ",;\t|"
# [0.1, 0.2], as Python writes it, and [0.1 0.2], as NumPy does
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf)"
_LIST = re.compile(
    rf"[\[(]\s*(?:{_NUMBER})(?:\s*[,;\s]\s*(?:{_NUMBER}))*\s*,?\s*[\])]", re.I
)
_MOST_ROWS = 200  # that are looked at to find columns of lists
_MOST_SHOWN = 60


@dataclass(frozen=True)
class Preamble:
    """What stands above the rows of a CSV file.

    ``header``: the line with the names. ``rows``: lines below it, as far as they were
    read. ``delimiter``: as a first line ``sep=;`` says, empty without one. ``skipped``:
    1 with that line, else 0. ``comment``: what lines begin with that are no rows; None
    if comments do not stand above the header. ``end``: of lines.
    """

    header: bytes
    rows: Sequence[str]
    delimiter: str
    skipped: int
    comment: str | None
    end: str


def read_preamble(head: bytes, name: str) -> Preamble:
    """Take a line ``sep=;`` and comments apart from the header.

    head: the first bytes of the file. name: of the file. Raises DataError if nothing
    but comments is there, or if ``sep=`` names no separator.
    """
    end = "\n"
    if b"\r" in head and b"\n" not in head:
        end = "\r"
    raw_lines = head.split(end.encode())
    lines = [line.rstrip(b"\r") for line in raw_lines]
    first = lines[0].removeprefix(b"\xef\xbb\xbf").strip(b'"').decode("latin-1")
    delimiter = ""
    skipped = 0
    if first.lower().startswith("sep="):
        delimiter = first[len("sep=") :]
        skipped = 1
        if len(delimiter) != 1:
            raise DataError(
                f"{name} begins with {first[:_MOST_SHOWN]!r}, which names no separator;"
                " write sep=; or another single character, or leave the line out"
            )
    place = skipped
    while place < len(lines) and _is_comment(lines, place, delimiter):
        place += 1
    comment = None
    if place > skipped:
        comment = _COMMENT
    if place >= len(lines) or (place > 0 and not lines[place].strip()):
        raise DataError(
            f"{name} has no header below its first {place} lines; write the names of"
            " the columns there"
        )
    # the last line may be cut off where the head ends
    rows = lines[place + 1 : place + 1 + _MOST_ROWS]
    if place + 1 + len(rows) == len(lines):
        rows = rows[:-1] or rows
    texts = [row.decode("utf-8", "replace") for row in rows]
    return Preamble(lines[place], texts, delimiter, skipped, comment, end)


def _is_comment(lines: Sequence[bytes], place: int, delimiter: str) -> bool:
    """Whether a line is a comment, and no header whose first name begins with #: that
    has as many fields as the line below, which is no comment.
    """
    line = lines[place].removeprefix(b"\xef\xbb\xbf").lstrip()
    if not line.startswith(_COMMENT.encode()):
        return False
    if place + 1 >= len(lines):
        return True
    below = lines[place + 1]
    if below.lstrip().startswith(_COMMENT.encode()):
        return True
    text = line.decode("utf-8", "replace")
    mark = delimiter or max(_DELIMITERS, key=text.count)
    n_fields = text.count(mark)
    return n_fields == 0 or n_fields != below.decode("utf-8", "replace").count(mark)


def list_columns(rows: Iterable[list[str]], width: int) -> list[int]:
    """Places of the columns in which every field that is not empty is a list of
    numbers. rows: the first of a file. width: number of columns.
    """
    n_lists = [0] * width
    n_other = [0] * width
    try:
        for row in islice(rows, _MOST_ROWS):
            for place, field in enumerate(row[:width]):
                text = field.strip()
                if _LIST.fullmatch(text):
                    n_lists[place] += 1
                elif text:
                    n_other[place] += 1
    except csv.Error:
        return []  # the rows are refused when they are read
    return [place for place in range(width) if n_lists[place] and not n_other[place]]


def with_lists(frame: pl.DataFrame, column: str, name: str, above: int) -> pl.DataFrame:
    """The frame with a column of texts read as lists of numbers.

    name: of the file. above: rows before these in it. Raises DataError for texts that
    are no list.
    """
    texts = frame[column].str.strip_chars()
    inside = texts.str.strip_chars("[]() ").str.strip_chars_end(", ")
    parted = inside.str.replace_all(r"\s*[,;\s]\s*", " ").str.split(" ")
    lists = parted.cast(pl.List(pl.Float64), strict=False)
    wrong = lists.list.eval(pl.element().is_null()).list.any().fill_null(False)
    if wrong.any():
        place = int(wrong.arg_max() or 0)
        raise DataError(
            f"{name}: column {column} holds {texts[place][:_MOST_SHOWN]!r} in row"
            f" {above + place + 1}, no list of numbers like those above; write all as in"
            " [0.1, 0.2]"
        )
    return frame.with_columns(lists.alias(column))
