"""A first look at an unknown table: its columns, guessed roles, all problems, and a
mapping to edit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import yaml

from koffline import display
from koffline.data.columns import in_natural_order, natural_key
from koffline.data.flat import REQUIRED, used_keys
from koffline.data.kinds import CSV, HDF5, NPZ, is_log_source
from koffline.data.raw import ORDER, SHARED
from koffline.data.structure import symptoms_of
from koffline.data.table import profiles
from koffline.data.table.arrow_frames import UnreadableColumn
from koffline.data.table.assembly import assemble
from koffline.data.table.column_names import Flag, flag_of, is_pattern, parts, says_cut
from koffline.data.table.column_types import ColumnType
from koffline.data.table.flag_values import TRUE
from koffline.data.table.flags import Answer
from koffline.data.table.guesses import Guess, guess_roles, the_list
from koffline.data.table.held import (
    HeldTable,
    TableSource,
    find_files,
    held_columns,
    held_frame,
)
from koffline.data.table.last_rows import find_final_states, find_no_action
from koffline.data.table.later import find_later
from koffline.data.table.mapping import (
    CUT,
    PREVIOUS,
    TableMapping,
    as_line,
    as_question,
    own_mapping,
)
from koffline.data.table.problems import Problems
from koffline.data.table.profiles import IGNORED, NUMBERS_AS_TEXT, ColumnProfile
from koffline.data.table.readers import Reader, faults
from koffline.data.table.step_order import Steps
from koffline.data.table.survey import prepare_table
from koffline.data.table.table_rows import TableRows, header_of, open_rows
from koffline.data.table.texts import doubtful_spellings, one_spelling
from koffline.data.table.time_forms import forms_of
from koffline.data.table.tools import Tool, check_name, find_tool
from koffline.errors import DataError, counted, listed, nearest_name, printable
from koffline.json_types import JsonObject
from koffline.store.files import Location

if TYPE_CHECKING:
    from rich.console import Console

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
    "final_state": (
        "true if last rows hold the final state alone, beside a dummy action and reward"
    ),
    "no_action": "values of the action that mean that none was taken",
    "reward_row": (
        "a reward without an action goes to the row above; drop: it does not count"
    ),
    "impute": (
        "mean, zero (none of the categories), forward, a number, or cut: ends episodes"
        " before them"
    ),
    "drop_duplicates": "exact, or first or last of rows of one episode and time",
}
_SEVERAL = (
    "observations",
    "next_observations",
    "action",
    "action_mask",
    "next_action_mask",
)
_FEW_VALUES = 20  # a column with more values cannot be an end flag
_MOST_UNREADABLE = 20  # columns; a file with more is damaged
_BY_CHANCE = 5  # fewer rows may be last rows by chance
# In notes that depend on what last rows are.
_OF_LAST_ROWS = (
    "(last_row)",
    "next observations were taken from",
    "without a flag",
    "no terminal column",
)
# Words of columns that list the actions which are possible in a row.
_POSSIBLE = frozenset(
    ("possible", "legal", "available", "allowed", "valid", "mask", "masks")
)
_ACTIONS = frozenset(("action", "actions"))
_FLAG_TEXTS = frozenset(("0", "1", "0.0", "1.0", "true", "false"))
_COSTS = ("cost", "costs", "loss", "penalty")


# headings of the table of columns, and what stands below them
_SHOWN = {
    "column": "name",
    "kind": "kind",
    "missing": "missing",
    "distinct": "distinct",
    "range": "range",
    "for example": "example",
    "guess": "role",
    "because": "reason",
}
_TEXT_WIDTH = 160  # of the table of columns


@dataclass(repr=False)
class Inspection:
    """Columns of the first ``rows`` rows of a log, problems, and for a table the
    guessed mapping.

    ``str(inspection)`` is what `koffline data inspect` prints; in a notebook the same
    is a table. Edit ``mapping`` and give it to `koffline.open_transitions` or
    `koffline.evaluate`.
    A key of ``mapping`` whose value begins with "?" is open: ``open`` lists its
    answers, and commands refuse the mapping until one is chosen. ``is_open``: only the
    user can say which rows form an episode.
    ``doubtful``: columns that may depend on what happens later. ``layout``: the tool
    that wrote the table, if it is known.
    """

    source: TableSource
    rows: int
    columns: list[ColumnProfile]
    mapping: JsonObject = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: str = ""
    is_open: bool = False
    open: dict[str, list[Answer]] = field(default_factory=dict)
    doubtful: list[str] = field(default_factory=list)
    _problems_of: dict[str, list[str]] = field(default_factory=dict)

    def ask(self, key: str, answers: Iterable[Answer], problem: str = "") -> None:
        """Leave a key open. answers: what to write instead, each with one key.
        problem: why it is asked, which goes with the answer.
        """
        known = self.open.setdefault(key, [])
        known += [answer for answer in answers if answer not in known]
        self.mapping[key] = as_question(known)
        if problem:
            self.add_problem(key, problem)

    def add_problem(self, key: str, problem: str) -> None:
        """A problem that is none as soon as the key of the mapping is answered."""
        self.problems.append(problem)
        self._problems_of.setdefault(key, []).append(problem)

    def answer(self, **answers: object) -> None:
        """Write keys into the mapping, and take out the questions that they answer.

        answers: values by key, as in ``inspection.answer(terminal="fell")`` where
        ``open`` says ``{"last_row": [{"terminal": "fell"}, …]}``. A column that is
        named as action or reward is no longer an observation. Raises DataError for what
        is no key of a mapping.
        """
        for key, value in answers.items():
            if key not in TableMapping.model_fields:
                raise DataError(
                    f"answer received '{key}', which is no key of a mapping;"
                    f" {nearest_name(key, TableMapping.model_fields)}"
                )
            answered = [
                question
                for question, choices in self.open.items()
                if question == key or any(key in choice for choice in choices)
            ]
            for question in answered:
                del self.open[question]
                self.mapping.pop(question, None)
            for question in {key, *answered}:
                solved = self._problems_of.pop(question, [])
                self.problems = [text for text in self.problems if text not in solved]
            self.mapping[key] = value
            if key in ("action", "reward"):
                self._take_from_observations(value)

    def _take_from_observations(self, columns: object) -> None:
        """An action or a reward is not known before the action. columns: its name, or
        a list of them.
        """
        names = columns
        if isinstance(columns, str):
            names = [columns]
        if not isinstance(names, (list, tuple)):
            return
        observations = self.mapping.get("observations")
        if isinstance(observations, list):
            kept = [name for name in observations if name not in names]
            self.mapping["observations"] = kept
        for key in ("encode", "impute"):
            by_column = self.mapping.get(key)
            if not isinstance(by_column, dict):
                continue
            for name in names:
                by_column.pop(name, None)
            if not by_column:
                del self.mapping[key]

    def to_json(self) -> JsonObject:
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
            {name: getattr(column, name) for name in names} for column in self.columns
        ]
        return {**vars(self), "source": str(self.source), "columns": columns}

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns by the role that each may have; "ignored" are those
        without one.
        """
        columns: dict[str, tuple[str, ...]] = {}
        for column in self.columns:
            columns[column.role] = (*columns.get(column.role, ()), column.name)
        return columns

    @property
    def title(self) -> str:
        """What was looked at, and how much of it."""
        return f"{self.source}, {self.rows} rows looked at"

    def cells(self) -> list[list[str]]:
        """The table of columns: what each holds, and its guessed role."""
        rows = []
        for column in self.columns:
            cells = []
            for name in _SHOWN.values():
                value = getattr(column, name)
                cells.append(printable(str(value or "")))
            rows.append(cells)
        return rows

    def lines(self) -> list[str]:
        """The layout if it is known, problems and notes, a line each."""
        layout = []
        if self.layout:
            layout.append(f"layout: {self.layout}")
        problems = [
            f"problem {number}: {printable(problem)}"
            for number, problem in enumerate(self.problems, 1)
        ]
        notes = [f"note: {printable(note)}" for note in self.notes]
        return layout + problems + notes

    def show(self, console: Console) -> None:
        """Print the table of columns."""
        display.print_table(console, self.title, list(_SHOWN), self.cells())

    def __str__(self) -> str:
        parts = [display.as_text(self.show, _TEXT_WIDTH), *self.lines()]
        if self.mapping:
            parts.append(f"\n{self.to_yaml()}")
        return "\n".join(parts)

    def __repr__(self) -> str:
        parts = [
            counted(len(self.columns), "column"),
            counted(len(self.problems), "problem"),
        ]
        if self.is_open:
            parts.append("open: which rows belong together")
        if self.open:
            parts.append(f"open: {', '.join(self.open)}")
        return f"Inspection({printable(str(self.source))}: {'; '.join(parts)})"

    def _repr_html_(self) -> str:
        """For notebooks: the table of columns, problems, notes and the mapping."""
        page = display.html_table(self.title, list(_SHOWN), self.cells())
        page += display.html_list(self.lines())
        if self.mapping:
            page += f"<pre>{display.html_text(self.to_yaml())}</pre>"
        return display.html_box(page)

    def to_yaml(self) -> str:
        """The mapping as YAML to edit, with problems and alternatives as comments."""
        lines = [
            (
                f"# Columns of {printable(str(self.source))}, guessed from its first"
                f" {self.rows} rows. Edit, then:"
            ),
            self._usage,
            *(f"# problem: {printable(problem)}" for problem in self.problems),
        ]
        for key in TableMapping.model_fields:
            if key in self.mapping:
                lines += self._lines_of(key)
            elif key in ("action", "reward"):
                lines.append(f"{key}:  # which column? No name says so")
        if self.is_open:
            lines.append(_QUESTION)
        for column in self.columns:
            if column.role == IGNORED:
                shown = printable(f"{column.name} ({column.reason})")
                lines.append(f"# ignored: {shown}")
        return "\n".join(lines) + "\n"

    @property
    def _usage(self) -> str:
        """How the mapping is given to an evaluation, as a comment."""
        if isinstance(self.source, HeldTable):
            return (
                "#   koffline.evaluate(frame, policy, gamma=0.99,"
                " mapping=inspection.mapping)"
            )
        return "#   koffline evaluate FILE --mapping THIS_FILE --policy POLICY --gamma 0.99"

    def _lines_of(self, key: str) -> list[str]:
        """A key of the mapping and its value, below a comment on its alternatives."""
        lines = []
        if key in self.open:
            lines.append(f"# {key} is open; write one of these lines instead:")
            for answer in self.open[key]:
                lines.append(f"#   {printable(as_line(answer))}")
        elif key in _CHOICES:
            lines.append(f"# {key}: {_CHOICES[key]}")
        value = {key: self.mapping[key]}
        dumped = yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
        if not dumped.replace("\n", "").isprintable():
            dumped = yaml.safe_dump(value, sort_keys=False)
        lines.append(dumped.rstrip("\n"))
        return lines


