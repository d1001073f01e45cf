"""Start states from a file of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.arrays import array_names, read_array, read_arrays

_NAMES = ("initial_observations", "observations")


def read_initial_states(source: str) -> np.ndarray:
    """Start states (E, …): a .npy array, an .npz with ``initial_observations`` or ``observations``, or a log.

    A log (with ``rewards``) gives the first observations of its episodes. Raises DataError.
    """
    path = Path(source)
    if not source.startswith("minari:") and not path.exists():
        raise DataError(f"initial states {source} do not exist; check the path")
    if path.is_file():
        with reading(path, "NumPy"), path.open("rb") as file:
            magic = file.read(8)
        if magic.startswith(b"\x93NUMPY"):
            return _load(path)
        if magic.startswith(b"PK"):
            found = _from_archive(path)
            if found is not None:
                return found
    return open_transitions(source).initial_observations()


def _from_archive(path: Path) -> np.ndarray | None:
    """The array that holds start states; None where the archive is a whole log."""
    with reading(path, "NPZ"):
        names = array_names(path)
        if "rewards" in names:
            return None
        name = next((name for name in _NAMES if name in names), None)
        if name is None:
            raise DataError(f"initial states {path} hold {', '.join(names[:12])}; name the array {_NAMES[0]}")
        return read_arrays(path, [name])[name]


def _load(path: Path) -> np.ndarray:
    try:
        return read_array(path)
    except (ValueError, OSError):
        raise DataError(
            f"initial states {path} cannot be read as an array; save them with numpy.save"
        ) from None
