"""Arrays of flat files that can be read by slices: HDF5 datasets and stored members of NPZ archives."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.files import reading
from koffline.data.flat import known_keys
from koffline.data.raw import FileDescription, read_description
from koffline.errors import DataError

LAZY_REMEDY = "write shards with `koffline data convert SOURCE FOLDER --shard-rows N` and open those"


@dataclass(frozen=True, eq=False)
class SlicedFile:
    """What an open file offers: arrays by key (each with shape, dtype and slices), and its description."""

    arrays: Mapping[str, Any]
    description: FileDescription | None
    marks_episode_ends: bool = False  # has d3rlpy 1's episode_terminals


@contextlib.contextmanager
def open_sliced(path: Path, name: str) -> Iterator[SlicedFile]:
    """Open a flat file without reading its rows; ``name`` is what errors call it. Raises DataError."""
    import h5py

    with reading(name, "data"), path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise DataError(f"{name} is empty (0 bytes); copy or export it again")
    if h5py.is_hdf5(path):
        with reading(name, "HDF5"), h5py.File(path, "r") as opened:
            yield _hdf5_arrays(opened, name)
    elif head.startswith(b"\x89HDF"):
        raise DataError(f"{name} is a truncated or corrupt HDF5 file (damaged header); copy it again")
    elif head.startswith(b"PK"):
        with reading(name, "NPZ"):
            yield _npz_arrays(path, name)
    else:
        raise DataError(f"{name} is no HDF5 file and no NPZ archive, which lazy reading needs; {LAZY_REMEDY}")


def _hdf5_arrays(file: Any, name: str) -> SlicedFile:
    import h5py

    from koffline.data.d3rlpy_dump import is_d3rlpy_dump
    from koffline.data.hdf5 import DESCRIPTION

    if is_d3rlpy_dump(file) or "episode_0" in file:
        raise DataError(f"{name} is kept episode by episode, which cannot be read lazily; {LAZY_REMEDY}")
    arrays = {}
    for key in known_keys():
        if isinstance(file.get(key), h5py.Dataset):
            arrays[key] = _own_dataset(file, key, name)
    described = read_description(file.attrs[DESCRIPTION]) if DESCRIPTION in file.attrs else None
    return SlicedFile(arrays, described, "episode_terminals" in file)


def _own_dataset(file: Any, key: str, name: str) -> Any:
    """A dataset whose values lie in this very file. Raises DataError."""
    dataset = file[key]
    if dataset.file.filename != file.filename or dataset.is_virtual or dataset.external:
        raise DataError(f"{name}: {key} points to another file; copy the values into one file")
    if dataset.shape is None or not dataset.shape:
        raise DataError(f"{name}: {key} is no array with one row per transition; export the log again")
    return dataset


def _npz_arrays(path: Path, name: str) -> SlicedFile:
    arrays, described = {}, None
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if "koffline" in members:
            with np.load(path, allow_pickle=False) as loaded:
                described = read_description(str(loaded["koffline"]))
        for key in known_keys():
            if key in members:
                arrays[key] = _mapped(path, members[key], name)
    return SlicedFile(arrays, described)


def _mapped(path: Path, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    """A stored member as a memory map. Raises DataError for a compressed one."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise DataError(f"{name} is compressed, so it cannot be read lazily; {LAZY_REMEDY}")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
        if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
            raise ValueError("its table of contents points elsewhere")
        file.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), 1)
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        if dtype.hasobject or not shape:
            raise ValueError(f"{info.filename} has dtype {dtype} and shape {shape}")
        if not all(shape):
            return np.zeros(shape, dtype)
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")
