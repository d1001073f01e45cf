"""Where episodes meet: terminations that ended nothing, dummy rows of resets, next
observations of resets.

Every test counts rows that are exactly equal, and compares the count with the chance of
such equalities between episodes that have nothing to do with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from koffline.data.flat import rows_are_linked
from koffline.data.structure.chances import (
    SIGNIFICANT,
    chance_of_count,
    coincidence_rate,
    is_clear,
)
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.surprise import PlacesOfEpisodes
from koffline.data.structure.symptom import Symptom
from koffline.data.transitions import Transitions
from koffline.errors import counted, percent

_LEAST_ROWS = 3
_ENOUGH_ALIKE = 20  # rows that tell what a state pays
_LEAST_BOTH = 0.05  # of the cuts, which are flagged terminal too
_FEW_CUTS = 0.1  # of all truncated rows: more are cuts of a flag of all ends
_UNLINKED_SHARE = 0.01  # of the rows inside episodes
_MOSTLY = 0.5


@dataclass(frozen=True, eq=False)
class _Equalities:
    """Rows that cut an episode, whether each one's next observation is some start, and
    how often that happens by chance.
    """

    cuts: Int[np.ndarray, " cut"]
    is_equal: Bool[np.ndarray, " cut"]
    rate: float

    @property
    def p_value(self) -> float:
        """Chance of so many equalities."""
        return chance_of_count(
            count=int(self.is_equal.sum()), trials=len(self.cuts), rate=self.rate
        )


def boundary_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield the symptoms that show where episodes meet."""
    yield from _terminations_that_end_nothing(rows)
    yield from _reset_rows(rows)
    yield from _next_observations_of_resets(rows)


def _terminations_that_end_nothing(rows: LoggedRows) -> Iterator[Symptom]:
    """Terminations after which the next episode begins in the very observation that
    ended the last one.

    Either the flag did not end anything, or the next row is a dummy row of an automatic
    reset.
    """
    lasts, firsts = rows.meetings
    is_terminated = np.asarray(rows.log.terminated)[lasts]
    lasts = lasts[is_terminated]
    firsts = firsts[is_terminated]
    # readers may repeat the last observation
    has_own = rows.next_keys[lasts] != rows.observation_keys[lasts]
    lasts = lasts[has_own]
    firsts = firsts[has_own]
    if len(lasts) < _LEAST_ROWS:
        return
    is_joined = rows.next_keys[lasts] == rows.observation_keys[firsts]
    rate = coincidence_rate(
        ends=rows.next_keys[lasts], starts=rows.observation_keys[rows.firsts]
    )
    count = int(is_joined.sum())
    p_value = chance_of_count(count=count, trials=len(lasts), rate=rate)
    if not is_clear(count=count, of=len(lasts), p_value=p_value):
        return
    joined_rewards = np.asarray(rows.log.rewards)[firsts[is_joined]]
    if (joined_rewards == 0.0).all():
        statement = (
            f"after {count} of {counted(len(lasts), 'termination')} the next episode"
            " begins in the observation that ended the last one, with reward 0"
        )
        remedy = (
            "leave out these rows if an automatic reset wrote them; if the episode went"
            " on, its terminal flag is wrong"
        )
    else:
        statement = (
            f"after {count} of {counted(len(lasts), 'termination')} the next episode"
            " begins in the observation that ended the last one"
        )
        remedy = (
            "check the terminal flag: a flag that ends nothing is a time limit, or"
            " means the opposite"
        )
    yield Symptom(
        test="terminations that end nothing",
        kind="ends",
        rows=count,
        of=len(lasts),
        p_value=p_value,
        statement=statement,
        remedy=remedy,
    )