def inspect(
    source: Any,
    *,
    action: str | Sequence[str] | None = None,
    reward: str | None = None,
    episode: str | None = None,
    time: str | None = None,
    rows: int = 100_000,
    format: str | None = None,
) -> Inspection:
    """Look at a table before it is read: its columns, the role that each may have, all
    problems, and a mapping to edit.

    source: a path, URL or pattern of files; a pandas, polars or Arrow frame; or a dict
    of columns. action, reward, episode, time: columns whose role is known, because no
    name says so. rows: the most to look at. format: the tool that wrote the table, as
    in ``koffline data inspect --format``; by default it is recognised. A key of ``mapping`` that only you can
    answer begins with "?"; it is refused until you replace it by one of the answers
    that ``open`` lists. Raises DataError, also for files that need no mapping.
    """
    known: dict[str, tuple[str, ...]] = {}
    if isinstance(action, str):
        known["action"] = (action,)
    elif action is not None:
        known["action"] = tuple(action)
    for role, column in {"reward": reward, "episode": episode, "time": time}.items():
        if column is not None:
            known[role] = (column,)
    if isinstance(source, (str, os.PathLike)):
        return inspect_table(source, rows, known, format)
    table = held_frame(source)
    if table is None and isinstance(source, Mapping):
        table = held_columns(source, "the dict of arrays")
    if table is None:
        raise DataError(
            f"inspect looks at tables, and received a {type(source).__name__}; give a"
            " path, a pandas, polars or Arrow frame, or a dict of columns"
        )
    return inspect_table(table, rows, known, format)


