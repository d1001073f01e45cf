"""Make the columns of transitions from rows of whole episodes, as they are in a
table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from koffline.data.raw import (
    RawLog,
    followed,
    lacks_next_masks,
    leave_out_unmasked,
    shaped_actions,
)
from koffline.data.spaces import Discrete
from koffline.data.table.action_masks import (
    as_lists,
    masks_of_columns,
    masks_of_lists,
)
from koffline.data.table.column_names import Flag, flag_of
from koffline.data.table.column_types import Kind
from koffline.data.table.flag_values import read_flags
from koffline.data.table.mapping import CUT, TableMapping
from koffline.data.table.numbers import hashed_ids, number_type
from koffline.data.table.rewards import lacks_action, move_rewards, reward_values
from koffline.data.table.survey import SurveyedTable, links_of
from koffline.data.table.texts import doubtful_spellings, one_spelling, spelling_note
from koffline.errors import DataError, counted, listed

_FEWEST_DOUBLES = 20  # fewer may be corrections
_MANY_DOUBLES = 0.05  # share of the rows; so many are hardly repeated
# Names that no column has.
_NO_ACTION = "koffline: the row has no action"
_FINAL_STATE = "koffline: the row holds the final state alone"


def assemble(frame: pl.DataFrame, table: SurveyedTable) -> RawLog | None:
    """Aligned columns of a piece with whole episodes; None if no row is left.

    Episodes and rows are in the order of `_ordered`; ``table.counts`` records what was
    done, ``table.unearned`` and ``table.lost_rewards`` which rewards went with rows
    that are left out. Raises DataError with all problems.
    """
    roles = table.roles
    if table.is_open:
        table.problems.refuse()
    if not table.stands_alone:
        frame = _ordered(frame, table)
    columns, episodes = _flags(frame, table)
    frame = _with_earned_rewards(frame, episodes, table)
    table.problems.refuse()
    # Before rows are left out: the flag of a final state moves to the row above.
    _flag_last_rows(columns, _last(episodes), table)
    frame, episodes = _cut(frame, episodes, columns, table)
    if not frame.height:
        return None
    frame, episodes = _without_next(frame, episodes, columns, table)
    if not frame.height:
        return None
    is_last = _last(episodes)
    if table.cuts_are_marked:
        is_cut = is_last & ~columns["terminated"]
        columns["truncated"] = columns["truncated"] | is_cut
    if roles.by is not None:
        columns["labels"] = _labels(frame[roles.by], table)
    frame = _imputed(frame, episodes, table)
    _add_values(columns, frame, table)
    if not table.stands_alone or roles.one_step:
        columns["episode_ids"] = _episode_ids(frame, episodes, table)
    if roles.cluster is not None:
        columns["clusters"] = _cluster_ids(frame[roles.cluster])
    columns = _with_next_observations(columns, frame, is_last, table)
    if table.cuts_are_marked:
        cut_rows = columns["truncated"] & ~columns["terminated"]
        table.counts.cut += int(cut_rows.sum())
    _check_numbers(columns, table)
    table.problems.refuse()
    labels = columns.pop("labels", None)
    episode_ids = columns.get("episode_ids")
    if labels is not None and episode_ids is not None:
        labels = labels[_begins(episode_ids)]
    if len(columns["rewards"]):
        return RawLog(columns, table.action_space, table.metadata, labels)
    return None


def _with_earned_rewards(
    frame: pl.DataFrame, episodes: np.ndarray, table: SurveyedTable
) -> pl.DataFrame:
    """The rows (N,) of ordered episodes with a column `_NO_ACTION`, and each reward in
    the row of the action that earned it, if the mapping asks for that.

    Rewards without such an action are a problem.
    """
    roles = table.roles
    without = lacks_action(frame, episodes, roles)
    table.unearned.add(frame, episodes, without, roles)
    frame = frame.with_columns(pl.Series(_NO_ACTION, without))
    frame, n_unmoved = move_rewards(frame, episodes, without, roles)
    if n_unmoved:
        rewards = counted(n_unmoved, "reward", "stands", "stand")
        table.problems.add(
            f"{rewards} in rows without an action, with none above in the episode whose"
            " action earned it; set them to 0, or let them go (--reward-row drop)"
        )
    return frame


def _flag_last_rows(
    columns: dict[str, np.ndarray], is_last: np.ndarray, table: SurveyedTable
) -> None:
    """Flag the last rows (N,) of episodes that no flag marks as the mapping's
    ``last_row`` says; changes ``columns``.
    """
    unflagged = is_last & ~columns["terminated"] & ~columns["truncated"]
    if table.roles.last_row == "terminal":
        columns["terminated"] = columns["terminated"] | unflagged
    elif table.roles.last_row == CUT:
        columns["truncated"] = columns["truncated"] | unflagged


def _add_values(
    columns: dict[str, np.ndarray], frame: pl.DataFrame, table: SurveyedTable
) -> None:
    """Add observations (N, d), actions (N,) or (N, k), rewards (N,), and weights and
    log-probabilities (N,) if the mapping names them; changes ``columns``.
    """
    roles = table.roles
    columns["observations"] = _vectors(frame, roles.observations, table)
    columns["actions"] = _actions(frame, table)
    columns["rewards"] = _numbers(frame[roles.reward or ""])
    if roles.weight is not None:
        columns["weights"] = _numbers(frame[roles.weight])
    if roles.action_mask:
        columns["action_mask"] = _masks(frame, roles.action_mask, table)
    if roles.next_action_mask:
        columns["next_action_mask"] = _masks(frame, roles.next_action_mask, table)
    if roles.behavior is None:
        return
    behavior = _numbers(frame[roles.behavior])
    if roles.behavior_probability:
        # `_check_numbers` reports what is no probability.
        with np.errstate(divide="ignore", invalid="ignore"):
            behavior = np.log(behavior)
    columns["behavior_log_probabilities"] = behavior


def _masks(
    frame: pl.DataFrame, names: tuple[str, ...], table: SurveyedTable
) -> np.ndarray:
    """Masks (N, n) of available actions, from the columns of a role.

    Raises DataError for actions that are not there.
    """
    space = table.action_space
    column = frame[names[0]]
    if not column.dtype.is_nested():
        return masks_of_columns(frame, names, table.categories, table.source)
    if not isinstance(space, Discrete):
        raise DataError(
            f"column {column.name} lists available actions, and the actions are"
            f" {space}; leave it out, or declare choices (--discrete N)"
        )
    first = table.roles.action_mask[:1]
    return masks_of_lists(
        as_lists(column),
        are_flags=any(table.mask_flags.get(name, False) for name in first),
        categories=table.categories,
        spelled=table.spelled.get(table.roles.action[0], {}),
        n_actions=space.n,
    )


def _episode_ids(
    frame: pl.DataFrame, episodes: np.ndarray, table: SurveyedTable
) -> np.ndarray:
    """Ids (N,) of the rows' episodes: the table's own if they are numbers of 64 bits,
    else numbers that go on from those of the pieces before.
    """
    n_before = table.counts.episodes
    table.counts.episodes += int(episodes[-1]) + 1
    if table.roles.episode:
        kind = frame.schema[table.roles.episode]
        if kind.is_integer() and kind != pl.UInt64:
            return frame[table.roles.episode].cast(pl.Int64).to_numpy()
    return n_before + episodes


def _cluster_ids(column: pl.Series) -> np.ndarray:
    """Ids (N,) of the rows' clusters as 64-bit integers; other types are hashed."""
    if not column.dtype.is_integer():
        column = hashed_ids(column)
    return column.cast(pl.Int64, wrap_numerical=True).to_numpy()


