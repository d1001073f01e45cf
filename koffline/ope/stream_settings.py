"""How a log that is not held in memory is read: memory, and where passes run."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from koffline.errors import ConfigError
from koffline.jobs import PassSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
DEFAULT_MEMORY = "2GB"
SAVED = ".sums"  # what files of saved passes end in


@dataclass(frozen=True)
class StreamSettings:
    """Settings of passes over a log; they decide time and memory, not the estimate.

    memory: what a process may hold at most, in bytes or as in "2GB": blocks of rows are made to fit.
    workers, ray, skip_bad_shards: as in `PassSettings`. partial: a folder where passes over shards save their
    sums now and then; the same evaluation goes on from there after it was killed.
    """

    memory: int | str = DEFAULT_MEMORY
    workers: int = 1
    ray: str | None = None
    skip_bad_shards: bool = False
    partial: str | Path | None = None

    def __post_init__(self) -> None:
        parse_memory(self.memory)  # whether it is enough depends on the log

    @property
    def memory_bytes(self) -> int:
        """The limit as a number."""
        return parse_memory(self.memory)

    @property
    def passes(self) -> PassSettings:
        """Where the pass runs."""
        return PassSettings(self.workers, self.ray, self.skip_bad_shards)


def parse_memory(size: int | str) -> int:
    """Bytes of a size such as "2GB", "1.5G", "500MiB" or a number. Raises ConfigError."""
    found = _SIZE.fullmatch(str(size).strip())
    if found is None or isinstance(size, bool):
        raise ConfigError(f"memory is '{size}'; give a size such as 2GB or 500MB")
    number, unit, binary = found.groups()
    base = _UNITS[unit.lower()]
    if binary and unit:
        base = 1024 ** ("kmgt".index(unit.lower()) + 1)
    return int(float(number) * base)


def remove_saved(folder: Path) -> None:
    """Remove the sums that passes have saved in a folder, and the folder where it holds nothing else."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SAVED}"):
            path.unlink()
        folder.rmdir()
