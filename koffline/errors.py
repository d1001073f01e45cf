"""Errors that a user can act on: what is wrong, what was received, and the remedy, in one line."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping

# Longer messages quote a file, not its fault.
_LONG_WORD = re.compile(r"\S{400,}")  # longer than honest paths
_LONGEST_MESSAGE = 4000
_MOST_NAMES = 12
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


class KofflineError(Exception):
    """Base of every error koffline raises for bad input; the command line prints it and exits with 2.

    Messages are one line without control characters: names in files may hold anything, also commands to a
    terminal.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class DataError(KofflineError):
    """A log that cannot be read or whose columns contradict each other."""


class PolicyError(KofflineError):
    """A policy that cannot be loaded safely or does not fit the log."""


class ConfigError(KofflineError):
    """A setting that is unknown or out of range."""


def printable(text: str) -> str:
    """The text in one line that a terminal shows and does not obey, long words and long texts cut."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:80]}…{word[0][-20:]}", text)
    cut = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in cut)


def is_control(character: str) -> bool:
    """Whether a terminal obeys a character and does not show: escapes, marks that turn the writing."""
    if unicodedata.category(character) == "Cc":
        return character not in "\n\t"
    return unicodedata.bidirectional(character) in _TURNS


def nearest_name(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The remedy for an unknown name: its synonym here, the most similar one, or those that are known."""
    names, other = list(known), synonyms or {}
    plain = name.lower().replace("_", "-").replace(" ", "-")
    if other.get(plain) in names:
        return f"here it is called '{other[plain]}'"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    more = f", … ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    return (
        f"did you mean '{close[0]}'?"
        if close
        else f"known are {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"
    )
