"""Logs in JSON as columns: one object a row, a batch of rows, an episode of steps, or a
decision of VowpalWabbit.

A file holds one object a line, a list of objects, or a single object. Objects inside of
a row become columns of their own: ``state_features: {"0": …}`` is ``state_features.0``.
Four kinds of objects are told apart by their keys:

- a **row**: every other object;
- a **batch** (RLlib's SampleBatch, or any object whose reward is a list): every list of
  the reward's length is a column, single values repeat;
- an **episode** (RLDS, ``{"steps": [{…}, …]}``): every step is a row, and the number of
  the episode is the column ``episode``;
- a **decision** of VowpalWabbit (dsjson): see `_Decisions`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from koffline.errors import DataError, listed
from koffline.json_types import JsonObject
from koffline.untrusted.limits import Refused, check_memory, parse_json

# What an object takes in memory, in bytes of its text.
BYTES_PER_BYTE = 8
# What the objects of a file may be; rows are no layout of their own.
BATCHES = "batches"
EPISODES = "episodes"
DECISIONS = "vowpalwabbit"
_REWARDS = ("rewards", "reward", "rew", "r")
_SAMPLE_BATCH = "SampleBatch"
_MULTI_AGENT = "MultiAgentBatch"
# Keys of one decision in VowpalWabbit's dsjson.
_DECISION = ("_label_cost", "_label_probability", "c")
# Column of the actions that were available, where they differ from row to row.
AVAILABLE = "available_actions"
_IDENTITIES = ("id", "tag")  # words of features that identify an action
_MOST_DEEP = 8  # objects inside of objects
_INT64 = 2**63
_BYTES_OF_CELL = 8

Row = JsonObject


def columns_of(text: str, name: str) -> tuple[dict[str, pl.Series], str]:
    """The columns of a JSON file, by name, in the order in which they first occur, and
    what its objects are; an empty text for rows.

    name: of the file. Raises DataError for what is no log, Refused for what is no JSON.
    """
    rows: list[Row] = []
    layout = ""
    decisions = _Decisions(name)
    for number, record in enumerate(_records(text, name), 1):
        if not isinstance(record, dict):
            raise DataError(
                f"{name} holds {_kind_of(record)} in place {number}; write one object a"
                ' row, {"column": value, …}'
            )
        if all(key in record for key in _DECISION):
            layout = DECISIONS
            rows.append(decisions.row_of(record, number))
        elif isinstance(record.get("steps"), list):
            layout = EPISODES
            rows += _rows_of_episode(record, number, name)
        elif record.get("type") == _MULTI_AGENT:
            layout = BATCHES
            rows += _rows_of_batch(_only_policy(record, name), number, name)
        elif _length_of_batch(record) is not None or _is_sample_batch(record):
            layout = BATCHES
            rows += _rows_of_batch(record, number, name)
        else:
            rows.append(_flat(record))
    decisions.name_actions()
    names = dict.fromkeys(key for row in rows for key in row)
    if decisions.are_all_of_one_weight(rows):
        del names["weight"]
    # objects of different keys leave most cells empty
    check_memory(len(names) * len(rows) * _BYTES_OF_CELL)
    columns = {key: _series(key, [row.get(key) for row in rows]) for key in names}
    return columns, layout


def _records(text: str, name: str) -> Iterator[Any]:
    """The objects of a file. Raises DataError if it is empty, Refused for no JSON."""
    text = text.removeprefix("\ufeff").strip()
    if not text:
        raise DataError(f"{name} is empty; copy or export it again")
    if text.startswith("["):
        yield from parse_json(text)
        return
    first, _, rest = text.partition("\n")
    try:
        json.loads(first)
        is_by_line = True
    except (ValueError, RecursionError):
        is_by_line = False
    if not is_by_line and rest:
        yield parse_json(text)
        return
    for line in text.split("\n"):
        if line.strip():
            yield parse_json(line)


def _kind_of(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    return "a single value"


def _flat(record: JsonObject, above: str = "", depth: int = 0) -> Row:
    """A row without objects inside: their keys follow that of the object and a point.

    above: key of the object that holds the record, with a point. Raises Refused for
    objects too deep.
    """
    if depth > _MOST_DEEP:
        raise Refused(f"objects lie in objects more than {_MOST_DEEP} deep")
    row: Row = {}
    for key, value in record.items():
        if isinstance(value, dict):
            row |= _flat(value, f"{above}{key}.", depth + 1)
        else:
            row[f"{above}{key}"] = value
    return row


def _rows_of_episode(record: JsonObject, number: int, name: str) -> list[Row]:
    """The steps of an episode as rows; what the object says beside them, such as
    metadata, is left out.
    """
    rows = []
    for step in record["steps"]:
        if not isinstance(step, dict):
            raise DataError(
                f"{name}: the steps of object {number} are no objects; write each step"
                ' as {"observation": …, "action": …, "reward": …}'
            )
        rows.append({"episode": number - 1, **_flat(step)})
    return rows


def _is_sample_batch(record: JsonObject) -> bool:
    return record.get("type") == _SAMPLE_BATCH


def _length_of_batch(record: JsonObject) -> int | None:
    """The number of rows of a batch, that of its rewards; None for other objects."""
    for key in _REWARDS:
        if isinstance(record.get(key), list):
            return len(record[key])
    return None


def _only_policy(record: JsonObject, name: str) -> JsonObject:
    """The batch of the only policy. Raises DataError if there are several."""
    batches = record.get("policy_batches")
    if not isinstance(batches, dict) or len(batches) != 1:
        policies = "none"
        if isinstance(batches, dict):
            policies = listed(list(batches), 4) or "none"
        raise DataError(
            f"{name} holds batches of several policies ({policies}); write the batches"
            " of one policy into a file of its own"
        )
    (batch,) = batches.values()
    if not isinstance(batch, dict):
        raise DataError(
            f"{name} holds a batch that is {_kind_of(batch)}; write it as an object"
            " with a list for each column"
        )
    return batch


def _rows_of_batch(record: JsonObject, number: int, name: str) -> list[Row]:
    """The rows of a batch, whose columns are lists of one length.

    Raises DataError for packed columns, and for lists of other lengths.
    """
    length = _length_of_batch(record)
    if length is None:
        raise DataError(
            f"{name}: batch {number} has no list of rewards; write rewards as a list"
        )
    columns: Row = {}
    for key, values in record.items():
        if key == "type":
            continue
        is_packed = isinstance(values, str) and key in ("obs", "new_obs")
        if is_packed:
            raise DataError(
                f"{name}: {key} is packed into a pickle, which is never opened; write"
                " the batches again with output_compress_columns=[]"
            )
        if isinstance(values, list) and len(values) != length:
            raise DataError(
                f"{name}: batch {number} has {key} for {len(values)} of {length}"
                " rewards; write lists of one length"
            )
        if not isinstance(values, dict):
            columns[key] = values
    rows: list[Row] = []
    for i in range(length):
        row = {}
        for key, values in columns.items():
            row[key] = values
            if isinstance(values, list):
                row[key] = values[i]
        rows.append(_flat(row))
    return rows


class _Decisions:
    """Rows of VowpalWabbit's decisions.

    A decision has the columns ``action``, ``cost``, ``probability`` and those of its
    context ``c``. The actions are listed in ``c._multi``. If they are the same in all
    decisions, those whose only feature is a text or number are called by it, others by
    their place, from 1. If they differ, each is called by what identifies it
    (`_identity`), and the column ``available_actions`` lists those of each decision.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: list[str] | None = None
        # of each decision: its row, its number in the file, the place of its action, and
        # what identifies all of its actions
        self._rows: list[Row] = []
        self._numbers: list[int] = []
        self._places: list[int] = []
        self._identities: list[list[str | None]] = []
        self._labels: list[str] = []
        self._other: int | None = None  # number of the first one with other actions

    def row_of(self, record: JsonObject, number: int) -> Row:
        """The row of a decision, the ``number``-th of the file; `name_actions` fills in
        its action. Raises DataError.
        """
        context = record["c"]
        if not isinstance(context, dict) or not isinstance(context.get("_multi"), list):
            raise DataError(
                f"{self._name}: decision {number} lists no actions (c._multi); slates"
                " and continuous actions are not read: write a table, one decision a"
                " row"
            )
        if record.get("_skipLearn"):
            raise DataError(
                f"{self._name}: decision {number} was not carried out (_skipLearn);"
                " leave such lines out"
            )
        actions = context["_multi"]
        self._look_at(actions, number)
        place = record.get("_labelIndex")
        one_based = record.get("_label_Action")
        if place is None and isinstance(one_based, int):
            place = one_based - 1
        if not isinstance(place, int) or not 0 <= place < len(actions):
            raise DataError(
                f"{self._name}: decision {number} does not say which action was chosen"
                " (_labelIndex, _label_Action)"
            )
        self._places.append(place)
        row: Row = {
            "action": None,
            "cost": record["_label_cost"],
            "probability": record["_label_probability"],
        }
        # this share of such decisions was dropped before they were written
        dropped = record.get("pdrop", 0.0)
        if not isinstance(dropped, (int, float)) or not 0.0 <= dropped < 1.0:
            raise DataError(
                f"{self._name}: decision {number} has pdrop {dropped!r}; give a share"
                " of at least 0, below 1"
            )
        row["weight"] = 1.0 / (1.0 - dropped)
        for key in ("Timestamp", "EventId"):
            if key in record:
                row[key] = record[key]
        shared = {key: value for key, value in context.items() if key != "_multi"}
        row |= _flat(shared)
        self._rows.append(row)
        return row

    def are_all_of_one_weight(self, rows: Sequence[Row]) -> bool:
        """Whether there are decisions, and none was dropped before."""
        return self._first is not None and all(row.get("weight") == 1.0 for row in rows)

    def name_actions(self) -> None:
        """Fill in the actions of all rows, and the available ones where they differ from
        row to row. Raises DataError if nothing identifies them.
        """
        decisions = zip(self._rows, self._places, self._identities, strict=True)
        if self._other is None:
            for row, place, _ in decisions:
                row["action"] = self._labels[place]
            return
        for number, identities in zip(self._numbers, self._identities, strict=True):
            if None in identities or len(set(identities)) < len(identities):
                raise DataError(
                    f"{self._name}: the actions differ from row to row (decision"
                    f" {self._other} has others than decision 1), and nothing identifies"
                    f" those of decision {number}: give each an id or a tag of its own"
                    " in c._multi, or put the decisions with the same c._multi into a"
                    " file of their own"
                )
        for row, place, identities in decisions:
            row["action"] = identities[place]
            row[AVAILABLE] = identities

    def _look_at(self, actions: Sequence[object], number: int) -> None:
        """Compare a decision's actions with those of the first one."""
        features = [json.dumps(action, sort_keys=True) for action in actions]
        if self._first is None:
            self._first = features
            self._labels = _labels(actions)
        if features != self._first and self._other is None:
            self._other = number
        self._numbers.append(number)
        self._identities.append([_identity(action) for action in actions])


