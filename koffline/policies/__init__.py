"""Policies, and koffline's own policy files: .npz of plain arrays, read without running
code.

The same policy gives the same bytes. A network's arrays: `format` = "koffline-policy",
`version` = 1, W0 (in, out), b0 (out,), W1, b1, ..., `output`, and optionally
`activation`, `temperature`, `observation_mean`, `observation_std`, `std` (or
`log_std`), `action_low`, `action_high`, as in `Mlp`. A grid's arrays: `format` =
"koffline-grid-policy", `version` = 1, `low` (2,), `high` (2,), `action_values` (n1, n2,
A), `temperature`. A mixture's arrays: `format` = "koffline-mixture-policy", `version` =
1, `shares` (K,), and of its network number i those of a network as `part_i.W0`, …; of
its gate as `part_i.gate.W0`, …, with `part_i.gate_ratio`.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike

from koffline.data.transitions import ActionSpace, Discrete
from koffline.envs.finite import Grid
from koffline.errors import PolicyError, nearest_name
from koffline.policies.base import (
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
    reading,
)
from koffline.policies.builtin import CHOICES, VECTORS, Mlp, mlp_policy, softmax
from koffline.policies.mixtures import Mixture, MixturePart, mixture_policy
from koffline.store.files import atomic_file
from koffline.untrusted import arrays as untrusted

__all__ = [
    "ContinuousPolicy",
    "DiscretePolicy",
    "GridPolicy",
    "Mixture",
    "MixturePart",
    "Policy",
    "read_mixture",
    "save_grid_policy",
    "save_mixture_policy",
    "save_mlp_policy",
]

FORMAT = "koffline-policy"
GRID_FORMAT = "koffline-grid-policy"
MIXTURE_FORMAT = "koffline-mixture-policy"
VERSION = 1
_KEYS = (*CHOICES, "temperature", *VECTORS, "log_std")
_REMEDY = "write it with koffline.policies.save_mlp_policy or save_grid_policy"
_MOST_PARTS = 64  # of a mixture


@dataclass(frozen=True, eq=False)
class GridPolicy:
    """π(a|s) ∝ exp(Q(s, a) / temperature), Q bilinear between cell centres and constant
    beyond them.

    low, high: the bounds of the state space in its own units. action_values: (n1, n2,
    A). Raises PolicyError.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    action_values: np.ndarray  # (n1, n2, A)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        values = np.asarray(self.action_values, np.float64)
        box = np.array([self.low, self.high], np.float64)
        is_table = (
            values.ndim == 3 and values.size > 0 and bool(np.isfinite(values).all())
        )
        is_box = box.shape == (2, 2) and bool(
            np.isfinite(box).all() and (box[0] < box[1]).all()
        )
        if not is_table:
            raise PolicyError(
                f"action_values has shape {values.shape}; give finite numbers (n1,"
                " n2, A)"
            )
        if not is_box:
            raise PolicyError(
                f"low is {self.low}, high {self.high}; give two corners, low below high"
            )
        if not 0 < self.temperature < math.inf:
            raise PolicyError(
                f"temperature is {self.temperature}; give a positive number"
            )
        object.__setattr__(self, "action_values", values)

    @property
    def n(self) -> int:
        """Number of actions."""
        return self.action_values.shape[-1]

    def __call__(
        self, observations: Shaped[np.ndarray, "row 2"]
    ) -> Float[np.ndarray, "row action"]:
        """Probabilities (N, A) for observations (N, 2) in the environment's units."""
        shape = self.action_values.shape[0], self.action_values.shape[1]
        cells, weights = Grid(self.low, self.high, shape).weights_of(observations)
        corners = self.action_values.reshape(-1, self.n)[cells]  # (N, 4, A)
        return softmax(np.einsum("nc,nca->na", weights, corners) / self.temperature)


def save_grid_policy(path: str | Path, policy: GridPolicy) -> None:
    """Write a policy file atomically; the same policy gives the same bytes."""
    write_arrays(Path(path), GRID_FORMAT, vars(policy))


