"""Arrays of flat files that can be read by slices: HDF5 datasets and stored members of NPZ archives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.data.flat import known_keys
from koffline.data.raw import FileDescription, read_description
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.arrays import map_arrays, read_arrays
from koffline.untrusted.hdf5 import CheckedFile, open_hdf5
from koffline.untrusted.limits import check_regular

LAZY_REMEDY = "write shards with `koffline data convert SOURCE FOLDER --shard-rows N` and open those"


@dataclass(frozen=True, eq=False)
class SlicedFile:
    """What an open file offers: arrays by key (each with shape, dtype and slices), and its description.

    ``name`` is what errors call the file.
    """

    name: str
    arrays: Mapping[str, Any]
    description: FileDescription | None
    marks_episode_ends: bool = False  # has d3rlpy 1's episode_terminals


@contextlib.contextmanager
def open_sliced(path: Path, name: str) -> Iterator[SlicedFile]:
    """Open a flat file without reading its rows; ``name`` is what errors call it. Raises DataError."""
    import h5py

    with contextlib.ExitStack() as opened:
        with reading(name, "data"):
            check_regular(path)
            with path.open("rb") as file:
                head = file.read(8)
        if not head:
            raise DataError(f"{name} is empty (0 bytes); copy or export it again")
        if h5py.is_hdf5(path):
            with reading(name, "HDF5"):
                found = _hdf5_arrays(opened.enter_context(open_hdf5(path)), name)
        elif head.startswith(b"\x89HDF"):
            raise DataError(f"{name} is a truncated or corrupt HDF5 file (damaged header); copy it again")
        elif head.startswith(b"PK"):
            with reading(name, "NPZ"):
                found = _npz_arrays(path, name)
        else:
            raise DataError(
                f"{name} is no HDF5 file and no NPZ archive, which lazy reading needs; {LAZY_REMEDY}"
            )
        yield found


def _hdf5_arrays(file: CheckedFile, name: str) -> SlicedFile:
    from koffline.data.d3rlpy_dump import is_d3rlpy_dump
    from koffline.data.hdf5 import DESCRIPTION

    if is_d3rlpy_dump(file.raw) or "episode_0" in file.raw:
        raise DataError(f"{name} is kept episode by episode, which cannot be read lazily; {LAZY_REMEDY}")
    arrays = file.slices([key for key in known_keys() if key in file])
    text = file.text(DESCRIPTION)
    described = read_description(text) if text is not None else None
    return SlicedFile(name, arrays, described, "episode_terminals" in file)


def _npz_arrays(path: Path, name: str) -> SlicedFile:
    description = read_arrays(path, ["koffline"]).get("koffline")
    described = read_description(str(description)) if description is not None else None
    return SlicedFile(name, map_arrays(path, known_keys()), described)
