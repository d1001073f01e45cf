"""Open a log by its content, whatever its name; write it in the requested format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from koffline.data import remote
from koffline.data.array_labels import with_labels
from koffline.data.d3rlpy_dump import write_d3rlpy_dump
from koffline.data.disk.log import AnyLog, LazyTransitions
from koffline.data.disk.writer import ShardWriter, open_lazy
from koffline.data.flat import write_hdf5, write_npz
from koffline.data.kinds import is_shard_folder, is_table_source
from koffline.data.log_readers import Place, Request, read_log, recognise
from koffline.data.minari import write_minari
from koffline.data.objects import is_of_arrays, read_object
from koffline.data.raw import RawLog, settle_space, shaped_actions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions, check_in_memory
from koffline.errors import DataError, listed
from koffline.store import check_apart
from koffline.store.files import MINARI, Location, minari_folder, parents_made, reading
from koffline.untrusted.arrays import open_npz, read_array

if TYPE_CHECKING:
    import numpy as np

    from koffline.data.table.mapping import MappingRequest, TableMapping

_Space: TypeAlias = SpaceRequest | None
LogMapping: TypeAlias = "MappingRequest | None"
# A path or URL, a log, or an object that `koffline.data.objects` reads: a frame, a dict
# of arrays, a buffer of d3rlpy, a Minari dataset, a list of episodes.
LogSource: TypeAlias = Any
_WRITERS = {"hdf5": write_hdf5, "npz": write_npz, "d3rlpy": write_d3rlpy_dump}
FORMATS = ("hdf5", "minari", "npz", "d3rlpy", "parquet", "arrow", "csv")
SUFFIXES = {f".{name}": name for name in ("hdf5", "npz", "parquet", "arrow", "csv")}
SUFFIXES |= {".h5": "hdf5", ".feather": "arrow"}
_START_NAMES = ("initial_observations", "observations")


@overload
def open_transitions(
    source: LogSource,
    action_space: _Space = None,
    *,
    lazy: Literal[False] = False,
    mapping: LogMapping = None,
) -> Transitions: ...
@overload
def open_transitions(
    source: LogSource,
    action_space: _Space = None,
    *,
    lazy: Literal[True],
    mapping: LogMapping = None,
) -> LazyTransitions: ...
def open_transitions(
    source: LogSource,
    action_space: _Space = None,
    *,
    lazy: bool = False,
    mapping: LogMapping = None,
) -> AnyLog:
    """Read a log from ``source``: a file, a folder or ``minari:<id>``, recognised by
    its content and not by its name, or what a Python session holds.

    The latter is a pandas, polars or Arrow frame (read like a table in a file), a dict
    of arrays (like an NPZ archive), a d3rlpy ``MDPDataset`` or ``ReplayBuffer``, a
    Minari dataset, or a list of episodes, each a dict of observations (T + 1, …),
    actions (T, …), rewards (T,), terminations and truncations (T,)
    (`koffline.data.episode_lists.read_episode_list` says what else is understood).
    ``action_space`` overrides what the log declares; without either, the reader assumes
    one and says so in ``metadata.notes``. ``metadata.sha256`` is the digest of the
    rows. With ``lazy`` the rows of a folder of shards, at a path or URL, stay on disk.
    ``mapping`` (a TableMapping, a dict, what `koffline.inspect` returns, or a YAML
    file) says what the columns of a table are; ``{"one_step": True}`` makes every row
    of any flat file an episode, and ``{"encode": {"observations": "one-hot"}}`` says
    that numbers in arrays are labels.
    Raises DataError in one line.
    """
    if isinstance(source, Transitions):
        if lazy or mapping is not None:
            raise DataError(
                "the log is in memory already; give its path (a mapping is for tables)"
            )
        if action_space is None:
            return source
        space, _ = settle_space(source.actions, action_space, None, "the log")
        return source.replace(
            actions=shaped_actions(source.actions, space), action_space=space
        )
    if isinstance(source, LazyTransitions):
        declared = source.declared_anew(action_space)
        if lazy:
            return declared
        return declared.load()
    if lazy and not isinstance(source, (str, os.PathLike)):
        raise DataError(
            f"the log is a {type(source).__name__} in memory; lazy=True is for folders"
            " of shards"
        )
    if lazy and mapping is not None:
        raise DataError(
            "a table is read into memory; make shards of it with `koffline data convert"
            " … --shard-rows N` and open those lazily"
        )
    if lazy:
        return open_lazy(source, action_space)
    return _digested(open_raw(source, action_space, mapping).transitions())


def open_log(
    source: LogSource, action_space: _Space = None, mapping: LogMapping = None
) -> AnyLog:
    """What a user gives as a log, as evaluations take it: a folder of shards stays on
    disk, and so does a log that is there; anything else is read by `open_transitions`.

    Raises DataError.
    """
    is_on_disk = isinstance(source, LazyTransitions)
    if isinstance(source, (str, os.PathLike)) and mapping is None:
        is_on_disk = is_shard_folder(os.fspath(source))
    if is_on_disk:
        return open_transitions(source, action_space, lazy=True)
    return open_transitions(source, action_space, mapping=mapping)


def open_log_by(
    source: LogSource, action_space: _Space, mapping: LogMapping, by: Any
) -> tuple[AnyLog, Any]:
    """A log, and groups of its start states by ``by``: a feature's name or number,
    labels under a name, or any column of a table with a mapping. Raises DataError.
    """
    from koffline.data.table.mapping import as_mapping

    is_log = isinstance(source, (Transitions, LazyTransitions))
    if is_log or mapping is None or is_of_arrays(mapping):
        return open_log(source, action_space, mapping), by
    roles = as_mapping(mapping)
    if by is None:
        by = roles.by
    if not isinstance(by, str):
        return open_log(source, action_space, roles), by
    return open_labelled(source, action_space, roles, by)


def open_labelled(
    source: LogSource, action_space: _Space, mapping: TableMapping, by: str
) -> tuple[Transitions, str | dict[str, np.ndarray]]:
    """A log from a table, and its groups by the column ``by``: {name: value at each
    episode's first row}.

    Without episodes there is one value per row. For a column among the observations,
    only its name is returned. Raises DataError.
    """
    raw = open_raw(source, action_space, mapping.model_copy(update={"by": by}))
    log = _digested(raw.transitions())
    if raw.labels is None:
        return log, by
    return log, {by: raw.labels}


def _digested(log: Transitions) -> Transitions:
    """The log with the digest of its rows in its metadata."""
    recorded = log.metadata.sha256
    metadata = log.metadata
    if recorded not in (None, log.sha256):
        metadata = metadata.with_notes(
            "the rows are not those the file was written with: it was edited"
        )
    return log.with_metadata(replace(metadata, sha256=log.sha256))


def open_raw(
    source: LogSource, action_space: _Space = None, mapping: LogMapping = None
) -> RawLog:
    """Open a log with unchecked values, to list all of its errors. Raises DataError."""
    if not isinstance(source, (str, os.PathLike)):
        return read_object(source, action_space, mapping)
    name = os.fspath(source)
    with Place(name, _says_table(mapping)) as place:
        is_table = place.is_table or place.table_kind is not None
        if not is_table and isinstance(mapping, Mapping) and "encode" in mapping:
            of_rows = None
            if "one_step" in mapping:
                of_rows = {"one_step": True}
            log = open_raw(source, action_space, of_rows)
            return with_labels(log, mapping["encode"], name)
        one_step = mapping is not None and not is_table
        return read_log(place, Request(action_space, mapping, one_step))


def layout_of(source: Location, mapping: LogMapping = None) -> str:
    """What the layout of a log is called. Raises DataError if it is not known."""
    with Place(os.fspath(source), _says_table(mapping)) as place:
        reader = recognise(place)
        if reader.tool is None:
            return reader.title
        tool = reader.tool(place)
        if not tool:
            return reader.title
        return f"{reader.title}: {tool}"


def _says_table(mapping: LogMapping) -> bool:
    """Whether a mapping has more than arrays understand, so that the log is a table."""
    return not is_of_arrays(mapping)


def write_transitions(
    transitions: LogSource,
    target: Location,
    format: str | None = None,
    force: bool = False,
    *,
    mapping: LogMapping = None,
) -> str:
    """Write ``transitions`` to the path ``target`` atomically and return the format
    used.

    transitions: a log, or anything that `open_transitions` reads with ``mapping``.
    format: ``hdf5``, ``minari``, ``npz``, ``d3rlpy``, ``parquet``, ``arrow`` or
    ``csv``. By default the target decides: ``minari:<id>`` is Minari, .hdf5 and .h5 our
    HDF5, .npz NPZ, .parquet Parquet, .arrow and .feather Arrow, .csv CSV (which stores
    the rows but no action space and no metadata). Minari takes a folder or
    ``minari:<id>``. Raises DataError, also if the target exists without ``force``.
    """
    transitions = open_log(transitions, mapping=mapping)
    check_in_memory(transitions)
    name = os.fspath(target)
    chosen = target_format(name, format)
    if name.startswith(MINARI):
        folder = minari_folder(name)
        with parents_made(folder):
            write_minari(transitions, folder, name.removeprefix(MINARI), force)
    elif chosen == "minari":
        write_minari(transitions, Path(name), Path(name).name, force)
    elif chosen in _WRITERS:
        _WRITERS[chosen](transitions, Path(name), force)
    else:
        from koffline.data.table.reading import write_table

        write_table(transitions, Path(name), chosen, force)
    return chosen


def target_format(target: str, requested: str | None) -> str:
    """The requested format, else the one of the target's name. Raises DataError."""
    of_minari = target.startswith(MINARI)
    chosen = requested
    if not chosen and of_minari:
        chosen = "minari"
    elif not chosen:
        chosen = SUFFIXES.get(Path(target).suffix.lower())
    if chosen not in FORMATS:
        problem = f"{target} does not tell its format"
        if requested:
            problem = f"format {requested!r} is unknown"
        raise DataError(
            f"{problem}; choose one of {', '.join(FORMATS)} (ending, or data convert"
            " --format)"
        )
    if of_minari and chosen != "minari":
        raise DataError(
            f"{target} names a Minari dataset but the format is {chosen}; give a file"
            " name"
        )
    return chosen


def convert_to_shards(
    source: Location,
    target: Location,
    shard_rows: int,
    force: bool = False,
    action_space: _Space = None,
    mapping: LogMapping = None,
) -> LazyTransitions:
    """Write ``source`` as a folder of shards and open it; tables and shards are read
    piece by piece.

    Raises DataError, also if source and target are the same.
    """
    name = os.fspath(source)
    check_apart([name], os.fspath(target))
    with (
        ShardWriter(target, shard_rows, force) as writer,
        Place(name, _says_table(mapping)) as place,
    ):
        reader = recognise(place)
        # a mapping of arrays alone changes rows that lie in memory
        is_changed = mapping is not None and place.table_kind is None
        if reader.pieces is None or is_changed:
            writer.append(open_transitions(source, action_space, mapping=mapping))
        else:
            stream = reader.pieces(place, Request(action_space, mapping))
            for piece in stream:
                writer.append(piece)
            # what was done to the rows is known at the end
            writer.metadata = stream.metadata
    return open_lazy(target)


def read_initial_states(
    source: str, mapping: Any = None, features: Any = None
) -> np.ndarray:
    """Start states (E, …) from a .npy array, an .npz, or a log.

    An .npz holds ``initial_observations`` or ``observations``. A log (with ``rewards``)
    gives the first observations of its episodes; a table is read with the log's
    ``mapping``, its categories numbered as in the log's ``features``. Raises DataError.
    """
    path = Path(source)
    if not source.startswith(MINARI) and not path.exists():
        raise DataError(f"initial states {source} do not exist; check the path")
    with reading(f"initial states {path}", "NumPy"):
        states = _states_of_arrays(source)
    if states is not None:
        return states
    if not is_table_source(source):
        mapping = None
    if features is not None and hasattr(mapping, "encode"):
        encode = {**mapping.encode, **features.encodings}
        mapping = mapping.model_copy(update={"encode": encode})
    return open_transitions(source, mapping=mapping).initial_observations()


def _states_of_arrays(source: str) -> np.ndarray | None:
    """Start states (E, …) from a .npy array or an .npz; None for logs, and for other
    files. Raises DataError for archives without them.
    """
    path = Path(source)
    if not path.is_file():
        return None
    magic = remote.read_bytes(source, 8)
    if magic.startswith(b"\x93NUMPY"):
        return read_array(path)
    if not magic.startswith(b"PK"):
        return None
    with open_npz(path) as archive:
        if "rewards" in archive:
            return None
        for name in _START_NAMES:
            if name in archive:
                return archive.arrays([name])[name]
        raise DataError(
            f"initial states {path} hold {listed(archive.datasets, 12)}; name the array"
            f" {_START_NAMES[0]}"
        )