def _reset_rows(rows: LoggedRows) -> Iterator[Symptom]:
    """First rows whose observation ended another episode, as dummy rows of an automatic
    reset begin.

    They are named if their rewards are all 0 where others are not, or if their steps
    are unlike all others. A stream that was cut into pieces, and worlds that begin
    where they end, show neither.
    """
    log = rows.log
    last_keys = rows.next_keys[rows.lasts]
    ended = last_keys[last_keys != rows.observation_keys[rows.lasts]]
    begins_at_end = np.isin(rows.observation_keys[rows.firsts], np.unique(ended))
    count = int(begins_at_end.sum())
    rewards = np.asarray(log.rewards)
    first_rewards = rewards[rows.firsts]
    has_other_starts = bool((~begins_at_end).any())
    is_zero = bool((first_rewards[begins_at_end] == 0.0).all())
    if count < _LEAST_ROWS or not is_zero or not has_other_starts:
        return
    second = rows.firsts[np.asarray(log.episode_lengths) > 1] + 1
    other_rewards = np.concatenate([first_rewards[~begins_at_end], rewards[second]])
    zero_rate = (float((other_rewards == 0.0).sum()) + 1.0) / (len(other_rewards) + 2.0)
    # the states in which episodes end may pay 0 in all rows
    is_alike = np.isin(
        rows.observation_keys, rows.observation_keys[rows.firsts[begins_at_end]]
    )
    is_alike[rows.firsts] = False
    n_alike = int(is_alike.sum())
    if n_alike >= _ENOUGH_ALIKE:
        n_zeros = float((rewards[is_alike] == 0.0).sum())
        zero_rate = max(zero_rate, (n_zeros + 1.0) / (n_alike + 2.0))
    p_value = zero_rate**count
    evidence = "with reward 0"
    if not is_clear(count=count, of=len(rows.firsts), p_value=p_value):
        dummies = rows.firsts[begins_at_end]
        places = PlacesOfEpisodes.of(rows, without=dummies)
        p_value = places.p_value_of_unlike(dummies)
        evidence = "and then jump, with reward 0"
    if not is_clear(count=count, of=len(rows.firsts), p_value=p_value):
        return
    yield Symptom(
        test="rows of automatic resets",
        kind="starts",
        rows=count,
        of=len(rows.firsts),
        p_value=p_value,
        statement=(
            f"{count} of {counted(len(rows.firsts), 'episode')} begin in an observation"
            f" that ended another one, {evidence}"
        ),
        remedy=(
            "leave out these first rows if an automatic reset wrote them (their actions"
            " did nothing)"
        ),
    )


def _next_observations_of_resets(rows: LoggedRows) -> Iterator[Symptom]:
    """Cut rows whose next observation is a start of another episode, which the dynamics
    do not lead to.

    Where few states exist, steps inside episodes reach starts as well. Then only the
    equality with the very next episode's first observation tells.
    """
    log = rows.log
    is_terminated = np.asarray(log.terminated)
    starts = rows.observation_keys[rows.firsts]
    inside = np.flatnonzero(~rows.is_last)
    inside_rate = (float(np.isin(rows.next_keys[inside], starts).sum()) + 1.0) / (
        len(inside) + 2.0
    )
    all_cuts = rows.lasts[~is_terminated[rows.lasts]]
    of_any_start = _Equalities(
        cuts=all_cuts,
        is_equal=np.isin(rows.next_keys[all_cuts], starts),
        rate=inside_rate,
    )
    lasts, firsts = rows.meetings
    is_cut = ~is_terminated[lasts]
    joined_cuts = lasts[is_cut]
    of_next_start = _Equalities(
        cuts=joined_cuts,
        is_equal=rows.next_keys[joined_cuts] == rows.observation_keys[firsts[is_cut]],
        rate=coincidence_rate(ends=rows.next_keys[joined_cuts], starts=starts),
    )
    equalities = min(of_any_start, of_next_start, key=lambda pair: pair.p_value)
    cut = equalities.cuts
    is_start = equalities.is_equal
    count = int(is_start.sum())
    p_value = equalities.p_value
    if len(cut) < _LEAST_ROWS or not is_clear(
        count=count, of=len(cut), p_value=p_value
    ):
        return
    places = PlacesOfEpisodes.of(rows)
    if places.p_value_of_unlike(cut[is_start]) >= SIGNIFICANT:
        return  # one stream was cut into pieces, and goes on in the next episode
    yield Symptom(
        test="next observations of resets",
        kind="states",
        rows=count,
        of=len(cut),
        p_value=p_value,
        statement=(
            f"in {count} of {len(cut)} cut episodes the last next observation is the"
            " first one of another episode, as after an automatic reset"
        ),
        remedy=(
            "store the observation that was reached (Gymnasium: info['final_obs']), or"
            " leave next observations out of the log"
        ),
    )


