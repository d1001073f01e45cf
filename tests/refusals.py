"""Commands in this process, and refusals: by the library or by shape annotations, which
tests may turn on.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jaxtyping import TypeCheckError

from koffline.cli import cli
from koffline.errors import KofflineError


def run_cli(*words: object) -> Result:
    """What a command line says and how it ends; errors that are not the user's pass
    through.
    """
    return CliRunner().invoke(
        cli, [*map(str, words)], prog_name="koffline", catch_exceptions=False
    )


def succeed(*words: object) -> str:
    """What a command that works prints on stdout."""
    done = run_cli(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


@contextmanager
def refused(kind: type[KofflineError], match: str) -> Iterator[None]:
    """Like pytest.raises(kind, match), but content with a violated annotation too; in
    one line.
    """
    with pytest.raises((kind, TypeCheckError)) as caught:
        yield
    if isinstance(caught.value, kind):
        assert re.search(match, str(caught.value)), str(caught.value)
        assert "\n" not in str(caught.value)


@contextmanager
def one_line(
    kind: type[KofflineError], *words: str, match: str | None = None
) -> Iterator[Any]:
    """Like pytest.raises(kind, match=match); the message is one line for a terminal and
    holds the words.
    """
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert str(caught.value).isprintable()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def assert_refused(result: Result, *words: str) -> None:
    """A command ended with exit code 2 and one line on stderr that holds these words.

    On a busy machine lines of progress may stand before it.
    """
    assert result.exit_code == 2
    assert result.stdout == ""
    text = re.sub(r"^.*, \d+ s\n", "", result.stderr, flags=re.MULTILINE)
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    for word in words:
        assert word in text


class Attack:
    """Pickles as a call of os.system that leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)
