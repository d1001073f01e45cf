"""A guess of each column's role, with its reason: from names first, then tested on the
rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from koffline.data.ends import rows_are_linked
from koffline.data.table.flags import ENDS, Ends, find_ends, meaning, set_rows
from koffline.data.table.names import (
    STATE_WORDS,
    Flag,
    earlier_name,
    is_about_actions,
    is_earlier,
    is_later,
    joined,
    parts,
)
from koffline.data.table.profiles import IGNORED, Profile
from koffline.data.table.steps import Steps
from koffline.data.table.values import FALSE, ID_NAME, is_pattern
from koffline.errors import counted

MOST_ONE_HOT = 50  # at most so many categories become features by default
_SHARED = (
    0.2  # share of rows: if more share their guessed time with others, it is no time
)
_ID = "an id by its name"
_NONE = 1000  # rank of a name without a word of the role
_FEWEST_COUNTED = (
    5  # episodes with two rows or more: fewer do not show that a column counts rows
)

_FLAGGED = "give true and false, or 1 and 0"
# By role: words in names, the likeliest first; whether values suit; what to do where
# they do not, if said.
_ROLES: dict[str, tuple[str, Callable[[Profile], bool], str]] = {
    "behavior_log_probability": (
        "logprob logp loglikelihood logpropensity",
        lambda it: it.is_number and it.high <= 0,
        "",
    ),
    "behavior_probability": (
        (
            "probability prob propensity propensities pscore chance behaviour behavior"
            " p mu"
        ),
        lambda it: it.is_number and it.low > 0 and it.high <= 1,
        "give probabilities above 0, up to 1",
    ),
    "terminal": (
        "terminal terminals terminated done dones death dead died ended end churned",
        lambda it: False,
        _FLAGGED,
    ),
    "truncated": (
        "truncated truncation timeout timeouts censored cut",
        lambda it: False,
        _FLAGGED,
    ),
    "reward": (
        (
            "reward rewards rew r payoff profit revenue spend conversion converted"
            " clicked click outcome gain"
        ),
        lambda it: it.is_number,
        "give numbers, or a formula, as in reward: clicked == 'yes'",
    ),
    "action": (
        (
            "action actions a act acts treatment treated arm decision choice offer dose"
            " recommendation variant bid"
        ),
        lambda it: it.is_number or it.distinct <= MOST_ONE_HOT,
        "",
    ),
    "weight": ("weight weights w", lambda it: it.is_number and it.low >= 0, ""),
    "time": (
        (
            "timestamp time t ts datetime date unixtime timestep step tick hour day"
            " week month period visit when created occurred"
        ),
        lambda it: (it.is_time or it.values.dtype.is_numeric()) and it.distinct > 1,
        "give numbers or times, as in 2024-01-31T12:00:00",
    ),
    "episode": (
        (
            "episode episodes trajectory traj rollout session ep patient customer user"
            " subject client account visitor cookie household player subscriber uid"
            " guid id"
        ),
        lambda it: (
            not it.is_time
            and it.values.dtype != pl.Boolean
            and 1.5 * it.distinct <= it.present
        ),
        "",
    ),
}
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


def rank(column: Profile, role: str) -> int:
    """Position of the likeliest word of a name among the role's words; `_NONE` without
    one.
    """
    words = _ROLES[role][0].split()
    name_parts = parts(column.name)
    whole = joined(column.name)
    if role in ("action", "reward") and is_earlier(column.name):
        return _NONE
    if role == "action" and (is_about_actions(column.name) or is_later(column.name)):
        return _NONE
    if role == "time" and whole in _COUNTERS.split():
        return len(words)
    if whole in words or (
        role == "behavior_log_probability" and whole.endswith(tuple(words))
    ):
        if whole in words:
            return words.index(whole)
        return 0
    return min(
        (words.index(part) for part in name_parts if part in words and len(part) > 1),
        default=_NONE,
    )


def guess_roles(columns: Sequence[Profile]) -> Guess:
    """Set the role of each column, with a reason, from its name and values."""
    _set_aside(columns)
    flagged = [(each, said) for each in columns if (said := meaning(each)) is not None]
    for each, _ in flagged:
        each.reason = "a flag by its name"
    _by_names(columns, has_ends=any(said in ENDS for _, said in flagged))
    _settle_lists(columns)
    for each in columns:
        if not each.reason:
            each.role, each.reason = _as_observation(each)
    _settle_episodes(columns, [each for each, said in flagged if said in ENDS])
    _settle_times(columns)
    steps = _steps(columns, flagged)
    ends = find_ends(flagged, steps, _unlinked(columns, steps))
    for each in ends.no_flags:
        each.role, each.reason = _as_observation(each)
    if not steps.has_ids:
        steps = _steps(columns, flagged)
    _settle_starts(columns)
    _leave_out_names_of_episodes(columns, steps)
    return Guess(steps, ends)


def _set_aside(columns: Sequence[Profile]) -> None:
    """Give a reason to columns that no role fits, and to next observations by their
    names.
    """
    names = [each.name for each in columns]
    for each in columns:
        kind = each.unread_kind
        base = earlier_name(each.name, names)
        if not each.name or is_pattern(each.name):
            each.reason = "its name; rename it"
        elif kind:
            each.reason = f"it holds {kind}, which are not read"
        elif not each.distinct:
            each.reason = "no value in it"
        elif base is not None:
            each.role = "next_observations"
            each.partner = base
            each.reason = f"{base} one step later, by its name"


def _by_names(columns: Sequence[Profile], has_ends: bool) -> None:
    """Give each role to the column whose name says it most clearly, if its values
    suit.
    """
    for role, (words, suits, remedy) in _ROLES.items():
        free = [each for each in columns if not each.reason]
        named = sorted(
            (each for each in free if rank(each, role) < _NONE),
            key=lambda each: rank(each, role),
        )
        if role == "action":
            likely = [each for each in named if each.width is not None or suits(each)]
        else:
            likely = [
                each
                for each in named
                if not each.values.dtype.is_nested() and suits(each)
            ]
        if role == "time":
            likely += [
                each
                for each in free
                if each.is_time and each.distinct > 1 and each not in likely
            ]
        for each in likely[:1]:
            if role == "time" and each.is_time:
                said = "its values are times"
            else:
                said = "its name"
            each.role = role
            each.reason = f"{said}; {counted(each.distinct, 'value')}"
        is_answered = bool(likely) or (role == "terminal" and has_ends)
        for each in named if remedy and not is_answered else ():
            # "step 7" is meant as a time, "Monday" is a category
            if each.name.lower() in words.split() and (
                role != "time" or each.has_digits
            ):
                each.reason = f"its name says {role}, its values do not: {remedy}"
                each.problem = f"{each.problem}; {each.reason}".removeprefix("; ")
        # a vector of actions: action_0, action_1
        for each in likely[1:] if role == "action" else ():
            stem, first = (re.sub(r"\d+$", "", one.name) for one in (each, likely[0]))
            if stem and first == stem != each.name:
                each.role = role
                each.reason = f"beside {likely[0].name}"


def _settle_lists(columns: Sequence[Profile]) -> None:
    """Columns of lists without a role: the one that is called a state comes first among
    them.
    """
    lists = [
        each for each in columns if each.values.dtype.is_nested() and not each.reason
    ]
    for each in lists:
        words = set(parts(each.name))
        if "action" in words or "actions" in words or "act" in words:
            each.reason = "a list, and by its name about actions"
        else:
            each.role = "observations"
            each.reason = "a list of numbers"


def the_list(columns: Sequence[Profile]) -> Profile | None:
    """The list that is the observation: one that is called a state, else the first;
    None if there is none.
    """
    lists = [
        each
        for each in columns
        if each.role == "observations" and each.values.dtype.is_nested()
    ]
    called = [each for each in lists if STATE_WORDS.intersection(parts(each.name))]
    return next(iter(called or lists), None)


def _settle_episodes(columns: Sequence[Profile], flags: Sequence[Profile]) -> None:
    """Take ids inside the guessed episodes if these share times or end often; what is
    shared is no time.
    """
    chosen = {each.role: each for each in columns}
    whole = chosen.get("episode")
    if whole is None:
        return
    marked = [chosen["time"], *flags[:1]] if "time" in chosen else flags[:1]
    texts = [each.values.to_physical().cast(pl.String) for each in marked]
    marks = [each.str.to_lowercase().replace(FALSE, None) for each in texts]
    inner = [
        each
        for each in columns
        if each.reason.startswith(_ID) and _ROLES["episode"][1](each)
        if pl.DataFrame([each.values, whole.values]).n_unique() == each.distinct
        if any(
            _are_shared(whole, mark) and not _are_shared(each, mark) for mark in marks
        )
    ]
    for each in sorted(inner, key=lambda each: each.distinct)[-1:]:
        whole.role = "cluster"
        whole.reason = f"each has several {each.name}"
        each.role = "episode"
        each.reason = f"each has one {whole.name}"
        whole = each
    time = chosen.get("time")
    if time is not None and not time.is_time and _are_shared(whole, time.values):
        time.role = "observations"
        time.reason = "numbers; rows of an episode share them, so they are no time"


def _settle_times(columns: Sequence[Profile]) -> None:
    """Without a time, take a column that counts the rows of every episode."""
    chosen = {each.role: each for each in columns}
    if "time" in chosen or "episode" not in chosen:
        return
    ids = chosen["episode"].values
    for each in columns:
        is_free = each.role == "observations" or each.reason.startswith(_ID)
        if not (
            is_free
            and each.values.dtype.is_integer()
            and each.distinct > 1
            and not each.missing
        ):
            continue
        rows = pl.DataFrame({"id": ids, "count": each.values})
        spans = rows.group_by("id").agg(
            pl.len().alias("rows"),
            pl.col("count").n_unique().alias("different"),
            (pl.col("count").max() - pl.col("count").min()).alias("span"),
            pl.col("count").min().alias("first"),
        )
        counts = spans.filter(
            (pl.col("different") == pl.col("rows"))
            & (pl.col("span") == pl.col("rows") - 1)
        )
        long = int((spans["rows"] > 1).sum())
        if (
            counts.height == spans.height
            and long >= _FEWEST_COUNTED
            and spans["first"].n_unique() == 1
        ):
            each.role = "time"
            each.reason = "it counts the rows of each episode"
            return


def _settle_starts(columns: Sequence[Profile]) -> None:
    """Without ids, take a count of steps that begins anew for the starts of episodes;
    there is no time then.

    A time orders the rows of an episode, and without ids those of the whole table.
    """
    chosen = {each.role: each for each in columns}
    time = chosen.get("time")
    if time is None or "episode" in chosen:
        return
    if "starts" in chosen:
        time.role = IGNORED
        time.reason = (
            f"rows are in the table's order, since {chosen['starts'].name} tells"
            " episodes"
        )
        return
    if (
        not time.values.dtype.is_integer()
        or time.missing
        or time.distinct == time.present
    ):
        return
    first = int(time.low)
    counts = time.values.cast(pl.Int64).to_numpy()
    is_start = counts == first
    goes_on = np.append(False, np.diff(counts) == 1)
    if is_start[0] and (is_start | goes_on).all() and is_start.sum() >= _FEWEST_COUNTED:
        if time.name.isidentifier():
            name = time.name
        else:
            name = f"`{time.name}`"
        time.role = "starts"
        time.formula = f"{name} == {first}"
        time.reason = "it counts the steps of each episode"


def _are_shared(ids: Profile, marks: pl.Series) -> bool:
    """Whether many marks of rows are those of other rows with the same id."""
    both = pl.DataFrame({"id": ids.values, "mark": marks}).drop_nulls()
    return int(both.is_duplicated().sum()) > _SHARED * both.height


def _steps(
    columns: Sequence[Profile], flagged: Sequence[tuple[Profile, Flag]]
) -> Steps:
    """The order of the rows by episode and time; without ids, by flags, as settled or
    by their names.
    """
    chosen = {each.role: each for each in columns}
    if "episode" in chosen:
        times = chosen["time"].values if "time" in chosen else None
        return Steps.of_ids(chosen["episode"].values, times)
    ends = np.zeros(len(columns[0].values), dtype=np.bool_)
    for each, said in flagged:
        is_set = set_rows(each)
        if said is Flag.GOES_ON or (each.role == "terminal" and each.formula):
            is_set = ~is_set
        if said is Flag.START:
            is_set = np.append(is_set[1:], True)
        if is_set.mean() <= _SHARED or each.role in ("terminal", "truncated", "starts"):
            ends |= is_set
    return Steps.of_flags(ends)


def _unlinked(columns: Sequence[Profile], steps: Steps) -> np.ndarray | None:
    """Whether (N,) a row's next observation is not the observation of the row below, if
    that is known.
    """
    by_name = {each.name: each for each in columns}
    following = [
        each
        for each in columns
        if each.role == "next_observations" and each.partner in by_name
    ]
    pairs = [(by_name[each.partner], each) for each in following]
    matrices = [(as_matrix(now), as_matrix(later)) for now, later in pairs]
    known = [
        (now, later) for now, later in matrices if now is not None and later is not None
    ]
    if steps.has_ids or not known or len(known[0][0]) < 2:
        return None
    linked = np.ones(len(known[0][0]) - 1, dtype=np.bool_)
    for now, later in known:
        linked &= rows_are_linked(now, later)
    return np.append(~linked, True)


def as_matrix(column: Profile) -> np.ndarray | None:
    """(N, d) numbers of a column of numbers or of lists, NaN where missing; None for
    other columns.
    """
    if column.is_number:
        return (
            column.values.cast(pl.Float64).fill_null(np.nan).to_numpy().reshape(-1, 1)
        )
    if column.width is None:
        return None
    found = np.full((len(column.values), column.width), np.nan)
    there = column.values.is_not_null()
    numbers = column.values.filter(there).explode(empty_as_null=False).cast(pl.Float64)
    found[there.to_numpy()] = numbers.to_numpy().reshape(-1, column.width)
    return found


def _leave_out_names_of_episodes(columns: Sequence[Profile], steps: Steps) -> None:
    """A text or number that names the episode once more is no observation."""
    ids = next((each for each in columns if each.role == "episode"), None)
    if ids is None or not steps.has_ids:
        return
    for each in columns:
        is_name = each.values.dtype == pl.String or rank(each, "episode") < _NONE
        if each.role != "observations" or not is_name or each.distinct != ids.distinct:
            continue
        if (
            pl.DataFrame([each.values.alias("a"), ids.values.alias("b")]).n_unique()
            == ids.distinct
        ):
            each.role = IGNORED
            each.reason = f"it names the episodes, as {ids.name} does"


def _as_observation(each: Profile) -> tuple[str, str]:
    """Role (observation or ignored) and reason for a column whose name does not tell
    its role.
    """
    if each.distinct == 1:
        return IGNORED, "the same value in every row"
    if each.is_time:
        return IGNORED, "times; export what matters of them as numbers"
    is_counted = (
        each.values.dtype.is_numeric() and (each.values == each.values.floor()).all()
    )
    if ID_NAME.search(each.name) and (is_counted or each.has_digits):
        return IGNORED, f"{_ID}; {counted(each.distinct, 'value')}"
    if each.values.dtype == pl.String:
        if each.distinct > min(MOST_ONE_HOT, each.present // 2):
            return (
                IGNORED,
                (
                    f"{each.distinct} different texts; encode it (one-hot, ordinal) if"
                    " they matter"
                ),
            )
        return "observations", counted(each.distinct, "categor").replace(
            "categors", "categories"
        )
    is_whole = each.values.dtype.is_integer() and each.distinct == each.present
    if is_whole and each.present > 2 and each.high - each.low == each.present - 1:
        return IGNORED, "it counts the rows"
    if is_whole and each.present > 20 and rank(each, "episode") < _NONE:
        return IGNORED, "a different value in every row"
    return "observations", "numbers"