def _identity(action: object) -> str | None:
    """What identifies an action: its only feature, or else the only one that is called
    id or tag; None if there is no such text or number.
    """
    if not isinstance(action, dict):
        return None
    features = {
        key: value
        for key, value in _flat(action).items()
        if isinstance(value, (str, int)) and not isinstance(value, bool)
    }
    named = [
        value
        for key, value in features.items()
        if key.split(".")[-1].strip("_").lower() in _IDENTITIES
    ]
    if len(named) == 1:
        return str(named[0])
    if len(_flat(action)) == len(features) == 1:
        return str(next(iter(features.values())))
    return None


def _labels(actions: Sequence[object]) -> list[str]:
    """Names of actions: the only feature of each, if these differ; else their places."""
    names = []
    for action in actions:
        values = []
        if isinstance(action, dict):
            values = list(_flat(action).values())
        if len(values) == 1 and isinstance(values[0], (str, int)):
            names.append(str(values[0]))
    if len(names) == len(actions) == len(set(names)):
        return names
    return [str(place) for place in range(1, len(actions) + 1)]


def _series(name: str, values: list[Any]) -> pl.Series:
    """A column of the narrowest type that holds all values: flags, whole numbers,
    numbers, texts, lists of numbers; of several kinds, texts.
    """
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pl.Series(name, values, dtype=pl.Null)
    if kinds == {bool}:
        return pl.Series(name, values, dtype=pl.Boolean)
    if kinds == {str}:
        return pl.Series(name, values, dtype=pl.String)
    if kinds == {int}:
        fits = all(-_INT64 <= value < _INT64 for value in values if value is not None)
        if fits:
            return pl.Series(name, values, dtype=pl.Int64)
        return pl.Series(name, [_as_text(value) for value in values])
    if kinds <= {int, float}:
        return pl.Series(name, values, dtype=pl.Float64, strict=False)
    if kinds == {list}:
        return _lists(name, values)
    return pl.Series(name, [_as_text(value) for value in values], dtype=pl.String)


def _lists(name: str, values: list[Any]) -> pl.Series:
    """A column of lists of numbers, or of texts where a list holds anything else."""
    items = {type(item) for value in values if value is not None for item in value}
    if items and items <= {int, float, bool}:
        return pl.Series(name, values, dtype=pl.List(pl.Float64), strict=False)
    texts: list[list[str | None] | None] = []
    for value in values:
        if value is None:
            texts.append(None)
        else:
            texts.append([_as_text(item) for item in value])
    return pl.Series(name, texts, dtype=pl.List(pl.String))


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)
