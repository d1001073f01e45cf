"""NumPy files from strangers: .npy and .npz without pickles, every size checked before memory is taken."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

from koffline.untrusted.limits import Refused, Tally, check_regular

_LONGEST_HEADER = 65_536
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


def array_names(path: Path) -> list[str]:
    """Names of everything in an .npz, as numpy gives them. Raises Refused."""
    with _opened(path) as archive:
        return [entry.filename.removesuffix(".npy") for entry in archive.infolist()]


def read_arrays(path: Path, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz with these names, or all: numbers and text. Raises Refused for anything else."""
    with _opened(path) as archive:
        members = _members(archive)
        tally = Tally(path.stat().st_size)
        found = {}
        for name, entry in members.items():
            if wanted is None or name in wanted:
                _check_entry(name, entry)
                with archive.open(entry) as file:
                    found[name] = _read(file, name, entry.file_size, entry.compress_size, tally)
        return found


def map_arrays(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Memory maps of those arrays of an .npz that it has. Raises Refused, also for compressed ones."""
    with _opened(path) as archive, path.open("rb") as file:
        members = _members(archive)
        found: dict[str, np.ndarray] = {}
        for name, entry in members.items():
            if name not in wanted:
                continue
            _check_entry(name, entry)
            if entry.compress_type != zipfile.ZIP_STORED:
                raise Refused(f"{name} is compressed and can only be read whole; write it with numpy.savez")
            file.seek(entry.header_offset)
            local = file.read(30)
            file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), 1)
            found[name] = _mapped(path, file, name, entry.file_size)
        return found


def _mapped(path: Path, file: IO[bytes], name: str, size: int) -> np.ndarray:
    """The array whose .npy of ``size`` bytes begins where the open file stands."""
    start = file.tell()
    shape, fortran, dtype = _header(file, name, size)
    if dtype.kind not in "biuf" or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise Refused(f"{name} has dtype {str(dtype)[:80]}; give numbers, one row per transition")
    declared, held = math.prod(shape) * dtype.itemsize, size - (file.tell() - start)
    if declared != held or file.tell() + declared > path.stat().st_size:
        raise Refused(f"{name} declares {declared} bytes and holds {held}; write it again")
    if not declared:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def read_array(path: Path) -> np.ndarray:
    """The array of an .npy file. Raises Refused for anything that is not plain numbers or text."""
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        return _read(file, "the array", size, size, Tally(size))


def _opened(path: Path) -> zipfile.ZipFile:
    check_regular(path)
    return zipfile.ZipFile(path)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Entries by the names that numpy gives them; those that are no arrays do not count."""
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
    members = {entry.filename.removesuffix(".npy"): entry for entry in entries}
    if len(members) != len(entries):
        raise Refused("two of its arrays have the same name; write it again")
    return members


def _check_entry(name: str, entry: zipfile.ZipInfo) -> None:
    if entry.flag_bits & _ENCRYPTED:
        raise Refused(f"{name} is encrypted; write it again without a password")
    if entry.compress_type not in _METHODS:
        raise Refused(f"{name} is compressed in a way NumPy never uses; write it with numpy.savez_compressed")


def _read(file: IO[bytes], name: str, size: int, stored: int, tally: Tally) -> np.ndarray:
    """One .npy of ``size`` bytes. Raises Refused where its header declares another size."""
    shape, fortran, dtype = _header(file, name, size)
    if dtype.kind not in "biufcSU" or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise Refused(f"{name} has dtype {str(dtype)[:80]}, which koffline never loads; give numbers")
    declared = math.prod(shape) * dtype.itemsize
    held = size - file.tell()
    if declared != held:
        raise Refused(f"{name} declares {declared} bytes and holds {held}; write it again")
    tally.add(name, declared, stored, compressed=stored < size)
    content = bytearray(declared)
    _fill(file, content, name)
    flat = np.frombuffer(content, dtype=dtype) if declared else np.empty(0, dtype)
    return flat.reshape(shape[::-1]).transpose() if fortran else flat.reshape(shape)


def _header(file: IO[bytes], name: str, size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype. Raises Refused, whatever the header does to its parser."""
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise Refused(f"{name} is no NumPy array; write it again")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > min(_LONGEST_HEADER, size):
        raise Refused(f"{name} has a header of {length} bytes; write it again")
    head = io.BytesIO(length.to_bytes(width, "little") + file.read(length))
    numpy = np.lib.format
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy remarks on headers written by Python 2
            read = numpy.read_array_header_1_0 if width == 2 else numpy.read_array_header_2_0
            shape, fortran, dtype = read(head)
    except Exception as error:  # the header is a Python literal: a hostile one fails in any way
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise Refused(f"{name} has no readable header ({reason}); write it again") from None
    if any(side < 0 for side in shape) or len(shape) > 32:
        raise Refused(f"{name} has shape {str(shape)[:80]}; write it again")
    return shape, fortran, dtype


def _fill(file: IO[bytes], content: bytearray, name: str) -> None:
    view, done = memoryview(content), 0
    while done < len(view):
        part = file.readinto(view[done : done + 2**24])  # type: ignore[attr-defined]
        if not part:
            raise Refused(f"{name} ends after {done} of {len(view)} bytes; copy it again")
        done += part
