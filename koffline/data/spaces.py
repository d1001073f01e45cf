"""Spaces of actions, as declared; names of features and categories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from koffline.data.labels import Layout
from koffline.errors import DataError, PolicyError, listed
from koffline.json_types import JsonObject

if TYPE_CHECKING:
    import polars as pl

ONE_HOT: Literal["one-hot"] = "one-hot"
ORDINAL: Literal["ordinal"] = "ordinal"
# Keys in the ``extra`` of metadata.
NAMES = "feature_names"
ENCODINGS = "encodings"
ACTIONS = "action_names"
# Largest discrete space: larger ones in a file would exhaust the memory, as policies
# return (N, n).
LARGEST_SPACE = 2**20
_MOST_SHOWN = 30  # actions in a note


@dataclass(frozen=True, init=False)
class Discrete:
    """Actions are the integers 0 … n − 1.

    Raises DataError unless n is an integer from 1 to 1,048,576.
    """

    n: int

    def __init__(self, n: object) -> None:
        object.__setattr__(self, "n", _positive_int("Discrete(n)", n))

    def __str__(self) -> str:
        return f"Discrete({self.n})"

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """The actions as they are."""
        return actions


@dataclass(frozen=True, init=False)
class Continuous:
    """Actions are vectors of k numbers within [low, high], with bounds for each number;
    infinite by default.

    ``low`` and ``high`` are given as one number or k numbers, and stored as tuples of k
    floats. Raises DataError unless k ≥ 1, the bounds fit k and low ≤ high.
    """

    k: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __init__(
        self, k: object, low: object = -math.inf, high: object = math.inf
    ) -> None:
        object.__setattr__(self, "k", _positive_int("Continuous(k)", k))
        object.__setattr__(self, "low", _bounds("low", low, self.k))
        object.__setattr__(self, "high", _bounds("high", high, self.k))
        for i, (lower, upper) in enumerate(zip(self.low, self.high, strict=True)):
            if lower > upper:
                raise DataError(
                    f"action bound {i} has low {lower:g} above high {upper:g}; swap"
                    " them"
                )

    def __str__(self) -> str:
        bounds = [
            f"{low:g} … {high:g}" for low, high in zip(self.low, self.high, strict=True)
        ]
        if len(set(bounds)) == 1:
            bounds = bounds[:1]
        return f"Continuous({self.k}, {', '.join(bounds)})"

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Clip actions (…, k) to the bounds."""
        return np.clip(actions, self.low, self.high)


@dataclass(frozen=True)
class Bounds:
    """A request for continuous actions within [low, high]; their dimension is that of
    the log's actions.
    """

    low: float | int
    high: float | int


ActionSpace = Discrete | Continuous
# Action space that a caller may request from a reader.
SpaceRequest = Discrete | Continuous | Bounds


def requested_space(
    discrete: int | None, continuous: tuple[float, float] | None
) -> SpaceRequest | None:
    """The requested space from two settings, of which at most one may be given.

    Raises DataError for both.
    """
    if discrete is not None and continuous is not None:
        raise DataError(
            "discrete and continuous actions were both declared; choose one"
        )
    if discrete is not None:
        return Discrete(discrete)
    if continuous is None:
        return None
    low, high = continuous
    return Bounds(low, high)


