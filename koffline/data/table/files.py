"""The files of a table: which there are, of which kind, and their rows as Arrow batches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from koffline.data import remote
from koffline.data.table import csv_files
from koffline.data.table.faults import open_bytes, table_faults
from koffline.data.table.roles import Roles, natural_key
from koffline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

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
_STREAM = b"\xff\xff\xff\xff"
_HDF5 = b"\x89HDF"


@dataclass(frozen=True)
class TableFile:
    """One file; ``constants`` are the columns that its folders' names give (``key=value``)."""

    name: str
    kind: str
    constants: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TableFiles:
    """A table in one file or several; columns are those of the first, and of its folders' names."""

    source: str
    files: tuple[TableFile, ...]
    names: tuple[str, ...]
    description: dict[str, str]  # what koffline wrote beside the rows, if it did

    @property
    def kind(self) -> str:
        """Parquet, Arrow or CSV."""
        return self.files[0].kind

    def schema(self, roles: Roles) -> dict[str, pa.DataType]:
        """Types of the columns that the roles name. Raises DataError where files contradict each other."""
        import pyarrow as pa

        if self.kind == CSV:
            stored: dict[str, Any] = csv_files.column_types(roles)
        else:
            with _arrow_reader(self.files[0]) as opened:
                stored = {name: opened.schema.field(name).type for name in opened.schema.names}
        for name in self.files[0].constants:
            stored[name] = pa.float64() if name in roles.numbers else pa.string()
        return {name: stored[name] for name in roles.columns}

    def is_text(self, name: str) -> bool:
        """Whether a column comes without a type, so that its texts may stand for numbers or times."""
        return self.kind == CSV or name in self.files[0].constants

    def batches(
        self, columns: Sequence[str], types: Mapping[str, pa.DataType], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The columns in the given order and types, in batches of at most ``batch_rows`` rows."""
        for file in self.files:
            yield from _file_batches(file, columns, types, batch_rows)


def looks_like_table(name: str) -> bool:
    """Whether a file is a table: by its content for Parquet and Arrow, by its name too."""
    head = remote.read_bytes(name, 16)
    if head.startswith((_HDF5, b"PK")):  # koffline's own, whatever the name says
        return False
    return _kind_by_content(head) is not None or _kind_by_name(name) is not None


def holds_tables(folder: str) -> bool:
    """Whether there is a table anywhere below a folder."""
    return bool(_files_below(folder))


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
        names, root = _files_below(name), name
    else:
        names, root = [name], ""
    files = [_table_file(each, root, alone=names == [name]) for each in names]
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
    if not head or head.startswith((_HDF5, b"PK", b"\x80")):
        raise DataError(
            f"{source} is no table (Parquet, Arrow or CSV), and a mapping is for tables; leave it out"
        )
    return _with_names(source, (TableFile(source, CSV),))


def _with_names(source: str, files: tuple[TableFile, ...]) -> TableFiles:
    first = files[0]
    description: dict[str, str] = {}
    if first.kind == CSV:
        names = csv_files.header(first.name)
    else:
        with _arrow_reader(first) as opened:
            names = tuple(opened.schema.names)
            metadata = opened.schema.metadata or {}
            ours = {key: value for key, value in metadata.items() if key.startswith(b"koffline")}
            description = {
                key.decode("ascii", "replace"): value.decode("utf-8") for key, value in ours.items()
            }
    constants = tuple(name for name in first.constants if name not in names)
    return TableFiles(source, files, (*names, *constants), description)


def _table_file(name: str, root: str, alone: bool) -> TableFile | None:
    head = remote.read_bytes(name, 16)
    kind = _kind_by_content(head)
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


def _kind_by_content(head: bytes) -> str | None:
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"FEA1"):
        raise DataError(
            "a Feather file of version 1, which is no longer read; write it as version 2 or Parquet"
        )
    return ARROW if head.startswith((b"ARROW1", _STREAM)) else None


def _kind_by_name(name: str) -> str | None:
    path = Path(name.lower())
    if path.suffix in _COMPRESSED:
        path = path.with_suffix("")
        return CSV if _SUFFIXES.get(path.suffix) == CSV else None
    return _SUFFIXES.get(path.suffix)


def _files_below(folder: str) -> list[str]:
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


@contextlib.contextmanager
def _arrow_reader(file: TableFile) -> Iterator[Any]:
    """pyarrow's reader of a Parquet file, Arrow file or Arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet

    with table_faults(file.name, file.kind), open_bytes(file.name) as source:
        if file.kind == PARQUET:
            with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as opened:
                yield _ParquetReader(opened)
            return
        head = source.read(4)
        source.seek(0)
        open_reader = pa.ipc.open_stream if head == _STREAM else pa.ipc.open_file
        with open_reader(source) as opened:
            yield _ArrowReader(opened)


@dataclass(frozen=True)
class _ParquetReader:
    opened: Any

    @property
    def schema(self) -> Any:
        return self.opened.schema_arrow

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[Any]:
        yield from self.opened.iter_batches(batch_rows, columns=list(columns), use_threads=False)


@dataclass(frozen=True)
class _ArrowReader:
    opened: Any

    @property
    def schema(self) -> Any:
        return self.opened.schema

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[Any]:
        stream = not hasattr(self.opened, "num_record_batches")
        parts = self.opened if stream else map(self.opened.get_batch, range(self.opened.num_record_batches))
        for whole in parts:
            chosen = whole.select(list(columns))
            chosen.validate(full=True)  # offsets of a stranger's file may point anywhere
            for start in range(0, chosen.num_rows, batch_rows):
                yield chosen.slice(start, batch_rows)


def _file_batches(
    file: TableFile, columns: Sequence[str], types: Mapping[str, Any], rows: int
) -> Iterator[Any]:
    wanted = {name: types[name] for name in columns}
    stored = [name for name in columns if name not in file.constants]
    if file.kind == CSV:
        yield from (_fitted(b, file, wanted) for b in csv_files.batches(file.name, stored, types, rows))
        return
    with _arrow_reader(file) as opened:
        missing = [name for name in stored if name not in opened.schema.names]
        if missing:
            raise DataError(
                f"{file.name} lacks column {missing[0]}, which the first file has; mend or remove the file"
            )
        for batch in opened.batches(stored, rows):
            yield _fitted(batch, file, wanted)


def _fitted(batch: Any, file: TableFile, types: Mapping[str, Any]) -> Any:
    """The batch with all columns in order and in the first file's types."""
    import pyarrow as pa

    arrays = []
    for name, wanted in types.items():
        if name in file.constants:
            value = None if file.constants[name] == "__HIVE_DEFAULT_PARTITION__" else file.constants[name]
            array = _constant(value, wanted, batch.num_rows, file.name, name)
        else:
            array = batch.column(name)
        if array.type != wanted:
            try:
                array = array.cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise DataError(
                    f"{file.name}: column {name} is {array.type}, in the first file {wanted}; "
                    "write all files with one type"
                ) from None
        arrays.append(array)
    return pa.record_batch(arrays, names=list(types))


def _constant(value: str | None, wanted: Any, rows: int, file: str, name: str) -> Any:
    import pyarrow as pa

    try:
        return pa.repeat(pa.scalar(value, pa.string()).cast(wanted), rows)
    except pa.ArrowInvalid:
        raise DataError(f"{file}: the folder's {name}={value} is no number; name another column") from None
