"""Disks that fill up, and logs to lose."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from scripts.fault_checks import litter_in


@contextlib.contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes, as on a disk that is full (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its bytes; no temporary ones may be there."""
    assert litter_in(folder) == []
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
