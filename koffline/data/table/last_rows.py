"""What last rows of episodes hold: a step, or the final state beside an action and a
reward that mean nothing.

RLDS (``is_first``, ``is_last``, ``is_terminal``) writes a row for the final state; its
action and its reward are no part of the log. Other programs write a word or a number
into the action that means that none was taken. Both look like steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from koffline.data.table.column_names import Flag, flag_of, joined
from koffline.data.table.flags import set_rows
from koffline.data.table.guesses import as_matrix
from koffline.data.table.profiles import ColumnProfile
from koffline.data.table.step_order import Steps
from koffline.errors import counted

_NEARLY_ALL = 0.99  # share of the last rows
_MOSTLY = 0.95  # share of the other rows
_FEWEST_EPISODES = 20  # fewer may have such last rows by chance
_FEWEST_REWARDS = 5  # rewards other than 0: fewer do not show that last rows lack them
_MOST_USUAL = 0.7  # share of an action in other rows; a more usual one proves nothing
_BY_CHANCE = 5  # fewer rows may be last rows by chance


@dataclass(frozen=True)
class FinalStates:
    """Why last rows seem to hold final states alone, and whether that is sure."""

    reason: str
    is_sure: bool


@dataclass(frozen=True)
class NoAction:
    """Values of an action that stand in last rows of episodes alone."""

    column: ColumnProfile
    values: list[object]
    n_rows: int


def rlds_flag(names: Collection[str]) -> str | None:
    """The column that marks last rows as RLDS does, beside one for first rows or for
    terminations; None if there is none. names: of all columns.
    """
    companions = {"isfirst", "isterminal"}
    if not companions.intersection(map(joined, names)):
        return None
    return next((name for name in names if joined(name) == "islast"), None)


def find_final_states(
    columns: Sequence[ColumnProfile], steps: Steps
) -> FinalStates | None:
    """Say so if last rows seem to hold final states alone; None if they seem to be
    steps, or if their actions are missing, which says it already.
    """
    if any(column.role == "next_observations" for column in columns):
        return None
    rewards = _matrix_of(columns, "reward")
    actions = _matrix_of(columns, "action")
    if rewards is None or actions is None:
        return None
    is_last = np.zeros(len(rewards), dtype=np.bool_)
    is_last[steps.order[steps.is_last]] = True
    if np.isnan(actions[is_last]).any(axis=1).all():
        return None
    rewards = np.nan_to_num(rewards[:, 0])
    has_no_reward = bool((rewards[is_last] == 0.0).mean() >= _NEARLY_ALL)
    is_earned = rewards[~is_last] != 0.0
    episodes = counted(int(is_last.sum()), "episode")
    last_flag = _last_flag(columns, is_last)
    by_names = rlds_flag([column.name for column in columns])
    if last_flag is not None and last_flag == by_names:
        if has_no_reward and is_earned.sum() >= _FEWEST_REWARDS:
            reason = (
                f"{last_flag} marks the last row of each episode, and the reward there"
                f" is 0 in all of {episodes}"
            )
            return FinalStates(reason, is_sure=True)
        return FinalStates(
            f"{last_flag} marks the last row of each episode", is_sure=False
        )
    if is_last.sum() < _FEWEST_EPISODES or len(is_earned) == 0:
        return None
    if not has_no_reward or is_earned.mean() < _MOSTLY:
        return None
    if last_flag is None and not _has_one_action(actions, is_last):
        return None
    reason = (
        f"the reward is 0 in the last row of nearly all of {episodes}, and in"
        f" {np.mean(~is_earned):.2%} of the other rows"
    )
    return FinalStates(reason, is_sure=False)


def _matrix_of(columns: Sequence[ColumnProfile], role: str) -> np.ndarray | None:
    """(N, d) numbers of the columns with a role; texts as codes; None if there are
    none.
    """
    parts = []
    for column in columns:
        if column.role != role:
            continue
        numbers = as_matrix(column)
        if numbers is None and not column.values.dtype.is_nested():
            codes = column.values.rank("dense").cast(pl.Float64)
            numbers = codes.fill_null(np.nan).to_numpy().reshape(-1, 1)
        if numbers is not None:
            parts.append(numbers)
    if not parts:
        return None
    return np.hstack(parts)


def _last_flag(columns: Sequence[ColumnProfile], is_last: np.ndarray) -> str | None:
    """The name of a flag of last rows by its name that marks the last rows (N,)."""
    for column in columns:
        if flag_of(column.name) is not Flag.LAST or not column.is_flag:
            continue
        if (set_rows(column) == is_last).mean() >= _NEARLY_ALL:
            return column.name
    return None


def _has_one_action(actions: np.ndarray, is_last: np.ndarray) -> bool:
    """Whether nearly all last rows have the same action (N, k), which is not usual in
    the other rows.
    """
    rows, counts = np.unique(actions[is_last], axis=0, return_counts=True)
    usual = rows[counts.argmax()]
    is_usual = np.isclose(actions, usual).all(axis=1)
    share = is_usual[is_last].mean()
    return bool(share >= _NEARLY_ALL and is_usual[~is_last].mean() <= _MOST_USUAL)


def find_no_action(columns: Sequence[ColumnProfile], steps: Steps) -> NoAction | None:
    """Values of a single action column that stand in last rows of episodes alone; None
    if there are none, or if that may be chance.
    """
    actions = [column for column in columns if column.role == "action"]
    if len(actions) != 1 or actions[0].values.dtype.is_nested():
        return None
    column = actions[0]
    is_last = np.zeros(len(column.values), dtype=np.bool_)
    is_last[steps.order[steps.is_last]] = True
    if 2 * is_last.sum() > len(is_last) or column.values.dtype == pl.Boolean:
        return None
    rows = pl.DataFrame({"value": column.values, "last": is_last}).drop_nulls()
    counts = rows.group_by("value").agg(
        pl.len().alias("rows"), pl.col("last").all().alias("only last")
    )
    ends = counts.filter(pl.col("only last") & (pl.col("rows") >= _BY_CHANCE))
    if ends.height == 0 or ends.height == counts.height:
        return None
    values = ends["value"].sort().to_list()
    return NoAction(column=column, values=values, n_rows=int(ends["rows"].sum()))
