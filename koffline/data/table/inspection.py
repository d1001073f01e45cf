"""A first look at a stranger's table: its columns, guessed roles, everything wrong, and a mapping to edit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from koffline.data import remote
from koffline.data.columns import counted
from koffline.data.disk.opening import is_shard_folder
from koffline.data.flat import REQUIRED, used_keys
from koffline.data.minari import data_folder
from koffline.data.table import profiles
from koffline.data.table.counts import ORDER, only_last
from koffline.data.table.episodes import assemble
from koffline.data.table.files import CSV, HDF5, NPZ, faults, find_tables
from koffline.data.table.mapping import CUT, TableMapping, own_mapping
from koffline.data.table.problems import Problems, is_pattern
from koffline.data.table.profiles import IGNORED, Profile
from koffline.data.table.rows import CLOCK, TableRows, described, open_rows
from koffline.data.table.survey import prepare_table
from koffline.errors import DataError, printable
from koffline.store.files import MINARI

ROWS = 100_000
_KEYS = {"observation": "observations", "next observation": "next_observations"}
_SEVERAL = ("observations", "next_observations", "action")
_QUESTION = """
# Which rows belong together? No column says so. Uncomment the line that is true:
# one_step: true     # every row is an episode of one step that ends (a bandit: one user, one decision)
# episode: COLUMN    # rows with one value in this column are one episode
# one_step: false    # all rows are one record, in the order of time or of the table
"""
_ALL_ACTIONS = "  # all that were seen, numbered in this order: add others that the policy may take"
_FEW_VALUES = 20  # a column with more does not say how an episode ended


@dataclass
class Inspection:
    """Columns of the first ``rows`` rows of a log, what is wrong, and for a table the guessed mapping.

    ``reasons``: why a line of the mapping is there, by its key, or by key and column. ``is_open``: only the
    user knows which rows are an episode.
    """

    source: str
    rows: int
    columns: list[Profile]
    mapping: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reasons: dict[Any, str] = field(default_factory=dict)
    is_open: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("name", "kind", "missing", "distinct", "range", "example", "role", "reason")
        columns = [{name: getattr(each, name) for name in names} for each in self.columns]
        shown = ("source", "rows", "mapping", "problems", "notes", "is_open")
        return {**{name: getattr(self, name) for name in shown}, "columns": columns}

    def to_yaml(self) -> str:
        """The mapping with its reasons, to be edited and used."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"# Columns of {printable(self.source)}, guessed from its first {self.rows} rows. Edit, then:"
        yield f"#   koffline evaluate FILE --mapping THIS_FILE --policy POLICY --gamma 0.99"
        for key in TableMapping.model_fields:
            value = self.mapping.get(key)
            if value is None and key in ("action", "reward"):
                yield f"{key}:  # which column? No name says so"
            elif isinstance(value, dict):
                yield f"{key}:"
                yield from (
                    f"  {_text(name)}: {_text(how)}{self._why(key, name)}" for name, how in value.items()
                )
            elif isinstance(value, list):
                yield f"{key}:{_ALL_ACTIONS if key == 'action_names' else ''}"
                yield from (f"  - {_text(name)}{self._why(key, name)}" for name in value)
            elif value is not None:
                yield f"{key}: {_text(value)}{self._why(key, value)}"
        if self.is_open:
            yield _QUESTION
        ignored = [each for each in self.columns if each.role == IGNORED]
        yield from ["# Ignored:"] * bool(ignored)
        yield from (f"#   {_text(each.name)}: {printable(each.reason)}" for each in ignored)

    def _why(self, key: str, name: Any) -> str:
        reason = self.reasons.get((key, name))
        return f"  # {printable(reason)}" if reason else ""


def _text(value: Any) -> str:
    """A text or a yes as YAML in one line, whatever it holds."""
    style = None if re.fullmatch(r"[\w.-]+", str(value)) else '"'
    found = yaml.safe_dump(value, allow_unicode=str(value).isprintable(), width=10**9, default_style=style)
    return str(found).removesuffix("...\n").strip()


