"""What folders of runs have in common: one process at a time, the clock, values in messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError

LOCK = ".lock"


def now() -> str:
    """Time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def shown(value: Any) -> str:
    """A setting in a message, long ones cut."""
    text = "not set" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """The system lets go of the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two runs in one folder are the user's own affair
        yield
        return
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another process is training in {out}; wait for it or choose another --out"
            ) from None
        yield


def is_free(out: Path, record: str) -> bool:
    """Whether a run may begin there: no folder yet, or one with nothing but what a start left behind.

    record: the file that makes a folder a run's. Raises ConfigError for a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder for the run")
    return not out.exists() or all(path.name.startswith((LOCK, "." + record)) for path in out.iterdir())
