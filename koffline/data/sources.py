"""Opening a log by what it contains, whatever its name; writing it in the format asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from koffline.data import remote
from koffline.data.disk.log import LazyTransitions
from koffline.data.flat import file_kind
from koffline.data.raw import RawLog, settle_actions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import MINARI, minari_folder, reading

if TYPE_CHECKING:
    from koffline.data.table.mapping import MappingRequest

LogSource = str | os.PathLike[str] | Transitions | LazyTransitions | Sequence[str | os.PathLike[str]]
FORMATS = ("hdf5", "minari", "npz", "d3rlpy", "parquet", "arrow", "csv")
SUFFIXES = {
    ".hdf5": "hdf5",
    ".h5": "hdf5",
    ".npz": "npz",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
}
_READABLE = (
    "give a koffline, D4RL or d3rlpy HDF5 file, an NPZ archive, a Parquet, Arrow or CSV table, a folder of "
    "shards, a Minari folder or minari:<id>"
)


@overload
def open_transitions(
    source: LogSource,
    action_space: SpaceRequest | None = None,
    *,
    lazy: Literal[False] = False,
    mapping: MappingRequest | None = None,
) -> Transitions: ...
@overload
def open_transitions(
    source: LogSource,
    action_space: SpaceRequest | None = None,
    *,
    lazy: Literal[True],
    mapping: MappingRequest | None = None,
) -> LazyTransitions: ...
def open_transitions(
    source: LogSource,
    action_space: SpaceRequest | None = None,
    *,
    lazy: bool = False,
    mapping: MappingRequest | None = None,
) -> Transitions | LazyTransitions:
    """Read a log: a file, a folder or ``minari:<id>``, recognised by its content and not by its name.

    ``action_space`` overrides what the log declares; without either, the reader assumes one and says so in
    ``metadata.notes``. ``metadata.sha256`` is the digest of the rows. With ``lazy`` the rows stay on disk:
    for a folder of shards, a flat HDF5 file with next_observations, or a folder, pattern or list of such
    files, at paths or URLs. ``mapping`` (a TableMapping, a dict, or a YAML file) says what the columns of a
    table are. Raises DataError in one line.
    """
    if lazy and mapping is not None:
        raise DataError(
            "a table is read into memory; make shards of it with `koffline data convert … --shard-rows N` "
            "and open those lazily"
        )
    if lazy:
        return _opened_lazily(source, action_space)
    if isinstance(source, Transitions):
        if mapping is not None:
            raise DataError("the log is in memory already; a mapping is for tables")
        if action_space is None:
            return source
        settled = settle_actions(source.actions, action_space, None)
        return source.replace(actions=settled.actions, action_space=settled.space)
    if not isinstance(source, (str, os.PathLike)):  # several files, or a log that was opened lazily
        return _opened_lazily(source, action_space).load()
    log = open_raw(source, action_space, mapping).transitions()
    recorded, metadata = log.metadata.sha256, log.metadata
    if recorded not in (None, log.sha256):
        metadata = metadata.with_notes("the rows are not those the file was written with: it was edited")
    return log.with_metadata(replace(metadata, sha256=log.sha256))


def _opened_lazily(source: LogSource, action_space: SpaceRequest | None) -> LazyTransitions:
    from koffline.data.disk.opening import declared_anew, open_lazy

    if isinstance(source, Transitions):
        raise DataError("the log is in memory already; give its path to open it lazily")
    if isinstance(source, LazyTransitions):
        return declared_anew(source, action_space)
    return open_lazy(source, action_space)


def open_raw(
    source: str | os.PathLike[str],
    action_space: SpaceRequest | None = None,
    mapping: MappingRequest | None = None,
) -> RawLog:
    """The same with values unchecked, for looking at everything that is wrong. Raises DataError."""
    from koffline.data.disk.shards import is_shard_folder
    from koffline.data.minari import read_minari
    from koffline.data.table.files import is_table_source
    from koffline.data.table.reading import read_table

    name = os.fspath(source)
    if mapping is not None or is_table_source(name):
        return read_table(name, mapping, action_space)
    if remote.is_url(name):
        return _open_url(name, action_space)
    if name.startswith(MINARI):
        folder = minari_folder(name.removeprefix(MINARI))
        if not folder.exists():
            identifier = name.removeprefix(MINARI)
            raise DataError(f"{name} is not at {folder}; fetch it with `minari download {identifier}`")
        return read_minari(folder, name, action_space)
    path = Path(name)
    if not remote.exists(name):
        raise DataError(f"{name} does not exist; check the path, or {_READABLE}")
    if path.is_dir() and is_shard_folder(name):
        return _loaded(name, action_space)
    if path.is_dir():
        return read_minari(path, name, action_space)
    return _open_file(path, action_space)


def _open_url(name: str, action_space: SpaceRequest | None) -> RawLog:
    """A folder of shards, or a file that is copied here while it is read."""
    from koffline.data.disk.shards import is_shard_folder

    if not remote.exists(name):
        raise DataError(f"{name} does not exist; check the address")
    if is_shard_folder(name):
        return _loaded(name, action_space)
    if remote.is_folder(name):
        raise DataError(f"{name} is no folder of shards; {_READABLE}")
    with remote.local_file(name) as path:
        try:
            log = _open_file(path, action_space)
        except DataError as error:
            raise DataError(str(error).replace(str(path), name)) from None
    return replace(log, metadata=replace(log.metadata, source=name))


def _loaded(name: str, action_space: SpaceRequest | None) -> RawLog:
    """A folder of shards, in memory."""
    from koffline.data.disk.opening import open_lazy

    log = open_lazy(name, action_space).load()
    columns = {key: value for key, value in vars(log).items() if isinstance(value, np.ndarray)}
    return RawLog(columns, log.action_space, log.metadata)


def _open_file(path: Path, action_space: SpaceRequest | None) -> RawLog:
    import h5py

    from koffline.data.d3rlpy_dump import read_d3rlpy_dump
    from koffline.data.hdf5 import is_d3rlpy_dump, read_hdf5
    from koffline.data.minari import data_folder, read_minari
    from koffline.data.npz import read_npz

    kind = file_kind(path, str(path))
    if kind == "NPZ":
        return read_npz(path, action_space)
    if kind is None:
        head = remote.read_bytes(str(path), 4096)
        raise DataError(f"{path} is {_guess(head)}, whatever its name says; {_READABLE}")
    with reading(path, kind), h5py.File(path, "r") as opened:
        dump, episodes = is_d3rlpy_dump(opened), "episode_0" in opened
    if dump:
        return read_d3rlpy_dump(path, action_space)
    if episodes and data_folder(path.parent) == path.parent:  # Minari's main_data.hdf5 itself
        return read_minari(path.parent, str(path), action_space)
    return read_hdf5(path, action_space)


def _guess(head: bytes) -> str:
    if head.startswith(b"\x80"):
        return "a Python pickle, which koffline never opens"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip file"
    try:
        head.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return "no data file koffline knows"
    return "no data file koffline knows" if b"\0" in head else "a text file"


@dataclass(frozen=True)
class Written:
    """Where a log went, and in which format."""

    target: str
    format: str


def write_transitions(
    transitions: Transitions,
    target: str | os.PathLike[str],
    format: str | None = None,
    force: bool = False,
) -> Written:
    """Write a log as ``hdf5``, ``minari``, ``npz``, ``d3rlpy`` or a table, whole or not at all.

    Without ``format``: ``minari:<id>`` is Minari, .hdf5 and .h5 our HDF5, .npz NPZ, .parquet Parquet, .arrow
    and .feather Arrow, .csv CSV (which keeps the rows but no action space and no metadata). Minari takes a
    folder or ``minari:<id>``. Raises DataError, also where the target exists without ``force``.
    """
    from koffline.data.d3rlpy_dump import write_d3rlpy_dump
    from koffline.data.hdf5 import write_hdf5
    from koffline.data.npz import write_npz
    from koffline.data.table.arrow_files import write_table

    name = os.fspath(target)
    chosen = target_format(name, format)
    if chosen == "minari":
        _write_minari(transitions, name, force)
    else:
        writers = {"hdf5": write_hdf5, "npz": write_npz, "d3rlpy": write_d3rlpy_dump}
        if chosen in writers:
            writers[chosen](transitions, Path(name), force)
        else:
            write_table(transitions, Path(name), chosen, force)
    return Written(name, chosen)


def target_format(target: str, asked: str | None) -> str:
    """The format asked for, else the one that the target's name tells. Raises DataError."""

    if asked is not None and asked not in FORMATS:
        raise DataError(f"format {asked!r} is unknown; choose one of {', '.join(FORMATS)}")
    guessed = "minari" if target.startswith(MINARI) else SUFFIXES.get(Path(target).suffix.lower())
    chosen = asked or guessed
    if chosen is None:
        raise DataError(f"{target} does not tell its format; choose one of {', '.join(FORMATS)} (--format)")
    if target.startswith(MINARI) and chosen != "minari":
        raise DataError(f"{target} names a Minari dataset but the format is {chosen}; give a file name")
    return chosen


def _write_minari(log: Transitions, target: str, force: bool) -> None:
    from koffline.data.minari import write_minari

    if not target.startswith(MINARI):
        write_minari(log, Path(target), Path(target).name, force)
        return
    identifier = target.removeprefix(MINARI)
    folder = minari_folder(identifier)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_minari(log, folder, identifier, force)
