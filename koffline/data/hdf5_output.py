"""HDF5 files on disks that may be full: the library never learns of it, the caller always does.

HDF5 cannot take back what it has begun: where writing fails, closing the file may end the whole process. So
it writes through an object that keeps the first error and lets nothing through from then on.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class KeptErrors(io.RawIOBase):
    """A new file for HDF5; ``check`` raises the first OSError that writing to it met."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("x+b", buffering=0)
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise OSError where anything that was written is not in the file."""
        if self._error is not None:
            raise self._error

    def write(self, content: Any) -> int:
        """All of it, or nothing where something was lost before."""
        view = memoryview(content).cast("B")
        done = 0
        while done < len(view) and self._error is None:
            with self._keeping():
                done += self._file.write(view[done:]) or 0
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """What was written there; zeros where that was lost."""
        view = memoryview(buffer).cast("B")
        done = 0
        with self._keeping():
            while done < len(view) and (count := self._file.readinto(view[done:])):
                done += count
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        with self._keeping():
            self._file.truncate(size)
        return size or 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The place."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        with self._keeping():
            self._file.close()
        super().close()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[Any]:
    """A new h5py.File, whole at the end. Raises OSError where the disk does not take it."""
    import h5py

    with contextlib.closing(KeptErrors(path)) as output:
        with h5py.File(output, "w", libver="v108") as file:
            yield file
        output.check()
    output.check()
