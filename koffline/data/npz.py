"""NumPy archives with the keys of the flat layout; never unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.flat import (
    SlicedFile,
    check_required,
    counted_twice,
    equal_rows,
    flat_arrays,
    known_keys,
    read_flat,
)
from koffline.data.raw import FileDescription, RawLog, describe_log, read_description
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.store.files import atomic_file, reading
from koffline.untrusted.arrays import array_headers, array_names, map_arrays, read_arrays

# The archive member that holds what describe_log says.
_DESCRIPTION = "koffline"


def read_npz(path: Path, action_space: SpaceRequest | None = None) -> RawLog:
    """Read an archive that we wrote, or any with the same keys. Raises DataError."""
    with reading(path, "NPZ"):
        check_required(array_names(path), str(path))
        headers = array_headers(path, known_keys())
        equal_rows(headers, str(path))
        found = read_arrays(path, [*headers, _DESCRIPTION], counted_twice(headers))
        return read_flat(found, _description(found), str(path), action_space)


def sliced_npz(path: Path, name: str) -> SlicedFile:
    """The arrays of an archive without compression, to be read by slices. Raises Refused."""
    described = _description(read_arrays(path, [_DESCRIPTION]))
    return SlicedFile(name, map_arrays(path, known_keys()), described)


def _description(found: dict[str, np.ndarray]) -> FileDescription | None:
    text = found.pop(_DESCRIPTION, None)
    return read_description(None if text is None else str(text))


def write_npz(log: Transitions, path: Path, force: bool = False) -> None:
    """Write a compressed archive, whole or not at all. Raises DataError."""
    members: dict[str, Any] = {**flat_arrays(log), _DESCRIPTION: np.array(describe_log(log))}
    with atomic_file(path, force) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **members)
