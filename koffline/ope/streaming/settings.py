"""How a log on disk is read: memory, where the pass runs, and what it leaves of the rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from koffline.errors import ConfigError
from koffline.jobs.mapping import PassSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
DEFAULT_MEMORY = "2GB"


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a pass that do not belong to the estimate itself.

    memory: what the process may hold at most, in bytes or as in "2GB"; blocks and the sample are made to fit.
    sample_rows: rows that networks are trained on (default: 200,000, or what fits the memory). groups: the
    independent parts that the log's units are shared out to, for the interval. precision: of features and
    their products, "single" or "double"; sums over blocks are always double.
    """

    memory: int | str = DEFAULT_MEMORY
    workers: int = 1
    ray: str | None = None
    skip_bad_shards: bool = False
    sample_rows: int | None = None
    groups: int = 40
    precision: str = "single"

    def __post_init__(self) -> None:
        parse_memory(self.memory)  # whether it is enough depends on the log
        if self.sample_rows is not None and self.sample_rows < 2:
            raise ConfigError(f"sample_rows is {self.sample_rows}; give at least 2, better some ten thousand")
        if not 2 <= self.groups <= 1000:
            raise ConfigError(f"groups is {self.groups}; give a number from 2 to 1000, 40 by default")
        if self.precision not in ("single", "double"):
            raise ConfigError(f"precision is '{self.precision}'; give single or double")

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
