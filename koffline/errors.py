"""Errors that a user can act on: what is wrong, what was received, and the remedy, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KofflineError(Exception):
    """Base of every error koffline raises for bad input; the command line prints it and exits with 2."""


class DataError(KofflineError):
    """A log that cannot be read or whose columns contradict each other."""


class PolicyError(KofflineError):
    """A policy that cannot be loaded safely or does not fit the log."""


class ConfigError(KofflineError):
    """A setting that is unknown or out of range."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the most similar one, or all that are known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(names)}"
