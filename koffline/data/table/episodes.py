"""Make the columns of transitions from rows of whole episodes, as they are in a
table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from koffline.data.raw import RawLog, followed, shaped_actions
from koffline.data.spaces import Discrete
from koffline.data.table.mapping import CUT
from koffline.data.table.rewards import lacks_action, move_rewards, reward_values
from koffline.data.table.survey import Table, links_of
from koffline.data.table.texts import doubtful_spellings, one_spelling, spelling_note
from koffline.data.table.values import hashed, number_type, read_flags
from koffline.errors import DataError, counted, listed

_NO_ACTION = "koffline: the row has no action"  # a name that no column has


def assemble(frame: pl.DataFrame, table: Table) -> RawLog | None:  # noqa: C901
    """Aligned columns of a piece with whole episodes; None if no row is left.

    Episodes and rows are in the order of `_ordered`; ``table.counts`` records what was
    done. Raises DataError with all problems.
    """
    roles = table.roles
    counts = table.counts
    if table.is_open:
        table.problems.refuse()
    if table.stands_alone:
        frame = frame
    else:
        frame = _ordered(frame, table)
    log, episodes = _flags(frame, table)
    table.unearned.add(frame, episodes, roles)
    frame = frame.with_columns(pl.Series(_NO_ACTION, lacks_action(frame, roles)))
    frame, unmoved = move_rewards(frame, episodes, roles)
    if unmoved:
        rewards = counted(unmoved, "reward", "stands", "stand")
        said = (
            f"{rewards} in rows without an action, with none above in the episode whose"
            " action earned it"
        )
        table.problems.add(f"{said}; set them to 0, or let them go (--reward-row drop)")
    table.problems.refuse()
    frame, episodes = _cut(frame, episodes, log, table)
    if not frame.height:
        return None
    last = _last(episodes)
    for flag, is_so in (("terminated", "terminal"), ("truncated", "cut")):
        if roles.last_row == is_so:
            log[flag] = log[flag] | (last & ~log["terminated"] & ~log["truncated"])
    frame, episodes = _without_next(frame, episodes, log, table)
    if not frame.height:
        return None
    last = _last(episodes)
    if table.cuts_are_marked:
        log["truncated"] = log["truncated"] | (last & ~log["terminated"])
    if roles.by is not None:
        log["labels"] = _labels(frame[roles.by], table)
    frame = _imputed(frame, episodes, table)
    log["observations"] = _vectors(frame, roles.observations, table)
    log["actions"] = _actions(frame, table)
    log["rewards"] = _numbers(frame[roles.reward or ""])
    if roles.weight is not None:
        log["weights"] = _numbers(frame[roles.weight])
    if roles.behavior is not None:
        found = _numbers(frame[roles.behavior])
        # bad values are reported below
        with np.errstate(divide="ignore", invalid="ignore"):
            if roles.behavior_probability:
                log["behavior_log_probabilities"] = np.log(found)
            else:
                log["behavior_log_probabilities"] = found
    if not table.stands_alone or roles.one_step:
        log["episode_ids"] = counts.episodes + episodes
        if (
            roles.episode
            and (kind := frame.schema[roles.episode]).is_integer()
            and kind != pl.UInt64
        ):
            log["episode_ids"] = frame[roles.episode].cast(pl.Int64).to_numpy()
        counts.episodes += int(episodes[-1]) + 1
    if roles.cluster is not None:
        shared = frame[roles.cluster]
        if shared.dtype.is_integer():
            numbers = shared
        else:
            numbers = hashed(shared)
        log["clusters"] = numbers.cast(pl.Int64, wrap_numerical=True).to_numpy()
    if roles.one_step:
        log["next_observations"] = log["observations"]
    elif roles.next_observations:
        log["next_observations"] = _vectors(frame, roles.next_observations, table)
    else:
        is_lost = last & ~log["terminated"]
        has_action = ~frame[_NO_ACTION].to_numpy()
        table.lost_rewards.add(log["rewards"][has_action], is_lost[has_action])
        log, lost = followed(log, last)
        counts.left_out = (counts.left_out or 0) + lost
    if table.cuts_are_marked:
        counts.cut += int((log["truncated"] & ~log["terminated"]).sum())
    _check_numbers(log, table)
    table.problems.refuse()
    labels = log.pop("labels", None)
    ids = log.get("episode_ids")
    if labels is not None and ids is not None:
        labels = labels[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]
    if len(log["rewards"]):
        return RawLog(log, table.action_space, table.metadata, labels)
    return None


def _check_numbers(log: dict[str, np.ndarray], table: Table) -> None:
    """Add problems for numbers that no log may hold, with the table's names for the
    columns.
    """
    roles = table.roles
    named = {
        "rewards": roles.reward,
        "weights": roles.weight,
        "behavior_log_probabilities": roles.behavior,
    }
    for key, name in named.items():
        if name is None:
            continue
        bad = ~np.isfinite(log[key])
        remedy = "give finite numbers"
        shown = log[key]
        if name == roles.behavior_probability:
            remedy = "give probabilities of the logged actions, above 0 and at most 1"
            shown = np.exp(shown)
            bad |= (shown > 1.0 + 1e-4) & bool(isinstance(table.action_space, Discrete))
        if bad.any():
            rows = counted(int(bad.sum()), "row")
            table.problems.add(
                f"column {name} holds {shown[bad][0]:.6g} (wrong in {rows}); {remedy}"
            )


def _flags(
    frame: pl.DataFrame, table: Table
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Flags of the rows, and the number of each row's episode.

    Flags inside episodes are a problem.
    """
    roles = table.roles
    named = {"terminated": roles.terminal, "truncated": roles.truncated}
    log = {
        flag: read_flags(frame, name, table.source).to_numpy()
        for flag, name in named.items()
    }
    if table.is_done:
        log["terminated"] = log["terminated"] & ~log["truncated"]
    if roles.one_step:
        log["terminated"] = np.ones(frame.height, dtype=bool)
    if table.stands_alone:
        return log, np.arange(frame.height)
    if roles.episode is None:
        return log, np.cumsum(begins_episode(frame, table))
    episodes = frame[roles.episode].rle_id().cast(pl.Int64).to_numpy()
    for flag, name in named.items():
        inside = log[flag] & ~_last(episodes)
        if inside.any():
            goes_on = counted(len(np.unique(episodes[inside])), "episode")
            said = (
                f"is set in {counted(int(inside.sum()), 'row')} whose episode goes on"
                f" ({goes_on})"
            )
            remedy = "drop what follows, or give it another episode id"
            table.problems.add(f"column {name} {said}; {remedy}")
    return log, episodes


