"""Global heaps of HDF5 files, where texts of any length live, walked before the library walks them.

The HDF5 library follows the objects of a heap by their sizes and never ends at a free one of size zero; no
signal reaches Python meanwhile. Heaps begin with a signature, so that all of a file can be found.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from koffline.untrusted.limits import Refused

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
