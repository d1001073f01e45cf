"""The layouts in which logs lie, one reader each, in one table: a source is opened by
the first reader that recognises it.

A reader recognises a source by its content, and by its name where content cannot tell
(CSV, JSON). To read a further layout, write `sniff` and `read` and add a line to
`READERS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import h5py

from koffline.data import kinds, remote
from koffline.data.array_layouts import episode_groups, joined_groups
from koffline.data.d3rlpy_dump import read_d3rlpy_dump
from koffline.data.disk.log import in_whole_units
from koffline.data.disk.writer import open_lazy
from koffline.data.flat import log_of_arrays, read_flat
from koffline.data.minari import read_minari
from koffline.data.raw import RawLog
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import MINARI, minari_folder, reading
from koffline.untrusted.hdf5 import open_hdf5

if TYPE_CHECKING:
    from koffline.data.table.mapping import MappingRequest

READABLE = (
    "give a koffline, D4RL or d3rlpy HDF5 file, an NPZ archive, a Parquet, Arrow,"
    " CSV or JSON table, a folder of shards, a Minari folder or minari:<id>"
)
_NOT_FLAT = "--one-step is for tables and flat HDF5 or NPZ files"


class Place:
    """Where a log lies, and what readers look at to recognise it; each is looked up
    once.

    ``name``: a path, a URL, a pattern or ``minari:<id>``. ``is_table``: whether a
    mapping says that it is a table, whatever else it may be.
    """

    def __init__(self, name: str, is_table: bool = False) -> None:
        self.name = name
        self.is_table = is_table
        self._copies = contextlib.ExitStack()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self._copies.close()

    def named(self, message: str) -> str:
        """A message with the name of the source where it names a temporary copy."""
        path = self.__dict__.get("path")  # if it was looked at
        if path is None:
            return message
        return message.replace(str(path), self.name)

    @cached_property
    def exists(self) -> bool:
        """Whether a file or folder is there."""
        return remote.exists(self.name)

    @cached_property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return remote.is_folder(self.name)

    @cached_property
    def path(self) -> Path:
        """The local file; a temporary copy, removed at the end, if the file is
        remote.
        """
        return self._copies.enter_context(remote.local_file(self.name))

    @cached_property
    def kind(self) -> str | None:
        """The kind of a file, by its content: HDF5, NPZ, …; None for folders and for
        what does not exist. Raises DataError for empty files.
        """
        if self.name.startswith(MINARI) or self.is_folder or not self.exists:
            return None
        return kinds.kind_of(str(self.path), is_table=True)

    @cached_property
    def table_kind(self) -> str | None:
        """The kind of table, None if it is no table. Raises DataError."""
        return kinds.kind_of_table(self.name, self.is_table)

    @cached_property
    def hdf5_names(self) -> frozenset[str]:
        """Names at the root of an HDF5 file, none for other files. Raises DataError."""
        if self.kind != kinds.HDF5:
            return frozenset()
        with reading(self.path, kinds.HDF5), h5py.File(self.path, "r") as opened:
            # names alone: `name in opened` would open the file that an external link
            # names
            return frozenset(opened)


@dataclass(frozen=True)
class Request:
    """How a log is to be read.

    ``action_space``: None for the one that the log declares. ``mapping``: what the
    columns of a table are, None for logs that say so themselves. ``one_step``: whether
    every row of a file of arrays is an episode.
    """

    action_space: SpaceRequest | None = None
    mapping: MappingRequest | None = None
    one_step: bool = False


@runtime_checkable
class PieceStream(Protocol):
    """A log as pieces of whole episodes; ``metadata`` is complete after the last."""

    @property
    def metadata(self) -> Metadata:
        """Metadata of the whole log."""

    def __iter__(self) -> Iterator[Transitions]: ...


@dataclass(frozen=True)
class LogReader:
    """One layout of logs.

    ``name``: short, the same for one layout in several places. ``title``: what `data
    info` calls the layout. ``sniff``: whether a place holds it, by its first bytes or
    its names. ``read``: the log, its values unchecked; raises DataError.
    ``of_episodes``: whether its rows are bound to episodes, so that they cannot be read
    as steps that stand alone. ``pieces``: the log piece by piece in bounded memory;
    None where it is read as a whole. ``tool``: what the tool that wrote it is called,
    empty if it is not known; None where the layout tells it.
    """

    name: str
    title: str
    sniff: Callable[[Place], bool]
    read: Callable[[Place, Request], RawLog]
    of_episodes: bool = False
    pieces: Callable[[Place, Request], PieceStream] | None = None
    tool: Callable[[Place], str] | None = None


class _ShardPieces:
    """The blocks of a folder of shards, cut at whole episodes."""

    def __init__(self, place: Place, request: Request) -> None:
        self._log = open_lazy(place.name, request.action_space)

    @property
    def metadata(self) -> Metadata:
        return self._log.metadata

    def __iter__(self) -> Iterator[Transitions]:
        for shard in range(len(self._log.shards)):
            yield from in_whole_units(self._log.shard_blocks(shard))


def _read_shards(place: Place, request: Request) -> RawLog:
    loaded = open_lazy(place.name, request.action_space).load()
    return RawLog(loaded.columns, loaded.action_space, loaded.metadata)


def _read_minari_id(place: Place, request: Request) -> RawLog:
    name = place.name
    folder = minari_folder(name)
    if not folder.exists():
        fetch = f"minari download {name.removeprefix(MINARI)}"
        raise DataError(f"{name} is not at {folder}; fetch it with `{fetch}`")
    return read_minari(folder, name, request.action_space)


def _read_minari_folder(place: Place, request: Request) -> RawLog:
    return read_minari(Path(place.name), place.name, request.action_space)


def _is_minari_file(place: Place) -> bool:
    """Whether a file is the ``main_data.hdf5`` of a Minari folder, named by itself."""
    if "episode_0" not in place.hdf5_names:
        return False
    return kinds.data_folder(place.path.parent) == place.path.parent


def _read_minari_file(place: Place, request: Request) -> RawLog:
    return read_minari(place.path.parent, str(place.path), request.action_space)


def _is_dump(place: Place) -> bool:
    return {"columns", "num_episodes"} <= place.hdf5_names


def _read_dump(place: Place, request: Request) -> RawLog:
    return read_d3rlpy_dump(place.path, request.action_space)


def _read_arrays(place: Place, request: Request) -> RawLog:
    if request.one_step and "episode_0" in place.hdf5_names:
        raise DataError(f"{place.path} holds episodes; {_NOT_FLAT}")
    assert place.kind is not None, "it is HDF5 or NPZ"
    return read_flat(place.path, place.kind, request.action_space, request.one_step)


def _holds_groups(place: Place) -> bool:
    """Whether an HDF5 file holds a group of arrays for each episode."""
    if place.kind != kinds.HDF5 or _is_dump(place):
        return False
    with reading(place.path, kinds.HDF5), open_hdf5(place.path) as file:
        return bool(episode_groups(file.datasets))


def _read_groups(place: Place, request: Request) -> RawLog:
    with reading(place.path, kinds.HDF5), open_hdf5(place.path) as file:
        headers = {path: file.raw[path] for path in file.datasets}
        groups = episode_groups(headers)
        arrays = joined_groups(file, headers, groups, place.name)
    return log_of_arrays(arrays, place.name, request.action_space)


def _read_table(place: Place, request: Request) -> RawLog:
    from koffline.data.table.reading import read_table

    return read_table(place.name, request.mapping, request.action_space)


def _table_pieces(place: Place, request: Request) -> PieceStream:
    from koffline.data.table.reading import TableStream

    # whatever the order of the table
    return TableStream(place.name, request.mapping, request.action_space)


def _tool_of_table(place: Place) -> str:
    from koffline.data.table.table_rows import header_of
    from koffline.data.table.tools import find_tool

    kind, files = kinds.find_tables(place.name, place.is_table)
    header = header_of(files[0], kind)
    tool = find_tool([name for name, _ in header.fields], header.layout, None)
    if tool is None:
        return ""
    return tool.title


def _table(name: str, kind: str, title: str) -> LogReader:
    return LogReader(
        name=name,
        title=title,
        sniff=lambda place: place.table_kind == kind,
        read=_read_table,
        pieces=_table_pieces,
        tool=_tool_of_table,
    )


def _arrays(name: str, kind: str) -> LogReader:
    return LogReader(
        name=name,
        title=f"{kind} file with an array for each column of a log",
        sniff=lambda place: place.kind == kind,
        read=_read_arrays,
    )


# Arrays are a table where a mapping says so.
_TABLES = (
    LogReader(
        name="lerobot",
        title="LeRobot dataset (Parquet)",
        sniff=lambda place: (
            place.table_kind is not None and kinds.is_lerobot_folder(place.name)
        ),
        read=_read_table,
        pieces=_table_pieces,
    ),
    _table("parquet", kinds.PARQUET, "Parquet table"),
    _table("arrow", kinds.ARROW, "Arrow table"),
    _table("csv", kinds.CSV, "CSV table"),
    _table("json", kinds.JSON, "table of JSON objects"),
    _table("hdf5", kinds.HDF5, "table of the arrays in an HDF5 file"),
    _table("npz", kinds.NPZ, "table of the arrays in an NPZ archive"),
)
# The first that recognises a source reads it.
READERS = (
    LogReader(
        name="minari",
        title="Minari dataset",
        sniff=lambda place: place.name.startswith(MINARI),
        read=_read_minari_id,
        of_episodes=True,
    ),
    LogReader(
        name="shards",
        title="folder of shards",
        sniff=lambda place: kinds.is_shard_folder(place.name),
        read=_read_shards,
        of_episodes=True,
        pieces=_ShardPieces,
    ),
    *_TABLES,
    LogReader(
        name="minari",
        title="Minari folder",
        # a folder that is nothing else: the reader says what it lacks
        sniff=lambda place: place.is_folder and not remote.is_url(place.name),
        read=_read_minari_folder,
        of_episodes=True,
    ),
    LogReader(
        name="d3rlpy",
        title="replay buffer that d3rlpy wrote (HDF5)",
        sniff=_is_dump,
        read=_read_dump,
        of_episodes=True,
    ),
    LogReader(
        name="minari",
        title="main_data.hdf5 of a Minari folder",
        sniff=_is_minari_file,
        read=_read_minari_file,
        of_episodes=True,
    ),
    LogReader(
        name="groups",
        title="HDF5 file with a group of arrays for each episode",
        sniff=_holds_groups,
        read=_read_groups,
        of_episodes=True,
    ),
    _arrays("hdf5", kinds.HDF5),
    _arrays("npz", kinds.NPZ),
)


def recognise(place: Place) -> LogReader:
    """The reader of a place. Raises DataError if no layout is known there."""
    readers: tuple[LogReader, ...] = READERS
    if place.is_table:
        readers = _TABLES
    for reader in readers:
        if reader.sniff(place):
            return reader
    if not place.exists:
        raise DataError(f"{place.name} does not exist; check the path, or {READABLE}")
    if place.is_folder:
        raise DataError(f"{place.name} is no folder of shards; {READABLE}")
    raise DataError(
        f"{place.name} is no data file that koffline knows, whatever its name says;"
        f" {READABLE}"
    )


def read_log(place: Place, request: Request) -> RawLog:
    """A log, its values unchecked, read by the first reader that recognises it.

    Raises DataError in one line.
    """
    try:
        reader = recognise(place)
        if request.one_step and reader.of_episodes:
            raise DataError(f"{place.name} holds episodes; {_NOT_FLAT}")
        log = reader.read(place, request)
    except DataError as error:
        raise DataError(place.named(str(error))) from None
    return replace(log, metadata=replace(log.metadata, source=place.name))
