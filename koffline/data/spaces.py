"""Spaces of actions, as declared; names of features and categories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from koffline.data.labels import Layout
from koffline.errors import DataError, PolicyError, listed

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

    def __init__(self, n: Any) -> None:
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

    def __init__(self, k: Any, low: Any = -math.inf, high: Any = math.inf) -> None:
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
        return (
            f"Continuous({self.k},"
            f" {', '.join(bounds if len(set(bounds)) > 1 else bounds[:1])})"
        )

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
    return continuous and Bounds(*continuous)


def _positive_int(name: str, value: object) -> int:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= LARGEST_SPACE:  # type: ignore[operator]
        shown = f"{value!r}"[:40]
        raise DataError(
            f"{name} is {shown}; give an integer from 1 to {LARGEST_SPACE}, actions"
            " without gaps"
        )
    return int(value)  # type: ignore[call-overload]


def _bounds(name: str, value: object, k: int) -> tuple[float, ...]:
    try:
        given = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        given = np.array(np.nan)
    if given.shape not in ((), (1,), (k,)) or np.isnan(given).any():
        raise DataError(
            f"Continuous({name}=…) is {value!r}; give a number or {k} numbers, none of"
            " them NaN"
        )
    return tuple(np.broadcast_to(given, (k,)).tolist())


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

    def to_extra(self) -> dict[str, Any]:
        """Plain values for the ``extra`` of metadata."""
        encoded = {
            name: {each.kind: list(each.categories)}
            for name, each in self.encodings.items()
        }
        layout = {} if self.layout is None else self.layout.to_extra()
        return {
            NAMES: list(self.names),
            **({ENCODINGS: encoded} if encoded else {}),
            **layout,
        }

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Features | None:
        """Inverse of `to_extra`; None if names are missing or inconsistent."""
        try:
            encodings = {}
            for column, said in dict(extra.get(ENCODINGS, {})).items():
                ((kind, categories),) = said.items()
                encodings[str(column)] = Encoding(kind, tuple(map(str, categories)))
            names = tuple(map(str, extra[NAMES]))
            known = all(each.kind in (ONE_HOT, ORDINAL) for each in encodings.values())
            fit = all(
                set(each.names(column)) <= set(names)
                for column, each in encodings.items()
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if not (known and fit):
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
        columns = {}
        inside = {
            name: column
            for column, each in self.encodings.items()
            for name in each.names(column)
        }
        for name in self.names:
            column = inside.get(name, name)
            if column in self.encodings and column not in columns:
                encoding = self.encodings[column]
                numbers = observations[
                    :, [place[each] for each in encoding.names(column)]
                ]
                columns[column] = pl.Series(
                    column, encoding.texts(numbers), dtype=pl.String
                )
            elif column not in columns:
                columns[column] = pl.Series(column, observations[:, place[name]])
        return pl.DataFrame(list(columns.values()))

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
        return self.actions != places and all(
            name.lstrip("-").isdecimal() for name in self.actions
        )

    def numbers(self, actions: Any, policy: str) -> Any:
        """Convert a policy's output to numbers: actions to indices, columns named by
        action to (N, n).

        Actions are texts, or whole numbers (N,) if the log's actions are numbers other
        than 0, 1, 2, … A frame (polars, pandas) or mapping may have one column per
        action, in any order. Anything else is returned unchanged. Raises PolicyError
        for names that are no actions of the log.
        """
        columns = list(
            getattr(actions, "columns", actions if isinstance(actions, Mapping) else ())
        )
        if self.actions and (len(columns) > 1 or isinstance(actions, Mapping)):
            if sorted(map(str, columns)) != sorted(self.actions):
                what = f"columns of the output are {listed(columns)}"
                raise PolicyError(
                    f"{policy}: {what}; name them as the log's actions,"
                    f" {listed(self.actions)}"
                )
            return np.stack(
                [np.asarray(actions[name], dtype=np.float64) for name in self.actions],
                axis=1,
            )
        try:
            texts: Any = np.asarray(
                actions.detach().cpu() if hasattr(actions, "detach") else actions
            )
        except ValueError:  # rows of several lengths
            return actions
        if (
            self.is_coded
            and texts.dtype.kind in "iuf"
            and texts.ndim
            and texts.size == len(texts)
        ):
            texts = np.array(
                [f"{x:.0f}" if x % 1 == 0 else f"{x:g}" for x in texts.ravel().tolist()]
            )
        if not self.actions or not any(
            isinstance(text, str) for text in texts.flat[:1]
        ):
            return actions
        numbers = {name: number for number, name in enumerate(self.actions)}
        for row, text in enumerate(texts.flat):
            if text not in numbers:
                what = (
                    f"row {row} of the output is {str(text)!r}, no action of this log"
                )
                raise PolicyError(
                    f"{policy}: {what}; its actions are {listed(self.actions)}"
                )
        return np.array([numbers[text] for text in texts.flat]).reshape(texts.shape)
