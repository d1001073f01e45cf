"""Lines of a command on stdout and stderr, whatever these can print."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import click


def say(text: str, err: bool = False) -> None:
    """Print a line to stdout, or to stderr; click alone would write UTF-8 where a
    terminal reads ASCII.
    """
    stream = sys.stdout
    if err:
        stream = sys.stderr
    click.echo(text, file=stream)


def print_what_is_possible() -> None:
    """Make stdout replace characters that its encoding lacks, as stderr always does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def unwritten() -> OSError | None:
    """Write out what stdout and stderr hold; the error if it cannot be written.

    Python would try again at its end, and complain.
    """
    problem = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            problem = problem or error
            _discard(stream)
        except ValueError:  # it was closed
            continue
    return problem


def _discard(stream: Any) -> None:
    """Let a stream write into nothing from now on."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
        stream.flush()
