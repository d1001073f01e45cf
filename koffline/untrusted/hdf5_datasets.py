"""What an HDF5 dataset holds and how it is stored, in the words of HDF5: what cannot be read is named.

Texts of any length live in global heaps, whose objects the HDF5 library follows by their sizes; it never ends
at a free one of size zero, and no signal reaches Python meanwhile. So heaps are walked here first: they begin
with a signature, by which all of a file are found.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import printable
from koffline.untrusted.limits import Refused

# Filters that come as plugins, by the numbers under which they are registered with the HDF Group.
_PLUGINS = {
    305: "LZO", 307: "bzip2", 32000: "LZF", 32001: "Blosc", 32004: "LZ4", 32008: "Bitshuffle", 32013: "ZFP",
    32015: "Zstandard", 32017: "SZ", 32024: "SZ3", 32026: "Blosc2",
}  # fmt: skip
_CHECKSUM_BYTES = 4  # Fletcher's, behind the numbers of a chunk
_KINDS = {
    "INTEGER": "whole numbers",
    "FLOAT": "floating-point numbers",
    "TIME": "times (H5T_TIME)",
    "STRING": "texts",
    "BITFIELD": "bit fields",
    "OPAQUE": "opaque bytes",
    "COMPOUND": "compound records",
    "REFERENCE": "references",
    "ENUM": "named values (an enumeration)",
    "VLEN": "sequences of any length",
    "ARRAY": "arrays within rows",
    "COMPLEX": "complex numbers",
}


def held_kind(found: Any) -> str:
    """What an h5py.Dataset holds, by the class of its type in the file."""
    from h5py import h5t

    if found.shape is None:
        return "nothing (a null dataspace)"
    kind = found.id.get_type().get_class()
    return next(
        (words for name, words in _KINDS.items() if getattr(h5t, name, None) == kind), "values unknown"
    )


def dtype_of(found: Any, name: str) -> np.dtype:
    """The dtype in which h5py hands the values out. Raises Refused where NumPy has none for them."""
    try:
        dtype: np.dtype = found.dtype
    except (TypeError, ValueError, NotImplementedError):
        size = found.id.get_type().get_size()
        raise Refused(
            f"{name} holds {held_kind(found)} of {size} bytes each, for which NumPy has no type; give "
            "numbers, one row per transition"
        ) from None
    return dtype


def check_filters(plan: Any, name: str) -> None:
    """Raise Refused where a filter of a dataset, given its creation plan, is missing on this machine."""
    from h5py import h5z

    for i in range(plan.get_nfilters()):
        code, _, _, said = plan.get_filter(i)
        if not h5z.filter_avail(code):
            known = _PLUGINS.get(code) or printable(said.decode("utf-8", "replace"))[:40] or "of no name"
            raise Refused(
                f"{name} uses HDF5 filter {code} ({known}), which this HDF5 library lacks; rewrite it with "
                "gzip (h5repack -f GZIP=4)"
            )


def check_checksums(found: Any, plan: Any, name: str) -> None:
    """Raise Refused for a stored chunk that is shorter than its checksum: HDF5 itself would crash on it."""
    from h5py import h5z

    if h5z.FILTER_FLETCHER32 not in [plan.get_filter(i)[0] for i in range(plan.get_nfilters())]:
        return
    short: list[int] = []
    found.id.chunk_iter(lambda chunk: short.append(chunk.size) if chunk.size < _CHECKSUM_BYTES else None)
    if short:
        raise Refused(
            f"{name} has a chunk of {short[0]} bytes with a checksum of {_CHECKSUM_BYTES}; it is damaged"
        )


_SIGNATURE = b"GCOL"
_HEADER = struct.Struct("<4sB3sQ")  # signature, version, reserved, bytes of the heap
_OBJECT = struct.Struct("<HHIQ")  # index (0: free space), references, reserved, bytes
_SMALLEST = 4096


def check_heaps(path: Path) -> None:
    """Raise Refused where a heap of the file would lead its reader astray."""
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(_SIGNATURE)
        while place >= 0:
            if place + _HEADER.size <= size:
                _check_heap(content, place)
            place = content.find(_SIGNATURE, place + 1)


def _check_heap(content: mmap.mmap, start: int) -> None:
    _, version, reserved, length = _HEADER.unpack_from(content, start)
    if version != 1 or length < _SMALLEST:
        return  # four bytes of data that look like a signature: the library refuses it as well
    if reserved != b"\0\0\0" and length > len(content):
        return
    end, place = start + length, start + _HEADER.size
    if end > len(content):
        raise Refused("a heap of texts in it is longer than the file; copy it again")
    while place + _OBJECT.size <= end:
        index, _, _, held = _OBJECT.unpack_from(content, place)
        step = held if index == 0 else _OBJECT.size + -(-held // 8) * 8
        if step < _OBJECT.size or place + step > end:
            raise Refused("a heap of texts in it is damaged; copy or export it again")
        place += step
