"""koffline's own policy files: .npz of plain arrays, read without running code, byte-stable, atomic.

A network's arrays: `format` = "koffline-policy", `version` = 1, W0 (in, out), b0 (out,), W1, b1, ...,
`output`, and optionally `activation`, `temperature`, `observation_mean`, `observation_std`, `std` (or
`log_std`), `action_low`, `action_high`; their meaning is that of `Mlp`. Those of a grid are in `grid_policy`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from koffline.errors import DataError, PolicyError, nearest_name
from koffline.policies.mlp import Mlp
from koffline.policies.outputs import one_line
from koffline.store.files import atomic_file
from koffline.untrusted import arrays as untrusted

FORMAT = "koffline-policy"
VERSION = 1
_TEXT_KEYS = ("output", "activation")
_NUMBER_KEYS = (
    "temperature",
    "observation_mean",
    "observation_std",
    "std",
    "log_std",
    "action_low",
    "action_high",
)


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
    try:
        with atomic_file(path, force=True) as temporary:
            temporary.write_bytes(_npz_bytes(marked))
    except DataError as error:
        raise PolicyError(str(error)) from None


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


def save_mlp_policy(
    path: str | Path,
    layers: Sequence[tuple[ArrayLike, ArrayLike]],
    output: str,
    **settings: Any,
) -> None:
    """Write a policy file; the same content gives the same bytes, and the file appears whole or not at all.

    layers: (W, b) pairs of shapes (in, out) and (out,), stored as float32 if they are, else float64.
    output and settings: as in `Mlp`; `log_std` may stand for `std`.

    Raises PolicyError for content that `Mlp` refuses, and for an unknown setting.
    """
    columns: dict[str, Any] = {}
    for layer, (weight, bias) in enumerate(layers):
        columns[f"W{layer}"], columns[f"b{layer}"] = weight, bias
    columns["output"] = output
    columns.update({key: value for key, value in settings.items() if value is not None})
    arrays = {key: stored_array(value) for key, value in columns.items()}
    try:
        mlp_from_arrays(arrays)  # a file that could not be read back is never written
    except PolicyError as error:
        raise PolicyError(f"cannot write {path}: {error}") from error
    write_arrays(Path(path), FORMAT, VERSION, arrays)


def mlp_of_file(path: Path, marker: str, arrays: dict[str, np.ndarray]) -> Mlp:
    """The network in what a file holds. Raises PolicyError naming the file for anything that is not valid."""
    if marker != FORMAT:
        keys = ", ".join(sorted(arrays)[:8])
        raise PolicyError(
            f"{path}: the .npz is not a koffline policy (arrays: {keys}); "
            "write one with koffline.policies.save_mlp_policy"
        )
    check_version(path, arrays, VERSION)
    try:
        return mlp_from_arrays(arrays)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


def mlp_from_arrays(arrays: Mapping[str, np.ndarray]) -> Mlp:
    """The network in a policy file's arrays. Raises PolicyError for missing, unknown or wrong ones."""
    depth = 0
    while f"W{depth}" in arrays or f"b{depth}" in arrays:
        depth += 1
    layer_keys = [f"{kind}{layer}" for layer in range(depth) for kind in "Wb"]
    _check_keys(arrays, layer_keys)
    settings: dict[str, Any] = {key: str(arrays[key]) for key in _TEXT_KEYS if key in arrays}
    settings |= {key: _numbers(key, arrays[key]) for key in _NUMBER_KEYS if key in arrays}
    if "log_std" in settings:
        settings["std"] = np.exp(settings.pop("log_std"))
    if "temperature" in settings:
        if settings["temperature"].shape != ():
            raise PolicyError(f"temperature has shape {settings['temperature'].shape}; give one number")
        settings["temperature"] = float(settings["temperature"])
    weights = tuple(_numbers(f"W{layer}", arrays[f"W{layer}"]) for layer in range(depth))
    biases = tuple(_numbers(f"b{layer}", arrays[f"b{layer}"]) for layer in range(depth))
    return Mlp(weights, biases, **settings)


def _check_keys(arrays: Mapping[str, np.ndarray], layer_keys: list[str]) -> None:
    for key in ["W0", "b0", "output", *layer_keys]:
        if key not in arrays:
            raise PolicyError(f"{key} is missing; give W0, b0, W1, b1, ... and output")
    if "std" in arrays and "log_std" in arrays:
        raise PolicyError("std and log_std are both given; give one of them")
    known = [*_TEXT_KEYS, *_NUMBER_KEYS]
    for key in arrays:
        if key not in known and key not in layer_keys:
            remedy = nearest_name(key, ["W0", "b0", *known])
            raise PolicyError(f"{key} is not a setting of a policy file; {remedy}")


def _numbers(key: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iuf":
        raise PolicyError(f"{key} has dtype {array.dtype}; give numbers")
    return array.astype(np.float64)