def inspect_table(
    source: Location | HeldTable,
    rows: int = 100_000,
    known: Mapping[str, Sequence[str]] | None = None,
    format: str | None = None,
) -> Inspection:
    """Look at the first rows of a table and guess a mapping.

    rows: the most to look at. known: columns by roles (action, reward, episode, time)
    that need not be guessed. format: the tool that wrote the table (`tools.TOOLS`); by
    default it is recognised. Raises DataError, also for files that need no mapping, for
    known columns that the table does not have, and for tables of another tool.
    """
    if format is not None:
        check_name(format)
    if not isinstance(source, HeldTable):
        source = os.fspath(source)
    name = str(source)
    kind, files, header = _table_without_roles(source)
    stored = dict(header.fields)
    readable = {
        column: column_type
        for column, column_type in stored.items()
        if column and not is_pattern(column) and column_type != pl.Unknown
    }
    held, unreadable = _first_rows(name, kind, files, readable, rows)
    if not held.height:
        raise DataError(
            f"{name} has no rows; give a table with at least one transition"
        )
    empty = pl.repeat(None, held.height, eager=True, dtype=pl.Null)
    columns = [
        profiles.profile(
            held.get_column(column, default=empty.alias(column)), is_typed=kind != CSV
        )
        for column in stored
    ]
    # an option that was not given has no columns
    settled = {role: names for role, names in (known or {}).items() if names}
    _check_known(name, settled, list(stored))
    try:
        tool = find_tool(stored, header.layout, format)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    guess = _guess(columns, tool, settled)
    inspection = Inspection(source, held.height, columns)
    if tool is not None:
        inspection.layout = tool.title
    if tool is not None and tool.one_step:
        inspection.mapping["one_step"] = True
    inspection.problems += unreadable
    if kind == CSV and _are_values(list(stored)):
        inspection.problems.append(
            f"the first line holds numbers ({listed(stored, 3)}); write column names"
            " above it"
        )
    _describe_columns(inspection)
    inspection.problems += guess.ends.problems
    for key, answers in guess.ends.questions.items():
        inspection.ask(key, answers)
    if tool is not None:
        _check_last_flag(inspection, guess, tool)
        _ask_about_doubtful(inspection, tool, settled)
    _check_last_rows(inspection, guess)
    _settle_masks(inspection, settled)
    if guess.steps.has_ids:
        _check_ends(inspection, guess)
    _check_later(inspection, guess)
    _check_states(inspection)
    beside_list = _settle_lists(inspection)
    _settle_costs(inspection)
    _settle_probabilities(inspection)
    _propose(inspection, held, guess)
    _sort_observations(inspection, tool)
    _ask_about_list(inspection, beside_list)
    _settle_observations(inspection)
    links = {"episode", "starts", "one_step"}
    inspection.is_open = not links & inspection.mapping.keys()
    if _has_all_roles(inspection):
        _survey(inspection, rows)
    return inspection