def inspect_table(source: str | os.PathLike[str], rows: int = ROWS) -> Inspection:
    """Look at the first rows of a table and guess a mapping. Raises DataError, also for what needs none."""
    name = os.fspath(source)
    is_log = name.startswith(MINARI) or (
        remote.is_folder(name) and (is_shard_folder(name) or data_folder(Path(name)) is not None)
    )
    kind, files = ("", ("",)) if is_log else find_tables(name, is_table=True)
    stored = {} if is_log else dict(described(files[0], kind).fields)
    is_log = is_log or own_mapping(stored) is not None
    if is_log or (kind in (HDF5, NPZ) and set(REQUIRED) <= used_keys(stored).keys()):
        said = f"{name} needs no mapping: its keys say what the columns are"
        raise DataError(f"{said}; koffline data info and koffline data validate look into it")
    readable = {n: kind for n, kind in stored.items() if n and not is_pattern(n) and kind != pl.Unknown}
    with faults(name, kind):
        held = open_rows(TableRows(kind, files, readable, 8), hold=True, first=rows).held
    if held is None or not held.height:
        raise DataError(f"{name} has no rows; give a table with at least one transition")
    empty = pl.repeat(None, held.height, eager=True, dtype=pl.Null)
    columns = [
        profiles.profile(held[each] if each in readable else empty.alias(each), kind != CSV)
        for each in stored
    ]
    profiles.guess_roles(columns)
    found = Inspection(name, held.height, columns)
    if kind == CSV and all(map(_is_number, stored)) and not all(map(str.isdecimal, stored)):
        first = ", ".join(list(stored)[:3])
        found.problems.append(f"the first line holds numbers ({first}, …); write names of columns above it")
    for each in columns:
        if each.role == profiles.UNFIT:
            each.role = IGNORED
            found.problems.append(f"{each.name}: {each.reason}")
        if each.kind == profiles.DECIMAL_COMMA:
            found.mapping["decimal_comma"] = True
        if each.kind == profiles.TWO_WAYS:
            said = f"{each.example!r} may be a thousand or a number with decimals"
            remedy = "write it without the comma, or say decimal_comma: true"
            found.problems.append(f"{each.name}: {said}; {remedy}")
    _check_ends(found)
    for each in columns:
        if each.kind == CLOCK and each.role == "time" and any(c.is_time and c is not each for c in columns):
            found.problems.append(f"{each.name}: times of day beside dates; write both into one column")
        if each.role == "time" and (rule := each.time_rule()):
            found.notes.append(f"times in {each.name}: {rule}")
    _propose(found, held)
    _check_states(found)
    found.is_open = "episode" not in found.mapping
    missing = [key for key in ("observations", "action", "reward") if key not in found.mapping]
    found.problems += [f"no column looks like {key}; name one in the mapping" for key in missing]
    if not missing:
        _survey(found, rows)
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?\d*[.,]?\d*(e[+-]?\d+)?\s*", text, re.I) is not None


def _check_ends(found: Inspection) -> None:
    """Ask about a feature with values that stand in last rows of episodes alone: they may be its ends."""
    roles = {each.role: each for each in found.columns}
    if "episode" not in roles or "terminal" in roles:
        return
    episodes, times = roles["episode"].values, roles["time"].values if "time" in roles else None
    for each in found.columns:
        is_asked = each.role == "observation" and 2 <= each.distinct <= _FEW_VALUES
        ends = only_last(each.values, episodes, times) if is_asked else []
        if 0 < len(ends) < each.distinct:
            name = each.name if each.name.isidentifier() else f"`{each.name}`"
            told = each.name if each.is_flag else f'"{name} == {ends[0]!r}"'
            each.role, each.reason = IGNORED, f"{ends[0]!r} stands in last rows of episodes alone"
            said = f"if the world ended there, say terminal: {told}"
            found.reasons["last_row", CUT] = f"{each.name}: {each.reason}; {said}"
            found.problems.append(f"{each.name}: {each.reason}; {said}")


def _check_states(found: Inspection) -> None:
    """Note features whose every value occurs with one action only: they may be results of the action."""
    actions = [each for each in found.columns if each.role == "action"]
    if len(actions) != 1 or actions[0].distinct < 2:
        return
    name, action = actions[0].name, actions[0].values.cast(pl.String)
    for each in found.columns:
        if each.role != "observation" or not 2 <= each.distinct <= found.rows // 10:
            continue
        both = pl.DataFrame({"feature": each.values, "action": action}).drop_nulls()
        if both.n_unique() == both["feature"].n_unique():
            said = f"each value goes with one {name} only; leave it out if it is what the {name} led to"
            found.problems.append(f"{each.name}: {said}")
            found.reasons["observations", each.name] = f"{each.kind}; {said}"


