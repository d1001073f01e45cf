"""The files of a table: their names, kinds and errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from koffline.data import remote
from koffline.data.table.values import natural_key
from koffline.errors import DataError
from koffline.store.files import MINARI, reading
from koffline.untrusted.limits import Refused

PARQUET, ARROW, CSV, HDF5, NPZ = "Parquet", "Arrow", "CSV", "HDF5", "NPZ"
NO_TABLE = (
    "is no table that koffline knows (Parquet, Arrow, CSV, or arrays with one row per transition in "
    "HDF5 or NPZ); a mapping is for tables, `koffline data info` looks into other logs"
)
_SUFFIXES = {
    PARQUET: (".parquet", ".pq"),
    ARROW: (".arrow", ".feather", ".arrows", ".ipc"),
    CSV: tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", ".gz", ".zst")),
}
# Arrow's streams begin with the mark of a message; its files, and Feather version 2, with their own name.
STREAM = b"\xff\xff\xff\xff"
_CONTENTS = {b"PAR1": PARQUET, b"ARROW1": ARROW, STREAM: ARROW}
_ARRAYS = {b"\x89HDF": HDF5, b"PK": NPZ}
_PICKLE = b"\x80"


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: told by content for Parquet and Arrow, by name for CSV.

    A folder is one where it holds such files and is neither a folder of shards nor a Minari dataset.
    """
    from koffline.data.disk.opening import is_shard_folder
    from koffline.data.minari import data_folder

    if name.startswith(MINARI) or is_shard_folder(name):
        return False
    if not remote.is_url(name) and data_folder(Path(name)) is not None:
        return False
    heads = [(remote.read_bytes(each, 16), each) for each in _candidates(name)[:1]]
    return any(_begins(head, _CONTENTS) or (_kind_said(each) and not _is_other(head)) for head, each in heads)


def find_tables(name: str, is_table: bool) -> tuple[str, tuple[str, ...]]:
    """Kind and names of the files at a path or URL: a file, a folder of files, or a pattern.

    With ``is_table`` a text file is CSV whatever its name, and arrays of HDF5 and NPZ files are columns.
    Raises DataError where there is none, for one that is damaged, or for files of different kinds.
    """
    kinds = {each: kind for each in _candidates(name) if (kind := _kind_of(each, is_table))}
    if len(set(kinds.values())) > 1:
        shown = " and ".join(sorted(set(kinds.values())))
        raise DataError(f"{name} holds files of different kinds ({shown}); keep one in a folder")
    if not kinds:
        raise DataError(f"{name} {NO_TABLE if remote.exists(name) else 'does not exist; check the path'}")
    return next(iter(kinds.values())), tuple(kinds)


def _candidates(name: str) -> list[str]:
    """The file at a path, those below a folder, or those that fit a pattern."""
    if remote.is_folder(name):
        return _files_below(name)
    is_pattern = ("*" in name or "?" in name) and not remote.exists(name)
    return remote.listed(name) if is_pattern else [name] * remote.exists(name)


def _kind_of(name: str, is_table: bool) -> str | None:
    """Kind of a file by its first bytes and its name; None if it is no table. Raises DataError if damaged."""
    head, said = remote.read_bytes(name, 16), _kind_said(name)
    kind = _begins(head, _CONTENTS) or (CSV if said == CSV else None)
    if kind is None and said is not None:
        state = f"a truncated or corrupt {said} table (damaged header)" if head else "empty (0 bytes)"
        raise DataError(f"{name} is {state}; copy or export it again")
    is_text = bool(head) and not _is_other(head)
    return kind or ((_begins(head, _ARRAYS) or (CSV if is_text else None)) if is_table else None)


def _begins(head: bytes, marks: Mapping[bytes, str]) -> str | None:
    return next((kind for mark, kind in marks.items() if head.startswith(mark)), None)


def _is_other(head: bytes) -> bool:
    return head.startswith((*_ARRAYS, _PICKLE))


def _kind_said(name: str) -> str | None:
    return next((kind for kind, ends in _SUFFIXES.items() if name.lower().endswith(ends)), None)


def _files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are others' notes."""
    if not remote.is_url(folder):
        below = [os.path.join(place, each) for place, _, inside in os.walk(folder) for each in inside]
    else:
        import fsspec

        with remote.storage_faults(folder):
            system, path = fsspec.core.url_to_fs(folder)
            below = [system.unstrip_protocol(found) for found in system.find(path)]
    chosen = []
    for name in below:
        parts = name[len(folder) :].strip("/").split("/")
        if _kind_said(name) and not any(part.startswith(("_", ".")) for part in parts):
            chosen.append(name)
    return sorted(chosen, key=natural_key)


@contextlib.contextmanager
def faults(name: str, kind: str) -> Iterator[None]:
    """Turn the errors of polars, pyarrow and the storage into one DataError; our own pass as they are."""
    with remote.storage_faults(name) if remote.is_url(name) else reading(name, kind):
        try:
            yield
        except Refused as error:
            raise DataError(f"{name} is not read: {error}") from None
        except (pl.exceptions.PanicException, pl.exceptions.PolarsError, ValueError) as error:
            reason = " ".join(str(error).partition("You might want")[0].split())[:300]
            if "utf" in reason.lower():
                raise DataError(f"{name} is not UTF-8 text; save it as UTF-8 (or as Parquet)") from None
            reason = f"{name} is a truncated or corrupt {kind} file ({reason}); copy or export it again"
            raise DataError(reason) from None


@contextlib.contextmanager
def open_bytes(name: str) -> Iterator[Any]:
    """A file to read from, local or remote.

    A local one is Arrow's own: its threads then hold no Python object when the process ends, which would
    abort it.
    """
    if remote.is_url(name):
        import fsspec

        source = fsspec.open(name, "rb")
    else:
        import pyarrow as pa

        source = pa.OSFile(name)
    with source as file:
        yield file


def width_of(kind: Any) -> int:
    """Bytes of a value of fixed size (in a list, of one of its numbers), or of the reference to any other."""
    kind = getattr(kind, "inner", kind)
    found = re.search(r"\d+", str(kind)) if kind.is_numeric() else None
    return int(found.group()) // 8 if found and not kind.is_decimal() else 1 if kind == pl.Boolean else 8
