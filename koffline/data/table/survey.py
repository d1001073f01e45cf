"""Prepare a table: apply the mapping, check it, and make a first pass over the rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from koffline.data.ends import EndFlags, LinkCounts, rows_are_linked
from koffline.data.flat import ONE_STEP_NOTE
from koffline.data.kinds import HELD
from koffline.data.raw import FileDescription, read_description, settle_space
from koffline.data.spaces import (
    ACTIONS,
    ActionSpace,
    Discrete,
    Encoding,
    Features,
    SpaceRequest,
)
from koffline.data.table import mapping as mappings
from koffline.data.table import roles as applied
from koffline.data.table.action_masks import MaskLists, as_lists
from koffline.data.table.column_types import ColumnType, Kind, Types
from koffline.data.table.counts import TableCounts
from koffline.data.table.flag_values import read_flags
from koffline.data.table.held import TableSource, find_files
from koffline.data.table.last_rows import rlds_flag
from koffline.data.table.mapping import Formula, TableMapping
from koffline.data.table.missing import without_values
from koffline.data.table.numbers import category_features, hashed_ids, number_type
from koffline.data.table.problems import Problems
from koffline.data.table.readers import faults, width_of
from koffline.data.table.rewards import LostRewards, UnearnedRewards
from koffline.data.table.table_rows import (
    TableRows,
    header_of,
    open_rows,
    shared_ids,
    split_ids,
)
from koffline.data.table.text_ways import LOCAL, as_read, in_zone
from koffline.data.table.texts import TextCensus, spelling_note
from koffline.data.transitions import Metadata
from koffline.errors import DataError, counted, listed

SHAPE_KEY = "koffline_observation_shape"  # of one that is stored as a list of numbers
_A_DATE = 1e7  # 20240131, or seconds since 1970; no step of an episode


@dataclass(eq=False)
class SurveyedTable:
    """Rows, the columns' roles, results of the first pass, and the action space.

    ``names``: of all columns of the files. ``file_notes``: on rows of a file that are
    no rows of the table. By column: number of ``missing`` values,
    lengths of lists (``widths``), ``means``, other spellings of labels (``spelled``).
    ``flagged``: flags that occur. ``seen``:
    smallest and largest whole-number action of each frame. ``categories``: values of
    the action, in order. ``runs``: consecutive rows with one id in a frame, with their
    earliest time. ``origin``: the column of each feature that encodes a category.
    ``counts``: what is done to the rows later. ``end_flags``: rows flagged terminal,
    truncated or both. ``earliest``: smallest numeric time. ``links``:
    counted if next observations must show which rows form an episode. ``mask_lists``:
    what the lists of available actions hold, by column; ``mask_flags``: whether that is
    a flag for each action. ``unearned``,
    ``lost_rewards``: rewards of rows that are left out.
    """

    source: str
    rows: TableRows
    roles: TableMapping
    observation_type: Kind  # of a number
    observation_shape: tuple[int, ...] | None
    problems: Problems
    is_own: bool  # the mapping came from koffline's own column names
    formulas: tuple[Formula, ...]
    texts: Mapping[str, str]  # how they are read
    encodings: Mapping[str, Encoding]
    origin: Mapping[str, str]
    census: TextCensus
    names: tuple[str, ...] = ()
    file_notes: tuple[str, ...] = ()
    action_space: ActionSpace = field(default_factory=lambda: Discrete(1))
    metadata: Metadata = field(default_factory=Metadata)
    counts: TableCounts = field(default_factory=TableCounts)
    n_rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    # sums until the pass ends
    means: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    flagged: set[str] = field(default_factory=set)
    is_open: bool = False  # whether the mapping leaves open which rows form an episode
    categories: tuple[Any, ...] = ()
    spelled: dict[str, dict[str, str]] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    end_flags: EndFlags = field(default_factory=EndFlags)
    earliest: float = np.inf
    runs: pl.DataFrame | None = None
    links: LinkCounts | None = None
    mask_lists: dict[str, MaskLists] = field(default_factory=dict)
    mask_flags: dict[str, bool] = field(default_factory=dict)
    unearned: UnearnedRewards = field(default_factory=UnearnedRewards)
    lost_rewards: LostRewards = field(default_factory=LostRewards)

    @property
    def reward_question(self) -> str:
        """What to do with rewards of rows that were left out, after all rows were read;
        empty if none.
        """
        questions = (self.unearned.question, self.lost_rewards.question)
        if self.roles.reward_row is None:
            return "; ".join(filter(None, questions))
        return ""

    @property
    def stands_alone(self) -> bool:
        """Whether every row is a transition without links to other rows."""
        if self.links is None:
            return self.roles.stands_alone
        return self.links.stand_alone

    @property
    def cuts_are_marked(self) -> bool:
        """Whether a last row without a flag counts as cut because no row is flagged
        truncated.
        """
        shows_cuts = self.links is not None and self.links.show_cuts
        return not self.stands_alone and (self.roles.truncated is None or shows_cuts)

    @property
    def is_done(self) -> bool:
        """Whether ``terminal`` marks every end of an episode: all truncated rows have
        it, too.
        """
        return not self.is_own and self.end_flags.terminal_marks_every_end

    @property
    def is_dated(self) -> bool:
        """Whether times are dates, or count seconds since a date; episodes are then
        ordered by them.
        """
        kind = self.rows.schema.get(self.roles.time or "")
        is_date = kind == pl.Date or isinstance(kind, pl.Datetime)
        is_large_number = _A_DATE <= self.earliest < np.inf
        has_dates = is_date or is_large_number
        return has_dates and not self.is_own and self.roles.episode is not None

    @property
    def noted(self) -> Metadata:
        """Metadata with notes on what was done to the rows so far."""
        noted = self.metadata.with_notes(
            *self.counts.sentences(self.roles.time is not None)
        )
        return replace(
            noted, lost_last_rows=noted.lost_last_rows or bool(self.counts.left_out)
        )


def prepare_table(
    source: TableSource,
    mapping: mappings.MappingRequest | None,
    action_space: SpaceRequest | None,
    *,
    in_memory: bool,
    first: int | None = None,
) -> SurveyedTable:
    """Find the files of a table, apply the mapping, and pass over the rows once; errors
    are in ``problems``.

    mapping: None for tables that koffline wrote. Without ``in_memory``, rows are read
    from the files in every pass, and episodes are counted. first: the most rows to read
    into memory. Raises DataError for all that is wrong with the mapping.
    """
    name = str(source)
    is_own = mapping is None
    kind, files = find_files(source, is_table=not is_own)
    file = header_of(files[0], kind)
    stored = dict(file.fields)
    chosen = _chosen_mapping(mapping, name, kind, stored)
    description = None
    shape = None
    if is_own:
        description = read_description(file.described.get(b"koffline"))
    if description:
        shape = _stored_shape(file.described)
    problems = Problems(name)
    roles, formulas = applied.resolved(chosen, list(stored), problems)
    types = applied.column_types(stored, roles, formulas, problems)
    problems.refuse()
    number = _observation_type(roles, types)
    with faults(name, kind):
        rows = TableRows(kind, files, types, width_of(number))
        if roles.decimal_comma:
            rows = replace(
                rows, number_ways=applied.ways_of_numbers(rows, stored, name)
            )
        rows = open_rows(rows, in_memory, first)
        texts = applied.ways_of_texts(rows, roles, is_own, name)
        census = _census(types, stored, texts, roles, formulas)
        if in_memory:
            for frame in rows.frames():
                census.look(frame)
        encodings, spelled = applied.look_up(rows, roles, problems)
        problems.refuse()
        roles, origin = applied.encoded(roles, encodings)
        table = SurveyedTable(
            source=name,
            rows=rows,
            roles=roles,
            observation_type=number,
            observation_shape=shape,
            problems=problems,
            is_own=is_own,
            formulas=formulas,
            texts=texts,
            encodings=encodings,
            origin=origin,
            census=census,
            names=tuple(stored),
            file_notes=file.notes,
        )
        changes = (texts, formulas, encodings, roles.no_action, roles.time_zone)
        if any(changes):
            table.rows = rows.computing(_computed_columns(table, spelled))
        has_no_ids = (
            roles.episode is None and roles.starts is None and roles.one_step is None
        )
        if roles.next_observations and has_no_ids and not is_own:
            table.links = LinkCounts()
        for column, meant in spelled.items():
            if meant:
                table.spelled[column] = meant
        _look_through(table, in_pieces=not in_memory)
    _check_counts(table)
    _describe(table, action_space, description)
    return table


def _chosen_mapping(
    mapping: mappings.MappingRequest | None,
    name: str,
    kind: str,
    stored: Types,
) -> TableMapping:
    """The mapping that was requested, else that of koffline's own column names.

    name, kind: of the table's file. stored: types by column. Raises DataError if there
    is none.
    """
    if mapping is not None:
        return mappings.as_mapping(mapping)
    by_names = mappings.own_mapping(stored)
    if by_names is not None:
        return by_names
    options = (
        f"{mappings.EXAMPLE} (every row a decision of its own: --one-step, not the"
        " last three)"
    )
    if kind == HELD:
        raise DataError(
            f"{name} has columns {listed(stored)}; say what they are, as in"
            f" {mappings.PYTHON_EXAMPLE}; koffline.inspect(frame).mapping is a first"
            " one, and koffline.inspect(frame) says what is open in it"
        )
    raise DataError(
        f"{name} is a {kind} table with columns {listed(stored)}; say what they are,"
        f" as in {options} (or --mapping FILE.yaml; in Python mapping=);"
        f" {mappings.INSPECT}"
    )


def _stored_shape(described: Mapping[bytes, bytes]) -> tuple[int, ...] | None:
    """The shape of one observation by a file's metadata, None if it is not there."""
    text = described.get(SHAPE_KEY.encode(), b"").decode("ascii", "replace")
    sides = [
        int(side) for side in text.split(",") if side.isdecimal() and len(side) < 10
    ]
    return tuple(sides) or None