def save_mlp_policy(
    path: str | Path,
    layers: Sequence[tuple[ArrayLike, ArrayLike]],
    output: str,
    **settings: Any,
) -> None:
    """Write a policy file atomically; the same content gives the same bytes.

    layers: (W, b) pairs of shapes (in, out) and (out,), stored as float32 if they are,
    else as float64. output and settings: as in `Mlp`; `log_std` may replace `std`.
    Raises PolicyError for content that `Mlp` refuses, and for unknown settings.
    """
    columns: dict[str, object] = {}
    for layer, (weight, bias) in enumerate(layers):
        columns[f"W{layer}"] = weight
        columns[f"b{layer}"] = bias
    columns["output"] = output
    columns |= {key: value for key, value in settings.items() if value is not None}
    arrays = {key: _stored(value) for key, value in columns.items()}
    with reading(f"cannot write {path}", "the arrays make no policy", "give numbers"):
        mlp_from_arrays(arrays)  # checked before writing: the file must be readable
    write_arrays(Path(path), FORMAT, arrays)


def save_mixture_policy(path: str | Path, mixture: Mixture) -> None:
    """Write a policy file atomically; the same mixture gives the same bytes."""
    arrays: dict[str, Any] = {"shares": np.asarray(mixture.shares, np.float64)}
    for number, part in enumerate(mixture.parts):
        place = f"part_{number}."
        arrays |= _mlp_arrays(part.network, place)
        if part.gate is not None:
            arrays |= _mlp_arrays(part.gate, f"{place}gate.")
            arrays[f"{place}gate_ratio"] = np.asarray(part.gate_ratio)
    write_arrays(Path(path), MIXTURE_FORMAT, arrays)


def read_mixture(path: Path) -> Mixture:
    """The mixture of a file. Raises PolicyError if the file holds none."""
    with reading(path, "the .npz cannot be read", _REMEDY):
        arrays = untrusted.read_arrays(path)
    if str(arrays.pop("format", None)) != MIXTURE_FORMAT:
        raise PolicyError(f"{path!s}: the .npz is no mixture of networks; {_REMEDY}")
    arrays.pop("version", None)
    with reading(path, "the arrays make no policy", _REMEDY):
        return _mixture_from_arrays(arrays)


def _mlp_arrays(mlp: Mlp, prefix: str) -> dict[str, Any]:
    """A network's arrays by name, each after the prefix."""
    arrays: dict[str, Any] = {}
    for layer, (weight, bias) in enumerate(zip(mlp.weights, mlp.biases, strict=True)):
        arrays[f"{prefix}W{layer}"] = weight
        arrays[f"{prefix}b{layer}"] = bias
    for name in ("output", "activation", "temperature", *VECTORS):
        value = getattr(mlp, name)
        if value is not None:
            arrays[f"{prefix}{name}"] = np.asarray(value)
    return arrays


