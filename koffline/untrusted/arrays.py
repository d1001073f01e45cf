"""Untrusted arrays and models: NumPy files, pickles, torch.save and ONNX, read without
imports.

Every size is checked before memory is allocated. A pickle may build numbers, texts and
containers: its unpickler refuses every import. torch.load(weights_only=True) imports
only what rebuilds tensors; the declared sizes in an archive are added up first. ONNX
tensors may name another file for their numbers, by any path; these are refused.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from koffline.untrusted.limits import (
    COPIES,
    Refused,
    announce_large,
    check_memory,
    check_regular,
    kept_bytes,
)

_LONGEST_HEADER = 65_536
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@runtime_checkable
class ArrayHeader(Protocol):
    """Shape and type of an array, which may not be in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sides."""

    @property
    def dtype(self) -> np.dtype:
        """The type of its numbers."""


@runtime_checkable
class OpenArrays(Protocol):
    """An open file of arrays, or a dict of arrays that is read like one."""

    @property
    def datasets(self) -> list[str]:
        """Names of all arrays."""

    def __contains__(self, name: str, /) -> bool:
        """Whether there is an array of this name."""

    def dataset(self, name: str, /) -> ArrayHeader:
        """Shape and type of an array."""

    def arrays(
        self, names: Collection[str], /, twice: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Arrays by name. twice: names whose memory counts twice."""

    def text(self, name: str, /) -> str | None:
        """A text beside the arrays; None if it is not there."""