def _observation_type(roles: TableMapping, types: Types) -> ColumnType:
    """The polars type of an observation's numbers. types: by column, as stored."""
    kinds = [
        pl.Int16() if column in roles.encode else types[column]
        for column in (*roles.observations, *roles.next_observations)
    ]
    # imputed means are not whole numbers
    return number_type(kinds, bytes_stay=not roles.impute)


def _computed_columns(
    table: SurveyedTable, spelled: Mapping[str, Mapping[str, str]]
) -> list[pl.Expr]:
    """The columns of a table as its roles name them: read from texts, computed by
    formulas, and features of categories.

    spelled: other spellings of categories, by column.
    """
    computed_names = {*table.origin, *(formula.text for formula in table.formulas)}
    columns = []
    for name in table.roles.columns:
        if name in computed_names:
            continue
        column = pl.col(name)
        if name in table.texts:
            column = as_read(name, table.texts[name])
        elif name == table.roles.time and table.roles.time_zone:
            local_times = column.cast(pl.Datetime("ns"))
            column = in_zone(local_times, table.roles.time_zone).alias(name)
        if name in table.roles.action and table.roles.no_action:
            column = without_values(column, table.roles.no_action).alias(name)
        columns.append(column)
    columns += [formula.value for formula in table.formulas]
    for name, encoding in table.encodings.items():
        columns += category_features(name, encoding, spelled[name])
    return columns