def begins_episode(frame: pl.DataFrame, table: Table) -> np.ndarray:
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
    """Whether a row is the last one of its episode."""
    return np.append(episodes[1:] != episodes[:-1], True)


def _cut(
    frame: pl.DataFrame, episodes: np.ndarray, log: dict[str, np.ndarray], table: Table
) -> tuple[pl.DataFrame, np.ndarray]:
    """Cut episodes before their first row with a value missing in a ``cut`` column;
    changes ``log``.

    If that row still has its observation, it is kept as the last row, which has no next
    observation; if it is flagged terminal, the row before it becomes terminal.
    """
    roles = table.roles
    named = [
        name
        for name in frame.columns
        if roles.impute.get(name) == CUT and table.missing[name]
    ]
    if not named:
        return frame, episodes
    seen = [name for name in named if name in roles.observations]
    frame = frame.with_columns(
        frame[name].fill_nan(None) for name in named if frame[name].dtype.is_float()
    )
    missing, unseen = (
        pl.any_horizontal(pl.lit(False), pl.col(each).is_null())
        for each in (named, seen)
    )
    may_stay = not roles.next_observations and not table.stands_alone
    rows = frame.select(missing=missing, unseen=unseen).with_columns(
        episode=pl.Series(episodes)
    )
    count = pl.col("missing").cum_sum().over("episode")
    first = pl.col("missing") & (count == 1)
    kept = first & ~pl.col("unseen") & may_stay
    final = first & ~pl.col("unseen") & (count.shift(fill_value=0).over("episode") == 0)
    # above the first row that goes
    ends = (first & ~kept).shift(-1, fill_value=False).over("episode")
    found = rows.select(gone=count > 0, kept=kept, shortened=kept | ends, final=final)
    gone, stays, shortened, final_state = (
        found[name].to_numpy() for name in found.columns
    )
    left_out = gone & ~stays & ~frame[_NO_ACTION].to_numpy()
    table.lost_rewards.add(
        reward_values(frame, roles)[left_out], np.ones(int(left_out.sum()), np.bool_)
    )
    table.counts.ended += int(gone.sum())
    if gone.all():
        return frame.clear(), episodes[:0]
    passed = np.append((log["terminated"] & final_state)[1:], False) & ~_last(episodes)
    if not table.stands_alone:
        table.counts.ends_lost += int((log["terminated"] & gone).sum() - passed.sum())
    log["terminated"] = log["terminated"] | passed
    log["terminated"] = log["terminated"] & ~gone
    log["truncated"] = (log["truncated"] & ~gone) | shortened
    log.update({flag: column[~gone | stays] for flag, column in log.items()})
    # What stands in for missing values goes away with its row.
    frame = frame.filter(~found["gone"] | found["kept"])
    frame = frame.with_columns(pl.col(named).forward_fill().backward_fill())
    return frame, pl.Series(episodes[~gone | stays]).rle_id().cast(pl.Int64).to_numpy()


