"""The kind of data at a path, URL or pattern: the files of a table, or another kind of
log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from koffline.data import remote
from koffline.data.columns import natural_key
from koffline.errors import DataError
from koffline.store.files import MINARI

# The file that describes a folder of shards, and the mark in it.
MANIFEST = "manifest.json"
SHARDS = "koffline-shards"
METADATA = "metadata.json"  # of Minari
# Files of ours in a folder, which may be replaced with it.
OWN_FILES = {
    "shards": (MANIFEST, "shard-*.hdf5"),
    "minari": ("data/*", "data/*/*"),
}
PARQUET = "Parquet"
ARROW = "Arrow"
CSV = "CSV"
JSON = "JSON"
HDF5 = "HDF5"
NPZ = "NPZ"
HELD = "in-memory"  # a frame, or columns by name
NO_TABLE = (
    "is no table that koffline knows (Parquet, Arrow, CSV, JSON, or arrays with one row per"
    " transition in HDF5 or NPZ); a mapping is for tables, `koffline data info` looks"
    " into other logs"
)
# Arrow's streams begin with the mark of a message; its files, and Feather version 2,
# with their own name.
STREAM = b"\xff\xff\xff\xff"
_SUFFIXES = {
    PARQUET: (".parquet", ".pq"),
    ARROW: (".arrow", ".feather", ".arrows", ".ipc"),
    CSV: tuple(
        f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", ".gz", ".zst")
    ),
    JSON: tuple(
        f"{name}{packed}"
        for name in (".json", ".jsonl", ".ndjson")
        for packed in ("", ".gz", ".zst")
    ),
}
# The folder of a LeRobot dataset holds the rows in data/, and says so in meta/.
LEROBOT_MARK = "meta/info.json"
_LEROBOT_ROWS = "data"
_CONTENTS: dict[bytes, str | None] = {
    b"PAR1": PARQUET,
    b"ARROW1": ARROW,
    STREAM: ARROW,
    b"\x89HDF": HDF5,
    b"PK": NPZ,
    b"\x80": None,  # a pickle
}


def is_shard_folder(folder: str) -> bool:
    """Whether a folder, at a path or URL, holds a manifest of ours.

    A manifest that is a link is not opened, so that nothing outside the folder is
    touched. It counts as ours, and is refused where it is to be read, unless the folder
    is one of tables.
    """
    manifest = remote.joined(folder, MANIFEST)
    path = remote.local_path(manifest)
    if path is not None and path.is_symlink():
        return not _files_below(folder)
    try:
        head = remote.read_bytes(manifest, 4096)
    except DataError:
        return False
    return SHARDS.encode() in head


def data_folder(folder: Path) -> Path | None:
    """The folder with a Minari dataset's metadata, ``folder`` or ``folder/data``; None
    if there is none.
    """
    places = (folder / "data", folder)
    return next((place for place in places if (place / METADATA).is_file()), None)


def is_log_source(name: str) -> bool:
    """Whether a path or URL is a folder of shards or a Minari dataset."""
    if name.startswith(MINARI):
        return True
    if not remote.is_url(name) and data_folder(Path(name)) is not None:
        return True
    return is_shard_folder(name)


def is_table_source(name: str) -> bool:
    """Whether a path, URL or pattern is a table: Parquet and Arrow by content, CSV and
    JSON by name.

    A folder counts if it holds such files and is no log of another kind.
    """
    return kind_of_table(name, is_table=False) is not None


def kind_of_table(name: str, is_table: bool) -> str | None:
    """Kind of the first file of a table at a path, URL or pattern; None if it is no
    table, or a log of another kind.

    is_table: as in `find_tables`. Raises DataError for empty and damaged files, and
    with ``is_table`` for all that is no table.
    """
    if not is_table and is_log_source(name):
        return None
    for file in _candidates(name)[:1]:
        kind = kind_of(file, is_table)
        if kind is not None:
            return kind
    if is_table:
        return find_tables(name, is_table)[0]
    return None


def find_tables(name: str, is_table: bool) -> tuple[str, tuple[str, ...]]:
    """Kind and names of the files at a path or URL: a file, a folder of files, or a
    pattern.

    With ``is_table``, a text file is JSON or CSV whatever its name, and arrays in HDF5
    and NPZ files are columns.
    Raises DataError if there is no file, a damaged one, or files of different kinds.
    """
    kinds: dict[str, str] = {}
    for file in _candidates(name):
        kind = kind_of(file, is_table)
        if kind is not None:
            kinds[file] = kind
    if len(set(kinds.values())) > 1:
        shown = " and ".join(sorted(set(kinds.values())))
        raise DataError(
            f"{name} holds files of different kinds ({shown}); keep one in a folder"
        )
    if not kinds:
        if remote.exists(name):
            raise DataError(f"{name} {NO_TABLE}")
        raise DataError(f"{name} does not exist; check the path")
    return next(iter(kinds.values())), tuple(kinds)


def _candidates(name: str) -> list[str]:
    """The file at a path, those below a folder, or those that fit a pattern."""
    if remote.is_folder(name):
        return _files_below(name)
    if remote.exists(name):
        return [name]
    if "*" in name or "?" in name:
        return remote.listed(name)
    return []


def kind_of(name: str, is_table: bool) -> str | None:
    """Kind of a file by its first bytes and its name; None if it is no table.

    With ``is_table``, arrays in HDF5 and NPZ files are columns, and any text is JSON
    or CSV.
    Raises DataError if the file is empty or damaged.
    """
    head = remote.read_bytes(name, 16)
    lower = name.lower()
    if not head:
        raise DataError(f"{name} is empty (0 bytes); copy or export it again")
    for mark, kind in _CONTENTS.items():
        if head.startswith(mark):
            if is_table or kind in (PARQUET, ARROW):
                return kind
            return None
    for kind in (PARQUET, ARROW):
        if lower.endswith(_SUFFIXES[kind]):
            raise DataError(
                f"{name} is a truncated or corrupt {kind} table (damaged header); copy"
                " or export it again"
            )
    is_text_of_json = is_table and head.lstrip()[:1] in (b"{", b"[")
    if is_text_of_json or lower.endswith(_SUFFIXES[JSON]):
        return JSON
    if lower.endswith(_SUFFIXES[CSV]):
        return CSV
    if is_table and not _is_binary(head):
        return CSV
    return None


def _is_binary(head: bytes) -> bool:
    """Whether a file that begins so holds no text, such as one of NumPy (.npy) or of
    TensorFlow (.tfrecord). Compressed files may hold text.
    """
    is_compressed = head.startswith((b"\x1f\x8b", b"(\xb5/\xfd"))
    is_utf_16 = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    return b"\0" in head and not is_compressed and not is_utf_16


def is_lerobot_folder(name: str) -> bool:
    """Whether a folder, at a path or URL, is the root of a LeRobot dataset."""
    rows = remote.joined(name, _LEROBOT_ROWS)
    return remote.exists(remote.joined(name, LEROBOT_MARK)) and remote.is_folder(rows)


def _files_below(folder: str) -> list[str]:
    """Files with a table's suffix, in natural order; names that begin with _ or . are
    skipped, and so are manifests, and JSON beside other tables, which describes them.
    """
    if is_lerobot_folder(folder):
        folder = remote.joined(folder, _LEROBOT_ROWS)
    if not remote.is_url(folder):
        paths = [
            os.path.join(place, name)
            for place, _, names in os.walk(folder)
            for name in names
        ]
    else:
        with remote.storage(folder) as (system, root):
            paths = [system.unstrip_protocol(path) for path in system.find(root)]
    tables: list[str] = []
    of_json: list[str] = []
    for path in paths:
        if re.search(r"/[_.]", f"/{path[len(folder) :]}"):
            continue
        name = path.lower()
        if name.endswith(f"/{MANIFEST}"):
            continue
        if name.endswith(_SUFFIXES[JSON]):
            of_json.append(path)
        elif name.endswith((*_SUFFIXES[PARQUET], *_SUFFIXES[ARROW], *_SUFFIXES[CSV])):
            tables.append(path)
    return sorted(tables or of_json, key=natural_key)