def _census(
    types: Types,
    stored: Types,
    ways: Mapping[str, str],
    roles: TableMapping,
    formulas: Sequence[Formula],
) -> TextCensus:
    """What to count in the texts of a table.

    By column: types in which columns are read, and in which they are stored, and ways
    in which texts are read.
    """
    texts = {name for name in types if stored[name] == pl.String}
    labels = {*roles.action, *roles.encode, roles.episode, roles.cluster, roles.by}
    labels = (labels & texts) - set(ways)
    return TextCensus(
        numbers=[name for name in types if name in texts and types[name] == pl.Float64],
        read=list(ways),
        labels=[name for name in types if name in labels and types[name] == pl.String],
        formulas=formulas,
        listed=_listed_labels(roles),
    )


def _listed_labels(roles: TableMapping) -> dict[str, list[str]]:
    """The labels that a mapping lists, by column."""
    listed_labels = {
        name: list(encoding.categories) for name, encoding in roles.encode.items()
    }
    for action in roles.action[:1]:
        listed_labels[action] = [str(name) for name in roles.action_names]
    return listed_labels


def _describe(
    table: SurveyedTable,
    action_space: SpaceRequest | None,
    description: FileDescription | None,
) -> None:
    """Settle categories, action space and metadata; errors of the actions are
    problems.

    action_space: as requested. description: of a file that koffline wrote.
    """
    metadata = Metadata(gamma=table.roles.gamma)
    declared = None
    if description:
        metadata = description.metadata
        declared = description.action_space
        extra = metadata.extra
    elif table.is_own:
        extra = {}
    else:
        extra = _features(table).to_extra()
    notes = tuple[str, ...]()
    action = table.roles.action[0]
    with table.problems.noted():
        if table.categories:
            extra = {**extra, ACTIONS: list(table.categories)}
            declared = Discrete(len(table.categories))
        elif declared is None and len(table.roles.action_mask) > 1:
            declared = Discrete(len(table.roles.action_mask))
        # a few actions that determine the space like all of them
        if table.seen:
            actions = np.array(table.seen)
        else:
            actions = np.zeros((1, table.widths.get(action, len(table.roles.action))))
        table.action_space, notes = settle_space(
            actions, action_space, declared, table.source
        )
        if table.categories and table.action_space != declared:
            raise DataError(
                f"{action} holds {len(table.categories)} actions, and another number is"
                " asked; leave that out, or name all of them (action_names)"
            )
    metadata = replace(metadata, source=table.source, extra=extra)
    table.metadata = metadata.with_notes(
        *table.file_notes,
        *notes,
        *_open_questions(table),
        *_notes_on_texts(table),
    )


