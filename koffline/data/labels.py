"""Observations that hold labels, numbers of things without an order, as columns that
networks can use.

A log's ``observations`` hold what networks, kernels and distances may take for
quantities. A label (a number in a Discrete or MultiDiscrete space, or a column that the
user declares) is therefore stored as a one-hot column for each label, as Gymnasium
flattens it; if there are very many, as a code of random signs, in which all labels are
about equally far apart. The `Layout`, kept in the log's metadata, turns these numbers
back into what the file holds, and that is what a policy of the user gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from koffline.errors import DataError, counted, listed
from koffline.json_types import JsonObject

FloatType: TypeAlias = np.dtype | type[np.floating]
LAYOUT = "observation_layout"  # key in the ``extra`` of metadata
# columns of all labels together; with more, labels of large parts are coded
MOST_ONE_HOT = 1000
CODE_WIDTH = 64  # columns of a coded label
MOST_COLUMNS = 4096  # that networks and kernels take
MOST_LABELS = 2**20  # of one part
_CODE_SEED = 20_190_515  # codes are the same in every log and version


@dataclass(frozen=True)
class ObservationPart:
    """Consecutive columns of an observation as the file holds it.

    ``size``: number of columns, 1 for a label. ``labels``: the values of a label in the
    order of its columns; None for quantities. ``is_coded``: whether labels are codes
    instead of one-hot columns.
    """

    name: str
    size: int = 1
    labels: Sequence[int] | None = None
    is_coded: bool = False

    @property
    def width(self) -> int:
        """Number of encoded columns."""
        if self.labels is None:
            return self.size
        if self.is_coded:
            return CODE_WIDTH
        return len(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        if self.labels is None:
            if self.size == 1:
                return (self.name,)
            return tuple(f"{self.name}[{i}]" for i in range(self.size))
        if self.is_coded:
            return tuple(f"{self.name}#{i}" for i in range(CODE_WIDTH))
        return tuple(f"{self.name}={label}" for label in self.labels)

    def __str__(self) -> str:
        if self.labels is None:
            return f"{self.name}: {counted(self.size, 'number')}"
        if self.is_coded:
            how = f"as codes of {CODE_WIDTH} signs"
        else:
            how = "one-hot"
        return f"{self.name}: {counted(len(self.labels), 'label')}, {how}"

    @cached_property
    def _values(self) -> np.ndarray:
        """The labels (n,) in ascending order."""
        return np.asarray(self.labels, dtype=np.int64)

    @cached_property
    def _codes(self) -> np.ndarray:
        """The code (n,) of every label, its signs as bits; the same however many labels
        there are.
        """
        generator = np.random.default_rng(_CODE_SEED)
        return generator.integers(2**64, size=len(self._values), dtype=np.uint64)

    @cached_property
    def _by_code(self) -> np.ndarray:
        """Places (n,) of the labels in the order of their codes."""
        return np.argsort(self._codes)

    def encode(self, column: np.ndarray, kind: FloatType) -> np.ndarray:
        """Encoded labels (N, width) of a column (N,), as numbers of the type ``kind``.

        Raises DataError for a value that is no label.
        """
        places = np.searchsorted(self._values, column)
        places = np.minimum(places, len(self._values) - 1)
        wrong = self._values[places] != column
        if wrong.any():
            row = int(wrong.argmax())
            known = f"{self._values[0]} … {self._values[-1]}"
            if len(self._values) < self._values[-1] - self._values[0] + 1:
                known = listed(self._values.tolist(), 8)
            raise DataError(
                f"observation {self.name} is {column[row]:g} in row {row}, no label of"
                f" {known}; mend that row, or declare the space anew"
            )
        if self.is_coded:
            octets = self._codes[places, None].astype("<u8").view(np.uint8)
            return 2 * np.unpackbits(octets, axis=1).astype(kind) - 1
        encoded = np.zeros((len(column), len(self._values)), dtype=kind)
        encoded[np.arange(len(column)), places] = 1
        return encoded

    def decode(self, columns: np.ndarray) -> np.ndarray:
        """Labels (N,) int64 of encoded columns (N, width), which must be those of a
        label.
        """
        if not self.is_coded:
            return self._values[columns.argmax(axis=1)]
        words = np.packbits(columns > 0, axis=1).view("<u8").reshape(-1)
        places = np.searchsorted(self._codes, words, sorter=self._by_code)
        return self._values[self._by_code[np.minimum(places, len(self._by_code) - 1)]]


@dataclass(frozen=True)
class Layout:
    """The parts of an observation in order, of which at least one holds labels.

    ``shape``: of one observation in the file.
    """

    parts: tuple[ObservationPart, ...]
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of encoded columns."""
        return sum(part.width for part in self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(name for part in self.parts for name in part.names)

    @property
    def shape_text(self) -> str:
        """Shape of N observations in the file: ``(N, 1)``."""
        return f"(N, {', '.join(map(str, self.shape))})"

    @property
    def lowest(self) -> np.ndarray:
        """An observation as the file may hold it, flat: first labels, and zeros for
        quantities.
        """
        columns = []
        for part in self.parts:
            if part.labels is None:
                columns.append(np.full(part.size, 0))
            else:
                columns.append(np.full(part.size, part.labels[0]))
        return np.concatenate(columns)

    @property
    def note(self) -> str:
        """Sentence on how labels were read."""
        labels = "; ".join(str(part) for part in self.parts if part.labels is not None)
        policy = "a policy gets them as the file holds them"
        return f"observations hold labels, which have no order ({labels}); {policy}"

    def encode(self, logged: np.ndarray, kind: FloatType = np.float32) -> np.ndarray:
        """Observations (N, width) of a float type from those of the file (N, *shape).

        Raises DataError.
        """
        flat = logged.reshape(len(logged), -1)
        columns = []
        start = 0
        for part in self.parts:
            of_part = flat[:, start : start + part.size]
            if part.labels is None:
                columns.append(of_part.astype(kind))
            else:
                columns.append(part.encode(of_part[:, 0], kind))
            start += part.size
        return np.concatenate(columns, axis=1)

    def decode(self, observations: np.ndarray) -> np.ndarray:
        """What the file holds, (N, *shape): whole numbers (int64) if all parts are
        labels.
        """
        flat = observations.reshape(len(observations), -1)
        columns = []
        start = 0
        for part in self.parts:
            of_part = flat[:, start : start + part.width]
            if part.labels is None:
                columns.append(of_part)
            else:
                columns.append(part.decode(of_part)[:, None])
            start += part.width
        if any(part.labels is None for part in self.parts):
            columns = [column.astype(observations.dtype) for column in columns]
        return np.concatenate(columns, axis=1).reshape(len(observations), *self.shape)

    def encode_if_logged(self, observations: np.ndarray, kind: FloatType) -> np.ndarray:
        """Encode observations as the file holds them, (N, *shape), of one label also
        (N,); others stay.

        Raises DataError.
        """
        is_single = observations.ndim == 1 and self.shape == (1,)
        is_logged = observations.shape[1:] == self.shape != (self.width,)
        if is_single or is_logged:
            return self.encode(observations, kind)
        return observations

    def to_extra(self) -> JsonObject:
        """Plain values for the ``extra`` of metadata."""
        return {
            LAYOUT: {
                "parts": [_described(part) for part in self.parts],
                "shape": list(self.shape),
            }
        }

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Layout | None:
        """Inverse of `to_extra`; None if it is missing or inconsistent."""
        try:
            parts = tuple(_part(described) for described in extra[LAYOUT]["parts"])
            shape = tuple(_number(side, 0) for side in extra[LAYOUT]["shape"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        fits = math.prod(shape) == sum(part.size for part in parts)
        if fits and any(part.labels is not None for part in parts):
            return cls(parts, shape)
        return None


def _described(part: ObservationPart) -> JsonObject:
    """A part as plain values; consecutive labels by the first and their number."""
    if part.labels is None:
        return {"name": part.name, "size": part.size}
    described: JsonObject = {"name": part.name}
    if isinstance(part.labels, range):
        described["first"] = part.labels[0]
        described["count"] = len(part.labels)
    else:
        described["labels"] = [int(label) for label in part.labels]
    if part.is_coded:
        described["coded"] = True
    return described


def _part(described: Mapping[str, Any]) -> ObservationPart:
    """Inverse of `_described`.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    name = str(described["name"])
    is_coded = bool(described.get("coded", False))
    if "size" in described:
        return ObservationPart(name, _number(described["size"], 0))
    if "count" in described:
        first = _number(described["first"], -(2**53))
        count = _number(described["count"], 1)
        if count > MOST_LABELS:
            raise ValueError(f"{count} labels")
        return ObservationPart(
            name, labels=range(first, first + count), is_coded=is_coded
        )
    labels = tuple(_number(label, -(2**53)) for label in described["labels"])
    if not labels or any(after <= before for before, after in pairwise(labels)):
        raise ValueError("labels are not in order")
    return ObservationPart(name, labels=labels, is_coded=is_coded)


def _number(value: object, least: int) -> int:
    """A whole number from ``least`` up to 2⁵³. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    if not least <= value <= 2**53:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def make_layout(
    parts: Iterable[ObservationPart], shape: tuple[int, ...], source: str
) -> Layout | None:
    """The layout of these parts, large ones coded if there are many labels; None if
    none holds labels.

    shape: of one observation in the file. Raises DataError if even then there are more
    columns than networks take.
    """
    parts = tuple(parts)
    n_labelled = sum(part.labels is not None for part in parts)
    if not n_labelled:
        return None
    n_one_hot = sum(len(part.labels or ()) for part in parts)
    if n_one_hot > MOST_ONE_HOT:
        parts = tuple(
            replace(part, is_coded=len(part.labels or ()) > CODE_WIDTH)
            for part in parts
        )
    layout = Layout(parts, shape)
    n_columns = sum(part.width for part in parts if part.labels is not None)
    if n_columns > MOST_COLUMNS:
        raise DataError(
            f"{source}: observations hold {n_labelled} labels, which would take"
            f" {n_columns} columns, more than {MOST_COLUMNS}; flatten or embed them"
            " before recording, or record quantities as a Box"
        )
    return layout
