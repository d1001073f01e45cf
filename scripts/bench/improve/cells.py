"""Cells of the benchmark: one result each, in one file; what is there is not computed
again.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.store.files import atomic_file


@dataclass(frozen=True)
class Cell:
    """A name, from which the file's is made, and the function that makes the result."""

    name: str
    measure: Callable[[], Any]

    def path(self, folder: Path) -> Path:
        """The cell's file."""
        return folder / f"{re.sub('[^a-z0-9.]+', '-', self.name.lower())}.json"


def read(path: Path) -> Any:
    """The result in a file; None if there is none or it is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def missing(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """The cells without a result."""
    return [cell for cell in cells if read(cell.path(folder)) is None]


def run(cells: Iterable[Cell], folder: Path, keep_going: bool = True) -> int:
    """Make the results that are missing, one after the other; returns how many.

    keep_going: a cell that fails is printed with its traceback and stays missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = 0
    for cell in missing(cells, folder):
        started = time.process_time()
        try:
            result = cell.measure()
        except Exception:
            if not keep_going:
                raise
            print(f"{cell.name}: failed", flush=True)
            traceback.print_exc()
            continue
        seconds = time.process_time() - started
        with atomic_file(cell.path(folder), force=True) as temporary:
            content = {"name": cell.name, "result": result, "seconds": seconds}
            temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        print(f"{cell.name}: {seconds:.0f} s", flush=True)
        finished += 1
    return finished


def results(folder: Path, beginning: str = "") -> list[Any]:
    """The results of a folder whose file names begin so, by name."""
    paths = sorted(folder.glob(f"{beginning}*.json"))
    answers = [read(path) for path in paths]
    return [answer for answer in answers if answer is not None]