def _notes_on_texts(table: SurveyedTable) -> Iterator[str]:
    """Yield notes on what texts were taken for."""
    yield from table.census.notes()
    for column, meant in table.spelled.items():
        yield spelling_note(column, meant)


def _features(table: SurveyedTable) -> Features:
    """Names of an observation's numbers; those of a list are named by position."""
    names = table.roles.observations
    if names[0] in table.widths:
        names = tuple(f"{names[0]}[{i}]" for i in range(table.widths[names[0]]))
    encodings = {
        column: encoding
        for column, encoding in table.encodings.items()
        if set(encoding.names(column)) <= set(names)
    }
    return Features(names, encodings)


def _open_questions(table: SurveyedTable) -> list[str]:
    """Notes on what the mapping leaves open, and how it was decided."""
    roles = table.roles
    notes = list[str]()
    notes += _notes_on_times(table)
    if table.is_own or table.is_open:
        return notes
    notes += _order_of_actions(table)
    if (roles.one_step or roles.episode) and not roles.cluster:
        used = {*table.rows.types, *table.origin.values()}
        notes += shared_ids(table.rows, table.n_rows, used, roles.episode)
    if roles.one_step:
        return [*notes, ONE_STEP_NOTE]
    if table.links is not None:
        notes += table.links.notes
    if table.stands_alone and table.links is None:
        notes.append("no episode and no time column is named: every row stands alone")
    elif roles.episode is None and roles.starts is None and not table.stands_alone:
        notes.append(
            "no episode column is named: the rows were taken as one record, cut where"
            " flags end it"
        )
    if roles.time is None and not table.stands_alone:
        notes.append(
            "no time column is named: rows were taken in the order of the table"
        )
    if roles.terminal is None and roles.last_row != "terminal":
        notes.append(
            "no terminal column is named: no episode was taken to have ended by itself"
        )
    if table.is_done:
        notes.append(
            table.end_flags.note(
                truncated=str(roles.truncated), terminal=str(roles.terminal)
            )
        )
    if roles.last_row is not None:
        ended = {
            "terminal": "to have ended by itself",
            "cut": "to be cut by the end of logging",
        }
        notes.append(
            f"an episode whose last row has no flag was taken {ended[roles.last_row]}"
            " (last_row)"
        )
    return notes


