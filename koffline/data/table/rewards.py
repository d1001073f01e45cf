"""Rewards of rows that are left out: moved to the action that earned them, or asked
about, never just lost.

Three kinds of rows are left out: last rows without an action, rows from a missing value
on (``impute: cut``), and last rows of cut episodes, which have no next observation.
Often they hold the outcome of the episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from koffline.data.table.mapping import PREVIOUS, TableMapping
from koffline.data.table.numbers import number_type
from koffline.errors import counted

_FEWEST = 3  # fewer rewards of another size may be chance
_FEWEST_KEPT = 20  # rewards that stay: fewer do not show how large rewards are
_SHARE = 0.1  # of the rewards left out
# of the range of the rewards that are kept: how far rewards of another size lie outside
_APART = 0.5


def lacks_action(
    frame: pl.DataFrame, episodes: np.ndarray, roles: TableMapping
) -> np.ndarray:
    """Whether (N,) a row has no action: a missing one, or a dummy beside a final state.

    frame: rows of whole episodes in order; episodes: (N,) their numbers.
    """
    missing = np.zeros(frame.height, dtype=np.bool_)
    if roles.final_state:
        missing = np.append(episodes[1:] != episodes[:-1], True)
    for name in roles.action:
        column = frame[name]
        if column.dtype.is_float():
            column = column.fill_nan(None)
        missing = missing | column.is_null().to_numpy()
    return missing


def reward_values(frame: pl.DataFrame, roles: TableMapping) -> np.ndarray:
    """Rewards (N,) as float64; NaN where they are missing."""
    return frame[roles.reward or ""].cast(pl.Float64).fill_null(np.nan).to_numpy()


@dataclass
class UnearnedRewards:
    """Rewards in last rows without an action: how many are not zero, the smallest and
    the largest.
    """

    count: int = 0
    low: float = np.inf
    high: float = -np.inf

    def add(
        self,
        frame: pl.DataFrame,
        episodes: np.ndarray,
        without: np.ndarray,
        roles: TableMapping,
    ) -> None:
        """Add rows of whole episodes in order.

        episodes: (N,) their numbers. without: (N,) whether a row has no action.
        """
        if not without.any():
            return
        # by episode: its last row with an action
        last_with = np.full(int(episodes[-1]) + 1, -1)
        last_with[episodes[~without]] = np.flatnonzero(~without)
        is_final = np.arange(frame.height) > last_with[episodes]
        rewards = reward_values(frame, roles)[is_final]
        rewards = rewards[np.isfinite(rewards) & (rewards != 0.0)]
        if len(rewards):
            self.count += len(rewards)
            self.low = min(self.low, float(rewards.min()))
            self.high = max(self.high, float(rewards.max()))

    @property
    def question(self) -> str:
        """What the user must decide; empty if no reward is lost."""
        if not self.count:
            return ""
        rows = counted(self.count, "last row")
        if self.count == 1:
            has = "of an episode has"
        else:
            has = "of episodes have"
        return (
            f"{rows} {has} no action and a reward ({self.low:.6g} … {self.high:.6g}),"
            " lost if left out; add it to the row above, whose action earned it"
            " (--reward-row previous), or let it go (--reward-row drop)"
        )


def move_rewards(
    frame: pl.DataFrame,
    episodes: np.ndarray,
    without: np.ndarray,
    roles: TableMapping,
) -> tuple[pl.DataFrame, int]:
    """Add each reward of a row without an action to the nearest row above that has one,
    in the same episode.

    frame: rows of whole episodes in order; episodes: (N,) their numbers. without: (N,)
    whether a row has no action. A missing
    reward counts as 0 where one is moved to it. A row whose reward was moved has the
    reward 0. Returns the frame, and the number of rewards without an action above them,
    which stay where they are.
    """
    if roles.reward_row != PREVIOUS or not without.any():
        return frame, 0
    rewards = reward_values(frame, roles)
    moves = without & (np.nan_to_num(rewards) != 0.0)
    row = np.arange(frame.height)
    # the last row with an action so far
    above = np.maximum.accumulate(np.where(without, -1, row))
    has_action_above = (above >= 0) & (episodes[above] == episodes)
    moved = np.flatnonzero(moves & has_action_above)
    targets = above[moved]
    rewards = rewards.copy()
    rewards[targets] = np.nan_to_num(rewards[targets])
    np.add.at(rewards, targets, rewards[moved])
    rewards[moved] = 0.0
    name = roles.reward or ""
    column = (
        pl.Series(name, rewards).fill_nan(None).cast(number_type([frame.schema[name]]))
    )
    return frame.with_columns(column), int((moves & ~has_action_above).sum())


@dataclass
class LostRewards:
    """Rewards of rows with an action that are left out, compared with those that
    stay.
    """

    n_kept: int = 0
    low: float = np.inf  # of the rewards that stay
    high: float = -np.inf
    lost: list[np.ndarray] = field(default_factory=list)

    def add(self, rewards: np.ndarray, is_lost: np.ndarray) -> None:
        """Add (N,) rewards of rows, NaN where missing, and whether each is left out."""
        finite = np.isfinite(rewards)
        kept = rewards[finite & ~is_lost]
        if len(kept):
            self.n_kept += len(kept)
            self.low = min(self.low, float(kept.min()))
            self.high = max(self.high, float(kept.max()))
        self.lost.append(rewards[finite & is_lost])

    @property
    def question(self) -> str:
        """What the user must decide if the rewards left out are of another size; else
        empty.
        """
        if self.n_kept < _FEWEST_KEPT:
            return ""
        lost = np.concatenate(self.lost)
        margin = _APART * (self.high - self.low)
        outside = lost[(lost > self.high + margin) | (lost < self.low - margin)]
        if len(outside) < max(_FEWEST, _SHARE * len(lost)):
            return ""
        rows = f"{len(outside)} of {counted(len(lost), 'row')} that are left out"
        return (
            f"{rows} hold rewards unlike all others ({outside.min():.6g} …"
            f" {outside.max():.6g}, elsewhere {self.low:.6g} … {self.high:.6g}): last"
            " rows of episodes, or rows after a missing value; say that the world ended"
            " there (--terminal COLUMN, or --last-row terminal), fill in what is"
            " missing, or let these rewards go (--reward-row drop)"
        )