def load_policy_file(
    path: Path, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """The network, grid or mixture of a file as a policy for a log with this action
    space and shape of an observation.

    Raises PolicyError if the file is damaged, is no policy, or does not fit the log.
    """
    with reading(path, "the .npz cannot be read", _REMEDY):
        arrays = untrusted.read_arrays(path)
    kind = str(arrays.pop("format", None))
    version = arrays.pop("version", None)
    if kind not in (FORMAT, GRID_FORMAT, MIXTURE_FORMAT):
        raise PolicyError(
            f"{path!s}: the .npz is not a koffline policy (arrays:"
            f" {', '.join(sorted(arrays)[:8])}); {_REMEDY}"
        )
    if str(version) != str(VERSION):
        raise PolicyError(
            f"{path!s}: policy file version {version}; this koffline reads version"
            f" {VERSION}"
        )
    # also a TypeError, for text in place of numbers
    with reading(path, "the arrays make no policy", _REMEDY):
        content: Mlp | Mixture | GridPolicy
        if kind == FORMAT:
            content = mlp_from_arrays(arrays)
        elif kind == MIXTURE_FORMAT:
            content = _mixture_from_arrays(arrays)
        else:
            content = _grid_from_arrays(arrays)
    if isinstance(content, Mlp):
        return mlp_policy(content, str(path), action_space, observation_shape)
    if isinstance(content, Mixture):
        return mixture_policy(content, str(path), action_space, observation_shape)
    check_spaces(
        str(path), (Discrete(content.n), (2,)), (action_space, observation_shape)
    )
    return DiscretePolicy(content.n, content, str(path), (2,))


def write_arrays(path: Path, kind: str, arrays: Mapping[str, object]) -> None:
    """Write a file atomically; the same arrays give the same bytes.

    Raises DataError.
    """
    stored = {"format": np.array(kind), "version": np.array(VERSION, np.int64)}
    stored |= {key: _stored(value) for key, value in arrays.items()}
    with (
        atomic_file(path, force=True) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        for key, array in stored.items():
            # without a time stamp: the bytes depend on the content alone
            entry = zipfile.ZipInfo(f"{key}.npy")
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            with archive.open(entry, "w") as file:
                np.lib.format.write_array(
                    file, array, version=(1, 0), allow_pickle=False
                )


def mlp_from_arrays(arrays: Mapping[str, np.ndarray]) -> Mlp:
    """The network from a policy file's arrays.

    Raises PolicyError for missing, unknown or wrong arrays.
    """
    depth = max(1, sum(key.startswith("W") for key in arrays))
    weights = [f"W{layer}" for layer in range(depth)]
    biases = [f"b{layer}" for layer in range(depth)]
    missing = [key for key in (*weights, *biases, "output") if key not in arrays]
    unknown = [key for key in arrays if key not in (*_KEYS, *weights, *biases)]
    if missing:
        raise PolicyError(
            f"{', '.join(missing)} missing; give W0, b0, W1, b1, ... and output"
        )
    if unknown:
        remedy = nearest_name(unknown[0], ["W0", "b0", *_KEYS])
        raise PolicyError(
            f"{', '.join(unknown)}: no setting of a policy file; {remedy}"
        )
    if "std" in arrays and "log_std" in arrays:
        raise PolicyError("std and log_std are both given; give one of them")
    values: dict[str, Any] = {}
    for key, array in arrays.items():
        if key in CHOICES:
            values[key] = str(array)
        else:
            values[key] = array.astype(np.float64)
    if "log_std" in values:
        values["std"] = np.asarray(np.exp(values.pop("log_std")))
    return Mlp(
        weights=tuple(values.pop(key) for key in weights),
        biases=tuple(values.pop(key) for key in biases),
        temperature=float(values.pop("temperature", 1.0)),
        **values,
    )


def _mixture_from_arrays(arrays: Mapping[str, np.ndarray]) -> Mixture:
    """The mixture from a policy file's arrays.

    Raises PolicyError for missing, unknown or wrong arrays.
    """
    if "shares" not in arrays:
        raise PolicyError("shares missing; give the share of each network")
    shares = np.atleast_1d(arrays["shares"].astype(np.float64))
    if len(shares) > _MOST_PARTS:
        raise PolicyError(f"{len(shares)} networks; give at most {_MOST_PARTS}")
    left = {name: array for name, array in arrays.items() if name != "shares"}
    parts = []
    for number in range(len(shares)):
        place = f"part_{number}."
        of_part = _taken_after(left, place)
        of_gate = _taken_after(of_part, "gate.")
        ratio = of_part.pop("gate_ratio", None)
        gate = None
        gate_ratio = 0.0
        if of_gate:
            gate = mlp_from_arrays(of_gate)
            if ratio is None:
                raise PolicyError(f"{place}gate_ratio missing; give the gate's ratio")
            gate_ratio = float(ratio)
        network = mlp_from_arrays(of_part)
        parts.append(MixturePart(network, gate, gate_ratio))
    if left:
        raise PolicyError(
            f"{', '.join(sorted(left)[:3])}: no array of a mixture of {len(shares)}"
            " networks"
        )
    return Mixture(tuple(parts), tuple(shares.tolist()))


def _taken_after(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with the prefix, without it; they are removed."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays.pop(name) for name in names}


def _grid_from_arrays(arrays: Mapping[str, np.ndarray]) -> GridPolicy:
    """The grid from a policy file's arrays; TypeError or KeyError for others."""
    fields: dict[str, Any] = dict(arrays)
    for corner in ("low", "high"):
        fields[corner] = tuple(arrays[corner].astype(np.float64).tolist())
    fields["temperature"] = float(arrays["temperature"])
    return GridPolicy(**fields)


def _stored(value: object) -> np.ndarray:
    """The array as it is written: text, float32, or float64 for all other numbers."""
    array = np.asarray(value)
    if array.dtype.kind != "U" and array.dtype != np.float32:
        array = array.astype(np.float64)
    return (
        np.ascontiguousarray(array)
        .reshape(array.shape)
        .astype(array.dtype.newbyteorder("<"), copy=False)
    )