def rows_with_both_flags(log: Transitions) -> Iterator[Symptom]:
    """Yield a symptom if more rows are flagged both terminated and truncated than
    worlds end by chance where recording stops.

    That chance is taken to be twice the share of terminations among later rows. A
    truncated flag that is set at every end of an episode says nothing.
    """
    terminated = np.asarray(log.terminated)
    truncated = np.asarray(log.truncated)
    is_both = terminated & truncated
    count = int(is_both.sum())
    n_truncated = int(truncated.sum())
    is_rare = count < max(_LEAST_ROWS, _LEAST_BOTH * n_truncated)
    if is_rare or count == len(log):  # episodes of one step all end at their limit
        return
    is_terminated_only = terminated & ~truncated
    n_truncated_only = n_truncated - count
    if not is_terminated_only.any() and n_truncated_only > _FEW_CUTS * n_truncated:
        return
    is_late = np.ones(len(log), dtype=np.bool_)
    if log.has_episodes:
        steps = np.asarray(log.steps)
        is_late = steps >= 0.5 * np.median(steps[truncated])
    n_late = float(is_late.sum())
    n_ended = float((is_terminated_only & is_late).sum())
    p_value = chance_of_count(
        count=count, trials=n_truncated, rate=(2.0 * n_ended + 1.0) / (n_late + 2.0)
    )
    if not is_clear(count=count, of=n_truncated, p_value=p_value):
        return
    yield Symptom(
        test="both end flags",
        kind="ends",
        rows=count,
        of=n_truncated,
        p_value=p_value,
        statement=(
            f"{count} of {counted(n_truncated, 'row')} flagged truncated are flagged"
            " terminated, too, and count as ends of the world"
        ),
        remedy=(
            "if the terminal flag is set at every end, take it back where recording"
            " stopped (of columns done and timeout: --terminal 'done > timeout'); if the"
            " world ended there, take truncated back"
        ),
    )


def unlinked_rows(log: Transitions) -> Iterator[Symptom]:
    """Yield a symptom if next observations inside episodes are not the observations of
    the rows below.
    """
    linked = rows_are_linked(log.observations, log.next_observations)
    inside = np.delete(linked, log.episode_ends[:-1])
    broken = int((~inside).sum())
    if not len(inside) or broken <= _UNLINKED_SHARE * len(inside):
        return
    yield Symptom(
        test="linked rows",
        kind="states",
        rows=broken,
        of=len(inside),
        p_value=0.0,
        statement=(
            f"{percent(broken / len(inside))} of next observations in episodes are not"
            " those of the row below"
        ),
        remedy="export them anew, or leave next observations out of the log",
    )


def rows_that_go_on(log: Transitions) -> Iterator[Symptom]:
    """Yield a symptom if rows without episodes follow each other: episodes were
    lost.
    """
    goes_on = ~np.asarray(log.terminated)[:-1]
    if log.has_episodes or goes_on.sum() < _LEAST_ROWS:
        return
    linked: Bool[np.ndarray, " pair"] = rows_are_linked(
        log.observations, log.next_observations
    )
    count = int((linked & goes_on).sum())
    shifted: Float[np.ndarray, "..."] = np.roll(
        np.asarray(log.next_observations), shift=7, axis=0
    )
    by_chance = int((rows_are_linked(log.observations, shifted) & goes_on).sum())
    if count - by_chance < _MOSTLY * goes_on.sum():
        return
    yield Symptom(
        test="rows without episodes",
        kind="order",
        rows=count,
        of=int(goes_on.sum()),
        p_value=0.0,
        statement=(
            f"the rows stand alone, yet {percent(count / goes_on.sum())} of them go on"
            " in the row below: every row counts as a start"
        ),
        remedy="name the episode of each row (episode_ids, or steps)",
    )
