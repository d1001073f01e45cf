"""Which actions were available in each row of a table: a column of 0 and 1 for each
action, or one column of lists.

A list holds the available actions (their labels, or their numbers from 0), or a 0 or 1
for each action. Which of the two it is, all rows must tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.table.flag_values import read_flags
from koffline.errors import DataError, counted, listed

_REMEDY = "name a column of 0 and 1 for each action, or a list of the labels"


def as_lists(column: pl.Series) -> pl.Series:
    """A column of lists or arrays as one of lists."""
    kind = column.dtype
    if isinstance(kind, pl.Array):
        return column.cast(pl.List(kind.inner))
    return column


@dataclass
class MaskLists:
    """What lists of one column may be, from the rows so far.

    ``are_flags``: all hold 0 and 1, with 1 for the logged action. ``are_actions``: all
    hold different actions, with the logged one. ``lengths``: of the lists. ``labels``:
    texts or numbers that they hold. ``rows``: of which none is missing.
    """

    are_flags: bool = True
    are_actions: bool = True
    lengths: set[int] = field(default_factory=set)
    labels: set[Any] = field(default_factory=set)
    rows: int = 0

    def add(self, lists: pl.Series, actions: pl.Series) -> None:
        """Add rows. lists (N,): of texts or numbers. actions (N,): the logged ones."""
        rows = pl.DataFrame({"lists": lists, "actions": actions}).drop_nulls()
        self.rows += rows.height
        kind = lists.dtype
        assert isinstance(kind, pl.List), "of `as_lists`"
        inner = kind.inner
        size = pl.col("lists").list.len()
        self.lengths |= set(rows.select(size.unique()).to_series().to_list())
        items = rows.select(pl.col("lists").explode(empty_as_null=False)).to_series()
        self.labels |= set(items.drop_nulls().unique().to_list())
        if inner == pl.String:
            self.are_flags = False
        elif actions.dtype.is_integer():
            flag = pl.col("lists").list.get(pl.col("actions"), null_on_oob=True)
            is_flagged = rows.select((flag == 1).fill_null(False).all()).item()
            self.are_flags = self.are_flags and bool(is_flagged)
        if inner == pl.Boolean or (inner != pl.String and actions.dtype == pl.String):
            self.are_actions = False
            return
        logged = pl.col("actions").cast(inner, strict=False)
        holds_logged = pl.col("lists").list.contains(logged)
        differ = pl.col("lists").list.n_unique() == size
        is_set = rows.select((holds_logged & differ).fill_null(False).all()).item()
        self.are_actions = self.are_actions and bool(is_set)

    def settle(self, column: str, is_own: bool) -> bool:
        """Whether the lists hold a 0 or 1 for each action; else they hold actions.

        is_own: koffline wrote the table. Raises DataError if they may be both, or are
        neither.
        """
        of_flags = self.labels <= {0, 1} and len(self.lengths) == 1
        are_flags = self.are_flags and of_flags
        if are_flags and (is_own or not self.are_actions):
            return True
        if self.are_actions and not are_flags:
            return False
        if are_flags:
            raise DataError(
                f"column {column}: the lists may be flags of all actions, or numbers of"
                f" the available ones; {_REMEDY}"
            )
        raise DataError(
            f"column {column}: the lists of {counted(self.rows, 'row')} are neither all"
            " flags, with 1 for the logged action, nor all different available actions,"
            f" with the logged one; mend them, or {_REMEDY}"
        )


def masks_of_lists(
    lists: pl.Series,
    are_flags: bool,
    categories: Sequence[Any],
    spelled: dict[str, str],
    n_actions: int,
) -> np.ndarray:
    """Masks (N, n) of lists (N,); a missing list has no available action.

    categories: labels of the actions in their order, none if they are numbers.
    spelled: other spellings of labels. Raises DataError for labels and numbers of no
    action.
    """
    lengths = lists.list.len().fill_null(0).cast(pl.Int64).to_numpy()
    rows = np.repeat(np.arange(len(lists)), lengths)
    items = lists.drop_nulls().explode(empty_as_null=False)
    mask = np.zeros((len(lists), n_actions), dtype=np.bool_)
    if are_flags:
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(items)) - np.repeat(starts, lengths)
        flags = items.cast(pl.Float64).to_numpy() == 1
        _check_numbers(places, n_actions, lists.name)
        mask[rows[flags], places[flags]] = True
        return mask
    if categories:
        known = pl.Series(categories)
        labels = items.cast(known.dtype)
        if known.dtype == pl.String:
            labels = labels.replace(spelled)
        numbers = labels.replace_strict(
            known, range(len(known)), default=-1, return_dtype=pl.Int64
        )
        is_unknown = numbers == -1
        if is_unknown.any():
            shown = labels.filter(is_unknown).unique().to_list()
            raise DataError(
                f"column {lists.name} holds {listed(map(repr, shown), 4)}, which is no"
                " action of action_names; list all actions there"
            )
    else:
        numbers = items.cast(pl.Int64)
    places = numbers.to_numpy()
    _check_numbers(places, n_actions, lists.name)
    mask[rows, places] = True
    return mask


def _check_numbers(numbers: np.ndarray, n_actions: int, column: str) -> None:
    """Raise DataError unless numbers are those of actions, 0 … n_actions − 1."""
    is_outside = (numbers < 0) | (numbers >= n_actions)
    if is_outside.any():
        raise DataError(
            f"column {column} holds action {numbers[is_outside][0]}, and there are"
            f" {n_actions} actions, counted from 0; declare more (--discrete N), or mend"
            " the lists"
        )


def masks_of_columns(
    frame: pl.DataFrame, columns: Sequence[str], categories: Sequence[Any], source: str
) -> np.ndarray:
    """Masks (N, n) from a column of flags for each action.

    Columns stand in the order of the actions; if actions have labels, the name of each
    ends in its action's. source: the table's name for messages. Raises DataError for
    other names, and for what is no flag.
    """
    names = list(columns)
    if categories:
        names = [_column_of(str(label), columns) for label in categories]
        if len(names) != len(set(names)) or len(names) != len(columns):
            raise DataError(
                f"action_mask names {counted(len(columns), 'column')} for"
                f" {len(categories)} actions; name one for each, whose name ends in the"
                " action's label"
            )
    flags = [read_flags(frame, name, source).to_numpy() for name in names]
    return np.stack(flags, axis=1)


def _column_of(label: str, columns: Sequence[str]) -> str:
    """The only column, or the shortest, whose name ends in a label. Raises
    DataError."""
    fitting = [name for name in columns if name.endswith(label)]
    if not fitting:
        raise DataError(
            f"action_mask has no column for action {label!r} ({listed(columns, 6)}); name"
            " one for each action, whose name ends in the action's label"
        )
    return min(fitting, key=len)