def _notes_on_times(table: SurveyedTable) -> Iterator[str]:
    """Yield a note on the zone of times that have no UTC offset."""
    roles = table.roles
    if roles.time_zone:
        yield (
            f"times in {roles.time} were read by the clocks of {roles.time_zone}; of"
            " times that they showed twice, when they were set back, the earlier was"
            " taken"
        )
    elif _has_local_times(table):
        yield (
            f"times in {roles.time} have no UTC offset and were read as UTC; where a"
            " local clock was set back, rows of that hour may be out of order"
        )


def _has_local_times(table: SurveyedTable) -> bool:
    """Whether times are given without a UTC offset."""
    time = table.roles.time or ""
    if table.texts.get(time) == LOCAL:
        return True
    kind = table.rows.schema.get(time)
    return isinstance(kind, pl.Datetime) and kind.time_zone is None


def _order_of_actions(table: SurveyedTable) -> list[str]:
    """A note if texts of actions were numbered in an order that other programs do not
    share.
    """
    names = table.categories
    if table.roles.action_names or not all(isinstance(name, str) for name in names):
        return []
    if list(names) == sorted(names):
        return []
    return [
        f"actions are numbered in natural order ({listed(names, 8)}), not in that of"
        " letters; for arrays in another order say action_names"
    ]


def _look_through(table: SurveyedTable, in_pieces: bool) -> None:
    """Pass over all rows and fill in the table's statistics. Raises DataError.

    in_pieces: rows are read from the files; episodes are counted, and the census looks
    at texts.
    """
    roles = table.roles
    time = roles.time
    if roles.one_step:
        time = None
    # Rows in memory are put in the order of time before their links are counted.
    held = table.rows.held if time is not None else None
    look = table.census.look if in_pieces else None
    runs = []
    categories = set[Any]()
    last_row = pl.DataFrame()  # of the frames so far
    for frame in table.rows.frames(look=look):
        table.n_rows += frame.height
        if in_pieces and roles.episode is not None:
            runs.append(_runs_of_ids(frame, roles.episode, time))
        _look_at_columns(table, frame)
        _count_flags(table, frame)
        if time is not None:
            table.earliest = min(table.earliest, _least_number(frame[time]))
        if table.links is not None and held is None:
            _add_links(table, _below(last_row, frame))
            last_row = frame.tail(1)
        if len(roles.action) == 1:
            _look_at_actions(table, frame[roles.action[0]], categories)
    if not table.n_rows:
        raise DataError(
            f"{table.source} has no rows; give a table with at least one transition"
        )
    for name, total in table.means.items():
        table.means[name] = total / max(1, table.n_rows - table.missing[name])
    if runs:
        table.runs = pl.concat(runs)
    if table.links is not None and held is not None and time is not None:
        _add_links(table, held.sort(time, maintain_order=True))
    _settle_masks(table, categories)
    _settle_categories(table, categories)