def _propose(found: Inspection, held: pl.DataFrame) -> None:
    """Write the mapping: roles, encodings, missing values, ends of episodes, repeated rows."""
    mapping, why = found.mapping, found.reasons
    for each in found.columns:
        key = _KEYS.get(each.role, each.role)
        if key in _SEVERAL:
            mapping.setdefault(key, []).append(each.name)
        elif key != IGNORED:
            mapping[key] = each.name
        why[key, each.name] = each.reason if key in ("action", *mapping.keys() - _SEVERAL) else each.kind
        if each.role == "observation" and each.values.dtype == pl.String:
            mapping.setdefault("encode", {})[each.name] = "one-hot"
            why["encode", each.name] = f"{each.reason}; ordinal where they have an order"
        if each.role == "action" and each.values.dtype == pl.String:
            mapping["action_names"] = sorted(each.values.drop_nulls().unique())
    _pair_next(found)
    episodes, encoded = "episode" in mapping, mapping.get("encode", {})
    impute: dict[str, str] = {}
    for each in found.columns:
        if each.stray and each.role != IGNORED:
            found.problems.append(f"{each.name}: {each.stray}; write a number there, or leave it empty")
        if each.missing and each.role != IGNORED:
            found.problems.append(f"{each.name}: {counted(each.missing, 'value', 'is', 'are')} missing")
            if each.role in ("episode", "time", "terminal", "truncated") or each.values.dtype.is_nested():
                continue
            how, said = "mean", "or zero, forward, cut, a number"
            if each.name in encoded:
                how, said = "zero", "none of the categories; or forward, cut"
            elif "observation" not in each.role:
                how, said = CUT, "ends the episode before such a row" if episodes else "leaves such rows out"
            impute[each.name], why["impute", each.name] = how, f"{each.missing} missing; {said}"
    mapping |= {"impute": impute} if impute else {}
    if episodes and "terminal" not in mapping:
        mapping["last_row"] = CUT
        said = "no column says so; terminal, if the world ended after the last row"
        why.setdefault(("last_row", CUT), said)
    named = [each.name for each in found.columns if each.role != IGNORED]
    repeated = held.height - int(pl.DataFrame([held[name] for name in named]).hash_rows(0).n_unique())
    said = f"{counted(repeated, 'row', 'repeats', 'repeat')} another in all columns that have a role"
    if repeated and not (episodes and "time" in mapping):
        found.notes += [said] * episodes  # one decision may well be like another
    elif repeated:
        found.problems.append(said)
        mapping["drop_duplicates"] = "exact"
        why["drop_duplicates", "exact"] = f"{repeated} of {held.height}"


def _pair_next(found: Inspection) -> None:
    """Put next observations in the order of observations; drop them unless every observation has one."""
    following = found.mapping.get("next_observations", [])
    bare = [re.sub(r"^(next|new)[_. -]?|[_. -]next$", "", name, flags=re.I) for name in following]
    if following and set(bare) == set(found.mapping.get("observations", [])):
        order = {name: bare.index(name) for name in found.mapping["observations"]}
        found.mapping["next_observations"] = [following[i] for i in order.values()]
    elif following:
        del found.mapping["next_observations"]
        for each in found.columns:
            if each.role == "next observation":
                each.role, each.reason = IGNORED, "only some observations have a next one"


def _survey(found: Inspection, rows: int) -> None:
    """Collect the problems and notes of reading the log with this mapping."""
    problems, said = Problems(found.source), list[str]()
    with problems.noted():
        table = prepare_table(found.source, TableMapping(**found.mapping), None, in_memory=True, first=rows)
        assert table.rows.held is not None, "asked for"
        found.is_open = table.is_open
        with problems.noted():
            assemble(table.rows.held, table)
        problems.found = table.problems.found or problems.found
        said += [*table.metadata.notes, *table.counts.sentences()]
    found.notes += [note for note in said if not note.startswith(ORDER)]
    found.problems += problems.found + [note for note in said if note.startswith(ORDER)]
