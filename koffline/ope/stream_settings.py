"""How a log that is not held in memory is read: memory, and where passes run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from koffline.errors import ConfigError
from koffline.jobs import PassSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
DEFAULT_MEMORY = "2GB"


@dataclass(frozen=True, kw_only=True)
class StreamSettings(PassSettings):
    """Settings of passes over a log; they decide time and memory, not the estimate.

    memory: what a process may hold at most, in bytes or as in "2GB": blocks of rows are made to fit.
    workers, ray, skip_bad_shards: as in `PassSettings`.
    """

    memory: int | str = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_memory(self.memory)  # whether it is enough depends on the log

    @property
    def memory_bytes(self) -> int:
        """The limit as a number."""
        return parse_memory(self.memory)


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
