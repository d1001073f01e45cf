"""The files of a table: which there are, of which kind, and what goes wrong while they are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl

from koffline.data import remote
from koffline.data.table.roles import natural_key
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import Refused

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
_HDF5 = b"\x89HDF"


@dataclass(frozen=True)
class TableFile:
    """One file; ``constants`` are the columns that its folders' names give (``key=value``)."""

    name: str
    kind: str
    constants: dict[str, str] = field(default_factory=dict)


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: told by content for Parquet and Arrow, by name for CSV.

    A folder is one where it holds such files and is neither a folder of shards nor a Minari dataset.
    """
    from koffline.data.disk.shards import is_shard_folder
    from koffline.data.minari import data_folder
    from koffline.store.files import MINARI

    if name.startswith(MINARI):
        return False
    if not remote.exists(name):
        return any(mark in name for mark in "*?") and any(map(_looks_like_table, remote.listed(name)[:1]))
    if not remote.is_folder(name):
        return _looks_like_table(name)
    if is_shard_folder(name) or (not remote.is_url(name) and data_folder(Path(name)) is not None):
        return False
    return bool(_files_below(name))


def find_tables(name: str, is_table: bool) -> tuple[TableFile, ...]:
    """The table at a path or URL: a file, a folder of files (its folders may say ``key=value``) or a pattern.

    With ``is_table`` a text file is CSV whatever its name. Raises DataError where there is none, for one that
    is damaged, or for files of different kinds.
    """
    root = ""
    if any(mark in name for mark in "*?") and not remote.exists(name):
        names = remote.listed(name)
    elif remote.is_folder(name):
        names, root = _files_below(name), name
    else:
        names = [name]
    files = [_table_file(each, root, alone=names == [name]) for each in names]
    found = tuple(file for file in files if file is not None)
    if not found:
        return (_as_csv(name, is_table),)
    kinds = sorted({file.kind for file in found})
    if len(kinds) > 1:
        raise DataError(f"{name} holds {' and '.join(kinds)} files; keep one kind in a folder")
    keys = {tuple(file.constants) for file in found}
    if len(keys) > 1:
        raise DataError(f"{name}: folders name different keys ({keys}); partition all files alike")
    return found


def _as_csv(name: str, is_table: bool) -> TableFile:
    if not is_table:
        raise DataError(f"{name} is no table that koffline knows; give Parquet, Arrow or CSV")
    if not remote.exists(name):
        raise DataError(f"{name} does not exist; check the path")
    head = b"" if remote.is_folder(name) else remote.read_bytes(name, 4096)
    if not head or head.startswith((_HDF5, b"PK", b"\x80")):
        raise DataError(
            f"{name} is no table (Parquet, Arrow or CSV), and a mapping is for tables; leave it out"
        )
    return TableFile(name, CSV)


def _looks_like_table(name: str) -> bool:
    head = remote.read_bytes(name, 16)
    if head.startswith((_HDF5, b"PK")):  # koffline's own, whatever the name says
        return False
    return _kind_by_content(head, name) is not None or _kind_by_name(name) is not None


def _table_file(name: str, root: str, alone: bool) -> TableFile | None:
    """A file by its first bytes and its name; None for what is no table. Raises DataError for damage."""
    head, by_name = remote.read_bytes(name, 16), _kind_by_name(name)
    kind = _kind_by_content(head, name) or (CSV if by_name == CSV else None)
    if kind is None and by_name is not None:
        state = "empty (0 bytes)" if not head else f"no {by_name} table, whatever its name says"
        if alone and head:
            state = f"a truncated or corrupt {by_name} table (damaged header)"
        raise DataError(f"{name} is {state}; copy or export it again")
    inside = name[len(root) :].split("/")[:-1] if root else []
    pairs = [part.partition("=") for part in inside if "=" in part]
    constants = {unquote(key): unquote(value) for key, _, value in pairs if key}
    return None if kind is None else TableFile(name, kind, constants)


def _kind_by_content(head: bytes, name: str) -> str | None:
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"FEA1"):
        raise DataError(f"{name} is a Feather file of version 1; write it as version 2 or Parquet")
    return ARROW if head.startswith((b"ARROW1", STREAM)) else None


def _kind_by_name(name: str) -> str | None:
    path = Path(name.lower())
    if path.suffix in _COMPRESSED:
        return CSV if _SUFFIXES.get(path.with_suffix("").suffix) == CSV else None
    return _SUFFIXES.get(path.suffix)


def _files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are others' notes."""
    chosen: list[str] = []
    for count, name in enumerate(_all_below(folder)):
        if count >= _MOST_FILES:
            raise DataError(f"{folder} holds more than {_MOST_FILES} files; give a smaller folder")
        if not name.rpartition("/")[2].startswith(("_", ".")) and _kind_by_name(name):
            chosen.append(name)
    return sorted(chosen, key=natural_key)


def _all_below(folder: str) -> Iterator[str]:
    if not remote.is_url(folder):
        for place, folders, inside in os.walk(folder):
            folders[:] = [each for each in folders if not each.startswith((".", "_"))]
            yield from (os.path.join(place, each) for each in inside)
        return
    import fsspec

    with remote.storage_faults(folder):
        system, path = fsspec.core.url_to_fs(folder)
        yield from [system.unstrip_protocol(found) for found in system.find(path)]


@contextlib.contextmanager
def faults(name: str, kind: str) -> Iterator[None]:
    """Turn the errors of polars, pyarrow and the storage into one DataError; our own pass as they are."""
    try:
        with remote.storage_faults(name) if remote.is_url(name) else reading(name, kind):
            try:
                yield
            except Refused as error:
                raise DataError(f"{name} is not read: {error}") from None
            except (pl.exceptions.PanicException, pl.exceptions.PolarsError, ValueError) as error:
                if isinstance(error, UnicodeDecodeError) or "utf-8" in str(error).lower().replace(
                    "utf8", "utf-8"
                ):
                    raise DataError(f"{name} is not UTF-8 text; save it as UTF-8 (or as Parquet)") from None
                text = " ".join(str(error).partition("You might want")[0].split())[:300]
                text = f"{name} is a truncated or corrupt {kind} file ({text}); copy or export it again"
                raise DataError(text) from None
            except (TypeError, IndexError, OverflowError) as error:
                raise ValueError(str(error)) from None
    except MemoryError as error:
        reason = " ".join(str(error).split())[:200] or "too large"
        raise DataError(
            f"{name} does not fit into memory ({reason}); check the file, or read a part"
        ) from None


@contextlib.contextmanager
def open_bytes(name: str) -> Iterator[Any]:
    """A file-like object to read from, local or remote."""
    if remote.is_url(name):
        import fsspec

        with fsspec.open(name, "rb") as file:
            yield file
        return
    with open(name, "rb") as file:
        yield file
