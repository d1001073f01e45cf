"""What folders of runs have in common: whether one is free, the clock, values in messages."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError


def now() -> str:
    """Time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def shown(value: Any) -> str:
    """A setting in a message, long ones cut."""
    text = "not set" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"


def is_free(out: Path, record: str) -> bool:
    """Whether a run may begin there: no folder yet, or one with nothing but what a start left behind.

    record: the file that makes a folder a run's. Raises ConfigError for a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder for the run")
    return not out.exists() or all(path.name.startswith("." + record) for path in out.iterdir())
