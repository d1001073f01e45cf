"""HDF5: one flat layout that is D4RL's keys plus our description, readable by D4RL's readers too.

After a failed write, for example on a full disk, closing an HDF5 file may abort the process. Files are
therefore written through an object that stores the first error and ignores all later writes. The library sees
no error; the caller gets it at the end.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from koffline.data.flat import (
    DESCRIPTION,
    KNOWN_KEYS,
    check_layout,
    counted_twice,
    flat_arrays,
    read_flat,
)
from koffline.data.raw import RawLog, describe_log, read_description
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.store.files import atomic_file, reading
from koffline.untrusted.hdf5 import open_hdf5, write_text

_CHUNK_BYTES = 2**18  # bytes of a chunk, which holds whole rows


def read_hdf5(path: Path, action_space: SpaceRequest | None = None, one_step: bool = False) -> RawLog:
    """Read a flat file: ours, D4RL's, or any with the same keys. Raises DataError."""
    with reading(path, "HDF5"), open_hdf5(path) as file:
        keys = [key for key in KNOWN_KEYS if key in file]
        check_layout(file.datasets, {key: file.dataset(key) for key in keys}, str(path), one_step)
        found = file.arrays(keys, counted_twice(keys))
        if "episode_terminals" in file and "terminals" in found and "timeouts" not in found:
            # d3rlpy 1 marks the last row of every episode; unless terminal, it was truncated
            ends = file.arrays(["episode_terminals"])["episode_terminals"] == 1
            found["timeouts"] = ends & (found["terminals"] != 1)
        described = read_description(file.text(DESCRIPTION))
        return read_flat(found, described, str(path), action_space, one_step)


def write_hdf5(log: Transitions, path: Path, force: bool = False) -> None:
    """Write the flat layout, whole or not at all; checksums guard every block. Raises DataError."""
    filters = {"compression": "gzip", "compression_opts": 4, "shuffle": True, "fletcher32": True}
    with atomic_file(path, force) as temporary, new_hdf5(temporary) as file:
        for key, array in flat_arrays(log).items():
            rows = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
            chunks = (min(len(array), rows), *array.shape[1:])
            file.create_dataset(key, data=array, chunks=chunks, **filters)
        write_text(file, DESCRIPTION, describe_log(log))


class _KeptErrors(io.FileIO):
    """A new file for HDF5; ``check`` raises the first OSError of writing to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first OSError of writing, if there was one."""
        if self._error is not None:
            raise self._error

    def write(self, content: Any) -> int:
        """Write all of ``content``; write nothing after an error."""
        view, done = memoryview(content).cast("B"), 0
        while done < len(view) and self._error is None:
            with self._keeping():
                done += super().write(view[done:]) or 0
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read what was written; lost bytes are zeros."""
        view, done = memoryview(buffer).cast("B"), 0
        with self._keeping():
            while done < len(view) and (count := super().readinto(view[done:])):
                done += count
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        with self._keeping():
            super().truncate(size)
        return size or 0

    def close(self) -> None:
        """Close the file."""
        with self._keeping():
            super().close()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[Any]:
    """A new h5py.File, whole at the end. Raises OSError where the disk does not take it."""
    import h5py

    with contextlib.closing(_KeptErrors(path)) as output:
        with h5py.File(output, "w", libver="v108") as file:
            yield file
        output.check()
    output.check()


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """Turn the RuntimeErrors of HDF5 about failed writes into OSErrors."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, f"HDF5: {' '.join(str(error).split())}") from error