@dataclass(frozen=True)
class Header:
    """Shape and dtype that an array declares, known before reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype


class CheckedArchive:
    """An open .npz whose arrays are checked on access, as for HDF5 files.

    datasets: names of all its entries, as numpy gives them.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        entries = archive.infolist()
        self.datasets = [entry.filename.removesuffix(".npy") for entry in entries]
        arrays = [entry for entry in entries if entry.filename.endswith(".npy")]
        self._members = {entry.filename.removesuffix(".npy"): entry for entry in arrays}
        if len(self._members) != len(arrays):
            raise Refused("two of its arrays have the same name; write it again")

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def dataset(self, name: str) -> Header:
        """Shape and dtype of an array of numbers or text.

        Raises Refused for anything else.
        """
        entry = self._members[name]
        if entry.compress_type not in _METHODS:
            raise Refused(
                f"{name} is compressed in a way NumPy never uses; write it with"
                " savez_compressed"
            )
        with self._archive.open(entry) as file:
            return _header(file, name, entry.file_size)

    def arrays(
        self, names: Collection[str], twice: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Some arrays; their memory is added up before the first is read. Raises
        Refused.

        twice: names that count twice, because further columns will be made of them.
        """
        headers = {name: self.dataset(name) for name in names}
        needed = {
            name: kept_bytes(header.shape, header.dtype)
            for name, header in headers.items()
        }
        total = sum(needed.values()) + sum(needed[name] for name in twice)
        check_memory(total)
        announce_large(str(self._archive.filename), self._size(), total, COPIES)
        return {name: _read(self._archive.open(self._members[name])) for name in names}

    def _size(self) -> int:
        """Bytes of the archive's members as stored."""
        return sum(entry.compress_size for entry in self._members.values())

    def text(self, name: str) -> str | None:
        """The text in an array; None if there is no such array. Raises Refused."""
        if name in self:
            return str(self.arrays([name])[name])
        return None


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[CheckedArchive]:
    """Open an .npz for reading.

    Raises Refused for two arrays of one name; BadZipFile if it is no .npz.
    """
    check_regular(path)
    with zipfile.ZipFile(path) as archive:
        yield CheckedArchive(archive)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz, numbers and text. Raises Refused for anything else."""
    with open_npz(path) as archive:
        return archive.arrays([name for name in archive.datasets if name in archive])


def read_array(path: Path) -> np.ndarray:
    """The array of an .npy file.

    Raises Refused for anything that is not plain numbers or text.
    """
    check_regular(path)
    with path.open("rb") as file:
        header = _header(file, "the array", path.stat().st_size)
        check_memory(kept_bytes(header.shape, header.dtype))
        file.seek(0)
        return _read(file)


def _header(file: IO[bytes] | io.BufferedIOBase, name: str, size: int) -> Header:
    """The header of an .npy of ``size`` bytes; its array must take exactly the bytes
    after the header.

    Raises Refused for a header that cannot be parsed.
    """
    head = io.BytesIO(file.read(min(size, _LONGEST_HEADER)))
    numpy = np.lib.format
    try:
        with warnings.catch_warnings():
            # NumPy warns of headers written by Python 2
            warnings.simplefilter("ignore")
            short = numpy.read_array_header_1_0
            long = numpy.read_array_header_2_0
            read = {(1, 0): short, (2, 0): long, (3, 0): long}[numpy.read_magic(head)]
            shape, _, dtype = read(head, max_header_size=_LONGEST_HEADER)
    except Exception as error:
        # the header is a Python literal: a hostile one raises errors of any type
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise Refused(
            f"{name} has no readable header ({reason}); write it again"
        ) from None
    if any(side < 0 for side in shape) or len(shape) > 32:
        raise Refused(f"{name} has shape {str(shape)[:80]}; write it again")
    if dtype.kind not in "biufcSU" or dtype.itemsize == 0 or dtype.subdtype is not None:
        raise Refused(
            f"{name} has dtype {str(dtype)[:80]}, which koffline never loads; give"
            " numbers"
        )
    declared = math.prod(shape) * dtype.itemsize
    held = size - head.tell()
    if declared != held:
        raise Refused(
            f"{name} declares {declared} bytes and holds {held}; write it again"
        )
    return Header(shape, dtype)


def _read(file: IO[bytes] | io.BufferedIOBase) -> np.ndarray:
    """The array of an .npy whose header was checked."""
    with file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = np.lib.format.read_array
        array: np.ndarray = read(
            file, allow_pickle=False, max_header_size=_LONGEST_HEADER
        )
        return array


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts and containers; raises Refused for anything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse an import."""
        raise _refused_import(f"{module}.{name}")


def _refused_import(wanted: str) -> Refused:
    return Refused(
        f"it asks to import {wanted}, so loading it could run code; nothing ran; save"
        " it again as plain data (d3rlpy: algo.save)"
    )


def load_tensors(source: Path | bytes) -> Any:
    """The content of a file written by torch.save, on the CPU.

    Raises Refused, OSError, zipfile.BadZipFile, and torch's errors for a broken pickle.
    """
    import torch

    if isinstance(source, Path):
        check_regular(source)
        content = source.read_bytes()
    else:
        content = source
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_memory(sum(entry.file_size for entry in archive.infolist()))
        damaged = archive.testzip()
        if damaged:  # torch does not verify checksums
            raise Refused(f"{damaged[:40]} is damaged; copy or save it again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide torch's warnings about its own formats
        try:
            return torch.load(
                io.BytesIO(content), map_location="cpu", weights_only=True
            )
        except pickle.UnpicklingError as error:
            wanted = re.search(r"(?:GLOBAL|global:?) +([\w.]+)", str(error))
            if wanted:
                raise _refused_import(wanted[1]) from None
            raise


def check_onnx(content: bytes) -> None:
    """Raise Refused if the model keeps numbers in other files, or is no ONNX model."""
    import onnx
    from google.protobuf.message import DecodeError, Message

    try:
        waiting: list[Message] = [onnx.ModelProto.FromString(content)]
    except DecodeError:
        raise Refused(
            "it is no ONNX model, truncated or damaged; export it again"
        ) from None
    while waiting:
        message = waiting.pop()
        if isinstance(message, onnx.TensorProto) and (
            message.external_data or message.data_location
        ):
            raise Refused(
                "it keeps numbers in another file, which koffline never follows; export"
                " one file (onnx.save with save_as_external_data=False)"
            )
        for field, value in message.ListFields():
            if field.type != field.TYPE_MESSAGE:
                continue
            if isinstance(value, Sequence):
                waiting += value
            else:
                waiting.append(value)
