"""HDF5 files from strangers: no way out of the file, no more memory than is allowed.

An HDF5 file may name other files in three ways: external links, external raw storage and virtual datasets.
All three are refused before anything is followed. What is to be read is added up before memory is taken, and
links are walked one by one, so that loops and endless depth end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.untrusted.hdf5_datasets import check_checksums, check_filters, check_heaps, dtype_of, held_kind
from koffline.untrusted.limits import (
    EXPANSION,
    TEXT_BYTES,
    Refused,
    Tally,
    check_regular,
    kept_bytes,
    memory_allowance,
    shown_bytes,
)

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
        self.raw = raw
        self.datasets = _walk(raw)
        self._path, self._heaps_are_checked = path, False
        self._tally = Tally()
        self._known = frozenset(self.datasets)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def dataset(self, name: str) -> Any:
        """The h5py.Dataset, for its shape and dtype: numbers that are in this file. Raises Refused."""
        found = self.raw[name]
        check_dataset(found, name)
        return found

    def slices(self, names: Sequence[str]) -> dict[str, Any]:
        """Datasets to be read by slices: any slice takes little memory, all rows are in the file.

        Raises Refused. What memory could hold may be compressed without end; of more, the file must tell.
        """
        found = {name: self.raw[name] for name in names}
        facts = {name: check_dataset(found[name], name) for name in names}
        for name, fact in facts.items():
            if fact.piece > min(LARGEST_PIECE, memory_allowance()):
                raise Refused(
                    f"{name} can only be read {shown_bytes(fact.piece)} at a time; write it again with "
                    f"chunks of at most {shown_bytes(LARGEST_PIECE)} (h5repack -l)"
                )
        size, declared = self._path.stat().st_size, sum(array.nbytes for array in found.values())
        if declared > max(memory_allowance(), size * EXPANSION):
            raise Refused(
                f"it declares {shown_bytes(declared)} and has {shown_bytes(size)}; it is damaged or made to "
                "be read without end: export it again"
            )
        return found

    def arrays(self, names: Sequence[str], twice: Collection[str] = ()) -> dict[str, np.ndarray]:
        """All numbers of some arrays, added up before the first is read. Raises Refused.

        twice: those of the names that count twice, as more columns will be made of them.
        """
        needed = {name: check_dataset(self.raw[name], name).needed for name in names}
        self._tally.add(sum(needed.values()) + sum(needed[name] for name in twice))
        return {name: np.asarray(self.raw[name][()]) for name in names}

    def strings(self, name: str, most: int = 1000) -> list[str]:
        """The words in a small array of text. Raises Refused."""
        import h5py

        found = self.raw[name]
        facts = _facts(found, name)
        count = math.prod(found.shape or ())
        if h5py.check_string_dtype(found.dtype) is None or found.shape is None or count > most:
            raise Refused(f"{name} holds {found.dtype} of shape {found.shape}, not words; write it again")
        self._check_heaps(found.dtype)
        self._tally.add(facts.needed)
        values = found[()] if found.shape == () else found[()].reshape(-1).tolist()
        return [_word(value) for value in ([values] if found.shape == () else values)]

    def text(self, attribute: str) -> str | None:
        """The text of a root attribute; None where there is none. Raises Refused for anything else."""
        import h5py

        if attribute not in self.raw.attrs:
            return None
        found = self.raw.attrs.get_id(attribute)
        self._check_heaps(found.dtype)
        if found.shape != () or h5py.check_string_dtype(found.dtype) is None:
            raise Refused(f"its attribute '{attribute}' is no text; write the file again")
        if found.dtype.itemsize > TEXT_BYTES:
            raise Refused(f"its attribute '{attribute}' is too long; write the file again")
        return _word(self.raw.attrs[attribute])

    def check_everything(self) -> None:
        """Count every array as if it were read: for readers that open the file by themselves."""
        import h5py

        for name in self.datasets:
            found = self.raw[name]
            facts = _facts(found, name)
            if found.shape is None:
                continue
            self._tally.add(facts.needed * (2 if "/observations" in name else 1))
            if found.dtype.kind == "O":
                if not (h5py.check_string_dtype(found.dtype) or h5py.check_vlen_dtype(found.dtype)):
                    raise Refused(f"{name} holds {held_kind(found)}; export numbers")
                self._check_heaps(found.dtype)
                self._count_pieces(found, name)

    def _check_heaps(self, dtype: np.dtype) -> None:
        """Before the first values of any length are read."""
        if dtype.kind == "O" and not self._heaps_are_checked:
            if self.raw.id.get_create_plist().get_sizes() != (8, 8):
                raise Refused("it counts its bytes in fewer than 64 bits; write it again")
            check_heaps(self._path)
            self._heaps_are_checked = True

    def _count_pieces(self, found: Any, name: str) -> None:
        """Texts and pictures of any length: their number says nothing about their size, so they are read."""
        flat = found.shape == () or math.prod(found.shape[1:]) == 1
        rows = 1 if found.shape == () else len(found) if flat else 0
        if not flat:
            raise Refused(f"{name} holds texts in shape {found.shape}; export numbers")
        for start in range(0, rows, _PIECES_AT_ONCE):
            some = [found[()]] if found.shape == () else found[start : start + _PIECES_AT_ONCE].reshape(-1)
            size = sum(getattr(piece, "nbytes", None) or len(piece) for piece in some)
            self._tally.add(size)


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[CheckedFile]:
    """Open a file for reading. Raises Refused for links that leave it; OSError where it is none."""
    import h5py

    check_regular(path)
    with h5py.File(path, "r", rdcc_nbytes=_CACHED_BYTES) as file:
        yield CheckedFile(file, path)


def write_text(file: Any, name: str, text: str) -> None:
    """Keep a text at the root, in a fixed length: no reader has to look through heaps for it."""
    file.attrs[name] = np.bytes_(text.encode("utf-8"))


@dataclass(frozen=True)
class Facts:
    """kept: bytes of an array as a column. piece: the least of it, in bytes, that can be read."""

    kept: int
    piece: int

    @property
    def needed(self) -> int:
        """Bytes that reading all of it takes."""
        return max(self.kept, self.piece)


def check_dataset(found: Any, name: str) -> Facts:
    """Raise Refused unless ``found`` is an array of numbers kept inside its file."""
    import h5py

    if not isinstance(found, h5py.Dataset):
        raise Refused(f"{name} is no array; export it again")
    facts = _facts(found, name)
    if found.shape is None or found.dtype.kind not in "biuf" or found.dtype.subdtype is not None:
        raise Refused(f"{name} holds {held_kind(found)}; give numbers, one row per transition")
    return facts


def _word(value: Any) -> str:
    text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    if len(text) > TEXT_BYTES:
        raise Refused("a text in it is too long; write the file again")
    return text


def _walk(file: Any) -> tuple[str, ...]:
    """Paths of all arrays; every group once. Raises Refused at a link that leaves the file."""
    import h5py

    found: list[str] = []
    seen = {_address(file.id)}
    waiting: list[tuple[str, Any]] = [("", file.id)]
    while waiting:
        prefix, group = waiting.pop()
        for name, kind in _links(group):
            path = f"{prefix}{name.decode('utf-8', 'replace')}"
            if kind == h5py.h5l.TYPE_SOFT:
                continue  # leads to a place in this file, by a path without external links, or nowhere
            if kind != h5py.h5l.TYPE_HARD:
                raise Refused(f"{path} is a link to another file, {_LEAVES_THE_FILE}")
            info = h5py.h5o.get_info(group, name)
            if info.type == h5py.h5o.TYPE_DATASET:
                found.append(path)
            elif info.type == h5py.h5o.TYPE_GROUP and (info.fileno, info.addr) not in seen:
                seen.add((info.fileno, info.addr))
                if path.count("/") >= _DEEPEST:
                    raise Refused(f"its groups are nested more than {_DEEPEST} deep; export it again")
                waiting.append((f"{path}/", h5py.h5g.open(group, name)))
    return tuple(found)


def _links(group: Any) -> list[tuple[bytes, int]]:
    """Names and kinds of a group's own links."""
    links: list[tuple[bytes, int]] = []
    group.links.iterate(lambda name, info: links.append((name, info.type)), info=True)
    return links


def _address(group: Any) -> tuple[Any, Any]:
    import h5py

    info = h5py.h5o.get_info(group)
    return info.fileno, info.addr


def _facts(found: Any, name: str) -> Facts:
    """Sizes of an array whose numbers are in this file. Raises Refused for any other."""
    from h5py import h5d

    plan, dtype = found.id.get_create_plist(), dtype_of(found, name)
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        raise Refused(f"{name} is a virtual dataset, a view of other files, {_LEAVES_THE_FILE}")
    if plan.get_external_count():
        raise Refused(f"{name} keeps its numbers in another file, {_LEAVES_THE_FILE}")
    shape = found.shape or ()
    piece = math.prod(shape[1:]) * dtype.itemsize
    if layout == h5d.CHUNKED and plan.get_nfilters():
        check_filters(plan, name)
        check_checksums(found, plan, name)
        piece = max(piece, math.prod(plan.get_chunk()) * dtype.itemsize)
    return Facts(kept_bytes(shape, dtype), piece)
