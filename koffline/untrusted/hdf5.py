"""HDF5 files: untrusted ones are read within the file and the memory limit; ours are
written.

An HDF5 file may name other files in three ways: external links, external raw storage
and virtual datasets. All three are refused before anything is followed. The sizes of
what will be read are added up before memory is allocated.

After a failed write, for example on a full disk, closing an HDF5 file may abort the
process. Files are therefore written through an object that keeps the first error and
ignores all later writes. The library sees no error; the caller gets it at the end.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import h5py
import numpy as np
from h5py import h5d, h5z
from h5py.h5p import PropDCID

from koffline.untrusted import limits
from koffline.untrusted.limits import Refused, shown_bytes

# A filtered chunk is unpacked whole, and a row is read whole,
# however few numbers of it are wanted.
LARGEST_PIECE = 64 * 2**20
# Chunks of each array that stay in memory: two of ours. HDF5's own limit, 8 MB, adds up
# over open shards.
_CACHED_BYTES = 2**19
_DEEPEST = 50  # looking a path up takes time for each of its groups
_SHARDS = (
    "; where it fits, `koffline data convert … --shard-rows N` makes shards of it,"
    " which need less"
)
_LEAVES_THE_FILE = (
    "which koffline never follows; copy the data into one file (h5repack, or export it"
    " again)"
)


Link = h5py.HardLink | h5py.SoftLink | h5py.ExternalLink


class CheckedFile:
    """An open file whose links are checked; arrays are checked on access.

    raw: the h5py.File. datasets: paths of all arrays, nested ones included.
    """

    def __init__(self, raw: h5py.File, path: Path) -> None:
        self.raw = raw
        self._path = path
        self.datasets = _walk(raw)
        self._known = frozenset(self.datasets)
        self._needed = 0

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def dataset(self, name: str) -> h5py.Dataset:
        """The array, for its shape and dtype; it must hold numbers in this file.

        Raises Refused.
        """
        check_dataset(self.raw[name], name)
        return self.raw[name]

    def slices(self, names: Sequence[str]) -> dict[str, h5py.Dataset]:
        """Datasets to be read in slices: any slice takes little memory, and all rows
        are in the file.

        Raises Refused, also for arrays beyond the memory limit whose compression is
        implausibly strong.
        """
        datasets = {name: self.raw[name] for name in names}
        allowed = limits.memory_allowance()
        for name, dataset in datasets.items():
            _, piece = check_dataset(dataset, name)
            if piece > min(LARGEST_PIECE, allowed):
                raise Refused(
                    f"{name} can only be read {shown_bytes(piece)} at a time; write it"
                    f" again with chunks of at most {shown_bytes(LARGEST_PIECE)}"
                    " (h5repack -l)"
                )
        self._check_declared(names)
        return datasets

    def arrays(
        self, names: Collection[str], twice: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """All numbers of some arrays, whose memory is added up before the first is
        read. Raises Refused.

        twice: names that count twice, because further columns will be made of them.
        """
        needed = {name: max(check_dataset(self.raw[name], name)) for name in names}
        self._check_declared(names)
        self._needed += sum(needed.values()) + sum(needed[name] for name in twice)
        limits.check_memory(self._needed, _SHARDS)
        limits.announce_large(
            str(self._path), self._path.stat().st_size, self._needed, limits.COPIES
        )
        return {name: np.asarray(self.raw[name][()]) for name in names}

    def _check_declared(self, names: Iterable[str]) -> None:
        """Raise Refused for arrays that exceed the memory limit and all that the file
        can unpack to.
        """
        size = self._path.stat().st_size
        declared = sum(self.raw[name].nbytes for name in names)
        if declared > max(limits.memory_allowance(), size * limits.EXPANSION):
            raise Refused(
                f"it declares {shown_bytes(declared)} and has {shown_bytes(size)}; it"
                " is damaged or made to be read without end: export it again"
            )

    def text(self, attribute: str) -> str | None:
        """The text of a root attribute; None if there is none.

        Raises Refused for anything else.
        """
        if attribute not in self.raw.attrs:
            return None
        header = self.raw.attrs.get_id(attribute)
        is_text = (
            header.shape == () and h5py.check_string_dtype(header.dtype) is not None
        )
        if not is_text or header.dtype.itemsize > limits.TEXT_BYTES:
            raise Refused(
                f"its attribute '{attribute}' is no text, or too long; write the file"
                " again"
            )
        value = self.raw.attrs[attribute]
        if isinstance(value, bytes):
            text = value.decode("utf-8")
        else:
            text = str(value)
        if len(text) > limits.TEXT_BYTES:
            raise Refused("a text in it is too long; write the file again")
        return text

    def episodes(self, count: int) -> range:
        """Numbers of ``count`` episodes, each with at least one array.

        Raises Refused if there are fewer.
        """
        if not 0 <= count <= len(self.datasets):
            raise Refused(
                f"it promises {count} episodes, which it does not hold; write it again"
            )
        return range(count)


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[CheckedFile]:
    """Open a file for reading.

    Raises Refused for links to other files; OSError if it is no HDF5 file.
    """
    limits.check_regular(path)
    with h5py.File(path, "r", rdcc_nbytes=_CACHED_BYTES) as file:
        yield CheckedFile(file, path)


class _KeptErrors(io.FileIO):
    """A new file for HDF5; after the first OSError, kept in ``error``, nothing more is
    written.
    """

    error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of ``content``."""
        left = view = memoryview(content).cast("B")
        with self._keeping():
            while left and self.error is None:
                left = left[super().write(left) :]
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read the written bytes; lost bytes are zeros."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view)
        view[count:] = bytes(len(view) - count)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        with self._keeping():
            super().truncate(size)
        return size or 0

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[h5py.File]:
    """A new file, complete at the end. Raises OSError if the disk refuses."""
    with _written(path, "x+", libver="v108") as file:
        yield file


