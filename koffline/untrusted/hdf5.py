"""HDF5 files from strangers: no way out of the file, no array larger than the file can explain.

An HDF5 file may name other files in three ways: external links, external raw storage and virtual datasets.
All three are refused before anything is followed. Sizes are compared with the bytes on disk before memory is
taken, and links are walked one by one, so that loops and endless depth end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.untrusted.hdf5_heaps import check_heaps
from koffline.untrusted.limits import SLACK_BYTES, TEXT_BYTES, Refused, Tally, check_regular

_DEEPEST = 32
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
        self._tally = Tally(path.stat().st_size)
        self._known = frozenset(self.datasets)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def dataset(self, name: str) -> Any:
        """The h5py.Dataset, for reading slices of it: numbers that are in this file. Raises Refused."""
        found = self.raw[name]
        check_dataset(found, name)
        return found

    def _numbers(self, name: str) -> tuple[Any, Facts]:
        found = self.raw[name]
        return found, check_dataset(found, name)

    def sliced(self, name: str) -> Any:
        """The same, and its size is explained by the file. Raises Refused."""
        found, facts = self._numbers(name)
        self._tally.count(name, facts.declared, facts.stored, facts.is_filtered)
        return found

    def array(self, name: str) -> np.ndarray:
        """All numbers of an array. Raises Refused where they are not in the file, or are no numbers."""
        found, facts = self._numbers(name)
        self._tally.add(name, facts.declared, facts.stored, facts.is_filtered)
        return np.asarray(found[()])

    def strings(self, name: str, most: int = 1000) -> list[str]:
        """The words in a small array of text. Raises Refused."""
        import h5py

        found = self.raw[name]
        facts = _facts(found, name)
        count = math.prod(found.shape or ())
        if h5py.check_string_dtype(found.dtype) is None or found.shape is None or count > most:
            raise Refused(f"{name} holds {found.dtype} of shape {found.shape}, not words; write it again")
        self._check_heaps(found.dtype)
        self._tally.add(name, facts.declared, facts.stored)
        values = found[()] if found.shape == () else found[()].reshape(-1).tolist()
        return [_word(value) for value in ([values] if found.shape == () else values)]

    def text(self, attribute: str) -> str | None:
        """The text of a root attribute; None where there is none. Raises Refused for anything else."""
        if attribute in self.raw.attrs:
            self._check_heaps(self.raw.attrs.get_id(attribute).dtype)
        return text_attribute(self.raw, attribute)

    def check_everything(self) -> None:
        """Count every array as if it were read: for readers that open the file by themselves."""
        import h5py

        for name in self.datasets:
            found = self.raw[name]
            facts = _facts(found, name)
            if found.shape is None:
                continue
            self._tally.add(name, facts.declared, facts.stored, facts.is_filtered)
            if found.dtype.kind == "O":
                if not (h5py.check_string_dtype(found.dtype) or h5py.check_vlen_dtype(found.dtype)):
                    raise Refused(f"{name} holds {found.dtype}; export numbers")
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
            self._tally.add(name, size, size, compressed=False)


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
    """Bytes of an array in memory and on disk, and whether filters stand between the two."""

    declared: int
    stored: int
    is_filtered: bool


def check_dataset(found: Any, name: str) -> Facts:
    """Raise Refused unless ``found`` is an array of numbers kept inside its file."""
    import h5py

    if not isinstance(found, h5py.Dataset):
        raise Refused(f"{name} is no array; export it again")
    facts = _facts(found, name)
    if found.shape is None or found.dtype.kind not in "biuf" or found.dtype.subdtype is not None:
        raise Refused(f"{name} has dtype {str(found.dtype)[:80]}; give numbers, one row per transition")
    return facts


def text_attribute(file: Any, name: str) -> str | None:
    """The text of an attribute of the root; None where there is none. Raises Refused for anything else."""
    import h5py

    if name not in file.attrs:
        return None
    attribute = file.attrs.get_id(name)
    if attribute.shape != () or h5py.check_string_dtype(attribute.dtype) is None:
        raise Refused(f"its attribute '{name}' is no text; write the file again")
    if attribute.dtype.itemsize > TEXT_BYTES:
        raise Refused(f"its attribute '{name}' is too long; write the file again")
    return _word(file.attrs[name])


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

    plan, item = found.id.get_create_plist(), found.dtype.itemsize
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        raise Refused(f"{name} is a virtual dataset, a view of other files, {_LEAVES_THE_FILE}")
    if plan.get_external_count():
        raise Refused(f"{name} keeps its numbers in another file, {_LEAVES_THE_FILE}")
    declared = math.prod(found.shape or ()) * item
    if layout == h5d.CHUNKED and (chunk := math.prod(plan.get_chunk()) * item) > max(declared, SLACK_BYTES):
        raise Refused(f"{name} is cut into blocks of {chunk} bytes; export it with smaller chunks")
    is_filtered = layout == h5d.CHUNKED and plan.get_nfilters() > 0
    return Facts(declared, found.id.get_storage_size(), is_filtered)
