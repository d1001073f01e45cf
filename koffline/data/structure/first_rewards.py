"""First rows of episodes whose reward is 0, where hardly any other row's is.

Two recorders write such rows: one that stores each reward in the row below, and one
that writes a dummy row at every automatic reset. If all other rewards fit the states
and actions of their own rows, it was the second one. Worlds whose first states pay 0 do
it, too: so similar states at other steps must pay otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from koffline.data.structure.alignment import rewards_fit_their_rows
from koffline.data.structure.chances import SIGNIFICANT, chance_of_count
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.symptom import Symptom
from koffline.errors import counted

_FEWEST_EPISODES = 20
_MOST_ZEROS = 0.05  # share of the rewards that are no first ones
_MOSTLY = 0.5  # of the episodes, or of the first rows that have similar ones
_FEWEST_SIMILAR = 5
_NEAR = 3.0  # times the usual distance to the nearest row
_LEAST_DISTANCE = 1e-3  # standard deviations: nearer states are equal
_CLEARLY = 0.25  # of the usual size of rewards
_MOST_QUERIES = 500
_MOST_REFERENCES = 4000


def first_reward_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield a symptom if the first rewards of most episodes are 0, hardly any other
    is, and similar states at other steps pay.
    """
    rewards = np.asarray(rows.log.rewards, dtype=np.float64)
    n_episodes = len(rows.firsts)
    if not _FEWEST_EPISODES <= n_episodes < len(rewards):
        return
    is_zero = rewards == 0.0
    zero_firsts = rows.firsts[is_zero[rows.firsts]]
    count = len(zero_firsts)
    is_zero_later = np.delete(is_zero, rows.firsts)
    n_zeros_later = int(is_zero_later.sum())
    n_later = len(is_zero_later)
    if count < _MOSTLY * n_episodes or n_zeros_later > _MOST_ZEROS * n_later:
        return
    p_value = chance_of_count(
        count=count, trials=n_episodes, rate=(n_zeros_later + 1.0) / (n_later + 2.0)
    )
    if p_value >= SIGNIFICANT or not _similar_rows_pay(rows, zero_firsts):
        return
    if count == n_episodes:
        episodes = f"all {count} episodes"
    else:
        episodes = f"{count} of {counted(n_episodes, 'episode')}"
    statement = (
        f"the reward of the first row is 0 in {episodes}, and in {n_zeros_later} of"
        f" {counted(n_later, 'other row')}"
    )
    leave_out = (
        "leave out these first rows if an automatic reset wrote them (their actions did"
        " nothing)"
    )
    move_up = (
        "if each row holds the reward of the row before, move rewards up by one row, and"
        " the actions too if each row holds the action before"
    )
    if rewards_fit_their_rows(rows):
        yield Symptom(
            test="rows of automatic resets",
            kind="starts",
            rows=count,
            of=n_episodes,
            p_value=p_value,
            statement=f"{statement}, where states and actions explain the rewards of their own rows",
            remedy=leave_out,
        )
        return
    yield Symptom(
        test="first rewards",
        kind="rewards",
        rows=count,
        of=n_episodes,
        p_value=p_value,
        statement=statement,
        remedy=f"{move_up}; {leave_out}",
    )


def _similar_rows_pay(rows: LoggedRows, zero_firsts: Int[np.ndarray, " first"]) -> bool:
    """Whether most first rows that have a similar row at a later step of another
    episode would be expected to pay as that one does.
    """
    rewards = np.asarray(rows.log.rewards, dtype=np.float64)
    later = np.delete(np.arange(len(rewards)), rows.firsts)
    references = _evenly(later, _MOST_REFERENCES)
    firsts = _evenly(zero_firsts, _MOST_QUERIES)
    controls = _evenly(references, _MOST_QUERIES)
    _, usual = _nearest(rows, controls, references)
    nearest, distance = _nearest(rows, firsts, references)
    limit = _NEAR * max(float(np.median(usual)), _LEAST_DISTANCE)
    is_similar: Bool[np.ndarray, " first"] = distance <= limit
    if is_similar.sum() < _FEWEST_SIMILAR:
        return False
    size = float(np.median(np.abs(rewards[references])))
    pays = np.abs(rewards[nearest[is_similar]]) > _CLEARLY * size
    return bool(pays.mean() > _MOSTLY)


def _evenly(rows: Int[np.ndarray, " row"], most: int) -> Int[np.ndarray, " chosen"]:
    """Up to ``most`` of some rows, evenly spread."""
    stride = max(1, -(-len(rows) // most))
    return rows[::stride]


def _nearest(
    rows: LoggedRows,
    queries: Int[np.ndarray, " query"],
    references: Int[np.ndarray, " reference"],
) -> tuple[Int[np.ndarray, " query"], Float[np.ndarray, " query"]]:
    """The reference row of another episode with the nearest state, and its distance in
    standard deviations; the distance is infinite if there is none.
    """
    left = rows.states(queries)
    right = rows.states(references)
    squares = (
        (left**2).sum(axis=1)[:, None]
        + (right**2).sum(axis=1)[None, :]
        - 2.0 * (left @ right.T)
    )
    is_same = rows.episode[queries][:, None] == rows.episode[references][None, :]
    squares[is_same] = np.inf
    place = squares.argmin(axis=1)
    distance = np.sqrt(np.maximum(squares[np.arange(len(queries)), place], 0.0))
    return references[place], distance