def _guess(
    columns: list[ColumnProfile], tool: Tool | None, known: Mapping[str, Sequence[str]]
) -> Guess:
    """Guess the roles of columns by what is known of the tool, and of its columns.

    known: columns by role, as the user says; they come before what the tool says.
    """
    if tool is None:
        return guess_roles(columns, known)
    settled = {name for names in known.values() for name in names}
    roles = {**tool.known_roles([column.name for column in columns]), **known}
    for column in columns:
        if column.name in settled:
            continue
        reason = tool.reason_to_leave_out(column.name)
        if not reason:
            reason = tool.doubtful.get(column.name, "")
        if reason:
            column.leave_out(reason)
    guess = guess_roles(columns, roles, tool.one_step)
    for column in columns:
        if column.name in settled or column.role == IGNORED:
            continue
        if any(column.name in names for names in roles.values()):
            column.reason = f"a column of {tool.title}"
        if column.role == "reward":
            column.formula = tool.formulas.get(column.name, "")
    return guess


def _sort_observations(inspection: Inspection, tool: Tool | None) -> None:
    """Put the proposed observations in the order of the numbers in their names, if the
    tool numbers them.
    """
    if tool is not None and tool.is_numbered:
        inspection.mapping.get("observations", []).sort(key=natural_key)


def _check_last_flag(inspection: Inspection, guess: Guess, tool: Tool) -> None:
    """Ask why episodes ended if the flag of ends marks the last row of every episode,
    as its tool does for all of them.
    """
    flag = guess.ends.roles.get("terminal")
    if flag is None or flag.name not in tool.last_flags or not guess.steps.has_ids:
        return
    is_last = np.zeros_like(flag.is_set)
    is_last[guess.steps.last_rows] = True
    if (flag.is_set != is_last).any():
        return
    answers: list[Answer] = []
    for column in inspection.columns:
        if column.name in tool.successes and column.is_flag and column.distinct == 2:
            answers.append({"terminal": column.name})
            column.leave_out("whether it marks that the world ended is asked")
    answers += [{"terminal": flag.text}, {"last_row": CUT}]
    del guess.ends.roles["terminal"]
    inspection.ask(
        "terminal",
        answers,
        f"{flag.name} is set in the last row of every episode, however it ended; say"
        " which rows mark that the world ended (terminal), or that all were cut"
        " (last_row: cut)",
    )
    flag.column.leave_out("whether it marks that the world ended is asked")


def _ask_about_doubtful(
    inspection: Inspection, tool: Tool, known: Mapping[str, Sequence[str]]
) -> None:
    """Ask about columns of a tool that may be known before the action or not. known:
    columns by role, as the user says.
    """
    settled = {name for names in known.values() for name in names}
    for column in inspection.columns:
        if column.name in tool.doubtful and column.name not in settled:
            inspection.doubtful.append(column.name)
            inspection.problems.append(
                f"{column.name}: {column.reason}; say whether it is known before the"
                " action"
            )


def _settle_masks(inspection: Inspection, known: Mapping[str, Sequence[str]]) -> None:
    """Propose what says which actions were available as masks: a column of lists, or
    two or more columns of 0 and 1 that belong together; if they differ from row to row.

    known: columns by role, as the user says.
    """
    settled = {name for names in known.values() for name in names}
    flags: dict[str, list[ColumnProfile]] = {}
    lists: dict[str, list[ColumnProfile]] = {}
    for column in inspection.columns:
        words = parts(column.name)
        is_set = _POSSIBLE.intersection(words) and _ACTIONS.intersection(words)
        is_free = column.role in (IGNORED, "observations")
        is_free = is_free and column.name not in settled
        values = column.values.drop_nulls()
        if not is_set or not is_free or not len(values):
            continue
        role = "action_mask"
        if "next" in words:
            role = "next_action_mask"
        if not values.dtype.is_nested():
            if set(values.cast(pl.String).unique()) <= _FLAG_TEXTS:
                flags.setdefault(role, []).append(column)
        elif values.n_unique() > 1:
            lists.setdefault(role, []).append(column)
    for role in ("action_mask", "next_action_mask"):
        columns = lists.get(role, flags.get(role, []))
        is_pair = role == "action_mask" or "action_mask" in (lists or flags)
        if is_pair and (len(columns) == 1) == (role in lists):
            for column in columns:
                column.role = role
                column.reason = "the available actions"


def _settle_probabilities(inspection: Inspection) -> None:
    """Of probabilities and their logarithms, keep the probabilities if both say the
    same, else ask.
    """
    chosen = {column.role: column for column in inspection.columns}
    plain = chosen.get("behavior_probability")
    logarithm = chosen.get("behavior_log_probability")
    if plain is None or logarithm is None:
        return
    both = pl.DataFrame(
        {
            "plain": plain.values.cast(pl.Float64),
            "power": logarithm.values.cast(pl.Float64).exp(),
        }
    ).drop_nulls()
    if np.allclose(both["plain"], both["power"], rtol=1e-3, atol=1e-6):
        logarithm.leave_out(f"the logarithm of {plain.name}")
        return
    inspection.ask(
        "behavior_probability",
        [
            {"behavior_probability": plain.name},
            {"behavior_log_probability": logarithm.name},
        ],
        f"{plain.name} and {logarithm.name} disagree; say which is the probability of"
        " the logged action",
    )
    for column in (plain, logarithm):
        column.leave_out("which is the behavior policy's is asked")