def _look_at_columns(table: SurveyedTable, frame: pl.DataFrame) -> None:
    """Look at every column of a frame, and at lists of available actions."""
    for column in frame:
        if not _is_mask_list(table, column):
            _look_at(table, column)
    _look_at_masks(table, frame)


def _settle_masks(table: SurveyedTable, categories: set[Any]) -> None:
    """Decide what lists of available actions hold, and add their actions to those that
    were taken: to ``categories``, or to ``table.seen``; errors are problems.
    """
    with table.problems.noted():
        for name, lists in table.mask_lists.items():
            table.mask_flags[name] = lists.settle(name, table.is_own)
            if categories and not table.mask_flags[name]:
                applied.gather(categories, pl.Series(list(lists.labels)))
            elif not categories:
                table.seen += _largest_action(lists, table.mask_flags[name])


def _is_mask_list(table: SurveyedTable, column: pl.Series) -> bool:
    """Whether a column holds lists of available actions, which may have any length."""
    masks = (*table.roles.action_mask, *table.roles.next_action_mask)
    return column.name in masks and column.dtype.is_nested()


def _look_at_masks(table: SurveyedTable, frame: pl.DataFrame) -> None:
    """Look at lists of available actions; missing ones are counted."""
    roles = table.roles
    for name in roles.action_mask:
        if _is_mask_list(table, frame[name]):
            lists = as_lists(frame[name])
            table.missing[name] += lists.null_count()
            table.mask_lists.setdefault(name, MaskLists()).add(
                lists, frame[roles.action[0]]
            )


def _largest_action(lists: MaskLists, are_flags: bool) -> list[int]:
    """The largest number of an action that lists of available ones tell, if any."""
    if are_flags:
        return [max(lists.lengths) - 1]
    return [int(label) for label in [max(lists.labels)] if label == int(label)]