def _without_next(
    frame: pl.DataFrame, episodes: np.ndarray, log: dict[str, np.ndarray], table: Table
) -> tuple[pl.DataFrame, np.ndarray]:
    """The rows that have a next observation; a terminal row needs none and gets its
    own. Changes ``log``.

    A last row without a next observation is left out, as in tables without next
    observations; elsewhere it is a problem.
    """
    roles = table.roles
    named = [
        name
        for name in roles.next_observations
        if table.missing[name] and name not in roles.impute
    ]
    if not named:
        return frame, episodes
    columns = (
        pl.col(n).fill_nan(None) if frame.schema[n].is_float() else pl.col(n)
        for n in named
    )
    unseen = (
        frame.select(pl.any_horizontal(each.is_null() for each in columns))
        .to_series()
        .to_numpy()
    )
    lost = unseen & ~log["terminated"]
    inside = int((lost & ~_last(episodes)).sum())
    if inside:
        rows = counted(inside, "row")
        said = (
            f"next observations are missing in {rows} whose episode goes on"
            f" ({named[0]})"
        )
        table.problems.add(
            f"{said}; mend them, or leave next_observations out: rows that follow have"
            " them"
        )
    stand_in = pl.when(pl.Series(unseen & log["terminated"]))
    pairs = zip(roles.observations, roles.next_observations, strict=True)
    frame = frame.with_columns(
        stand_in.then(pl.col(now)).otherwise(pl.col(later)).alias(later)
        for now, later in pairs
    )
    table.counts.left_out = (table.counts.left_out or 0) + int(lost.sum())
    table.lost_rewards.add(reward_values(frame, roles), lost)
    above = np.append(lost[1:] & ~_last(episodes)[:-1], False)
    log["truncated"] = log["truncated"] | above
    log.update({flag: column[~lost] for flag, column in log.items()})
    return (
        frame.filter(pl.Series(~lost)),
        pl.Series(episodes[~lost]).rle_id().cast(pl.Int64).to_numpy(),
    )


def _ordered(frame: pl.DataFrame, table: Table) -> pl.DataFrame:
    """Rows by episode and time; episodes by their first dates, else by the places of
    their first steps.

    The place is that of the first step, not of the first row, because long episodes
    appear early if rows are mixed. Two rows of an episode at the same time are a
    problem.
    """
    roles = table.roles
    counts = table.counts
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    keys = frame.select(
        id=roles.episode or pl.lit(0), first=row, time=roles.time or row
    )
    if table.is_dated:
        start = pl.col("time").to_physical().min().over("id")
    else:
        start = pl.lit(0)
    keys = keys.select(
        pl.col("first").get(pl.col("time").arg_min()).over("id"), "time", start=start
    )
    same = pl.col("first").diff() == 0
    later = pl.col("time") >= pl.col("time").shift()
    begins = (pl.col("start").diff() > 0) | (
        (pl.col("start").diff() == 0) & (pl.col("first").diff() > 0)
    )
    if not keys.select((begins | (same & later)).all()).item():
        order = keys.select(
            pl.arg_sort_by("start", "first", "time", maintain_order=True)
        ).to_series()
        keys = keys[order]
        counts.reordered = True
        frame = pl.DataFrame([column.rechunk().gather(order) for column in frame])
    if roles.time is None:
        return frame
    repeats = (same & (pl.col("time") == pl.col("time").shift())).fill_null(False)
    doubles = keys.select(repeats).to_series()
    how = roles.drop_duplicates
    if how is not None and doubles.any():
        if how == "first":
            kept = ~doubles
        else:
            kept = ~doubles.shift(-1, fill_value=False)
        if how == "exact":  # ids and times are among the values of a row
            kept = frame.select(roles.needed).hash_rows(0).is_first_distinct()
        counts.repeated += int((~kept).sum())
        frame = frame.filter(kept)
        keys = keys.filter(kept)
        doubles = keys.select(repeats).to_series()
    counts.steps.add(keys["time"], keys.select(same.fill_null(False)).to_series())
    if (
        roles.episode is not None
        and not table.is_dated
        and keys["time"].dtype.is_integer()
    ):
        counts.firsts.update(
            keys.filter(pl.col("first").diff().fill_null(1) != 0)["time"].to_list()
        )
    if doubles.any():
        place = int(doubles.arg_max() or 0)
        where = f"{roles.time} {keys['time'].cast(pl.String)[place]}"
        remedy = "name the episode column (--episode)"
        if roles.episode is not None:
            where = f"episode {frame[roles.episode][place]!r}, {where}"
            remedy = (
                "name a finer time column, or drop doubles (--drop-duplicates exact,"
                " first or last)"
            )
            if len(table.rows.files) > 1:
                remedy += (
                    "; where ids begin anew in every file, make them different first"
                )
        said = (
            f"{counted(int(doubles.sum()), 'row', 'has', 'have')} the time of another"
            " row of their episode"
        )
        table.problems.add(f"{said} (first: {where}); {remedy}")
    return frame