def _check_known(
    name: str, known: Mapping[str, Sequence[str]], names: Sequence[str]
) -> None:
    """Raise DataError for known columns that a table does not have. names: of all
    columns.
    """
    problems = Problems(name)
    for role, columns in known.items():
        for column in columns:
            if column not in names:
                problems.unknown(column, role, names)
    problems.refuse()


def _table_without_roles(
    source: TableSource,
) -> tuple[str, tuple[TableSource, ...], Reader]:
    """The kind of a table, its files, and the columns of the first one.

    Raises DataError if it needs no mapping, since its keys are those of a log.
    """
    if not needs_mapping(source):
        raise DataError(
            f"{source} needs no mapping: its keys say what the columns are; koffline"
            " data info and koffline data validate look into it"
        )
    kind, files = find_files(source, is_table=True)
    return kind, files, header_of(files[0], kind)


def needs_mapping(source: TableSource) -> bool:
    """Whether a log is a table whose columns do not say themselves what they are.

    Raises DataError for what is no log.
    """
    if not isinstance(source, HeldTable) and is_log_source(source):
        return False
    kind, files = find_files(source, is_table=True)
    stored = dict(header_of(files[0], kind).fields)
    if kind in (HDF5, NPZ) and set(REQUIRED) <= used_keys(stored).keys():
        return False
    return own_mapping(stored) is None


def _are_values(names: list[str]) -> bool:
    """Whether the names of a table's columns are numbers, and so probably a first row;
    whole numbers alone may count the columns.
    """
    numbers = pl.Series(names).str.replace(",", ".").cast(pl.Float64, strict=False)
    return not numbers.has_nulls() and not all(map(str.isdecimal, names))


def _describe_columns(inspection: Inspection) -> None:
    """Add what the profiles say of the values: problems, decimal commas, and how times
    are read.
    """
    for column in inspection.columns:
        if column.problem:
            inspection.problems.append(f"{column.name}: {column.problem}")
        if column.kind == profiles.DECIMAL_COMMA:
            inspection.mapping["decimal_comma"] = True
        if column.role == "time" and (rule := column.time_rule()):
            inspection.notes.append(f"times in {column.name}: {rule}")


def _has_all_roles(inspection: Inspection) -> bool:
    """Whether the mapping has what every mapping must have; what it lacks is a
    problem.
    """
    missing = [
        key
        for key in ("observations", "action", "reward")
        if key not in inspection.mapping
    ]
    outcomes = [
        column.name
        for column in inspection.columns
        if column.role == IGNORED and flag_of(column.name) is Flag.OUTCOME
    ]
    for key in missing:
        if key == "observations":
            remedy = "name some in the mapping"
        elif key == "reward" and outcomes and "episode" in inspection.mapping:
            remedy = (
                f"an outcome ({listed(outcomes, 3)}) is the same in all rows of an"
                " episode and would count in each: write a column that holds the reward"
                " in the last row of each episode and 0 in the others"
            )
        else:
            option = f"koffline data inspect with --{key} COLUMN"
            if isinstance(inspection.source, HeldTable):
                option = f"koffline.inspect with {key}='COLUMN'"
            remedy = (
                f"say which one it is ({option}), or name it in the mapping and take it"
                " out of the observations"
            )
        inspection.add_problem(key, f"no column looks like {key}; {remedy}")
    if "observations" in missing:
        for column in inspection.columns:
            if column.is_struct:
                inspection.problems.append(
                    f"{column.name}: {column.reason}; write each field as a column of"
                    f" its own (in polars: frame.unnest({column.name!r}))"
                )
    return not missing