def _positive_int(name: str, value: object) -> int:
    """A size of a space. Raises DataError for what is no whole number of that size."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= LARGEST_SPACE:  # type: ignore[operator]
        shown = f"{value!r}"[:40]
        raise DataError(
            f"{name} is {shown}; give an integer from 1 to {LARGEST_SPACE}, actions"
            " without gaps"
        )
    return int(value)  # type: ignore[call-overload]


def _bounds(name: str, value: object, k: int) -> tuple[float, ...]:
    """k bounds from one number or k numbers. name: ``low`` or ``high``, for messages.

    Raises DataError for anything else.
    """
    try:
        bounds = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        bounds = np.array(np.nan)
    if bounds.shape not in ((), (1,), (k,)) or np.isnan(bounds).any():
        raise DataError(
            f"Continuous({name}=…) is {value!r}; give a number or {k} numbers, none of"
            " them NaN"
        )
    return tuple(np.broadcast_to(bounds, (k,)).tolist())


@dataclass(frozen=True)
class Encoding:
    """Encoding of a column of categories: one-hot columns, or the category's position
    (ordinal).

    ``categories``: in the order of their numbers; empty until they were looked up in
    the column.
    """

    kind: Literal["one-hot", "ordinal"]
    categories: tuple[str, ...] = ()

    def names(self, column: str) -> tuple[str, ...]:
        """Names of the features that encode the column."""
        if self.kind == ONE_HOT:
            return tuple(f"{column}={name}" for name in self.categories)
        return (column,)

    def texts(self, numbers: np.ndarray) -> list[str | None]:
        """Decode numbers (N, features) into categories; None for an unknown one."""
        if self.kind == ONE_HOT:
            codes = np.where(numbers.any(axis=1), numbers.argmax(axis=1), -1)
        else:
            codes = numbers[:, 0]
        names = dict(enumerate(self.categories))
        return [names.get(code) for code in codes.tolist()]


@dataclass(frozen=True)
class Features:
    """``names`` of the d numbers of an observation; ``encodings`` of the columns that
    were categories.

    ``actions``: the texts of discrete actions, in the order of their numbers.
    ``layout``: of labels that the file holds as whole numbers, so that a policy gets
    them as they are; None without such labels.
    """

    names: tuple[str, ...]
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    layout: Layout | None = None

    @classmethod
    def of_layout(cls, layout: Layout) -> Features:
        """Features of observations that hold labels; those that are one-hot are
        categories.
        """
        encodings = {
            part.name: Encoding(ONE_HOT, tuple(map(str, part.labels)))
            for part in layout.parts
            if part.labels is not None and not part.is_coded
        }
        return cls(layout.names, encodings, layout=layout)

    def to_extra(self) -> JsonObject:
        """Plain values for the ``extra`` of metadata."""
        extra: JsonObject = {NAMES: list(self.names)}
        if self.encodings:
            extra[ENCODINGS] = {
                column: {encoding.kind: list(encoding.categories)}
                for column, encoding in self.encodings.items()
            }
        if self.layout is not None:
            extra |= self.layout.to_extra()
        return extra

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Features | None:
        """Inverse of `to_extra`; None if names are missing or inconsistent."""
        try:
            encodings = {}
            for column, described in dict(extra.get(ENCODINGS, {})).items():
                ((kind, categories),) = described.items()
                encodings[str(column)] = Encoding(kind, tuple(map(str, categories)))
            names = tuple(map(str, extra[NAMES]))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        for column, encoding in encodings.items():
            if encoding.kind not in (ONE_HOT, ORDINAL):
                return None
            if not set(encoding.names(column)) <= set(names):
                return None
        layout = Layout.from_extra(extra)
        if layout is not None and layout.names != names:
            return None
        return cls(names, encodings, tuple(map(str, extra.get(ACTIONS, ()))), layout)

    def table(self, observations: np.ndarray) -> pl.DataFrame:
        """Observations (N, d) as a table with columns by name; categories as texts, as
        in the log's table.
        """
        import polars as pl

        place = {name: i for i, name in enumerate(self.names)}
        table = []
        for column in self.columns:
            if column in self.encodings:
                encoding = self.encodings[column]
                places = [place[feature] for feature in encoding.names(column)]
                texts = encoding.texts(observations[:, places])
                table.append(pl.Series(column, texts, dtype=pl.String))
            else:
                table.append(pl.Series(column, observations[:, place[column]]))
        return pl.DataFrame(table)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of `table`, a category as one."""
        inside = {
            name: column
            for column, encoding in self.encodings.items()
            for name in encoding.names(column)
        }
        return tuple(dict.fromkeys(inside.get(name, name) for name in self.names))

    @property
    def order_note(self) -> str:
        """Sentence on which action each column of a policy's array is."""
        return f"array columns are read as: {listed(self.actions, _MOST_SHOWN)}"

    @property
    def is_coded(self) -> bool:
        """Whether the log's actions are whole numbers that differ from their positions
        0, 1, 2, ….
        """
        places = tuple(map(str, range(len(self.actions))))
        if self.actions == places:
            return False
        return all(name.lstrip("-").isdecimal() for name in self.actions)

    def numbers(self, actions: Any, policy: str) -> Any:
        """Convert a policy's output to numbers: actions to indices, columns named by
        action to (N, n).

        Actions are texts, or whole numbers (N,) if the log's actions are numbers other
        than 0, 1, 2, … A frame (polars, pandas) or mapping may have one column per
        action, in any order. Anything else is returned unchanged. policy: its name, for
        messages. Raises PolicyError for names that are no actions of the log.
        """
        if not self.actions:
            return actions
        is_mapping = isinstance(actions, Mapping)
        columns = list(getattr(actions, "columns", actions if is_mapping else ()))
        if is_mapping or len(columns) > 1:
            return self._by_action(actions, columns, policy)
        values = actions
        if hasattr(actions, "detach"):
            values = actions.detach().cpu()
        try:
            texts: Any = np.asarray(values)
        except ValueError:  # rows of several lengths
            return actions
        is_vector = texts.ndim and texts.size == len(texts)
        if self.is_coded and is_vector and texts.dtype.kind in "iuf":
            texts = np.array([_number_text(value) for value in texts.ravel().tolist()])
        if not any(isinstance(text, str) for text in texts.flat[:1]):
            return actions
        numbers = {name: number for number, name in enumerate(self.actions)}
        for row, text in enumerate(texts.flat):
            if text not in numbers:
                raise PolicyError(
                    f"{policy}: row {row} of the output is {str(text)!r}, no action of"
                    f" this log; its actions are {listed(self.actions)}"
                )
        return np.array([numbers[text] for text in texts.flat]).reshape(texts.shape)

    def _by_action(
        self, actions: Any, columns: list[object], policy: str
    ) -> np.ndarray:
        """A policy's output (N, n), in the order of the log's actions, from one column
        per action. Raises PolicyError unless the columns are named as the actions.
        """
        if sorted(map(str, columns)) != sorted(self.actions):
            raise PolicyError(
                f"{policy}: columns of the output are {listed(columns)}; name them as"
                f" the log's actions, {listed(self.actions)}"
            )
        return np.stack(
            [np.asarray(actions[name], dtype=np.float64) for name in self.actions],
            axis=1,
        )


def _number_text(value: float | int) -> str:
    """A number as the text of an action: without decimals if it is whole."""
    if value % 1 == 0:
        return f"{value:.0f}"
    return f"{value:g}"