def _below(last_row: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """Rows below the last one of the frames before, which the first frame has not."""
    if last_row.height:
        return pl.concat([last_row, frame])
    return frame


def _settle_categories(table: SurveyedTable, categories: set[Any]) -> None:
    """Fill in the values of a categorical action in their order, and how they are
    spelled; errors of the names are problems. categories: the values of all rows.
    """
    roles = table.roles
    with table.problems.noted():
        meant = applied.action_spellings(categories, roles, table.source)
        if meant:
            table.spelled[roles.action[0]] = meant
        labels = {meant.get(category, category) for category in categories}
        table.categories = applied.ordered_actions(labels, roles, table.source)


def _runs_of_ids(frame: pl.DataFrame, episode: str, time: str | None) -> pl.DataFrame:
    """Consecutive rows with one id: the id hashed, their number, and their earliest
    time (0 without times).
    """
    if time:
        start = frame[time].to_physical()
    else:
        start = pl.repeat(0, frame.height, eager=True)
    keys = pl.DataFrame([hashed_ids(frame[episode]), start.alias("start")])
    by_run = keys.group_by(pl.col("id").rle_id().alias("run"), maintain_order=True)
    return by_run.agg(pl.first("id"), pl.len().alias("rows"), pl.min("start"))


def _least_number(times: pl.Series) -> float:
    """The smallest of times that are numbers, 0 without any; infinity for dates."""
    if not times.dtype.is_numeric():
        return np.inf
    least: Any = times.min()
    return float(least or 0.0)


def _count_flags(table: SurveyedTable, frame: pl.DataFrame) -> None:
    """Count rows with flags, and note which flags occur. Raises DataError for flags
    that cannot be read.
    """
    roles = table.roles
    ended = read_flags(frame, roles.terminal, table.source)
    cut = read_flags(frame, roles.truncated, table.source)
    begun = read_flags(frame, roles.starts, table.source)
    pairs = ((roles.terminal, ended), (roles.truncated, cut), (roles.starts, begun))
    for name, is_set in pairs:
        if name and is_set.any():
            table.flagged.add(name)
    table.end_flags.add(terminal=ended.to_numpy(), truncated=cut.to_numpy())


def _look_at_actions(
    table: SurveyedTable, column: pl.Series, categories: set[Any]
) -> None:
    """Add the values of a column of actions to ``categories`` if they are categories,
    else the smallest and the largest whole number to ``table.seen``.
    """
    actions = column.drop_nulls()
    if table.roles.action_names or actions.dtype in (pl.String, pl.Boolean):
        applied.gather(categories, actions)
    elif actions.dtype.is_integer() and len(actions):
        table.seen += [actions.min(), actions.max()]


def _add_links(table: SurveyedTable, frame: pl.DataFrame) -> None:
    """Count in ``table.links`` whether consecutive rows are linked by their next
    observations.

    Raises DataError for flags that cannot be read.
    """
    assert table.links is not None, "called where next observations show the episodes"
    roles = table.roles
    terminated = read_flags(frame, roles.terminal, table.source).to_numpy()
    truncated = read_flags(frame, roles.truncated, table.source).to_numpy()
    table.links.add(terminated | truncated, truncated, links_of(frame, table))


def links_of(frame: pl.DataFrame, table: SurveyedTable) -> np.ndarray:
    """Whether (N − 1,) the next observation of a row is the observation of the row
    below.

    A missing next observation is linked to nothing, since the row below has an
    observation.
    """
    roles = table.roles
    observations = _states(frame, roles.observations, table)
    following = _states(frame, roles.next_observations, table)
    return rows_are_linked(observations, following)


def _states(
    frame: pl.DataFrame, columns: tuple[str, ...], table: SurveyedTable
) -> np.ndarray:
    """(N, d) observations from columns of numbers, or from one column of lists; NaN
    where one is missing.
    """
    if not frame.schema[columns[0]].is_nested():
        kind = table.observation_type
        if any(table.missing[name] for name in columns):
            kind = pl.Float64
        return frame.select(pl.col(columns).cast(kind)).to_numpy()
    lists = frame[columns[0]].cast(pl.List(pl.Float64))
    lengths = lists.list.len().drop_nulls()
    longest: Any = lengths.max()
    width = int(longest or 0)
    if (lengths != width).any():
        # a problem already, since lists must have one length
        return np.full((frame.height, 1), np.nan)
    observations = np.full((frame.height, width), np.nan)
    present = lists.drop_nulls().explode().to_numpy()
    observations[lists.is_not_null().to_numpy()] = present.reshape(-1, width)
    return observations


def _look_at(table: SurveyedTable, column: pl.Series) -> None:
    """Count the missing values of a column, and sum those of which the mean is imputed;
    lists of different lengths are a problem.
    """
    name = column.name
    missing = column.null_count()
    if table.roles.impute.get(name) == "mean":
        table.means[name] += float(column.cast(pl.Float64).fill_nan(None).sum())
    if column.dtype.is_nested():
        column = column.drop_nulls()
        if column.dtype == pl.List:
            lengths = column.list.len()
        else:
            lengths = column.arr.len()
        for length in lengths.unique(maintain_order=True):
            if length == 0:
                table.problems.add(
                    f"column {name} holds lists without numbers; leave it, or those"
                    " rows, out"
                )
            width = table.widths.setdefault(name, length)
            if width != length:
                table.problems.add(
                    f"column {name} holds lists of {width} and {length} numbers; give"
                    " lists of one length"
                )
        column = column.explode(empty_as_null=False)
        missing += column.null_count()
    if column.dtype.is_float():
        missing += int(column.is_nan().sum())
    table.missing[name] += missing


def _check_counts(table: SurveyedTable) -> None:
    """Add problems: missing values, and questions that only the user can answer."""
    _check_missing(table)
    if table.is_own:
        return
    _check_episodes(table)
    if not table.problems.sentences:
        _check_formulas_of_flags(table)
    for sentence in table.census.problems(table.roles):
        table.problems.add(sentence)


def _check_formulas_of_flags(table: SurveyedTable) -> None:
    """Add problems for flags that compare texts and are set in no row."""
    roles = table.roles
    flags = (roles.terminal, roles.truncated, roles.starts)
    for formula in table.formulas:
        compares_texts = any(formula.columns.values())
        if formula.text not in flags or not compares_texts:
            continue
        if formula.text not in table.flagged:
            table.problems.add(
                f"no row fulfils {formula.text}; check how the column writes it, or"
                " leave the formula out"
            )


def _check_missing(table: SurveyedTable) -> None:
    """Add problems of columns whose missing values nothing replaces, and of means of no
    value.
    """
    roles = table.roles
    # Features count for the column that they encode, a formula for the reward.
    spelled = dict(table.origin)
    for formula in table.formulas:
        if formula.text == roles.reward:
            spelled[formula.text] = "reward"
    replaced = {*roles.impute, *roles.next_observations, *roles.next_action_mask}
    missing: dict[str, int] = {}
    for name, count in table.missing.items():
        is_group = name == roles.by and name not in roles.needed
        if count and name not in replaced and not is_group:
            missing[spelled.get(name, name)] = count
    if missing:
        cut = "leave such rows out (COLUMN=cut), or mend them"
        if not table.stands_alone:
            joins = "a row dropped inside joins two steps"
            cut = f"end episodes before such rows (COLUMN=cut), or mend them: {joins}"
        shown = ", ".join(f"{name}: {count}" for name, count in missing.items())
        shown = f"values are missing ({shown}, of {counted(table.n_rows, 'row')})"
        if any(table.census.missing[name] for name in missing):
            shown = f"{shown}; in such columns NA, null and the like are missing values"
        table.problems.add(
            f"{shown}; replace them (--impute COLUMN=mean, of categories zero), {cut}"
        )
    for name in table.means:
        if table.missing[name] == table.n_rows:
            table.problems.add(
                f"column {name} has no value to take the mean of; leave it out"
            )


def _check_final_states(table: SurveyedTable) -> None:
    """Add a problem if a table has the flags of RLDS, and nothing says what its last
    rows hold.
    """
    roles = table.roles
    flag = rlds_flag(table.names)
    is_said = roles.final_state is not None or bool(roles.next_observations)
    lacks_actions = any(table.missing[name] for name in roles.action)
    if flag is None or is_said or lacks_actions or roles.one_step is not None:
        return
    table.problems.add(
        f"in RLDS the row that {flag} marks holds the final state alone, beside an"
        " action and a reward that mean nothing; say whether last rows do so here"
        " (--final-state yes), or are steps (--final-state no)"
    )


def _check_episodes(table: SurveyedTable) -> None:
    """Add problems where nothing says which rows form an episode, or how episodes end,
    or where episodes may begin anew in every file.
    """
    roles = table.roles
    problems = table.problems
    ends_are_known = table.stands_alone or table.flagged or table.links is not None
    if roles.episode is None and roles.one_step is None and not ends_are_known:
        table.is_open = True
        problems.add(
            "no column says which rows belong together; name one (--episode), or say"
            " that each row is an episode of one step (--one-step), or all are one"
            " record (--one-record)"
        )
    _check_final_states(table)
    split = None
    if roles.episode is not None and roles.time is None and len(table.rows.files) > 1:
        split = split_ids(table.rows, roles.episode)
    if split is not None:
        count, example = split
        problems.add(
            f"{counted(count, 'episode')} ({roles.episode} {example}, for example) have"
            " rows in several files, with other episodes between them; where ids begin"
            " anew in every file, make them different first; else name a time column"
            " (--time)"
        )
    has_last_rows = roles.episode is not None or roles.starts is not None
    if has_last_rows and roles.terminal is None and roles.last_row is None:
        problems.add(
            "nothing says how episodes end; name a column (--terminal), or say what"
            " every last row is (--last-row terminal, or cut by the end of logging)"
        )