def _first_rows(
    name: str,
    kind: str,
    files: tuple[TableSource, ...],
    readable: dict[str, ColumnType],
    rows: int,
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


def _check_last_rows(inspection: Inspection, guess: Guess) -> None:
    """Say whether last rows hold final states alone, or ask; ask about actions that
    stand in last rows alone.
    """
    no_action = find_no_action(inspection.columns, guess.steps)
    if no_action is not None:
        shown = listed(map(repr, no_action.values))
        inspection.ask(
            "no_action",
            [{"no_action": no_action.values}, {"no_action": []}],
            f"{no_action.column.name}: {shown} stands in last rows of episodes alone"
            f" ({counted(no_action.n_rows, 'row')}); say whether it means that no action"
            " was taken (no_action), or is a decision",
        )
        return
    states = find_final_states(inspection.columns, guess.steps)
    if states is None:
        return
    if states.is_sure:
        inspection.mapping["final_state"] = True
        inspection.notes.append(
            f"{states.reason}: such rows hold the final state alone, as in RLDS"
            " (final_state)"
        )
        return
    inspection.ask(
        "final_state",
        [{"final_state": True}, {"final_state": False}],
        f"{states.reason}; say whether such rows hold the final state alone, with an"
        " action and a reward that mean nothing (final_state), or are steps",
    )


def _check_ends(inspection: Inspection, guess: Guess) -> None:
    """Find columns with values that occur in last rows of episodes only: they may mark
    terminations, and are left out.

    If no flag tells what the last rows are, this is a question, with these columns
    among the answers.
    """
    steps = guess.steps
    if 2 * len(steps.lengths) > inspection.rows:
        return
    has_flag = "terminal" in guess.ends.roles or "terminal" in inspection.open
    is_last = pl.Series(steps.last_rows)
    for column in inspection.columns:
        is_quantity = column.is_number and not column.is_flag
        if is_quantity and (has_flag or _is_told_by_step(column, steps)):
            continue
        values = _values_of_ends(column, is_last)
        if not values:
            continue
        shown = listed(map(repr, values))
        column.leave_out(f"{shown}: in last rows of episodes alone")
        question = "terminal"
        if has_flag:
            remedy = _asked_about_cuts(inspection, guess, column, values)
        else:
            question = "last_row"
            ends = [value for value in values if not says_cut(str(value))]
            end = _written_end(column, ends or values)
            inspection.ask(question, [{"terminal": end}])
            if end != column.name:
                end = f'"{end}"'
            remedy = f"if the world ended there, say terminal: {end}"
        if is_quantity:
            inspection.doubtful.append(column.name)
            remedy = f"{remedy}; if it is a quantity, add it to the observations"
        inspection.add_problem(question, f"{column.name}: {column.reason}; {remedy}")


def _is_told_by_step(column: ColumnProfile, steps: Steps) -> bool:
    """Whether a column is a function of the number of the step in the episode: it is
    known before, and no mark of an end.
    """
    age = np.empty(len(steps.order), dtype=np.int64)
    age[steps.order] = np.arange(len(steps.order)) - steps.firsts[steps.episodes]
    pairs = pl.DataFrame({"age": age, "value": column.values})
    return bool(pairs.n_unique() == len(np.unique(age)))


def _asked_about_cuts(
    inspection: Inspection, guess: Guess, column: ColumnProfile, values: list[object]
) -> str:
    """What to do with a column that says how episodes ended, beside a flag of ends; ask
    what terminal is if the flag is set where the column names a limit.

    values: those in last rows alone.
    """
    flag = guess.ends.roles.get("terminal")
    remedy = "left out, since it says how the episode ended"
    cuts = [value for value in values if says_cut(str(value))]
    ends = [value for value in values if value not in cuts]
    if flag is None or not cuts or not ends:
        return remedy
    is_cut = column.values.is_in(cuts).fill_null(False).to_numpy()
    cut_flag = guess.ends.roles.get("truncated")
    if cut_flag is not None:
        is_cut = is_cut & ~cut_flag.is_set
    if not (is_cut & flag.is_set).any():
        return remedy
    answers = [{"terminal": _written_end(column, ends)}, {"terminal": flag.text}]
    inspection.ask("terminal", answers)
    flag.column.leave_out("whether it marks limits, too, is asked")
    shown = listed(map(repr, cuts))
    return (
        f"{flag.name} is set where it is {shown}, too; say which rows mark that the"
        " world ended (terminal)"
    )


def _values_of_ends(column: ColumnProfile, is_last: pl.Series) -> list[object]:
    """The values of an observation that occur in last rows of episodes alone; none if
    that may be chance. is_last: (N,) whether a row is the last one of its episode.
    """
    n_values = column.distinct
    if column.missing:
        n_values += 1  # an empty cell is a value, too
    if column.role != "observations" or not 2 <= n_values <= _FEW_VALUES:
        return []
    if column.values.dtype.is_nested():
        return []
    rows = pl.DataFrame({"value": column.values, "last": is_last}).drop_nulls()
    counts = rows.group_by("value").agg(pl.len(), pl.col("last").all())
    ends = counts.filter(pl.col("last") & (pl.col("len") >= _BY_CHANCE))
    if ends.height == n_values:
        return []
    return ends["value"].sort().to_list()


def _written_end(column: ColumnProfile, values: list[object]) -> str:
    """The flag or formula that is true where a column has one of the values."""
    if column.is_flag and not column.missing and str(values[0]).lower() in TRUE:
        return column.name
    # Where a value is missing, a comparison with a number would be missing, too.
    if column.missing or column.values.dtype == pl.Boolean:
        values = [str(end).lower() for end in values]
    tests = [f"{column.formula_name} == {end!r}" for end in values]
    if len(tests) == 1:
        return tests[0]
    return f"max({', '.join(tests)})"


def _check_later(inspection: Inspection, guess: Guess) -> None:
    """Leave out features that depend on what happens later; ask about those that may be
    known before.
    """
    has_list = the_list(inspection.columns) is not None
    for later in find_later(inspection.columns, guess.steps):
        column = later.column
        if has_list and column.width is None:  # it is left out beside the list
            continue
        column.leave_out(later.reason)
        if later.is_sure:
            inspection.problems.append(
                f"{column.name}: {later.reason}: left out, since it is not known before"
            )
        else:
            inspection.doubtful.append(column.name)
            inspection.add_problem(
                "observations",
                f"{column.name}: {later.reason}; say whether it is known before the"
                " action",
            )


def _settle_lists(inspection: Inspection) -> list[ColumnProfile]:
    """A list is the whole observation: leave out other columns, and all but one
    list.

    Returns those that are left out though they are parts of the same object as the
    list, by their names: ``observation.speed`` beside the list ``observation.place``.
    """
    chosen = the_list(inspection.columns)
    if chosen is None:
        return []
    siblings = []
    for column in inspection.columns:
        if column.role == "observations" and column is not chosen:
            column.leave_out(f"the list {chosen.name} stands alone as the observation")
            whole = _whole_of(chosen.name)
            if whole and _whole_of(column.name) == whole:
                siblings.append(column)
    inspection.doubtful = [name for name in inspection.doubtful if name == chosen.name]
    return siblings


def _whole_of(name: str) -> str:
    """What a column is a part of by its name, with the mark that follows:
    ``observation.`` of ``observation.place``; empty if it is no part.
    """
    end = max(name.rfind("."), name.rfind("/"))
    return name[: end + 1]


def _ask_about_list(inspection: Inspection, left_out: Sequence[ColumnProfile]) -> None:
    """Ask whether the list is all of the observation. left_out: other parts of it, as
    from `_settle_lists`.
    """
    chosen = the_list(inspection.columns)
    if chosen is None or not left_out:
        return
    names = listed([column.name for column in left_out], 4)
    lists = [column for column in left_out if column.width is not None]
    inspection.ask(
        "observations",
        [{"observations": [part.name]} for part in (chosen, *lists)],
        f"{names}: left out beside the list {chosen.name}, since an observation is one"
        " list or columns of single numbers; if the policy needs all of them, write"
        f" them into one list; if not, say observations: {chosen.name}",
    )


def _settle_costs(inspection: Inspection) -> None:
    """Without a column of rewards, ask whether a column of costs is the reward with the
    other sign.
    """
    if any(column.role == "reward" for column in inspection.columns):
        return
    for column in inspection.columns:
        is_cost = (
            set(_COSTS).intersection(parts(column.name))
            and column.values.dtype.is_numeric()
        )
        is_free = column.role in ("observations", IGNORED)
        if is_cost and is_free and column.distinct:
            column.leave_out("a cost by its name; whether it is the reward is asked")
            inspection.ask(
                "reward",
                [{"reward": f"-{column.formula_name}"}, {"reward": column.name}],
            )


def _settle_observations(inspection: Inspection) -> None:
    """Ask which observations are right if some may depend on what happens later."""
    if not inspection.doubtful:
        return
    known = inspection.mapping.get("observations", [])
    with_doubtful = [
        column.name
        for column in inspection.columns
        if column.name in (*known, *inspection.doubtful)
    ]
    inspection.ask(
        "observations",
        [{"observations": names} for names in (known, with_doubtful) if names],
    )


def _check_states(inspection: Inspection) -> None:
    """Leave out features whose values each occur with one action only: they may be
    results of the action.
    """
    actions = [
        column
        for column in inspection.columns
        if column.role == "action" and column.distinct > 1 and column.width is None
    ]
    if len(actions) != 1:
        return
    action = actions[0]
    for column in inspection.columns:
        if column.role != "observations" or column.width is not None:
            continue
        if not 2 <= column.distinct <= inspection.rows // 10:
            continue
        pairs = pl.DataFrame(
            [column.values, action.values.cast(pl.String)]
        ).drop_nulls()
        if pairs.n_unique() != pairs[column.name].n_unique():
            continue
        column.leave_out(f"each value goes with one {action.name} only")
        inspection.problems.append(
            f"{column.name}: {column.reason}: left out, as if it came of it; add it to"
            f" the observations if it was known before the {action.name}"
        )


def _propose(inspection: Inspection, held: pl.DataFrame, guess: Guess) -> None:
    """Fill in the mapping: roles, encodings, missing values, ends of episodes, repeated
    rows. held: the inspected rows.
    """
    mapping = inspection.mapping
    for column in inspection.columns:
        if column.role in _SEVERAL:
            mapping.setdefault(column.role, []).append(column.name)
        elif column.role != IGNORED and column.role not in mapping:
            mapping[column.role] = column.formula or column.name
        if column.role == "observations" and column.values.dtype == pl.String:
            mapping.setdefault("encode", {})[column.name] = "one-hot"
        if column.role == "action" and column.is_choice and column.width is None:
            _propose_action_names(inspection, column)
    _propose_next_observations(inspection)
    _propose_imputation(inspection)
    has_terminal = "terminal" in mapping or "terminal" in inspection.open
    if {"episode", "starts"} & mapping.keys() and not has_terminal:
        _propose_last_rows(inspection, guess)
    _propose_duplicates(inspection, held)
    _propose_time_format(inspection)


def _propose_time_format(inspection: Inspection) -> None:
    """Say how the texts of the time are written, if that is no form which is read
    anyway; ask where two forms read all of them, as with days below 13 in 03/04/2021.
    """
    for column in inspection.columns:
        is_time = column.name == inspection.mapping.get("time")
        if not is_time or column.values.dtype != pl.String:
            continue
        forms = forms_of(column.values)
        if len(forms) == 1:
            inspection.mapping["time_format"] = forms[0]
        elif forms:
            inspection.ask("time_format", [{"time_format": form} for form in forms])


def _propose_action_names(inspection: Inspection, column: ColumnProfile) -> None:
    """List the values of a discrete action in their order; spellings that may be one
    action are a problem.
    """
    stored = column.values
    if column.kind == NUMBERS_AS_TEXT and column.texts is not None:
        stored = column.texts  # an action is read as the file has it
    values = stored.drop_nulls().unique().to_list()
    meant = one_spelling(values)
    values = list({meant.get(value, value) for value in values})
    if stored.dtype == pl.String:
        inspection.mapping["action_names"] = in_natural_order(values)
    else:
        inspection.mapping["action_names"] = sorted(values)
    for alike in doubtful_spellings(values):
        inspection.problems.append(
            f"{column.name}: {listed(map(repr, alike))} are one action, or several? If"
            " one, keep one of them in action_names"
        )


def _propose_next_observations(inspection: Inspection) -> None:
    """Name the next observations in the order of the observations, if each observation
    has one; else none.
    """
    mapping = inspection.mapping
    mapping.pop("next_observations", None)
    following = {
        column.partner: column.name
        for column in inspection.columns
        if column.role == "next_observations"
    }
    if following and following.keys() == set(mapping.get("observations", [])):
        mapping["next_observations"] = [
            following[name] for name in mapping["observations"]
        ]
    for column in inspection.columns:
        if column.role != "next_observations":
            continue
        if column.name not in mapping.get("next_observations", []):
            column.leave_out("only some observations have a next one")


def _propose_imputation(inspection: Inspection) -> None:
    """Say what replaces missing values, by column; they are problems, except those of
    next observations: an episode's last state may have none.
    """
    mapping = inspection.mapping
    for column in inspection.columns:
        if not column.missing or column.role in (IGNORED, "next_observations"):
            continue
        missing = counted(column.missing, "value", "is", "are")
        inspection.problems.append(f"{column.name}: {missing} missing")
        cannot_be_imputed = ("episode", "time", "terminal", "truncated")
        if column.role in cannot_be_imputed or column.values.dtype.is_nested():
            continue
        if column.role != "observations":
            method = CUT
        elif column.name in mapping.get("encode", {}):
            method = "zero"
        else:
            method = "mean"
        mapping.setdefault("impute", {})[column.name] = method


def _propose_duplicates(inspection: Inspection, held: pl.DataFrame) -> None:
    """Drop rows that repeat another in all columns with a role; without times, equal
    rows may be different steps. held: the inspected rows.
    """
    used = [column.name for column in inspection.columns if column.role != IGNORED]
    n_repeated = held.height - int(held.select(used).hash_rows(0).n_unique())
    if not n_repeated:
        return
    rows = counted(n_repeated, "row", "repeats", "repeat")
    sentence = f"{rows} another in all columns that have a role"
    if {"episode", "time"} <= inspection.mapping.keys():
        inspection.problems.append(sentence)
        inspection.mapping["drop_duplicates"] = "exact"
    elif "episode" in inspection.mapping:
        # without episodes, equal rows are plausible
        inspection.notes.append(sentence)


def _propose_last_rows(inspection: Inspection, guess: Guess) -> None:
    """Say that last rows are cut if a flag of cuts is set in all of them, else ask.

    Equal lengths tell nothing: a limit may have cut the episodes, or a course of so
    many steps was over.
    """
    cut = guess.ends.roles.get("truncated")
    is_all_cut = cut is not None and bool(cut.is_set[guess.steps.last_rows].all())
    if "last_row" not in inspection.open and is_all_cut:
        inspection.mapping["last_row"] = CUT
    else:
        inspection.ask("last_row", [{"last_row": CUT}, {"last_row": "terminal"}])


def _survey(inspection: Inspection, rows: int) -> None:
    """Collect the problems and notes of reading the log with this mapping.

    rows: the most to read. If rewards of rows without an action would be lost, the
    mapping is changed so that they are moved, and the log is read again.
    """
    problems = Problems(str(inspection.source))
    notes = list[str]()
    signs: list[str] = []
    with problems.noted():
        mapping = TableMapping(**_answered(inspection))
        table = prepare_table(
            inspection.source, mapping, None, in_memory=True, first=rows
        )
        assert table.rows.held is not None, "asked for"
        inspection.is_open = table.is_open
        with problems.noted():
            raw_log = assemble(table.rows.held, table)
            if raw_log is not None:
                # the log's own checks: infinities, probabilities above 1
                log = raw_log.transitions()
                # else the rows depend on an answer that the user has to give
                if not inspection.open:
                    signs = [symptom.text for symptom in symptoms_of(log)]
        # Each of them alone, not the sentence with all that was raised.
        problems.sentences = table.problems.sentences or problems.sentences
        if table.unearned.question and mapping.reward_row is None:
            inspection.mapping["reward_row"] = PREVIOUS
            _survey(inspection, rows)
            return
        if table.lost_rewards.question:
            problems.add(table.lost_rewards.question)
        notes += table.noted.notes
    if "last_row" in inspection.open:
        notes = [
            note for note in notes if not any(words in note for words in _OF_LAST_ROWS)
        ]
    cautions = (ORDER, SHARED)
    inspection.notes += [note for note in notes if not note.startswith(cautions)]
    inspection.problems += problems.sentences
    inspection.problems += [note for note in notes if note.startswith(cautions)]
    inspection.problems += signs


def _answered(inspection: Inspection) -> JsonObject:
    """The mapping as if the first answer was chosen where a key is open, to see what
    else is wrong; a key whose answers are other keys is left out.
    """
    answered = dict(inspection.mapping)
    for key, answers in inspection.open.items():
        del answered[key]
        for answer in answers:
            if key in answer:
                answered |= answer
                break
    return answered