def _with_next_observations(
    columns: dict[str, np.ndarray],
    frame: pl.DataFrame,
    is_last: np.ndarray,
    table: SurveyedTable,
) -> dict[str, np.ndarray]:
    """The columns with next observations (N, d): the table's, else those of the rows
    that follow; rows without one are then left out.

    is_last: (N,) whether a row is the last one of its episode.
    """
    roles = table.roles
    if roles.one_step:
        # It has no influence, since every row is terminal.
        return columns | {"next_observations": columns["observations"]}
    if roles.next_observations:
        following = _vectors(frame, roles.next_observations, table)
        columns = columns | {"next_observations": following}
        if lacks_next_masks(columns):
            n_unmasked = leave_out_unmasked(columns)
            table.counts.left_out = (table.counts.left_out or 0) + n_unmasked
        return columns
    is_lost = is_last & ~columns["terminated"]
    has_action = ~frame[_NO_ACTION].to_numpy()
    table.lost_rewards.add(columns["rewards"][has_action], is_lost[has_action])
    is_final_state = np.zeros_like(is_lost)
    if _FINAL_STATE in frame.columns:
        is_final_state = is_lost & frame[_FINAL_STATE].to_numpy()
    # After a termination nothing was cut: the flag of the final state does not move.
    is_below_end = np.append(False, columns["terminated"][:-1] & ~is_last[:-1])
    was_cut = columns["truncated"] & ~(is_final_state & is_below_end)
    columns, n_lost = followed(columns | {"truncated": was_cut}, is_last)
    # A final state is no step that was lost.
    n_lost -= int(is_final_state.sum())
    table.counts.left_out = (table.counts.left_out or 0) + n_lost
    return columns


