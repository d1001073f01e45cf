"""A first look at an unknown table: its columns, guessed roles, all problems, and a
mapping to edit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import yaml

from koffline.data.columns import in_natural_order
from koffline.data.flat import REQUIRED, used_keys
from koffline.data.kinds import CSV, HDF5, NPZ, find_tables, is_log_source
from koffline.data.raw import ORDER, SHARED
from koffline.data.structure import symptoms_of
from koffline.data.table import profiles
from koffline.data.table.arrow_frames import UnreadableColumn
from koffline.data.table.episodes import assemble
from koffline.data.table.guesses import Guess, guess_roles, the_list
from koffline.data.table.later import find_later
from koffline.data.table.mapping import (
    CUT,
    PREVIOUS,
    TableMapping,
    as_line,
    as_question,
    own_mapping,
)
from koffline.data.table.names import parts
from koffline.data.table.profiles import IGNORED, Profile
from koffline.data.table.readers import faults
from koffline.data.table.rows import TableRows, header_of, open_rows
from koffline.data.table.survey import prepare_table
from koffline.data.table.texts import doubtful_spellings, one_spelling
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
    "action_names": (
        "all that were seen, numbered in this order: add others that the policy may"
        " take"
    ),
    "last_row": (
        "cut by the end of logging, or terminal if the world ended after the last row"
    ),
    "reward_row": (
        "a reward without an action goes to the row above; drop: it does not count"
    ),
    "impute": (
        "mean, zero (none of the categories), forward, a number, or cut: ends episodes"
        " before them"
    ),
    "drop_duplicates": "exact, or first or last of rows of one episode and time",
}
_SEVERAL = ("observations", "next_observations", "action")
_FEW_VALUES = 20  # a column with more values cannot be an end flag
_MOST_UNREADABLE = 20  # columns; a file with more is damaged
_BY_CHANCE = 5  # fewer rows may be last rows by chance
# share of the episodes with the usual number of rows, above which a limit cut them
_ONE_LENGTH = 0.95
# In notes that depend on what last rows are.
_OF_LAST_ROWS = (
    "(last_row)",
    "next observations were taken from",
    "without a flag",
    "no terminal column",
)
_COSTS = ("cost", "costs", "loss", "penalty")


@dataclass
class Inspection:
    """Columns of the first ``rows`` rows of a log, problems, and for a table the
    guessed mapping.

    A key of ``mapping`` whose value begins with "?" is open: ``open`` lists its
    answers, and commands refuse the mapping until one is chosen. ``is_open``: only the
    user can say which rows form an episode.
    ``doubtful``: columns that may depend on what happens later.
    """

    source: str
    rows: int
    columns: list[Profile]
    mapping: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_open: bool = False
    open: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    doubtful: list[str] = field(default_factory=list)

    def ask(self, key: str, answers: Iterable[Mapping[str, Any]]) -> None:
        """Leave a key open. answers: what to write instead, each with one key."""
        known = self.open.setdefault(key, [])
        known += [each for each in answers if each not in known]
        self.mapping[key] = as_question(known)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = (
            "name",
            "kind",
            "missing",
            "distinct",
            "range",
            "example",
            "role",
            "reason",
        )
        columns = [
            {name: getattr(each, name) for name in names} for each in self.columns
        ]
        return {**vars(self), "columns": columns}

    def to_yaml(self) -> str:
        """The mapping as YAML to edit, with problems and alternatives as comments."""
        lines = [
            (
                f"# Columns of {printable(self.source)}, guessed from its first"
                f" {self.rows} rows. Edit, then:"
            ),
            (
                "#   koffline evaluate FILE --mapping THIS_FILE --policy POLICY --gamma"
                " 0.99"
            ),
            *(f"# problem: {printable(each)}" for each in self.problems),
        ]
        for key in TableMapping.model_fields:
            if key in self.mapping:
                if key in self.open:
                    lines.append(f"# {key} is open; write one of these lines instead:")
                    lines += [
                        f"#   {printable(as_line(answer))}" for answer in self.open[key]
                    ]
                elif key in _CHOICES:
                    lines.append(f"# {key}: {_CHOICES[key]}")
                dumped = yaml.safe_dump(
                    {key: self.mapping[key]}, allow_unicode=True, sort_keys=False
                )
                if not dumped.replace("\n", "").isprintable():
                    dumped = yaml.safe_dump({key: self.mapping[key]}, sort_keys=False)
                lines.append(dumped.rstrip("\n"))
            elif key in ("action", "reward"):
                lines.append(f"{key}:  # which column? No name says so")
        ignored = [
            f"{each.name} ({each.reason})"
            for each in self.columns
            if each.role == IGNORED
        ]
        lines += [_QUESTION] * self.is_open + [
            f"# ignored: {printable(each)}" for each in ignored
        ]
        return "\n".join(lines) + "\n"


def inspect_table(source: Location, rows: int = 100_000) -> Inspection:  # noqa: C901
    """Look at the first rows of a table and guess a mapping.

    Raises DataError, also if none is needed.
    """
    name = os.fspath(source)
    has_roles = is_log_source(name)
    if not has_roles:
        kind, files = find_tables(name, is_table=True)
        stored = dict(header_of(files[0], kind).fields)
        has_roles = kind in (HDF5, NPZ) and set(REQUIRED) <= used_keys(stored).keys()
    if has_roles or own_mapping(stored):
        said = f"{name} needs no mapping: its keys say what the columns are"
        raise DataError(
            f"{said}; koffline data info and koffline data validate look into it"
        )
    readable = {
        n: kind
        for n, kind in stored.items()
        if n and not is_pattern(n) and kind != pl.Unknown
    }
    held, unreadable = _first_rows(name, kind, files, readable, rows)
    if not held.height:
        raise DataError(
            f"{name} has no rows; give a table with at least one transition"
        )
    empty = pl.repeat(None, held.height, eager=True, dtype=pl.Null)
    columns = [
        profiles.profile(held.get_column(n, default=empty.alias(n)), kind != CSV)
        for n in stored
    ]
    guess = guess_roles(columns)
    found = Inspection(name, held.height, columns)
    problems = found.problems
    problems += unreadable
    numbers = (
        pl.Series(list(stored)).str.replace(",", ".").cast(pl.Float64, strict=False)
    )
    if kind == CSV and not numbers.has_nulls() and not all(map(str.isdecimal, stored)):
        problems.append(
            f"the first line holds numbers ({listed(stored, 3)}); write column names"
            " above it"
        )
    for each in columns:
        if each.problem:
            problems.append(f"{each.name}: {each.problem}")
        if each.kind == profiles.DECIMAL_COMMA:
            found.mapping["decimal_comma"] = True
        if each.role == "time" and (rule := each.time_rule()):
            found.notes.append(f"times in {each.name}: {rule}")
    problems += guess.ends.problems
    for key, answers in guess.ends.questions.items():
        found.ask(key, answers)
    if guess.steps.has_ids:
        _check_ends(found, guess)
    _check_later(found, guess)
    _check_states(found)
    _settle_lists(found)
    _settle_costs(found)
    _propose(found, held, guess)
    _settle_observations(found)
    found.is_open = not {"episode", "starts"} & found.mapping.keys()
    missing = [
        key for key in ("observations", "action", "reward") if key not in found.mapping
    ]
    problems += [
        f"no column looks like {key}; name one in the mapping" for key in missing
    ]
    if "observations" in missing:
        problems += [
            f"{each.name}: {each.reason}; {_unnested(each)}"
            for each in columns
            if each.is_struct
        ]
    if not missing:
        _survey(found, rows)
    return found


def _first_rows(
    name: str, kind: str, files: tuple[str, ...], readable: dict[str, Any], rows: int
) -> tuple[pl.DataFrame, list[str]]:
    """The first rows of the columns that can be read, and why others cannot; these
    leave ``readable``.
    """
    unreadable = []
    while True:
        try:
            with faults(name, kind):
                held = open_rows(
                    TableRows(kind, files, readable, 8), hold=True, first=rows
                ).held
        except UnreadableColumn as error:
            unreadable.append(str(error))
            if len(unreadable) > _MOST_UNREADABLE:
                raise
            del readable[error.column]
        else:
            assert held is not None, "asked for"
            return held, unreadable


def _unnested(each: Profile) -> str:
    return (
        "write each field as a column of its own (in polars:"
        f" frame.unnest({each.name!r}))"
    )


def _check_ends(found: Inspection, guess: Guess) -> None:
    """Find columns with values that occur in last rows of episodes only: they may mark
    terminations.

    If no flag tells what the last rows are, this is a question, with these columns
    among the answers.
    """
    steps = guess.steps
    if 2 * len(steps.lengths) > found.rows:
        return
    has_flag = "terminal" in guess.ends.roles or "terminal" in found.open
    is_last = pl.Series(steps.last_rows)
    for each in found.columns:
        several = each.distinct + bool(each.missing)  # an empty cell is a value, too
        is_state = has_flag and each.is_number and not each.is_flag
        if each.role != "observations" or not 2 <= several <= _FEW_VALUES or is_state:
            continue
        if each.values.dtype.is_nested():
            continue
        seen = (
            pl.DataFrame({"value": each.values, "last": is_last})
            .drop_nulls()
            .group_by("value")
        )
        ends = seen.agg(pl.len(), pl.col("last").all()).filter(
            pl.col("last") & (pl.col("len") >= _BY_CHANCE)
        )
        if not 0 < ends.height < several:
            continue
        values = ends["value"].sort().to_list()
        told = _written_end(each, values)
        each.role = IGNORED
        each.reason = f"{listed(map(repr, values))}: in last rows of episodes alone"
        said = (
            "left out, as if it came of the action; if not, add it to the observations"
        )
        if not has_flag:
            shown = told if told == each.name else f'"{told}"'
            said = f"if the world ended there, say terminal: {shown}"
            found.ask("last_row", [{"terminal": told}])
        found.problems.append(f"{each.name}: {each.reason}; {said}")


def _written_end(each: Profile, values: list[Any]) -> str:
    """The flag or formula that is true where a column has one of the values."""
    if each.is_flag and not each.missing and str(values[0]).lower() in TRUE:
        return each.name
    if each.name.isidentifier():
        name = each.name
    else:
        name = f"`{each.name}`"
    is_text = each.missing or each.values.dtype == pl.Boolean
    if each.values.dtype.is_numeric() and not each.missing:
        is_text = False
    tests = [f"{name} == {(str(end).lower() if is_text else end)!r}" for end in values]
    if len(tests) == 1:
        return tests[0]
    return f"max({', '.join(tests)})"


def _check_later(found: Inspection, guess: Guess) -> None:
    """Leave out features that depend on what happens later; ask about those that may be
    known before.
    """
    doubtful = []
    has_list = the_list(found.columns) is not None
    for later in find_later(found.columns, guess.steps):
        each = later.column
        if has_list and each.width is None:  # it is left out beside the list
            continue
        each.role = IGNORED
        each.reason = later.reason
        if later.is_sure:
            found.problems.append(
                f"{each.name}: {later.reason}: left out, since it is not known before"
            )
        else:
            doubtful.append(each.name)
            asked = "say whether it is known before the action"
            found.problems.append(f"{each.name}: {later.reason}; {asked}")
    found.doubtful += doubtful


def _settle_lists(found: Inspection) -> None:
    """A list is the whole observation: leave out other columns, and all but one
    list.
    """
    chosen = the_list(found.columns)
    if chosen is None:
        return
    for each in found.columns:
        if each.role == "observations" and each is not chosen:
            each.role = IGNORED
            each.reason = f"the list {chosen.name} stands alone as the observation"
    found.doubtful = [name for name in found.doubtful if name == chosen.name]


def _settle_costs(found: Inspection) -> None:
    """Without a column of rewards, ask whether a column of costs is the reward with the
    other sign.
    """
    if any(each.role == "reward" for each in found.columns):
        return
    for each in found.columns:
        is_cost = (
            set(_COSTS).intersection(parts(each.name))
            and each.values.dtype.is_numeric()
        )
        if is_cost and each.role in ("observations", IGNORED) and each.distinct:
            if each.name.isidentifier():
                name = each.name
            else:
                name = f"`{each.name}`"
            each.role = IGNORED
            each.reason = "a cost by its name; whether it is the reward is asked"
            found.ask("reward", [{"reward": f"-{name}"}, {"reward": each.name}])


def _settle_observations(found: Inspection) -> None:
    """Ask which observations are right if some may depend on what happens later."""
    if found.doubtful:
        known = found.mapping.get("observations", [])
        order = [
            each.name
            for each in found.columns
            if each.name in (*known, *found.doubtful)
        ]
        answers = [{"observations": names} for names in (known, order) if names]
        found.ask("observations", answers)


def _check_states(found: Inspection) -> None:
    """Leave out features whose values each occur with one action only: they may be
    results of the action.
    """
    actions = [
        each
        for each in found.columns
        if each.role == "action" and each.distinct > 1 and each.width is None
    ]
    for each in found.columns if len(actions) == 1 else ():
        if (
            each.role == "observations"
            and 2 <= each.distinct <= found.rows // 10
            and each.width is None
        ):
            both = pl.DataFrame(
                [each.values, actions[0].values.cast(pl.String)]
            ).drop_nulls()
            if both.n_unique() == both[each.name].n_unique():
                name = actions[0].name
                each.role = IGNORED
                each.reason = f"each value goes with one {name} only"
                said = f"add it to the observations if it was known before the {name}"
                found.problems.append(
                    f"{each.name}: {each.reason}: left out, as if it came of it; {said}"
                )


def _propose(found: Inspection, held: pl.DataFrame, guess: Guess) -> None:  # noqa: C901
    """Fill in the mapping: roles, encodings, missing values, ends of episodes, repeated
    rows.
    """
    mapping = found.mapping
    for each in found.columns:
        if each.role in _SEVERAL:
            mapping.setdefault(each.role, []).append(each.name)
        elif each.role != IGNORED and each.role not in mapping:
            mapping[each.role] = each.formula or each.name
        if each.role == "observations" and each.values.dtype == pl.String:
            mapping.setdefault("encode", {})[each.name] = "one-hot"
        if each.role == "action" and each.is_choice and each.width is None:
            values = each.values.drop_nulls().unique().to_list()
            meant = one_spelling(values)
            values = list({meant.get(value, value) for value in values})
            is_text = each.values.dtype == pl.String
            if is_text:
                mapping["action_names"] = in_natural_order(values)
            else:
                mapping["action_names"] = sorted(values)
            for alike in doubtful_spellings(values):
                said = (
                    f"{each.name}: {listed(map(repr, alike))} are one action, or"
                    " several?"
                )
                found.problems.append(
                    f"{said} If one, keep one of them in action_names"
                )
    mapping.pop("next_observations", None)
    following = {
        each.partner: each.name
        for each in found.columns
        if each.role == "next_observations"
    }
    if following and following.keys() == set(mapping.get("observations", [])):
        mapping["next_observations"] = [
            following[name] for name in mapping["observations"]
        ]
    for each in found.columns:
        if each.role == "next_observations" and each.name not in mapping.get(
            "next_observations", []
        ):
            each.role = IGNORED
            each.reason = "only some observations have a next one"
    used = [each for each in found.columns if each.role != IGNORED]
    for each in used:
        # an episode's last state may have none
        if each.missing and each.role != "next_observations":
            found.problems.append(
                f"{each.name}: {counted(each.missing, 'value', 'is', 'are')} missing"
            )
            if (
                each.role in ("episode", "time", "terminal", "truncated")
                or each.values.dtype.is_nested()
            ):
                continue
            if each.name in mapping.get("encode", {}):
                how = "zero"
            else:
                how = "mean"
            if "observations" in each.role:
                mapping.setdefault("impute", {})[each.name] = how
            else:
                mapping.setdefault("impute", {})[each.name] = CUT
    if {"episode", "starts"} & mapping.keys() and "terminal" not in mapping:
        _propose_last_rows(found, guess)
    repeated = held.height - int(
        held.select(each.name for each in used).hash_rows(0).n_unique()
    )
    said = (
        f"{counted(repeated, 'row', 'repeats', 'repeat')} another in all columns that"
        " have a role"
    )
    if repeated and {"episode", "time"} <= mapping.keys():
        found.problems.append(said)
        mapping["drop_duplicates"] = "exact"
    elif repeated and "episode" in mapping:
        # without episodes, equal rows are plausible
        found.notes.append(said)


def _propose_last_rows(found: Inspection, guess: Guess) -> None:
    """Say what last rows are if the rows tell, else ask.

    They are cut if a flag of cuts is set in all of them, or if nearly all episodes are
    equally long, so that a limit cut them, and no column has values of its own there.
    """
    lengths = guess.steps.lengths
    time = next((each for each in found.columns if each.role == "time"), None)
    if time is not None:
        ids = next(each.values for each in found.columns if each.role == "episode")
        rows = pl.DataFrame(
            {"id": ids, "time": time.values}
        ).unique()  # without repeated rows
        lengths = rows.group_by("id").len()["len"].to_numpy()
    cut = guess.ends.roles.get("truncated")
    is_all_cut = cut is not None and bool(cut.is_set[guess.steps.last_rows].all())
    usual = np.bincount(lengths).argmax()
    is_limit = (lengths == usual).mean() >= _ONE_LENGTH
    if "last_row" not in found.open and (is_all_cut or is_limit):
        found.mapping["last_row"] = CUT
    else:
        found.ask("last_row", [{"last_row": CUT}, {"last_row": "terminal"}])


def _survey(found: Inspection, rows: int) -> None:
    """Collect the problems and notes of reading the log with this mapping."""
    problems = Problems(found.source)
    said = list[str]()
    signs: list[str] = []
    answered = {**found.mapping}
    for (
        key,
        answers,
    ) in found.open.items():  # as if one was chosen, to see what else is wrong
        del answered[key]
        answered |= next((dict(each) for each in answers if key in each), {})
    with problems.noted():
        mapping = TableMapping(**answered)
        table = prepare_table(found.source, mapping, None, in_memory=True, first=rows)
        assert table.rows.held is not None, "asked for"
        found.is_open = table.is_open
        with problems.noted():
            read = assemble(table.rows.held, table)
            if read is not None:
                # the log's own checks: infinities, probabilities above 1
                log = read.transitions()
                # else the rows depend on an answer that the user has to give
                if not found.open:
                    signs = [symptom.text for symptom in symptoms_of(log)]
        problems.found = table.problems.found or problems.found
        if table.unearned.question and mapping.reward_row is None:
            found.mapping["reward_row"] = PREVIOUS
            said.append(table.unearned.question)
            _survey(found, rows)
            return
        if table.lost_rewards.question:
            problems.add(table.lost_rewards.question)
        said += table.noted.notes
    if "last_row" in found.open:
        said = [
            note for note in said if not any(words in note for words in _OF_LAST_ROWS)
        ]
    found.notes += [note for note in said if not note.startswith((ORDER, SHARED))]
    found.problems += (
        problems.found
        + [note for note in said if note.startswith((ORDER, SHARED))]
        + signs
    )