def _imputed(frame: pl.DataFrame, episodes: np.ndarray, table: Table) -> pl.DataFrame:
    """Rows in order, missing values replaced as requested; values that cannot be
    replaced are a problem.
    """
    columns = []
    for name, how in table.roles.impute.items():
        if how == CUT or not table.missing[name]:
            continue
        kind = frame.schema[name]
        # 16 bits do not hold every number that a user may impute.
        if kind in (pl.Float32, pl.Float64):
            column = frame[name]
        else:
            column = frame[name].cast(pl.Float64)
        column = column.fill_nan(None)
        count = column.null_count()
        said = "the last value before"
        if how == "forward":
            pairs = pl.DataFrame({name: column, "episode of the row": episodes})
            column = pairs.select(
                pl.col(name).forward_fill().over("episode of the row")
            ).to_series()
            if column.null_count():
                missing = counted(column.null_count(), "missing value")
                remedy = f"impute a number or the mean ({name}=mean)"
                table.problems.add(
                    f"column {name} has {missing} with no earlier value; {remedy}"
                )
        else:
            if how == "mean":
                value = table.means[name]
            elif how == "zero":
                value = 0.0
            else:
                value = float(how)
            said = f"{'mean ' * (how == 'mean')}{value:.6g}"
            column = column.fill_null(value)
        columns.append(column)
        # features of one category are missing together
        origin = table.origin.get(name, name)
        if count and (
            name == origin or name == table.encodings[origin].names(origin)[0]
        ):
            table.counts.imputed[origin, said] += count
    return frame.with_columns(columns)


def _vectors(frame: pl.DataFrame, columns: tuple[str, ...], table: Table) -> np.ndarray:
    """Observations (N, d) in row order, or in the stored shape if koffline wrote them
    as lists.
    """
    found = _matrix(frame, columns, table.observation_type, table)
    shape = table.observation_shape
    if shape is not None and int(np.prod(shape)) != found.shape[1]:
        raise DataError(
            f"{table.source}: the koffline description is damaged; write the file again"
        )
    if shape is None:
        return found
    return found.reshape(-1, *shape)


def _matrix(
    frame: pl.DataFrame, columns: tuple[str, ...], kind: Any, table: Table
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


def _labels(column: pl.Series, table: Table) -> np.ndarray:
    """The groups' labels (N,) of the rows; spellings that are certainly one label are
    taken for it.
    """
    texts = column.cast(pl.String)
    values = texts.drop_nulls().unique().to_list()
    meant = one_spelling(values)
    if meant:
        table.metadata = table.metadata.with_notes(spelling_note(column.name, meant))
    for alike in doubtful_spellings(values):
        said = (
            f"{listed(map(repr, alike))} of {column.name} differ in case or blanks"
            " alone"
        )
        table.metadata = table.metadata.with_notes(
            f"{said}: each is a group of its own"
        )
    return texts.replace(meant).fill_null("missing").to_numpy()


def _is_beyond_int64(column: pl.Series) -> bool:
    """Whether a column of whole numbers holds one that 64 bits with a sign cannot
    hold.
    """
    return column.dtype == pl.UInt64 and bool((column > np.iinfo(np.int64).max).any())


def _actions(frame: pl.DataFrame, table: Table) -> np.ndarray:
    names = table.roles.action
    kinds = [frame.schema[name] for name in table.roles.action]
    if table.categories:
        known = pl.Series(table.categories, dtype=kinds[0])
        column = frame[names[0]].replace(table.spelled.get(names[0], {}))
        column = column.replace_strict(
            known, range(len(known)), default=None, return_dtype=pl.Int64
        )
        return shaped_actions(column.to_numpy(), table.action_space)
    kind = number_type(kinds)
    if (
        len(names) == 1
        and kinds[0].is_integer()
        and not _is_beyond_int64(frame[names[0]])
    ):
        kind = pl.Int64()
    found = _matrix(frame, names, kind, table)
    return shaped_actions(found, table.action_space)