def _check_numbers(columns: dict[str, np.ndarray], table: SurveyedTable) -> None:
    """Add problems for numbers that no log may hold, with the table's names for the
    columns.
    """
    roles = table.roles
    names = {
        "rewards": roles.reward,
        "weights": roles.weight,
        "behavior_log_probabilities": roles.behavior,
    }
    for key, name in names.items():
        if name is None:
            continue
        shown = columns[key]
        is_bad = ~np.isfinite(shown)
        remedy = "give finite numbers"
        if name == roles.behavior_probability:
            remedy = "give probabilities of the logged actions, above 0 and at most 1"
            shown = np.exp(shown)
            # A density of quantities may be above 1; a probability is rounded.
            if isinstance(table.action_space, Discrete):
                is_bad |= shown > 1.0 + 1e-4
        if is_bad.any():
            rows = counted(int(is_bad.sum()), "row")
            value = f"{shown[is_bad][0]:.6g}"
            table.problems.add(
                f"column {name} holds {value} (wrong in {rows}); {remedy}"
            )


def _flags(
    frame: pl.DataFrame, table: SurveyedTable
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Flags ``terminated`` and ``truncated`` (N,) of the rows, and the number (N,) of
    each row's episode in the piece.

    Flags inside episodes are a problem. Raises DataError for flags that cannot be read.
    """
    roles = table.roles
    names = {"terminated": roles.terminal, "truncated": roles.truncated}
    columns = {
        flag: read_flags(frame, name, table.source).to_numpy()
        for flag, name in names.items()
    }
    if table.is_done:
        columns["terminated"] = columns["terminated"] & ~columns["truncated"]
    elif not table.is_own and flag_of(str(roles.truncated)) in (Flag.DONE, Flag.LAST):
        # a flag of all ends stands for cuts where the world did not end
        columns["truncated"] = columns["truncated"] & ~columns["terminated"]
    if roles.one_step:
        columns["terminated"] = np.ones(frame.height, dtype=bool)
    if table.stands_alone:
        return columns, np.arange(frame.height)
    if roles.episode is None:
        return columns, np.cumsum(begins_episode(frame, table))
    episodes = _numbered(frame[roles.episode])
    for flag, name in names.items():
        inside = columns[flag] & ~_last(episodes)
        if inside.any():
            rows = counted(int(inside.sum()), "row")
            goes_on = counted(len(np.unique(episodes[inside])), "episode")
            table.problems.add(
                f"column {name} is set in {rows} whose episode goes on ({goes_on});"
                " drop what follows, or give it another episode id"
            )
    return columns, episodes


def _numbered(ids: pl.Series) -> np.ndarray:
    """Numbers (N,) from 0 of the runs of equal ids."""
    return ids.rle_id().cast(pl.Int64).to_numpy()


def begins_episode(frame: pl.DataFrame, table: SurveyedTable) -> np.ndarray:
    """Whether (N,) a row, except the first, is the first one of an episode, in a table
    without episode ids.

    An episode begins in a row flagged as its start, and below a row flagged as an end.
    If next observations show where episodes were cut, it also begins below a row whose
    next observation is not the observation of the row below. Raises DataError for flags
    that cannot be read.
    """
    roles = table.roles
    terminated, truncated, starts = (
        read_flags(frame, name, table.source).to_numpy()
        for name in (roles.terminal, roles.truncated, roles.starts)
    )
    ends = (terminated | truncated)[:-1] | starts[1:]
    if table.links is not None and table.links.show_cuts:
        ends = ends | ~links_of(frame, table)
    return np.append(False, ends)


def _last(episodes: np.ndarray) -> np.ndarray:
    """Whether (N,) a row is the last one of its episode; episodes: (N,) ids."""
    return np.append(episodes[1:] != episodes[:-1], True)


def _begins(episodes: np.ndarray) -> np.ndarray:
    """Whether (N,) a row is the first one of its episode; episodes: (N,) ids, perhaps
    none.
    """
    changes = np.append(True, episodes[1:] != episodes[:-1])
    return changes[: len(episodes)]


def _cut(
    frame: pl.DataFrame,
    episodes: np.ndarray,
    columns: dict[str, np.ndarray],
    table: SurveyedTable,
) -> tuple[pl.DataFrame, np.ndarray]:
    """Cut episodes before their first row with a value missing in a ``cut`` column, or
    before their final states; the rows that stay, and the numbers of their episodes.

    If the first row with a missing value still has its observation, it is kept as the
    last row, which has no next observation; if it is flagged terminal, the row before
    it becomes terminal. ``columns``, the flags (N,) of the rows, are changed with the
    rows.
    """
    roles = table.roles
    cut_columns = [
        name
        for name in frame.columns
        if roles.impute.get(name) == CUT and table.missing[name]
    ]
    if not cut_columns and not roles.final_state:
        return frame, episodes
    frame = frame.with_columns(
        frame[name].fill_nan(None)
        for name in cut_columns
        if frame[name].dtype.is_float()
    )
    may_stay = not roles.next_observations and not table.stands_alone
    cuts = _cuts_of_episodes(frame, episodes, cut_columns, roles, may_stay)
    is_last = _last(episodes)
    is_kept = ~cuts.is_beyond | cuts.is_state_alone
    left_out = ~is_kept & ~frame[_NO_ACTION].to_numpy()
    table.lost_rewards.add(
        reward_values(frame, roles)[left_out], np.ones(int(left_out.sum()), np.bool_)
    )
    is_final_state = cuts.is_state_alone & is_last
    table.counts.final_states += int(is_final_state.sum())
    table.counts.ended += int((cuts.is_beyond & ~is_final_state).sum())
    if cuts.is_beyond.all():
        return frame.clear(), episodes[:0]
    terminated = columns["terminated"]
    # Of a terminal row without its action or reward only the state is there: the step
    # above led to it, and is the terminal one.
    ends_below = np.append((terminated & cuts.has_state)[1:], False)
    is_new_end = ends_below & ~is_last
    if not table.stands_alone:
        n_ends_lost = int((terminated & cuts.is_beyond).sum() - is_new_end.sum())
        table.counts.ends_lost += n_ends_lost
    columns["terminated"] = (terminated | is_new_end) & ~cuts.is_beyond
    was_cut = columns["truncated"] & ~cuts.is_beyond
    columns["truncated"] = was_cut | cuts.is_new_last
    for flag, rows in columns.items():
        columns[flag] = rows[is_kept]
    # What stands in for missing values goes away with its row.
    frame = frame.with_columns(pl.Series(_FINAL_STATE, is_final_state))
    frame = frame.filter(pl.Series(is_kept))
    if cut_columns:
        frame = frame.with_columns(pl.col(cut_columns).forward_fill().backward_fill())
    return frame, _numbered(pl.Series(episodes[is_kept]))


@dataclass(frozen=True)
class _Cuts:
    """Where episodes are cut, by their first row with a missing value; flags (N,) of
    the rows.

    is_beyond: that row and all below it in its episode. is_state_alone: that row, where
    it stays for the sake of its observation. is_new_last: the last row that stays.
    has_state: that row, if it has its observation.
    """

    is_beyond: np.ndarray
    is_state_alone: np.ndarray
    is_new_last: np.ndarray
    has_state: np.ndarray


def _cuts_of_episodes(
    frame: pl.DataFrame,
    episodes: np.ndarray,
    cut_columns: list[str],
    roles: TableMapping,
    may_stay: bool,
) -> _Cuts:
    """Where the ordered rows (N,) are cut: at the first row of an episode with a value
    missing in ``cut_columns``, or at its final state.

    episodes: (N,) the number of each row's episode. may_stay: whether a row with its
    observation stays as the last one.
    """
    observed = [name for name in cut_columns if name in roles.observations]
    is_final_state = pl.lit(False)
    if roles.final_state:
        is_final_state = pl.lit(pl.Series(_last(episodes)))
    rows = frame.select(
        lacks=pl.any_horizontal(is_final_state, pl.col(cut_columns).is_null()),
        has_state=~pl.any_horizontal(pl.lit(False), pl.col(observed).is_null()),
    ).with_columns(episode=pl.Series(episodes))
    # rows of the episode with a missing value, down to this one
    n_lacking = pl.col("lacks").cum_sum().over("episode")
    is_first = pl.col("lacks") & (n_lacking == 1)
    has_state = is_first & pl.col("has_state")
    is_state_alone = has_state & may_stay
    goes_below = (is_first & ~is_state_alone).shift(-1, fill_value=False)
    flags = rows.select(
        is_beyond=n_lacking > 0,
        is_state_alone=is_state_alone,
        is_new_last=is_state_alone | goes_below.over("episode"),
        has_state=has_state,
    )
    return _Cuts(**{name: flags[name].to_numpy() for name in flags.columns})


def _without_next(
    frame: pl.DataFrame,
    episodes: np.ndarray,
    columns: dict[str, np.ndarray],
    table: SurveyedTable,
) -> tuple[pl.DataFrame, np.ndarray]:
    """The rows that have a next observation, and the numbers of their episodes; a
    terminal row needs none and gets its own observation.

    A last row without a next observation is left out, as in tables without next
    observations; elsewhere it is a problem. ``columns``, the flags (N,) of the rows,
    are changed with the rows.
    """
    roles = table.roles
    incomplete = [
        name
        for name in roles.next_observations
        if table.missing[name] and name not in roles.impute
    ]
    if not incomplete:
        return frame, episodes
    states = frame.select(incomplete)
    states = states.with_columns(
        pl.col(name).fill_nan(None)
        for name in incomplete
        if states.schema[name].is_float()
    )
    is_unseen = states.select(pl.any_horizontal(pl.all().is_null()))
    unseen = is_unseen.to_series().to_numpy()
    is_last = _last(episodes)
    lost = unseen & ~columns["terminated"]
    n_inside = int((lost & ~is_last).sum())
    if n_inside:
        rows = counted(n_inside, "row")
        table.problems.add(
            f"next observations are missing in {rows} whose episode goes on"
            f" ({incomplete[0]}); mend them, or leave next_observations out: rows that"
            " follow have them"
        )
    stand_in = pl.when(pl.Series(unseen & columns["terminated"]))
    pairs = zip(roles.observations, roles.next_observations, strict=True)
    frame = frame.with_columns(
        stand_in.then(pl.col(now)).otherwise(pl.col(later)).alias(later)
        for now, later in pairs
    )
    table.counts.left_out = (table.counts.left_out or 0) + int(lost.sum())
    table.lost_rewards.add(reward_values(frame, roles), lost)
    # The row above one that is left out is the new last row.
    above = np.append(lost[1:] & ~is_last[:-1], False)
    columns["truncated"] = columns["truncated"] | above
    for flag, rows_of_flag in columns.items():
        columns[flag] = rows_of_flag[~lost]
    frame = frame.filter(pl.Series(~lost))
    return frame, _numbered(pl.Series(episodes[~lost]))


def _ordered(frame: pl.DataFrame, table: SurveyedTable) -> pl.DataFrame:
    """Rows by episode and time; episodes by their first dates, else by the places of
    their first steps.

    The place is that of the first step, not of the first row, because long episodes
    appear early if rows are mixed. Two rows of an episode at the same time are a
    problem.
    """
    roles = table.roles
    counts = table.counts
    keys = _sort_keys(frame, table)
    start = pl.col("start")
    place = pl.col("place")
    time = pl.col("time")
    # Rows of one episode have the same place.
    continues = place.diff() == 0
    is_in_order = (
        (continues & (time >= time.shift()))
        | (start.diff() > 0)
        | ((start.diff() == 0) & (place.diff() > 0))
    )
    if not keys.select(is_in_order.all()).item():
        order = keys.select(
            pl.arg_sort_by("start", "place", "time", maintain_order=True)
        ).to_series()
        keys = keys[order]
        counts.reordered = True
        frame = pl.DataFrame([column.rechunk().gather(order) for column in frame])
    if roles.time is None:
        return frame
    repeats_time = (continues & (time == time.shift())).fill_null(False)
    doubles = keys.select(repeats_time).to_series()
    if roles.drop_duplicates is not None and doubles.any():
        is_kept = _without_doubles(frame, doubles, roles)
        is_choice = roles.drop_duplicates != "exact"
        is_suspect = is_choice and counts.reordered
        if is_suspect and _are_other_steps(frame, doubles, roles):
            is_other = ~is_kept & frame.select(roles.needed).is_unique()
            counts.dropped_others += int(is_other.sum())
        counts.repeated += int((~is_kept).sum())
        frame = frame.filter(is_kept)
        keys = keys.filter(is_kept)
        doubles = keys.select(repeats_time).to_series()
    inside = keys.select(continues.fill_null(False)).to_series()
    counts.steps.add(keys["time"], inside)
    times_are_numbers_of_steps = keys["time"].dtype.is_integer() and not table.is_dated
    if roles.episode is not None and times_are_numbers_of_steps:
        first_times = keys.filter(~inside)["time"].drop_nulls()
        counts.firsts.update(first_times.to_list())
    if doubles.any():
        table.problems.add(_problem_of_doubles(frame, keys["time"], doubles, table))
    return frame


def _sort_keys(frame: pl.DataFrame, table: SurveyedTable) -> pl.DataFrame:
    """What rows (N,) are sorted by: ``start``, the first date of the episode (0 if
    times are no dates), ``place``, the number of the row with its first step, and
    ``time``, or the number of the row in tables without times.
    """
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    keys = frame.select(
        id=table.roles.episode or pl.lit(0), row=row, time=table.roles.time or row
    )
    start = pl.lit(0)
    if table.is_dated:
        start = pl.col("time").to_physical().min().over("id")
    place = pl.col("row").get(pl.col("time").arg_min()).over("id")
    return keys.select("time", place=place, start=start)


def _without_doubles(
    frame: pl.DataFrame, doubles: pl.Series, roles: TableMapping
) -> pl.Series:
    """Which rows (N,) stay, by the mapping's ``drop_duplicates``. doubles: (N,) whether
    a row has the episode and the time of the row above.
    """
    if roles.drop_duplicates == "exact":  # ids and times are among the values of a row
        return frame.select(roles.needed).hash_rows(0).is_first_distinct()
    if roles.drop_duplicates == "first":
        return ~doubles
    return ~doubles.shift(-1, fill_value=False)


def _are_other_steps(
    frame: pl.DataFrame, doubles: pl.Series, roles: TableMapping
) -> bool:
    """Whether so many of the doubles (N,) differ from all other rows that they are
    steps of other episodes with the same id.
    """
    differs = doubles & frame.select(roles.needed).is_unique()
    n_differing = int(differs.sum())
    return n_differing >= max(_FEWEST_DOUBLES, _MANY_DOUBLES * frame.height)


def _problem_of_doubles(
    frame: pl.DataFrame, times: pl.Series, doubles: pl.Series, table: SurveyedTable
) -> str:
    """The problem of rows (N,) that have the time of another row of their episode."""
    roles = table.roles
    place = int(doubles.arg_max() or 0)
    where = f"{roles.time} {times.cast(pl.String)[place]}"
    remedy = "name the episode column (--episode)"
    if roles.episode is not None:
        where = f"episode {frame[roles.episode][place]!r}, {where}"
        remedy = (
            "name a finer time column, or drop doubles (--drop-duplicates exact,"
            " first or last)"
        )
        anew = "where ids begin anew in every file, make them different first"
        if len(table.rows.files) > 1:
            remedy = f"{remedy}; {anew}"
        elif table.counts.reordered and _are_other_steps(frame, doubles, roles):
            # So many are steps of other episodes, which would be lost.
            remedy = "where ids begin anew inside the file, make them different first"
            if times.dtype.is_numeric():
                first = times.cast(pl.Float64).sort()[0]
                remedy = (
                    f"{remedy}, or leave ids and time out and say where episodes start"
                    f" (--starts '{roles.time} == {first:.6g}')"
                )
    rows = counted(int(doubles.sum()), "row", "has", "have")
    return f"{rows} the time of another row of their episode (first: {where}); {remedy}"


def _imputed(
    frame: pl.DataFrame, episodes: np.ndarray, table: SurveyedTable
) -> pl.DataFrame:
    """Rows in order, missing values replaced as the mapping asks; values that cannot be
    replaced are a problem. episodes: (N,) the number of each row's episode.
    """
    columns = []
    for name, method in table.roles.impute.items():
        if method == CUT or not table.missing[name]:
            continue
        column = frame[name]
        # 16 bits do not hold every number that a user may impute.
        if column.dtype not in (pl.Float32, pl.Float64):
            column = column.cast(pl.Float64)
        column = column.fill_nan(None)
        n_missing = column.null_count()
        if method == "forward":
            replacement = "the last value before"
            column = _filled_forward(column, episodes)
            if column.null_count():
                missing = counted(column.null_count(), "missing value")
                table.problems.add(
                    f"column {name} has {missing} with no earlier value; impute a number"
                    f" or the mean ({name}=mean)"
                )
        elif method == "mean":
            replacement = f"mean {table.means[name]:.6g}"
            column = column.fill_null(table.means[name])
        elif method == "zero":
            replacement = "0"
            column = column.fill_null(0.0)
        else:
            replacement = f"{float(method):.6g}"
            column = column.fill_null(float(method))
        columns.append(column)
        # Features of one category are missing together, and count once.
        origin = table.origin.get(name, name)
        is_category = name != origin
        if is_category and name != table.encodings[origin].names(origin)[0]:
            continue
        if n_missing:
            table.counts.imputed[origin, replacement] += n_missing
    return frame.with_columns(columns)


def _filled_forward(column: pl.Series, episodes: np.ndarray) -> pl.Series:
    """The column (N,) with the last value of the episode in place of missing ones."""
    pairs = pl.DataFrame({column.name: column, "episode of the row": episodes})
    filled = pl.col(column.name).forward_fill().over("episode of the row")
    return pairs.select(filled).to_series()


def _vectors(
    frame: pl.DataFrame, columns: tuple[str, ...], table: SurveyedTable
) -> np.ndarray:
    """Observations (N, d) in row order, or in the stored shape if koffline wrote them
    as lists.

    Raises DataError if that shape has another number of values.
    """
    observations = _matrix(frame, columns, table.observation_type, table)
    shape = table.observation_shape
    if shape is None:
        return observations
    if int(np.prod(shape)) != observations.shape[1]:
        raise DataError(
            f"{table.source}: the koffline description is damaged; write the file again"
        )
    return observations.reshape((-1, *shape))


def _matrix(
    frame: pl.DataFrame,
    columns: tuple[str, ...],
    kind: Kind,
    table: SurveyedTable,
) -> np.ndarray:
    """(N, d) from columns of numbers, or from one column of lists."""
    width = table.widths.get(columns[0])
    if width is None:
        return frame.select(pl.col(columns).cast(kind)).to_numpy(order="c")
    return (
        frame[columns[0]]
        .explode(empty_as_null=False)
        .cast(kind)
        .to_numpy()
        .reshape(-1, width)
    )


def _numbers(column: pl.Series) -> np.ndarray:
    return column.cast(number_type([column.dtype])).to_numpy()


def _labels(column: pl.Series, table: SurveyedTable) -> np.ndarray:
    """The groups' labels (N,) of the rows; spellings that are certainly one label are
    taken for it, and notes on spellings are added to the table's metadata.
    """
    texts = column.cast(pl.String)
    values = texts.drop_nulls().unique().to_list()
    meant = one_spelling(values)
    if meant:
        table.metadata = table.metadata.with_notes(spelling_note(column.name, meant))
    for alike in doubtful_spellings(values):
        shown = listed(map(repr, alike))
        table.metadata = table.metadata.with_notes(
            f"{shown} of {column.name} differ in case or blanks alone: each is a group"
            " of its own"
        )
    return texts.replace(meant).fill_null("missing").to_numpy()


def _is_beyond_int64(column: pl.Series) -> bool:
    """Whether a column of whole numbers holds one that 64 bits with a sign cannot
    hold.
    """
    return column.dtype == pl.UInt64 and bool((column > np.iinfo(np.int64).max).any())


def _actions(frame: pl.DataFrame, table: SurveyedTable) -> np.ndarray:
    """Actions (N,) if discrete, else (N, k); categories as numbers in their order."""
    names = table.roles.action
    kinds = [frame.schema[name] for name in names]
    if table.categories:
        known = pl.Series(table.categories, dtype=kinds[0])
        column = frame[names[0]].replace(table.spelled.get(names[0], {}))
        column = column.replace_strict(
            known, range(len(known)), default=None, return_dtype=pl.Int64
        )
        return shaped_actions(column.to_numpy(), table.action_space)
    kind = number_type(kinds)
    is_whole = len(names) == 1 and kinds[0].is_integer()
    if is_whole and not _is_beyond_int64(frame[names[0]]):
        kind = pl.Int64()
    return shaped_actions(_matrix(frame, names, kind, table), table.action_space)
