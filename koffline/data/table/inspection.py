"""A first look at an unknown table: its columns, guessed roles, all problems, and a mapping to edit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import yaml

from koffline.data.columns import in_natural_order
from koffline.data.flat import REQUIRED, used_keys
from koffline.data.kinds import CSV, HDF5, NPZ, find_tables, is_log_source
from koffline.data.raw import ORDER, SHARED
from koffline.data.table import profiles
from koffline.data.table.arrow_frames import UnreadableColumn
from koffline.data.table.episodes import assemble
from koffline.data.table.mapping import CUT, TableMapping, own_mapping
from koffline.data.table.profiles import IGNORED, NEXT, Profile
from koffline.data.table.readers import faults
from koffline.data.table.rows import TableRows, header_of, open_rows
from koffline.data.table.survey import prepare_table
from koffline.data.table.values import TRUE, Problems, is_pattern
from koffline.errors import DataError, counted, listed, printable
from koffline.store.files import Location

_QUESTION = """
# Which rows belong together? No column says so. Uncomment the line that is true:
# one_step: true     # every row is an episode of one step that ends (a bandit: one user, one decision)
# episode: COLUMN    # rows with one value in this column are one episode
# one_step: false    # all rows are one record, in the order of time or of the table
# cluster: COLUMN    # beside one_step, if a user has several rows: they are not independent
"""
_CHOICES = {
    "encode": "one-hot, or ordinal where the categories have an order",
    "action_names": "all that were seen, numbered in this order: add others that the policy may take",
    "last_row": "cut by the end of logging, or terminal if the world ended after the last row",
    "impute": "mean, zero (none of the categories), forward, a number, or cut: ends episodes before them",
    "drop_duplicates": "exact, or first or last of rows of one episode and time",
}
_SEVERAL = ("observations", "next_observations", "action")
_FEW_VALUES = 20  # a column with more values cannot be an end flag
_MOST_UNREADABLE = 20  # columns; a file with more is damaged
_BY_CHANCE = 5  # fewer rows may be last rows by chance


@dataclass
class Inspection:
    """Columns of the first ``rows`` rows of a log, problems, and for a table the guessed mapping.

    ``is_open``: only the user can say which rows form an episode.
    """

    source: str
    rows: int
    columns: list[Profile]
    mapping: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_open: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("name", "kind", "missing", "distinct", "range", "example", "role", "reason")
        columns = [{name: getattr(each, name) for name in names} for each in self.columns]
        return {**vars(self), "columns": columns}

    def to_yaml(self) -> str:
        """The mapping as YAML to edit, with problems and alternatives as comments."""
        lines = [
            f"# Columns of {printable(self.source)}, guessed from its first {self.rows} rows. Edit, then:",
            "#   koffline evaluate FILE --mapping THIS_FILE --policy POLICY --gamma 0.99",
            *(f"# problem: {printable(each)}" for each in self.problems),
        ]
        for key in TableMapping.model_fields:
            if key in self.mapping:
                lines += [f"# {key}: {_CHOICES[key]}"] if key in _CHOICES else []
                dumped = yaml.safe_dump({key: self.mapping[key]}, allow_unicode=True, sort_keys=False)
                if not dumped.replace("\n", "").isprintable():
                    dumped = yaml.safe_dump({key: self.mapping[key]}, sort_keys=False)
                lines.append(dumped.rstrip("\n"))
            elif key in ("action", "reward"):
                lines.append(f"{key}:  # which column? No name says so")
        ignored = [f"{each.name} ({each.reason})" for each in self.columns if each.role == IGNORED]
        lines += [_QUESTION] * self.is_open + [f"# ignored: {printable(each)}" for each in ignored]
        return "\n".join(lines) + "\n"


def inspect_table(source: Location, rows: int = 100_000) -> Inspection:
    """Look at the first rows of a table and guess a mapping. Raises DataError, also if none is needed."""
    name = os.fspath(source)
    has_roles = is_log_source(name)
    if not has_roles:
        kind, files = find_tables(name, is_table=True)
        stored = dict(header_of(files[0], kind).fields)
        has_roles = kind in (HDF5, NPZ) and set(REQUIRED) <= used_keys(stored).keys()
    if has_roles or own_mapping(stored):
        said = f"{name} needs no mapping: its keys say what the columns are"
        raise DataError(f"{said}; koffline data info and koffline data validate look into it")
    readable = {n: kind for n, kind in stored.items() if n and not is_pattern(n) and kind != pl.Unknown}
    held, unreadable = _first_rows(name, kind, files, readable, rows)
    if not held.height:
        raise DataError(f"{name} has no rows; give a table with at least one transition")
    empty = pl.repeat(None, held.height, eager=True, dtype=pl.Null)
    columns = [profiles.profile(held.get_column(n, default=empty.alias(n)), kind != CSV) for n in stored]
    profiles.guess_roles(columns)
    found = Inspection(name, held.height, columns)
    problems = found.problems
    problems += unreadable
    numbers = pl.Series(list(stored)).str.replace(",", ".").cast(pl.Float64, strict=False)
    if kind == CSV and not numbers.has_nulls() and not all(map(str.isdecimal, stored)):
        problems.append(f"the first line holds numbers ({listed(stored, 3)}); write column names above it")
    for each in columns:
        if each.problem:
            problems.append(f"{each.name}: {each.problem}")
        if each.kind == profiles.DECIMAL_COMMA:
            found.mapping["decimal_comma"] = True
        if each.role == "time" and (rule := each.time_rule()):
            found.notes.append(f"times in {each.name}: {rule}")
    _check_ends(found)
    _check_states(found)
    _propose(found, held)
    found.is_open = "episode" not in found.mapping
    missing = [key for key in ("observations", "action", "reward") if key not in found.mapping]
    problems += [f"no column looks like {key}; name one in the mapping" for key in missing]
    if not missing:
        _survey(found, rows)
    return found


def _first_rows(
    name: str, kind: str, files: tuple[str, ...], readable: dict[str, Any], rows: int
) -> tuple[pl.DataFrame, list[str]]:
    """The first rows of the columns that can be read, and why others cannot; these leave ``readable``."""
    unreadable = []
    while True:
        try:
            with faults(name, kind):
                held = open_rows(TableRows(kind, files, readable, 8), hold=True, first=rows).held
        except UnreadableColumn as error:
            unreadable.append(str(error))
            if len(unreadable) > _MOST_UNREADABLE:
                raise
            del readable[error.column]
        else:
            assert held is not None, "asked for"
            return held, unreadable


def _check_ends(found: Inspection) -> None:
    """Find features with values that occur in last rows of episodes only: they may mark terminations."""
    roles = {each.role: each.values for each in found.columns}
    if "episode" not in roles or 2 * roles["episode"].n_unique() > found.rows:
        return
    time = roles.get("time", pl.int_range(found.rows, eager=True))
    rows = pl.DataFrame({"episode": roles["episode"], "time": time})
    is_last = rows.select(pl.col("time") == pl.col("time").max().over("episode")).to_series()
    for each in found.columns:
        several = each.distinct + bool(each.missing)  # an empty cell is a value, too
        is_state = "terminal" in roles and each.is_number and not each.is_flag
        if each.role != "observations" or not 2 <= several <= _FEW_VALUES or is_state:
            continue
        seen = pl.DataFrame({"value": each.values, "last": is_last}).drop_nulls().group_by("value")
        ends = seen.agg(pl.len(), pl.col("last").all()).filter(pl.col("last") & (pl.col("len") >= _BY_CHANCE))
        if 0 < ends.height < several:
            values = ends["value"].sort().to_list()
            name = each.name if each.name.isidentifier() else f"`{each.name}`"
            is_text = each.missing or each.values.dtype == pl.Boolean
            parts = [f"{name} == {(str(end).lower() if is_text else end)!r}" for end in values]
            told = f'"{parts[0]}"' if len(parts) == 1 else f'"max({", ".join(parts)})"'
            if each.is_flag and not each.missing and str(values[0]).lower() in TRUE:
                told = each.name
            each.role, each.reason = IGNORED, f"{listed(map(repr, values))}: in last rows of episodes alone"
            left = "left out, as if it came of the action; if not, add it to the observations"
            said = left if "terminal" in roles else f"if the world ended there, say terminal: {told}"
            found.problems.append(f"{each.name}: {each.reason}; {said}")


def _check_states(found: Inspection) -> None:
    """Leave out features whose values each occur with one action only: they may be results of the action."""
    actions = [each for each in found.columns if each.role == "action" and each.distinct > 1]
    for each in found.columns if len(actions) == 1 else ():
        if each.role == "observations" and 2 <= each.distinct <= found.rows // 10:
            both = pl.DataFrame([each.values, actions[0].values.cast(pl.String)]).drop_nulls()
            if both.n_unique() == both[each.name].n_unique():
                name = actions[0].name
                each.role, each.reason = IGNORED, f"each value goes with one {name} only"
                said = f"add it to the observations if it was known before the {name}"
                found.problems.append(f"{each.name}: {each.reason}: left out, as if it came of it; {said}")


def _propose(found: Inspection, held: pl.DataFrame) -> None:
    """Fill in the mapping: roles, encodings, missing values, ends of episodes, repeated rows."""
    mapping = found.mapping
    for each in found.columns:
        if each.role in _SEVERAL:
            mapping.setdefault(each.role, []).append(each.name)
        elif each.role != IGNORED:
            mapping[each.role] = each.name
        if each.role == "observations" and each.values.dtype == pl.String:
            mapping.setdefault("encode", {})[each.name] = "one-hot"
        if each.role == "action" and each.is_choice:
            values = each.values.drop_nulls().unique().to_list()
            is_text = each.values.dtype == pl.String
            mapping["action_names"] = in_natural_order(values) if is_text else sorted(values)
    following = {NEXT.sub(r"\1\2", name): name for name in mapping.pop("next_observations", [])}
    if following and following.keys() == set(mapping.get("observations", [])):
        mapping["next_observations"] = [following[name] for name in mapping["observations"]]
    for each in found.columns:
        if each.role == "next_observations" and each.name not in mapping.get("next_observations", []):
            each.role, each.reason = IGNORED, "only some observations have a next one"
    used = [each for each in found.columns if each.role != IGNORED]
    for each in used:
        if each.missing and each.role != "next_observations":  # an episode's last state may have none
            found.problems.append(f"{each.name}: {counted(each.missing, 'value', 'is', 'are')} missing")
            if each.role in ("episode", "time", "terminal", "truncated") or each.values.dtype.is_nested():
                continue
            how = "zero" if each.name in mapping.get("encode", {}) else "mean"
            mapping.setdefault("impute", {})[each.name] = how if "observations" in each.role else CUT
    if "episode" in mapping and "terminal" not in mapping:
        mapping["last_row"] = CUT
    repeated = held.height - int(held.select(each.name for each in used).hash_rows(0).n_unique())
    said = f"{counted(repeated, 'row', 'repeats', 'repeat')} another in all columns that have a role"
    if repeated and {"episode", "time"} <= mapping.keys():
        found.problems.append(said)
        mapping["drop_duplicates"] = "exact"
    elif repeated and "episode" in mapping:  # without episodes, equal rows are plausible
        found.notes.append(said)


def _survey(found: Inspection, rows: int) -> None:
    """Collect the problems and notes of reading the log with this mapping."""
    problems, said = Problems(found.source), list[str]()
    with problems.noted():
        table = prepare_table(found.source, TableMapping(**found.mapping), None, in_memory=True, first=rows)
        assert table.rows.held is not None, "asked for"
        found.is_open = table.is_open
        with problems.noted():
            if (read := assemble(table.rows.held, table)) is not None:
                read.transitions()  # the log's own checks: infinities, probabilities above 1
        problems.found = table.problems.found or problems.found
        said += table.noted.notes
    found.notes += [note for note in said if not note.startswith((ORDER, SHARED))]
    found.problems += problems.found + [note for note in said if note.startswith((ORDER, SHARED))]
