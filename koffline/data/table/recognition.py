"""What is a table and of which kind: told by content for Parquet and Arrow, by name for CSV."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from koffline.data import remote
from koffline.data.table.roles import natural_key
from koffline.errors import DataError

PARQUET, ARROW, CSV = "Parquet", "Arrow", "CSV"
_SUFFIXES = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".arrows": ARROW,
    ".ipc": ARROW,
    ".csv": CSV,
    ".tsv": CSV,
}
_COMPRESSED = (".gz", ".bz2", ".zst")
_MOST_FILES = 1_000_000
# Arrow's streams begin with the mark of a message; its files, and Feather version 2, with their own name.
STREAM = b"\xff\xff\xff\xff"
HDF5 = b"\x89HDF"


@dataclass(frozen=True)
class TableFile:
    """One file; ``constants`` are the columns that its folders' names give (``key=value``)."""

    name: str
    kind: str
    constants: dict[str, str] = field(default_factory=dict)


def looks_like_table(name: str) -> bool:
    """Whether a file is a table: by its content for Parquet and Arrow, by its name too."""
    head = remote.read_bytes(name, 16)
    if head.startswith((HDF5, b"PK")):  # koffline's own, whatever the name says
        return False
    return _kind_by_content(head, name) is not None or _kind_by_name(name) is not None


def holds_tables(folder: str) -> bool:
    """Whether there is a table anywhere below a folder."""
    return bool(files_below(folder))


def table_file(name: str, root: str, alone: bool) -> TableFile | None:
    """A file by its first bytes and its name; None for what is no table. Raises DataError for damage."""
    head = remote.read_bytes(name, 16)
    kind = _kind_by_content(head, name)
    by_name = _kind_by_name(name)
    if kind is None and by_name == CSV:
        kind = CSV
    if kind is None and by_name is not None and (not alone or not head):
        state = "empty (0 bytes)" if not head else f"no {by_name} table, whatever its name says"
        raise DataError(f"{name} is {state}; copy or export it again")
    if kind is None and by_name is not None:
        raise DataError(f"{name} is a truncated or corrupt {by_name} table (damaged header); copy it again")
    if kind is None:
        return None
    return TableFile(name, kind, _constants(name, root))


def _constants(name: str, root: str) -> dict[str, str]:
    if not root:
        return {}
    inside = name[len(root) :].split("/")[:-1]
    pairs = [part.partition("=") for part in inside if "=" in part]
    return {unquote(key): unquote(value) for key, _, value in pairs if key}


def _kind_by_content(head: bytes, name: str) -> str | None:
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"FEA1"):
        raise DataError(f"{name} is a Feather file of version 1; write it as version 2 or Parquet")
    return ARROW if head.startswith((b"ARROW1", STREAM)) else None


def _kind_by_name(name: str) -> str | None:
    path = Path(name.lower())
    if path.suffix in _COMPRESSED:
        path = path.with_suffix("")
        return CSV if _SUFFIXES.get(path.suffix) == CSV else None
    return _SUFFIXES.get(path.suffix)


def files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are others' notes."""
    if remote.is_url(folder):
        import fsspec

        with remote.storage_faults(folder):
            system, path = fsspec.core.url_to_fs(folder)
            names = [system.unstrip_protocol(found) for found in system.find(path)]
    else:
        names = []
        for place, folders, inside in os.walk(folder):
            folders[:] = [each for each in folders if not each.startswith((".", "_"))]
            names += [os.path.join(place, each) for each in inside]
            if len(names) > _MOST_FILES:
                raise DataError(f"{folder} holds more than {_MOST_FILES} files; give a smaller folder")
    chosen = [n for n in names if not n.rpartition("/")[2].startswith(("_", ".")) and _kind_by_name(n)]
    return sorted(chosen, key=natural_key)
