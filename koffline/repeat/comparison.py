"""Two folders of one run, byte by byte: which files are its results, and which of them differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20
# What differs from one day to the next (seconds, dates, the machine), and the state to go on from.
_NOT_RESULTS = re.compile(
    r"(^|/)(run\.json|[^/]*\.run\.json|errors\.txt|\.[^/]*|timing_[^/]*\.csv|time_[^/]*\.csv|timing\.json|checkpoint\.pt"
    r"|(checkpoints|cells|tensorboard)/.*)$"
)


@dataclass(frozen=True)
class Comparison:
    """same: names of equal files; different, missing (in the second folder), new (only there): the others."""

    same: tuple[str, ...]
    different: tuple[str, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every result is there with the same bytes."""
        return not (self.different or self.missing or self.new)

    def lines(self) -> list[str]:
        """A line per file that is not the same."""
        return [
            *(f"differs: {name}" for name in self.different),
            *(f"missing: {name}" for name in self.missing),
            *(f"new: {name}" for name in self.new),
        ]


def compare_folders(first: Path, second: Path, only: str | None = None) -> Comparison:
    """Compare the results in two folders. only: a regular expression that their names begin with."""
    before, after = results_of(first, only), results_of(second, only)
    common = [name for name in before if name in after]
    equal = [name for name in common if same_bytes(first / name, second / name)]
    return Comparison(
        tuple(equal),
        tuple(name for name in common if name not in equal),
        tuple(name for name in before if name not in after),
        tuple(name for name in after if name not in before),
    )


def results_of(folder: Path, only: str | None = None) -> list[str]:
    """Names of the result files in a folder, in order: all but records, clocks and states to go on from."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if is_result(name) and (only is None or re.match(only, name)))


def is_result(name: str) -> bool:
    """Whether a file of that name, seen from the folder of a run, is a result."""
    return _NOT_RESULTS.search(name) is None


def same_bytes(first: Path, second: Path) -> bool:
    """Whether two files hold the same."""
    if first.stat().st_size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as other:
        while block := one.read(_BLOCK):
            if block != other.read(_BLOCK):
                return False
    return True
