"""Ends that nobody marked: steps inside episodes that lead to where episodes begin,
against the dynamics.

Two tests. A time limit shows at one step number: there nearly all rows lead to start
states, although the same states and actions lead elsewhere at other steps. Files glued
together and lost flags show at any step: a row leads to a start state, and no step from
similar states and actions resembles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from koffline.data.structure.chances import SIGNIFICANT, chance_of_count
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.surprise import PlacesOfEpisodes
from koffline.data.structure.symptom import Symptom
from koffline.errors import counted

_FEWEST_EPISODES = 10
_FEWEST_JUMPS = 3
_FEWEST_AT_STEP = 5
_MOST_OF_JUMPS = 0.5
_MOST_STARTS = 2000
_CANDIDATES = 600
_COMPARED = 1 << 18  # pairs of states at once, in a processor's cache
_FAR = 3.0  # times the surprise of the most surprising usual steps
_LEAST_SURPRISE = 1.0  # in units of a usual step
_AT_ONE_STEP = 0.9  # share of the rows at a step number that lead to start states
_USUAL = 0.95  # quantile of the usual steps' surprise
_ROUNDING = 1e-4
_NEAR_QUANTILE = 0.9  # of the distances between neighbouring start states


def jump_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield a symptom if episodes seem to contain several ones."""
    if len(rows.firsts) < _FEWEST_EPISODES:
        return
    inside = np.flatnonzero(~rows.is_last)
    if len(inside) < _FEWEST_EPISODES:
        return
    leads_to_start = _StartStates(rows).hold(rows.states(inside, following=True))
    places = PlacesOfEpisodes.of(rows)
    is_jump = _jumps(inside=inside, places=places)
    evidence = _Jumps(
        rows=rows,
        inside=inside,
        leads_to_start=leads_to_start,
        is_jump=is_jump,
        places=places,
    )
    symptom = evidence.of_time_limits() or evidence.of_scattered_jumps()
    if symptom is not None:
        yield symptom


def _jumps(
    inside: Int[np.ndarray, " inside"], places: PlacesOfEpisodes
) -> Bool[np.ndarray, " inside"]:
    """Which rows take a step that no similar row of another episode takes, among the
    longest steps.
    """
    is_jump = np.zeros(len(inside), dtype=np.bool_)
    usual = places.surprise(places.controls())
    usual = usual[np.isfinite(usual)]
    if not len(usual):
        return is_jump
    limit = max(_LEAST_SURPRISE, _FAR * float(np.quantile(usual, _USUAL)))
    count = min(_CANDIDATES, len(inside))
    longest = np.argpartition(-places.step_lengths(inside), kth=count - 1)[:count]
    surprise = places.surprise(inside[longest])
    is_jump[longest] = np.isfinite(surprise) & (surprise > limit)
    return is_jump


class _StartStates:
    """The region of the start states: balls around them, as wide as start states are
    apart.
    """

    def __init__(self, rows: LoggedRows) -> None:
        firsts = rows.firsts
        stride = max(1, len(firsts) // _MOST_STARTS)
        states = rows.states(firsts[::stride][:_MOST_STARTS])
        self._states = states
        self._radius = _ROUNDING
        if len(states) > 1:
            distances = _nearest(states, states, skip_self=True)
            self._radius = max(
                self._radius, float(np.quantile(distances, _NEAR_QUANTILE))
            )

    def hold(self, states: Float[np.ndarray, "some d"]) -> Bool[np.ndarray, " some"]:
        """Whether states lie in the region."""
        inside = np.empty(len(states), dtype=np.bool_)
        block = max(1, _COMPARED // len(self._states))
        for start in range(0, len(states), block):
            part = states[start : start + block]
            inside[start : start + block] = (
                _nearest(part, self._states, skip_self=False) <= self._radius
            )
        return inside


def _nearest(
    left: Float[np.ndarray, "left d"],
    right: Float[np.ndarray, "right d"],
    skip_self: bool,
) -> Float[np.ndarray, " left"]:
    """Distance of each left state to the nearest right one."""
    # ‖r‖² − 2 lᵀr in one product; ‖l‖² is the same for all right states
    with_ones = np.column_stack([left, np.ones(len(left))])
    with_squares = np.column_stack([-2.0 * right, (right**2).sum(axis=1)])
    squares = with_ones @ with_squares.T
    if skip_self:
        np.fill_diagonal(squares, np.inf)
    nearest = squares.min(axis=1) + (left**2).sum(axis=1)
    return np.sqrt(np.maximum(nearest, 0.0))


@dataclass(frozen=True, eq=False)
class _Jumps:
    """Rows inside episodes: which lead to where episodes begin, and which jump."""

    rows: LoggedRows
    inside: Int[np.ndarray, " inside"]
    leads_to_start: Bool[np.ndarray, " inside"]
    is_jump: Bool[np.ndarray, " inside"]
    places: PlacesOfEpisodes

    def of_time_limits(self) -> Symptom | None:
        """A time limit that is not marked: at one step number nearly all rows jump, or
        lead to starts.
        """
        steps = np.asarray(self.rows.log.steps)[self.inside]
        counts = np.bincount(steps)
        for sign in (self.is_jump, self.leads_to_start):
            hits = np.bincount(steps, weights=sign)
            rate = (float(sign.sum()) + 1.0) / (len(steps) + 2.0)
            is_clear = (counts >= _FEWEST_AT_STEP) & (hits >= _AT_ONE_STEP * counts)
            for step in np.flatnonzero(is_clear).tolist():
                chance = chance_of_count(
                    count=int(hits[step]), trials=int(counts[step]), rate=rate
                )
                p_value = len(counts) * chance
                if step == 0 or p_value >= SIGNIFICANT:
                    continue
                at_step = self.inside[(steps == step) & sign]
                if sign is self.is_jump or self.places.go_elsewhere_at_other_steps(
                    chosen=at_step, step=step
                ):
                    return _time_limit(
                        limit=step + 1,
                        hits=int(hits[step]),
                        episodes=int(counts[step]),
                        p_value=p_value,
                    )
        return None

    def of_scattered_jumps(self) -> Symptom | None:
        """Rows at any step that jump to where episodes begin."""
        jumps = int(self.is_jump.sum())
        to_start = int((self.is_jump & self.leads_to_start).sum())
        rate = (float(self.leads_to_start.sum()) + 1.0) / (len(self.inside) + 2.0)
        p_value = chance_of_count(count=to_start, trials=jumps, rate=rate)
        is_enough = to_start >= max(_FEWEST_JUMPS, _MOST_OF_JUMPS * jumps)
        if not is_enough or p_value >= SIGNIFICANT:
            return None
        return Symptom(
            test="jumps inside episodes",
            kind="ends",
            rows=to_start,
            of=len(self.inside),
            p_value=p_value,
            statement=(
                f"in {counted(to_start, 'row')} inside episodes"
                f" ({to_start / len(self.inside):.2%}) the state jumps to where"
                " episodes begin, as no similar row does"
            ),
            remedy=(
                "if an episode ended there unmarked, or files were glued together, mark"
                " the ends"
            ),
        )


def _time_limit(limit: int, hits: int, episodes: int, p_value: float) -> Symptom:
    """The symptom of a time limit that is not marked."""
    return Symptom(
        test="unmarked time limits",
        kind="ends",
        rows=hits,
        of=episodes,
        p_value=p_value,
        statement=(
            f"after {counted(limit, 'step')} {hits} of {episodes} episodes jump to"
            " where episodes begin"
        ),
        remedy=(
            f"mark a time limit of {limit} steps as truncated, and begin a new episode"
            " there"
        ),
    )
