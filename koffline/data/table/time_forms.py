"""Forms of written times that koffline does not read by itself, and which of them a
column has.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from koffline.data.table.text_ways import TEXT_WAYS, as_read, declared_times, unread

_DATES = (
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%Y/%m/%d",
    "%Y.%m.%d",
    "%d/%m/%y",
    "%m/%d/%y",
    "%d.%m.%y",
    "%d %b %Y",
    "%d-%b-%Y",
    "%b %d, %Y",
    "%b %d %Y",
)
_CLOCKS = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S%.f",
    " %I:%M %p",
    " %I:%M:%S %p",
    "T%H:%M:%S",
)
_OTHERS = (
    "%Y-%m-%d %I:%M %p",
    "%Y-%m-%d %I:%M:%S %p",
    "%d/%b/%Y:%H:%M:%S %z",  # web servers
    "%a %b %d %H:%M:%S %Y",  # C's ctime
    "%a, %d %b %Y %H:%M:%S %z",  # mail
)
_FIRST = 50  # texts that sort out most forms


def forms_of(texts: pl.Series) -> list[str]:
    """The forms that read every text of a column, each with other instants than those
    before it; none if the texts are read without a form, or are no times.

    texts: strings (N,). Missing ones and words for missing do not count.
    """
    if any(not is_wrong.any() for is_wrong in unread(texts, TEXT_WAYS).values()):
        return []
    forms: list[str] = []
    instants: list[pl.Series] = []
    beginning = texts.drop_nulls().head(_FIRST)
    for form in _all_forms():
        way = declared_times(form, None)
        if not _reads(beginning, way) or not _reads(texts, way):
            continue
        read = texts.to_frame().select(as_read(texts.name, way)).to_series()
        if not any(read.equals(earlier) for earlier in instants):
            forms.append(form)
            instants.append(read)
    return forms


def _all_forms() -> Iterator[str]:
    for date in _DATES:
        for clock in _CLOCKS:
            yield date + clock
    yield from _OTHERS


def _reads(texts: pl.Series, way: str) -> bool:
    return not unread(texts, [way])[way].any()
