"""NumPy archives with the keys of the flat layout; never unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.files import atomic_file, reading
from koffline.data.flat import check_required, flat_arrays, known_keys, read_flat
from koffline.data.raw import RawLog, describe_log, read_description
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions

# The archive member that holds what describe_log says.
_DESCRIPTION = "koffline"


def read_npz(path: Path, action_space: SpaceRequest | None = None) -> RawLog:
    """Read an archive that we wrote, or any with the same keys. Raises DataError."""
    with reading(path, "NPZ"), np.load(path, allow_pickle=False) as archive:
        check_required(archive.files, str(path))
        found = {key: archive[key] for key in known_keys() if key in archive.files}
        described = read_description(str(archive[_DESCRIPTION])) if _DESCRIPTION in archive.files else None
    return read_flat(found, described, str(path), action_space)


def write_npz(log: Transitions, path: Path, force: bool = False) -> None:
    """Write a compressed archive, whole or not at all. Raises DataError."""
    members: dict[str, Any] = {**flat_arrays(log), _DESCRIPTION: np.array(describe_log(log))}
    with atomic_file(path, force) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **members)
