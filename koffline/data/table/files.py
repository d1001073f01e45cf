"""The files of a table: which there are, of which kind, and their rows as Arrow batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from koffline.data import remote
from koffline.data.table import csv_files
from koffline.data.table.arrow_files import arrow_reader, file_batches
from koffline.data.table.recognition import CSV, HDF5, TableFile, files_below, table_file
from koffline.data.table.roles import Roles
from koffline.data.table.room import Room
from koffline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# Every column costs its own reading, some tenths of a millisecond: more than this are rows by mistake.
_MOST_COLUMNS = 2**17


@dataclass(frozen=True)
class TableFiles:
    """A table in one file or several; columns are those of the first, and of its folders' names."""

    source: str
    files: tuple[TableFile, ...]
    names: tuple[str, ...]
    types: Mapping[str, Any]  # of the first file; none for CSV, where the roles ask for them
    description: dict[str, str]  # what koffline wrote beside the rows, if it did

    @property
    def kind(self) -> str:
        """Parquet, Arrow or CSV."""
        return self.files[0].kind

    @cached_property
    def bytes(self) -> int:
        """Bytes on disk of all files."""
        return sum(remote.size(file.name) for file in self.files)

    def schema(self, roles: Roles) -> dict[str, pa.DataType]:
        """Types of the columns that the roles name. Raises DataError where files contradict each other."""
        import pyarrow as pa

        if self.kind == CSV:
            stored: dict[str, Any] = csv_files.column_types(roles)
        else:
            stored = dict(self.types)
        numbers = set(roles.numbers)
        for name in self.files[0].constants:
            stored[name] = pa.float64() if name in numbers else pa.string()
        return {name: stored[name] for name in roles.columns}

    def is_text(self, name: str) -> bool:
        """Whether a column comes without a type, so that its texts may stand for numbers or times."""
        return self.kind == CSV or name in self.files[0].constants

    def batches(
        self, columns: Sequence[str], types: Mapping[str, pa.DataType], batch_rows: int, room: Room
    ) -> Iterator[pa.RecordBatch]:
        """The columns in the given order and types, in batches of at most ``batch_rows`` rows.

        Raises Refused where a file declares more than there is room for.
        """
        for file in self.files:
            yield from file_batches(file, columns, types, batch_rows, room)


def find_tables(source: str | os.PathLike[str]) -> TableFiles | None:
    """The table at a path or URL: a file, a folder of files (its folders may say ``key=value``) or a pattern.

    None where there is none, a CSV file being one whose name says so. Raises DataError for one that is
    damaged, or for files of different kinds.
    """
    name = os.fspath(source)
    if any(mark in name for mark in "*?") and not remote.exists(name):
        names = remote.listed(name)
        root = ""
    elif remote.is_folder(name):
        names, root = files_below(name), name
    else:
        names, root = [name], ""
    files = [table_file(each, root, alone=names == [name]) for each in names]
    found = tuple(file for file in files if file is not None)
    if not found:
        return None
    kinds = sorted({file.kind for file in found})
    if len(kinds) > 1:
        raise DataError(f"{name} holds {' and '.join(kinds)} files; keep one kind in a folder")
    keys = {tuple(file.constants) for file in found}
    if len(keys) > 1:
        raise DataError(f"{name}: folders name different keys ({keys}); partition all files alike")
    return _with_names(name, found)


def as_csv(source: str) -> TableFiles:
    """A text file taken as CSV whatever its name, where a mapping says that it is a table.

    Raises DataError for what cannot be text.
    """
    if not remote.exists(source):
        raise DataError(f"{source} does not exist; check the path")
    head = b"" if remote.is_folder(source) else remote.read_bytes(source, 4096)
    if not head or head.startswith((HDF5, b"PK", b"\x80")):
        raise DataError(
            f"{source} is no table (Parquet, Arrow or CSV), and a mapping is for tables; leave it out"
        )
    return _with_names(source, (TableFile(source, CSV),))


def _with_names(source: str, files: tuple[TableFile, ...]) -> TableFiles:
    first = files[0]
    description: dict[str, str] = {}
    types: dict[str, Any] = {}
    if first.kind == CSV:
        names = csv_files.header(first.name)
    else:
        with arrow_reader(first) as opened:
            names = tuple(opened.schema.names)
            types = {field.name: field.type for field in opened.schema}
            metadata = opened.schema.metadata or {}
            ours = {key: value for key, value in metadata.items() if key.startswith(b"koffline")}
            description = {
                key.decode("ascii", "replace"): value.decode("utf-8") for key, value in ours.items()
            }
    if len(names) > _MOST_COLUMNS:
        raise DataError(
            f"{source} has {len(names)} columns, more than {_MOST_COLUMNS}; store observations as one column "
            "of lists, or export fewer columns"
        )
    constants = tuple(name for name in first.constants if name not in names)
    return TableFiles(source, files, (*names, *constants), types, description)
