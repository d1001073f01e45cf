"""Stated bounds: what a file declares is held against what it holds and against this machine's memory.

`Refused` carries the sentence without the file's name; each reader turns it into its own kind of error.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

# Deflate, the strongest compression that honest logs use, cannot do better than 1032 : 1.
EXPANSION = 1100
# What all arrays of one file may declare beyond that: columns of one value in stronger compressions.
SLACK_BYTES = 64 * 2**20
# Descriptions beside the columns: JSON in attributes, metadata.json, records of runs.
TEXT_BYTES = 16 * 2**20


class Refused(ValueError):
    """Why a file is not read, in words that follow its name."""


class Tally:
    """Adds up what one file declares; raises Refused as soon as that cannot be honest, or not fit.

    file_bytes: the size of the file, or of the folder.
    """

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._stored = 0
        self._declared = 0
        self._unexplained = 0
        self._memory = machine_memory()  # asked once: files may hold ten thousand arrays

    def add(self, name: str, declared: int, stored: int, compressed: bool = True) -> None:
        """Count an array of ``declared`` bytes in memory and ``stored`` bytes on disk before it is read."""
        self.count(name, declared, stored, compressed)
        check_memory(self._declared, self._memory)

    def count(self, name: str, declared: int, stored: int, compressed: bool = True) -> None:
        """The same of an array that is read by slices: it need not fit the memory."""
        stored = max(0, min(stored, self._file_bytes))
        self._stored += stored
        self._declared += declared
        self._unexplained += max(0, declared - stored * (EXPANSION if compressed else 1))
        if self._unexplained > SLACK_BYTES:
            raise Refused(
                f"{name} declares {shown_bytes(declared)} and holds {shown_bytes(stored)}; "
                "it is damaged or made to fill the memory: export it again"
            )
        if self._stored > 4 * self._file_bytes + SLACK_BYTES:
            raise Refused(
                f"it names the same data many times over ({name} is one of the names); export it again"
            )


def check_memory(declared: int, memory: int | None = None) -> None:
    """Raise Refused where ``declared`` bytes cannot fit into ``memory``, by default this process's."""
    memory = machine_memory() if memory is None else memory
    if declared > memory:
        raise Refused(
            f"its columns take {shown_bytes(declared)}, this process may use {shown_bytes(memory)}; "
            "convert it on a larger machine with `koffline data convert … --shard-rows` and open it lazily"
        )


def machine_memory() -> int:
    """Bytes that this process can hope for: physical memory, or a lower limit of its container or its own."""
    limits = [2**62]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit > 0]
    return min(limit for limit in limits if limit > 0)


def check_regular(path: Path) -> None:
    """Raise Refused for pipes, devices and what the system makes up: reading them may never end.

    OSError as the system gives it.
    """
    found = path.stat()
    made_up = any(os.path.isdir(root) and os.stat(root).st_dev == found.st_dev for root in ("/proc", "/sys"))
    if made_up or not stat.S_ISREG(found.st_mode):
        raise Refused("it is no regular file (a pipe, device or folder); copy its content into a file")


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """The text of a file of at most ``most`` bytes. Raises Refused, OSError and UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf-8")


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises Refused and OSError."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(f"it is larger than {shown_bytes(most)}, the most that such a file may have")
    return content


def read_json(path: Path, most: int = TEXT_BYTES) -> Any:
    """The value in a JSON file. Raises Refused, also for what is no JSON, and OSError."""
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises Refused for anything else, whatever it does to the parser."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise Refused(f"its JSON cannot be read ({reason[:120]}); write it again") from None


def shown_bytes(count: int) -> str:
    """12.3 GB, for messages."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return "more than 1000 PB"
