"""Policy files of plain arrays (.npz): read without running code, written atomically."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import PolicyError
from koffline.policies.outputs import one_line
from koffline.store.temporaries import remove_abandoned, temporary_beside
from koffline.untrusted import arrays as untrusted


def read_arrays(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The `format` of a file and its other arrays. Raises PolicyError where it cannot be read."""
    try:
        arrays = untrusted.read_arrays(path)
    except Exception as error:  # a hostile or truncated archive may fail in any way
        raise PolicyError(
            f"{path}: the .npz cannot be read ({one_line(error)}); write it again with "
            "koffline.policies.save_mlp_policy"
        ) from error
    return str(arrays.pop("format", None)), arrays


def check_version(path: Path, arrays: dict[str, np.ndarray], version: int) -> None:
    """Take `version` out of the arrays. Raises PolicyError unless it is the given one."""
    found = arrays.pop("version", None)
    if found is None or found.shape != () or found != version:
        raise PolicyError(f"{path}: policy file version {found}; this koffline reads version {version}")


def write_arrays(path: Path, kind: str, version: int, arrays: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; the same arrays give the same bytes. Raises PolicyError."""
    stored = {key: stored_array(value) for key, value in arrays.items()}
    marked = {"format": np.array(kind), "version": np.array(version, np.int64), **stored}
    remove_abandoned(path)
    temporary = temporary_beside(path)
    try:
        temporary.write_bytes(_npz_bytes(marked))
        os.replace(temporary, path)
    except OSError as error:
        raise PolicyError(f"{path} cannot be written ({one_line(error)}); give a writable folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def stored_array(value: Any) -> np.ndarray:
    """The array as written: text, float32, or float64 for every other kind of number."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise PolicyError(f"a policy setting is ragged ({one_line(error)}); give one array") from error
    if array.dtype.kind in "iuf" and array.dtype != np.float32:
        array = array.astype(np.float64)
    if array.dtype.kind not in "Uf":
        raise PolicyError(f"a policy setting has dtype {array.dtype}; give numbers or text")
    return np.ascontiguousarray(array).reshape(array.shape).astype(array.dtype.newbyteorder("<"), copy=False)


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An .npz with fixed time stamps and no compression, so that its bytes depend on the content alone."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for key, array in arrays.items():
            entry = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, content.getvalue())
    return buffer.getvalue()
