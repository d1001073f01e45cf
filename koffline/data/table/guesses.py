"""A guess of each column's role, with its reason: from names first, then tested on the
rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from koffline.data.ends import rows_are_linked
from koffline.data.table.column_names import (
    ID_NAME,
    STATE_WORDS,
    Flag,
    earlier_name,
    flag_of,
    is_about_actions,
    is_earlier,
    is_later,
    is_numbered,
    is_pattern,
    joined,
    parts,
)
from koffline.data.table.flag_values import FALSE
from koffline.data.table.flags import ENDS, Ends, find_ends, meaning, set_rows
from koffline.data.table.profiles import IGNORED, ColumnProfile
from koffline.data.table.step_order import Steps
from koffline.errors import counted

MOST_ONE_HOT = 50  # at most so many categories become features by default
# share of rows: if more share their guessed time with others, it is no time
_SHARED = 0.2
# episodes: of fewer, a quantity such as the age may have another value in each
_FEWEST_IDS = 20
# share of the rows: if fewer have the value of the row below, it is no next value
_LINKED = 0.5
_ID = "an id by its name"
_NONE = 1000  # rank of a name without a word of the role
# episodes with two rows or more: fewer do not show that a column counts rows
_FEWEST_COUNTED = 5

_FLAGGED = "give true and false, or 1 and 0"


@dataclass(frozen=True)
class _Role:
    """How a role is recognised: words in names, the likeliest first; whether values
    suit; what to do where they do not, empty if nothing is to be said.
    """

    words: str
    suits: Callable[[ColumnProfile], bool]
    remedy: str = ""


def _are_ids(column: ColumnProfile) -> bool:
    """Whether values can be ids of episodes, which have one and a half rows or more on
    average.
    """
    if column.is_time or column.values.dtype == pl.Boolean:
        return False
    return 1.5 * column.distinct <= column.present


def _are_times(column: ColumnProfile) -> bool:
    is_ordered = column.is_time or column.values.dtype.is_numeric()
    return is_ordered and column.distinct > 1


def _is_found_by_flags(column: ColumnProfile) -> bool:
    """Flags of ends are settled by the rows, in `find_ends`."""
    return False


_ROLES = {
    "behavior_log_probability": _Role(
        words="logprob logp loglikelihood logpropensity",
        suits=lambda column: column.is_number and column.high <= 0,
    ),
    "behavior_probability": _Role(
        words=(
            "probability prob propensity propensities pscore chance behaviour behavior"
            " p mu"
        ),
        suits=lambda column: column.is_number and column.low > 0 and column.high <= 1,
        remedy="give probabilities above 0, up to 1",
    ),
    "terminal": _Role(
        words=(
            "terminal terminals terminated done dones death dead died ended end churned"
        ),
        suits=_is_found_by_flags,
        remedy=_FLAGGED,
    ),
    "truncated": _Role(
        words="truncated truncation timeout timeouts censored cut",
        suits=_is_found_by_flags,
        remedy=_FLAGGED,
    ),
    "reward": _Role(
        words=(
            "reward rewards rew r payoff profit revenue spend conversion converted"
            " clicked click outcome gain"
        ),
        suits=lambda column: column.is_number,
        remedy="give numbers, or a formula, as in reward: clicked == 'yes'",
    ),
    "action": _Role(
        words=(
            "action actions a act acts treatment treated arm decision choice offer dose"
            " recommendation variant bid"
        ),
        suits=lambda column: column.is_number or column.distinct <= MOST_ONE_HOT,
    ),
    "weight": _Role(
        words="weight weights w",
        suits=lambda column: column.is_number and column.low >= 0,
    ),
    "time": _Role(
        words=(
            "timestamp time t ts datetime date unixtime timestep step tick hour day"
            " week month period visit when created occurred"
        ),
        suits=_are_times,
        remedy="give numbers or times, as in 2024-01-31T12:00:00",
    ),
    "episode": _Role(
        words=(
            "episode episodes trajectory traj rollout session ep stay icustay icustayid"
            " stayid encounter admission hadm hadmid patient patientid customer"
            " customerid user userid subject subjectid client account visitor cookie"
            " household player subscriber uid guid id"
        ),
        suits=_are_ids,
    ),
}
# Roles that rows which stand alone do not have.
_OF_EPISODES = ("terminal", "truncated", "time", "episode")
# Words of names that say something about a user or an environment and are no id of it.
_NO_IDS = (
    "feature features attribute attributes affinity embedding age gender sex type kind"
    " category segment group tier region country city score"
)
# Whole names of columns that count the rows of an episode.
_COUNTERS = (
    "sequencenumber sequence seq seqno transitionnumber frameindex frame stepindex"
    " stepnumber timeindex turn"
)


@dataclass
class Guess:
    """What was guessed beside the columns' roles: order of the rows, and flags of
    ends.
    """

    steps: Steps
    ends: Ends


def rank(column: ColumnProfile, role: str) -> int:
    """Position of the likeliest word of a name among the role's words; `_NONE` without
    one.
    """
    words = _ROLES[role].words.split()
    name_parts = parts(column.name)
    whole = joined(column.name)
    if role in ("action", "reward") and is_earlier(column.name):
        return _NONE
    if role == "action" and (is_about_actions(column.name) or is_later(column.name)):
        return _NONE
    if role == "episode" and set(_NO_IDS.split()).intersection(name_parts):
        return _NONE
    if role == "time" and whole in _COUNTERS.split():
        return len(words)
    if whole in words:
        return words.index(whole)
    if role == "behavior_log_probability" and whole.endswith(tuple(words)):
        return 0
    return min(
        (words.index(part) for part in name_parts if part in words and len(part) > 1),
        default=_NONE,
    )


def guess_roles(
    columns: Sequence[ColumnProfile],
    known: Mapping[str, Sequence[str]] | None = None,
    one_step: bool = False,
) -> Guess:
    """Set the role of each column, with a reason, from its name and values.

    known: columns by roles that are known beforehand. one_step: every row is known to
    be an episode of its own, so that no column tells episodes, their order or their
    ends. Columns that have a role or a reason already keep them.
    """
    _set_known(columns, known or {})
    _set_aside(columns)
    flagged: list[tuple[ColumnProfile, Flag]] = []
    for column in columns:
        if one_step:
            break
        by_name = meaning(column)
        if by_name is not None:
            flagged.append((column, by_name))
    for column, _ in flagged:
        column.reason = "a flag by its name"
    end_flags = [column for column, by_name in flagged if by_name in ENDS]
    _by_names(columns, has_ends=bool(end_flags), one_step=one_step)
    _settle_lists(columns)
    for column in columns:
        if not column.reason:
            column.role, column.reason = _as_observation(column)
    _settle_episodes(columns, end_flags)
    _settle_times(columns)
    steps = _steps(columns, flagged)
    ends = find_ends(flagged, steps, _unlinked(columns, steps))
    for column in ends.no_flags:
        column.role, column.reason = _as_observation(column)
        if _tells_outcome(column, steps):
            column.leave_out("the same in all rows of an episode: how it ended")
    _settle_starts(columns)
    if not steps.has_ids:
        # Now it is settled which of the flags are ends, and where episodes begin.
        steps = _steps(columns, flagged)
    _test_numbered_next(columns, steps)
    _leave_out_names_of_episodes(columns, steps)
    return Guess(steps, ends)


def _tells_outcome(column: ColumnProfile, steps: Steps) -> bool:
    """Whether a flag says by its name how an episode ended, and is the same in all of
    its rows: such as whether the patient died later.
    """
    if not steps.has_ids or flag_of(column.name) is not Flag.OUTCOME:
        return False
    values = column.values.to_physical().cast(pl.String)
    pairs = pl.DataFrame({"episode": steps.episodes, "value": values[steps.order]})
    return bool(pairs.n_unique() == len(steps.lengths))


def _by_role(columns: Sequence[ColumnProfile]) -> dict[str, ColumnProfile]:
    """The last column of each role."""
    return {column.role: column for column in columns}


def _set_known(
    columns: Sequence[ColumnProfile], known: Mapping[str, Sequence[str]]
) -> None:
    """Give the known columns (names by role) their roles."""
    for role, names in known.items():
        for column in columns:
            if column.name in names:
                column.role = role
                column.reason = "as you say"


def _set_aside(columns: Sequence[ColumnProfile]) -> None:
    """Give a reason to columns that no role fits, and to next observations by their
    names.
    """
    names = [column.name for column in columns]
    for column in columns:
        if column.reason:
            continue
        kind = column.unread_kind
        base = earlier_name(column.name, names)
        if not column.name or is_pattern(column.name):
            column.reason = "its name; rename it"
        elif kind:
            column.reason = f"it holds {kind}, which are not read"
        elif not column.distinct:
            column.reason = "no value in it"
        elif base is not None:
            column.role = "next_observations"
            column.partner = base
            column.reason = f"{base} one step later, by its name"


def _by_names(columns: Sequence[ColumnProfile], has_ends: bool, one_step: bool) -> None:
    """Give each role to the column whose name says it most clearly, if its values
    suit. has_ends: whether flags of ends are there. one_step: as for `guess_roles`.
    """
    known = {column.role for column in columns if column.role != IGNORED}
    for role, rule in _ROLES.items():
        if role in known or (one_step and role in _OF_EPISODES):
            continue
        free = [column for column in columns if not column.reason]
        named = [column for column in free if rank(column, role) < _NONE]
        named.sort(key=lambda column: rank(column, role))
        likely = [column for column in named if _suits(column, role)]
        if role == "time":
            likely += [
                column
                for column in free
                if column.is_time and column.distinct > 1 and column not in likely
            ]
        if likely:
            chosen = likely[0]
            why = "its name"
            if role == "time" and chosen.is_time:
                why = "its values are times"
            chosen.role = role
            chosen.reason = f"{why}; {counted(chosen.distinct, 'value')}"
        is_answered = bool(likely) or (role == "terminal" and has_ends)
        if rule.remedy and not is_answered:
            for column in named:
                is_meant = role != "time" or column.has_digits
                # "step 7" is meant as a time, "Monday" is a category
                if is_meant and column.name.lower() in rule.words.split():
                    _report_values(column, role, rule.remedy)
        if role == "action":
            _add_components(likely)


def _suits(column: ColumnProfile, role: str) -> bool:
    """Whether the values of a column suit a role; of the roles here, an action alone
    may be a list of numbers.
    """
    if role == "action" and column.width is not None:
        return True
    if role != "action" and column.values.dtype.is_nested():
        return False
    return _ROLES[role].suits(column)


def _report_values(column: ColumnProfile, role: str, remedy: str) -> None:
    """Say that a column has the name of a role, but not its values."""
    column.reason = f"its name says {role}, its values do not: {remedy}"
    if column.problem:
        column.problem = f"{column.problem}; {column.reason}"
    else:
        column.problem = column.reason


def _add_components(actions: Sequence[ColumnProfile]) -> None:
    """Give the role of the first action to the others of the same stem: action_0,
    action_1 are one vector.
    """
    for column in actions[1:]:
        stem = re.sub(r"\d+$", "", column.name)
        first_stem = re.sub(r"\d+$", "", actions[0].name)
        if stem and first_stem == stem != column.name:
            column.role = "action"
            column.reason = f"beside {actions[0].name}"


def _settle_lists(columns: Sequence[ColumnProfile]) -> None:
    """Give the role of observations to lists without a role, unless their names say
    that they are about actions.
    """
    for column in columns:
        if column.reason or not column.values.dtype.is_nested():
            continue
        if {"action", "actions", "act"}.intersection(parts(column.name)):
            column.reason = "a list, and by its name about actions"
        else:
            column.role = "observations"
            column.reason = "a list of numbers"


def the_list(columns: Sequence[ColumnProfile]) -> ColumnProfile | None:
    """The list that is the observation: one that is called a state, else the first;
    None if there is none.
    """
    lists = [
        column
        for column in columns
        if column.role == "observations" and column.values.dtype.is_nested()
    ]
    states = [
        column for column in lists if STATE_WORDS.intersection(parts(column.name))
    ]
    return next(iter(states or lists), None)


def _settle_episodes(
    columns: Sequence[ColumnProfile], flags: Sequence[ColumnProfile]
) -> None:
    """Take ids inside the guessed episodes if these share times or end often; what is
    shared is no time. flags: of ends.
    """
    chosen = _by_role(columns)
    whole = chosen.get("episode")
    if whole is None:
        return
    if whole.distinct == 1 and any(set_rows(flag).sum() > 1 for flag in flags):
        whole.leave_out("the same value in every row, while flags end several episodes")
        return
    marked = [*flags[:1]]
    if "time" in chosen:
        marked.insert(0, chosen["time"])
    texts = [column.values.to_physical().cast(pl.String) for column in marked]
    # A flag that is not set marks nothing.
    marks = [text.str.to_lowercase().replace(FALSE, None) for text in texts]
    inner = [column for column in columns if _is_inside(column, whole, marks)]
    if inner:
        # the finest; of several the last
        finest = sorted(inner, key=lambda column: column.distinct)[-1]
        whole.role = "cluster"
        whole.reason = f"each has several {finest.name}"
        finest.role = "episode"
        finest.reason = f"each has one {whole.name}"
        whole = finest
    time = chosen.get("time")
    if time is not None and _begin_anew(whole, time):
        whole.leave_out(f"its ids begin anew; {time.name} tells episodes")
        whole.problem = (
            f"ids begin anew in the table: {counted(whole.distinct, 'id')} for more"
            " episodes; make them different, or read the rows in the table's order"
            f" with starts: {time.formula_name} == {int(time.low)}, as proposed"
        )
        return
    if time is not None and not time.is_time and _are_shared(whole, time.values):
        time.role = "observations"
        time.reason = "numbers; rows of an episode share them, so they are no time"


def _counted_starts(time: ColumnProfile) -> np.ndarray | None:
    """Whether (N,) a row, in the order of the table, is the first step of an episode,
    by a column that counts steps and begins anew; None if it does not.
    """
    is_whole = time.values.dtype.is_integer()
    if not is_whole or time.missing or time.distinct == time.present:
        return None
    counts = time.values.cast(pl.Int64).to_numpy()
    is_start = counts == int(time.low)
    goes_on = np.append(False, np.diff(counts) == 1)
    if not is_start[0] or not (is_start | goes_on).all():
        return None
    if is_start.sum() < _FEWEST_COUNTED:
        return None
    return is_start


def _begin_anew(ids: ColumnProfile, time: ColumnProfile) -> bool:
    """Whether episodes that a count of steps shows have one id each, and share their
    ids with others.
    """
    is_start = _counted_starts(time)
    if is_start is None or ids.missing or is_start.sum() <= ids.distinct:
        return False
    return _is_constant_between(ids.values, is_start)


def _is_constant_between(values: pl.Series, is_start: np.ndarray) -> bool:
    """Whether values (N,) change in first rows of episodes alone."""
    changes = values.ne_missing(values.shift()).to_numpy()
    changes[0] = False
    return not (changes & ~is_start).any()


def _unnamed_ids(
    columns: Sequence[ColumnProfile], is_start: np.ndarray
) -> ColumnProfile | None:
    """A column without a role of its own that has another value in each episode; None
    if there is none. is_start: (N,) whether a row is the first one of an episode.
    """
    n_episodes = int(is_start.sum())
    for column in columns:
        is_free = column.role == "observations" or column.reason.startswith(_ID)
        is_float = column.values.dtype.is_float()
        is_single = not column.values.dtype.is_nested() and not column.is_time
        if not is_free or is_float or not is_single or column.missing:
            continue
        if column.distinct != n_episodes:
            continue
        is_sorted = column.values.is_sorted() or column.values.is_sorted(
            descending=True
        )
        if n_episodes < _FEWEST_IDS and not is_sorted:
            continue
        if _is_constant_between(column.values, is_start):
            return column
    return None


def _is_inside(
    column: ColumnProfile, whole: ColumnProfile, marks: Sequence[pl.Series]
) -> bool:
    """Whether a column holds ids of parts of the guessed episodes ``whole``, which do
    not share one of the ``marks`` (N,) that whole episodes share.
    """
    if not column.reason.startswith(_ID) or not _suits(column, "episode"):
        return False
    pairs = pl.DataFrame([column.values, whole.values])
    if pairs.n_unique() != column.distinct:
        return False
    return any(
        _are_shared(whole, mark) and not _are_shared(column, mark) for mark in marks
    )


def _settle_times(columns: Sequence[ColumnProfile]) -> None:
    """Without a time, take a column that counts the rows of every episode."""
    chosen = _by_role(columns)
    if "time" in chosen or "episode" not in chosen:
        return
    for column in columns:
        is_free = column.role == "observations" or column.reason.startswith(_ID)
        if is_free and _counts_rows(column, chosen["episode"].values):
            column.role = "time"
            column.reason = "it counts the rows of each episode"
            return


def _counts_rows(column: ColumnProfile, ids: pl.Series) -> bool:
    """Whether a column counts the rows of every episode, from the same number on.

    ids: (N,) of the rows' episodes.
    """
    is_whole = column.values.dtype.is_integer()
    if not is_whole or column.distinct <= 1 or column.missing:
        return False
    rows = pl.DataFrame({"id": ids, "count": column.values})
    count = pl.col("count")
    spans = rows.group_by("id").agg(
        pl.len().alias("rows"),
        count.n_unique().alias("different"),
        (count.max() - count.min()).alias("span"),
        count.min().alias("first"),
    )
    counting = spans.filter(
        (pl.col("different") == pl.col("rows")) & (pl.col("span") == pl.col("rows") - 1)
    )
    n_long = int((spans["rows"] > 1).sum())
    has_one_start = spans["first"].n_unique() == 1
    return (
        counting.height == spans.height and n_long >= _FEWEST_COUNTED and has_one_start
    )


def _test_numbered_next(columns: Sequence[ColumnProfile], steps: Steps) -> None:
    """Numbers called s1 and s2 are two numbers, unless s2 is s1 one row later.

    Lists of these names are states.
    """
    by_name = {column.name: column for column in columns}
    rows, following = steps.pairs
    for column in columns:
        partner = by_name.get(column.partner)
        if column.role != "next_observations" or partner is None:
            continue
        if not is_numbered(column.name) or not is_numbered(partner.name):
            continue
        now = as_matrix(partner)
        later = as_matrix(column)
        if now is None or later is None or column.width is not None:
            continue
        is_next = np.isclose(later[rows], now[following], rtol=1e-4, atol=1e-6)
        if len(rows) == 0 or is_next.mean() < _LINKED:
            column.partner = ""
            column.role, column.reason = _as_observation(column)


def _settle_starts(columns: Sequence[ColumnProfile]) -> None:
    """Without ids, take a count of steps that begins anew for the starts of episodes;
    there is no time then, unless a column has another value in each of them: their ids.

    A time orders the rows of an episode, and without ids those of the whole table.
    """
    chosen = _by_role(columns)
    time = chosen.get("time")
    if time is None or "episode" in chosen:
        return
    is_start = _counted_starts(time)
    if is_start is not None and is_start.sum() < len(is_start):
        ids = _unnamed_ids(columns, is_start)
        if ids is not None:
            ids.role = "episode"
            ids.reason = f"it has another value wherever {time.name} begins anew"
            if "starts" in chosen:
                chosen["starts"].leave_out("first rows of episodes")
            return
    if "starts" in chosen:
        starts = chosen["starts"].name
        time.leave_out(f"rows are in the table's order, since {starts} tells episodes")
        return
    if is_start is not None:
        time.role = "starts"
        time.formula = f"{time.formula_name} == {int(time.low)}"
        time.reason = "it counts the steps of each episode"


def _are_shared(ids: ColumnProfile, marks: pl.Series) -> bool:
    """Whether many marks of rows are those of other rows with the same id."""
    both = pl.DataFrame({"id": ids.values, "mark": marks}).drop_nulls()
    return int(both.is_duplicated().sum()) > _SHARED * both.height


def _steps(
    columns: Sequence[ColumnProfile], flagged: Sequence[tuple[ColumnProfile, Flag]]
) -> Steps:
    """The order of the rows by episode and time; without ids, by flags, as settled or
    by their names. flagged: flags with what their names mean.
    """
    chosen = _by_role(columns)
    if "episode" in chosen:
        times = None
        if "time" in chosen:
            times = chosen["time"].values
        return Steps.of_ids(chosen["episode"].values, times)
    ends = np.zeros(len(columns[0].values), dtype=np.bool_)
    if "starts" in chosen and chosen["starts"].formula:
        is_start = _counted_starts(chosen["starts"])
        if is_start is not None:
            ends = np.append(is_start[1:], True)
    for column, by_name in flagged:
        is_set = set_rows(column)
        is_negated = column.role == "terminal" and column.formula
        if by_name is Flag.GOES_ON or is_negated:
            is_set = ~is_set
        if by_name is Flag.START:
            # the row above a start is an end
            is_set = np.append(is_set[1:], True)
        is_settled = column.role in ("terminal", "truncated", "starts")
        if is_settled or is_set.mean() <= _SHARED:
            ends |= is_set
    return Steps.of_flags(ends)


def _unlinked(columns: Sequence[ColumnProfile], steps: Steps) -> np.ndarray | None:
    """Whether (N,) a row's next observation is not the observation of the row below, if
    that is known.
    """
    by_name = {column.name: column for column in columns}
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for column in columns:
        if column.role != "next_observations" or column.partner not in by_name:
            continue
        now = as_matrix(by_name[column.partner])
        later = as_matrix(column)
        if now is not None and later is not None:
            pairs.append((now, later))
    n_rows = len(columns[0].values)
    if steps.has_ids or not pairs or n_rows < 2:
        return None
    linked = np.ones(n_rows - 1, dtype=np.bool_)
    for now, later in pairs:
        linked &= rows_are_linked(now, later)
    return np.append(~linked, True)


def as_matrix(column: ColumnProfile) -> np.ndarray | None:
    """(N, d) numbers of a column of numbers or of lists, NaN where missing; None for
    other columns.
    """
    if column.is_number:
        numbers = column.values.cast(pl.Float64).fill_null(np.nan).to_numpy()
        return numbers.reshape(-1, 1)
    if column.width is None:
        return None
    matrix = np.full((len(column.values), column.width), np.nan)
    present = column.values.is_not_null()
    lists = column.values.filter(present).explode(empty_as_null=False)
    numbers = lists.cast(pl.Float64).to_numpy()
    matrix[present.to_numpy()] = numbers.reshape(-1, column.width)
    return matrix


def _leave_out_names_of_episodes(
    columns: Sequence[ColumnProfile], steps: Steps
) -> None:
    """A text or number that names the episode once more is no observation."""
    ids = next((column for column in columns if column.role == "episode"), None)
    if ids is None or not steps.has_ids:
        return
    for column in columns:
        if column.role != "observations" or column.distinct != ids.distinct:
            continue
        is_text = column.values.dtype == pl.String
        if not is_text and rank(column, "episode") == _NONE:
            continue
        pairs = pl.DataFrame([column.values.alias("a"), ids.values.alias("b")])
        if pairs.n_unique() == ids.distinct:
            column.leave_out(f"it names the episodes, as {ids.name} does")


def _as_observation(column: ColumnProfile) -> tuple[str, str]:
    """Role (observation or ignored) and reason for a column whose name does not tell
    its role.
    """
    if column.distinct == 1:
        return IGNORED, "the same value in every row"
    if column.is_time:
        return IGNORED, "times; export what matters of them as numbers"
    values = column.values
    has_whole_numbers = values.dtype.is_numeric() and (values == values.floor()).all()
    if ID_NAME.search(column.name) and (has_whole_numbers or column.has_digits):
        return IGNORED, f"{_ID}; {counted(column.distinct, 'value')}"
    if values.dtype == pl.String:
        if column.distinct > min(MOST_ONE_HOT, column.present // 2):
            reason = (
                f"{column.distinct} different texts; encode it (one-hot, ordinal) if"
                " they matter"
            )
            return IGNORED, reason
        categories = counted(column.distinct, "categor")
        return "observations", categories.replace("categors", "categories")
    is_different = values.dtype.is_integer() and column.distinct == column.present
    has_range = is_different and column.present > 2
    if has_range and column.high - column.low == column.present - 1:
        return IGNORED, "it counts the rows"
    if is_different and column.present > 20 and rank(column, "episode") < _NONE:
        return IGNORED, "a different value in every row"
    return "observations", "numbers"
