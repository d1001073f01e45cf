"""HDF5 files from strangers: no way out of the file, no more memory than is allowed.

An HDF5 file may name other files in three ways: external links, external raw storage and virtual datasets.
All three are refused before anything is followed. What is to be read is added up before memory is taken, and
links are walked one by one, so that loops and endless depth end.

Texts of any length live in global heaps, whose objects the HDF5 library follows by their sizes; it never ends
at a free one of size zero, and no signal reaches Python meanwhile. So heaps are walked here first: they begin
with a signature, by which all of a file are found.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import printable
from koffline.untrusted import limits
from koffline.untrusted.limits import Refused, shown_bytes

_DEEPEST = 32
# A filtered chunk is unpacked whole, and a row is read whole, however few numbers of it are wanted.
LARGEST_PIECE = 64 * 2**20
# Chunks of each array that stay in memory: two of ours. HDF5's own limit, 8 MB, adds up over open shards.
_CACHED_BYTES = 2**19
_PIECES_AT_ONCE = 256
_LEAVES_THE_FILE = "which koffline never follows; copy the data into one file (h5repack, or export it again)"


class CheckedFile:
    """An open file whose links have all been looked at; arrays are checked when they are asked for.

    raw: the h5py.File. datasets: paths of all arrays, nested ones included.
    """

    def __init__(self, raw: Any, path: Path) -> None:
        self.raw, self._path = raw, path
        self.datasets = tuple(_walk(raw))
        self._tally, self._heaps_are_checked = limits.Tally(), False
        self._known = frozenset(self.datasets)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def dataset(self, name: str) -> Any:
        """The h5py.Dataset, for its shape and dtype: numbers that are in this file. Raises Refused."""
        check_dataset(self.raw[name], name)
        return self.raw[name]

    def slices(self, names: Sequence[str]) -> dict[str, Any]:
        """Datasets to be read by slices: any slice takes little memory, all rows are in the file.

        Raises Refused. What memory could hold may be compressed without end; of more, the file must tell.
        """
        found, allowed = {name: self.raw[name] for name in names}, limits.memory_allowance()
        for name, array in found.items():
            _, piece = check_dataset(array, name)
            if piece > min(LARGEST_PIECE, allowed):
                remedy = f"write it again with chunks of at most {shown_bytes(LARGEST_PIECE)} (h5repack -l)"
                raise Refused(f"{name} can only be read {shown_bytes(piece)} at a time; {remedy}")
        size, declared = self._path.stat().st_size, sum(array.nbytes for array in found.values())
        if declared > max(allowed, size * limits.EXPANSION):
            remedy = "it is damaged or made to be read without end: export it again"
            raise Refused(f"it declares {shown_bytes(declared)} and has {shown_bytes(size)}; {remedy}")
        return found

    def arrays(self, names: Sequence[str], twice: Collection[str] = ()) -> dict[str, np.ndarray]:
        """All numbers of some arrays, added up before the first is read. Raises Refused.

        twice: those of the names that count twice, as more columns will be made of them.
        """
        needed = {name: max(check_dataset(self.raw[name], name)) for name in names}
        self._tally.add(sum(needed.values()) + sum(needed[name] for name in twice))
        return {name: np.asarray(self.raw[name][()]) for name in names}

    def strings(self, name: str, most: int = 1000) -> list[str]:
        """The words in a small array of text. Raises Refused."""
        import h5py

        found = self.raw[name]
        self._tally.add(max(_sizes(found, name)))
        is_text = h5py.check_string_dtype(found.dtype) is not None and found.shape is not None
        if not is_text or math.prod(found.shape) > most:
            raise Refused(f"{name} holds {found.dtype} of shape {found.shape}, not words; write it again")
        self._check_heaps(found.dtype)
        return [_word(value) for value in np.asarray(found[()], dtype=object).reshape(-1)]

    def text(self, attribute: str) -> str | None:
        """The text of a root attribute; None where there is none. Raises Refused for anything else."""
        import h5py

        if attribute not in self.raw.attrs:
            return None
        found = self.raw.attrs.get_id(attribute)
        self._check_heaps(found.dtype)
        is_text = found.shape == () and h5py.check_string_dtype(found.dtype) is not None
        if not is_text or found.dtype.itemsize > limits.TEXT_BYTES:
            raise Refused(f"its attribute '{attribute}' is no text, or too long; write the file again")
        return _word(self.raw.attrs[attribute])

    def check_everything(self) -> None:
        """Count every array as if it were read: for readers that open the file by themselves.

        Texts and pictures of any length are read for it: their number says nothing about their size.
        """
        import h5py

        for name in self.datasets:
            found = self.raw[name]
            self._tally.add(max(_sizes(found, name)) * (2 if "/observations" in name else 1))
            if found.shape is None or found.dtype.kind != "O":
                continue
            is_plain = h5py.check_string_dtype(found.dtype) or h5py.check_vlen_dtype(found.dtype)
            if not is_plain or math.prod(found.shape[1:]) != 1:
                raise Refused(f"{name} holds {found.dtype} in shape {found.shape}; export numbers")
            self._check_heaps(found.dtype)
            for start in range(0, found.size, _PIECES_AT_ONCE):
                some = found[start : start + _PIECES_AT_ONCE].reshape(-1) if found.shape else [found[()]]
                self._tally.add(sum(getattr(part, "nbytes", None) or len(part) for part in some))

    def _check_heaps(self, dtype: np.dtype) -> None:
        """Before the first values of any length are read."""
        if dtype.kind == "O" and not self._heaps_are_checked:
            if self.raw.id.get_create_plist().get_sizes() != (8, 8):
                raise Refused("it counts its bytes in fewer than 64 bits; write it again")
            check_heaps(self._path)
            self._heaps_are_checked = True


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[CheckedFile]:
    """Open a file for reading. Raises Refused for links that leave it; OSError where it is none."""
    import h5py

    limits.check_regular(path)
    with h5py.File(path, "r", rdcc_nbytes=_CACHED_BYTES) as file:
        yield CheckedFile(file, path)


def write_text(file: Any, name: str, text: str) -> None:
    """Keep a text at the root, in a fixed length: no reader has to look through heaps for it."""
    file.attrs[name] = np.bytes_(text.encode("utf-8"))


def check_dataset(found: Any, name: str) -> tuple[int, int]:
    """Bytes of an array as a column, and of the least of it that can be read.

    Raises Refused unless ``found`` is an array of numbers kept inside its file.
    """
    import h5py

    if not isinstance(found, h5py.Dataset):
        raise Refused(f"{name} is no array; export it again")
    sizes = _sizes(found, name)
    if found.shape is None or found.dtype.kind not in "biuf" or found.dtype.subdtype is not None:
        held = "nothing" if found.shape is None else f"values of type {found.dtype}"
        raise Refused(f"{name} holds {held}; give numbers, one row per transition")
    return sizes


def _word(value: Any) -> str:
    text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    if len(text) > limits.TEXT_BYTES:
        raise Refused("a text in it is too long; write the file again")
    return text


def _walk(file: Any) -> Iterator[str]:
    """Paths of all arrays; every group once. Raises Refused at a link that leaves the file."""
    from h5py import h5g, h5l, h5o

    top = h5o.get_info(file.id)
    seen = {(top.fileno, top.addr)}
    waiting: list[tuple[str, Any]] = [("", file.id)]
    while waiting:
        prefix, group = waiting.pop()
        links: list[tuple[bytes, int]] = []
        group.links.iterate(lambda name, info, found=links: found.append((name, info.type)), info=True)
        for name, kind in links:
            path = f"{prefix}{name.decode('utf-8', 'replace')}"
            if kind == h5l.TYPE_SOFT:
                continue  # leads to a place in this file, by a path without external links, or nowhere
            if kind != h5l.TYPE_HARD:
                raise Refused(f"{path} is a link to another file, {_LEAVES_THE_FILE}")
            info = h5o.get_info(group, name)
            if info.type == h5o.TYPE_DATASET:
                yield path
            elif info.type == h5o.TYPE_GROUP and (info.fileno, info.addr) not in seen:
                seen.add((info.fileno, info.addr))
                if path.count("/") >= _DEEPEST:
                    raise Refused(f"its groups are nested more than {_DEEPEST} deep; export it again")
                waiting.append((f"{path}/", h5g.open(group, name)))


def _sizes(found: Any, name: str) -> tuple[int, int]:
    """The same of any array. Raises Refused where its values are elsewhere or cannot be read."""
    from h5py import h5d, h5z

    try:
        dtype: np.dtype = found.dtype
    except (TypeError, ValueError, NotImplementedError):
        raise Refused(f"{name} holds values that NumPy has no type for; give numbers") from None
    plan = found.id.get_create_plist()
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        raise Refused(f"{name} is a virtual dataset, a view of other files, {_LEAVES_THE_FILE}")
    if plan.get_external_count():
        raise Refused(f"{name} keeps its numbers in another file, {_LEAVES_THE_FILE}")
    shape = found.shape or ()
    piece = math.prod(shape[1:]) * dtype.itemsize
    filters = [plan.get_filter(i) for i in range(plan.get_nfilters())] if layout == h5d.CHUNKED else []
    for code, _, _, said in filters:
        if not h5z.filter_avail(code):
            said = f"{name} uses HDF5 filter {code} ({printable(said.decode('utf-8', 'replace'))[:40]})"
            raise Refused(f"{said}, which this library lacks; rewrite it with gzip (h5repack -f GZIP=4)")
        if code == h5z.FILTER_FLETCHER32:  # HDF5 itself would crash on a chunk shorter than its checksum
            short: list[int] = []
            found.id.chunk_iter(lambda chunk, at=short: at.append(chunk.size) if chunk.size < 4 else None)
            if short:
                raise Refused(f"{name} has a chunk of {short[0]} bytes with a checksum of 4; it is damaged")
        piece = max(piece, math.prod(plan.get_chunk()) * dtype.itemsize)
    return limits.kept_bytes(shape, dtype) if found.shape is not None else 0, piece


_HEADER = struct.Struct("<4sB3sQ")  # signature, version, reserved, bytes of the heap
_OBJECT = struct.Struct("<HHIQ")  # index (0: free space), references, reserved, bytes
_SMALLEST = 4096


def check_heaps(path: Path) -> None:
    """Raise Refused where a heap of the file would lead its reader astray."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(b"GCOL")
        while 0 <= start <= len(content) - _HEADER.size:
            _, version, reserved, length = _HEADER.unpack_from(content, start)
            # else four bytes of data that look like a signature: the library refuses it as well
            if version == 1 and length >= _SMALLEST and (not any(reserved) or length <= len(content)):
                _check_heap(content, start + _HEADER.size, start + length)
            start = content.find(b"GCOL", start + 1)


def _check_heap(content: mmap.mmap, place: int, end: int) -> None:
    if end > len(content):
        raise Refused("a heap of texts in it is longer than the file; copy it again")
    while place + _OBJECT.size <= end:
        index, _, _, held = _OBJECT.unpack_from(content, place)
        step = held if index == 0 else _OBJECT.size + -(-held // 8) * 8
        if step < _OBJECT.size or place + step > end:
            raise Refused("a heap of texts in it is damaged; copy or export it again")
        place += step