@contextlib.contextmanager
def h5py_that_keeps_errors(module: ModuleType) -> Iterator[None]:
    """Context in which a library's module that imports h5py writes as `new_hdf5` does.

    The module opens an empty file once, for appending. Raises OSError if the disk
    refuses.
    """

    def fill(
        path: Path, mode: str, **options: Any
    ) -> contextlib.AbstractContextManager[h5py.File]:
        assert mode == "a", "only for writing"
        assert path.stat().st_size == 0, "only for new files"
        return _written(path, "r+", **options)

    stand_in = SimpleNamespace(**{**vars(h5py), "File": fill})
    with mock.patch.object(module, "h5py", stand_in):
        yield


@contextlib.contextmanager
def _written(path: Path, mode: str, **options: Any) -> Iterator[h5py.File]:
    with _KeptErrors(path, mode) as output:
        try:
            with h5py.File(output, "w", **options) as file:
                yield file
        finally:  # what HDF5 says of bytes that were lost explains nothing
            if output.error is not None:
                raise output.error


def write_text(file: h5py.File, name: str, text: str) -> None:
    """Store a text as a root attribute of fixed length, so that readers need no HDF5
    heap.
    """
    file.attrs[name] = np.bytes_(text.encode("utf-8"))


def _walk(file: h5py.File) -> list[str]:
    """Paths of all arrays. Raises Refused for a link to another file."""
    links: list[tuple[str, Link]] = []

    def take(path: str, link: Link) -> bool | None:
        links.append((path, link))
        if path.count("/") > _DEEPEST:
            return True  # ends the walk
        return None

    if file.visititems_links(take):
        raise Refused(
            f"its groups lie more than {_DEEPEST} deep in one another; write it again"
        )
    for path, link in links:  # a soft link leads to a place in this file, or nowhere
        if not isinstance(link, h5py.HardLink | h5py.SoftLink):
            raise Refused(f"{path} is a link to another file, {_LEAVES_THE_FILE}")
    hard = (path for path, link in links if isinstance(link, h5py.HardLink))
    return [
        path
        for path in hard
        if h5py.h5o.get_info(file.id, path.encode()).type == h5py.h5o.TYPE_DATASET
    ]


def check_dataset(dataset: object, name: str) -> tuple[int, int]:
    """Bytes of an array as a column, and of the smallest piece that can be read.

    Raises Refused unless ``dataset`` is a readable array of numbers stored inside its
    file.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise Refused(
            f"{name} is a {type(dataset).__name__.lower()}, not an array; store its"
            " numbers in one"
        )
    try:
        dtype: np.dtype = dataset.dtype
    except (TypeError, ValueError, NotImplementedError):
        raise Refused(
            f"{name} holds values that NumPy has no type for; give numbers"
        ) from None
    plan = dataset.id.get_create_plist()
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        raise Refused(
            f"{name} is a virtual dataset, a view of other files, {_LEAVES_THE_FILE}"
        )
    if plan.get_external_count():
        raise Refused(f"{name} keeps its numbers in another file, {_LEAVES_THE_FILE}")
    if dataset.shape is None:
        raise Refused(f"{name} holds nothing; give numbers, one row per transition")
    if dtype.kind not in "biuf" or dtype.subdtype is not None:
        raise Refused(
            f"{name} holds values of type {dtype}; give numbers, one row per transition"
        )
    piece = math.prod(dataset.shape[1:]) * dtype.itemsize
    if layout == h5d.CHUNKED:
        _check_filters(dataset, plan, name)
        piece = max(piece, math.prod(plan.get_chunk()) * dtype.itemsize)
    return limits.kept_bytes(dataset.shape, dtype), piece


def _check_filters(dataset: h5py.Dataset, plan: PropDCID, name: str) -> None:
    """Raise Refused for chunks that this library cannot unpack, or that would crash it.

    plan: the dataset's creation properties, which list its filters.
    """
    for number in range(plan.get_nfilters()):
        code = plan.get_filter(number)[0]
        if not h5z.filter_avail(code):
            raise Refused(
                f"{name} uses HDF5 filter {code}, which this library lacks; rewrite it"
                " with gzip (h5repack -f GZIP=4)"
            )
        if code == h5z.FILTER_FLETCHER32:
            # HDF5 itself would crash on a chunk shorter than its checksum
            sizes: list[int] = []
            dataset.id.chunk_iter(lambda chunk, sizes=sizes: sizes.append(chunk.size))
            short = [size for size in sizes if size < 4]
            if short:
                raise Refused(
                    f"{name}: a chunk of {short[0]} bytes with a checksum of 4; it is"
                    " damaged"
                )
