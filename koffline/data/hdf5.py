"""HDF5: one flat layout that is D4RL's keys plus our description, readable by D4RL's readers too."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from koffline.data.flat import check_required, counted_twice, equal_rows, flat_arrays, known_keys, read_flat
from koffline.data.hdf5_output import new_hdf5
from koffline.data.raw import RawLog, describe_log, read_description
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.store.files import atomic_file, reading
from koffline.untrusted.hdf5 import open_hdf5, write_text

# The root attribute that holds what describe_log says; any tool may ignore it.
DESCRIPTION = "koffline"


def read_hdf5(path: Path, action_space: SpaceRequest | None = None) -> RawLog:
    """Read a flat file: ours, D4RL's, or any with the same keys. Raises DataError."""
    with reading(path, "HDF5"), open_hdf5(path) as file:
        check_required(file.datasets, str(path))
        keys = [key for key in known_keys() if key in file]
        equal_rows({key: file.dataset(key) for key in keys}, str(path))
        found = file.arrays(keys, counted_twice(keys))
        if "episode_terminals" in file and "terminals" in found and "timeouts" not in found:
            # d3rlpy 1 marks the last row of every episode; where it is not terminal, time ran out
            found["timeouts"] = (file.arrays(["episode_terminals"])["episode_terminals"] == 1) & (
                found["terminals"] != 1
            )
        text = file.text(DESCRIPTION)
        described = read_description(text) if text is not None else None
        return read_flat(found, described, str(path), action_space)


def write_hdf5(log: Transitions, path: Path, force: bool = False, compress: bool = True) -> None:
    """Write the flat layout, whole or not at all; checksums guard every block. Raises DataError."""
    filters = {"compression": "gzip", "compression_opts": 4, "shuffle": True} if compress else {}
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        for key, array in flat_arrays(log).items():
            file.create_dataset(key, data=array, chunks=_chunks(array), fletcher32=True, **filters)
        write_text(file, DESCRIPTION, describe_log(log))


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """HDF5 tells of a full disk by RuntimeErrors in its own words; as an OSError others understand it."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, f"HDF5: {' '.join(str(error).split())}") from error


def _chunks(array: np.ndarray) -> tuple[int, ...]:
    """About a quarter of a megabyte of whole rows."""
    row_bytes = max(1, array[:1].nbytes)
    return (min(len(array), max(1, 2**18 // row_bytes)), *array.shape[1:])
