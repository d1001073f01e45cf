"""koffline's own policy file: an .npz of plain arrays, read without running code, byte-stable.

Arrays: `format` = "koffline-policy", `version` = 1, W0 (in, out), b0 (out,), W1, b1, ..., `output`, and
optionally `activation`, `temperature`, `observation_mean`, `observation_std`, `std` (or `log_std`),
`action_low`, `action_high`; their meaning is that of `Mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from koffline.errors import PolicyError
from koffline.policies.array_file import check_version, read_arrays, stored_array, write_arrays
from koffline.policies.mlp import Mlp

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


def read_mlp_policy(path: Path) -> Mlp:
    """Read a policy file. Raises PolicyError naming the file for anything that is not a valid one."""
    marker, arrays = read_arrays(path)
    if marker != FORMAT:
        keys = ", ".join(sorted(arrays)[:8])
        raise PolicyError(
            f"{path}: the .npz is not a koffline policy (arrays: {keys}); "
            "write one with koffline.policies.save_mlp_policy"
        )
    return mlp_of_file(path, arrays)


def mlp_of_file(path: Path, arrays: dict[str, np.ndarray]) -> Mlp:
    """The network in the arrays of a file of this format. Raises PolicyError naming the file."""
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
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are W0, b0, ..., {', '.join(known)}"
            raise PolicyError(f"{key} is not a setting of a policy file; {hint}")


def _numbers(key: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iuf":
        raise PolicyError(f"{key} has dtype {array.dtype}; give numbers")
    return array.astype(np.float64)
