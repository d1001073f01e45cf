"""How little a step resembles the log's other steps: distances to the nearest steps of
other episodes.

The step of a row is s' − s. A step is surprising if none of the steps that were taken
from similar states with similar actions, in other episodes, resembles it. That holds
for any dynamics, also for those that jump: where jumps are usual, similar steps jump
too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from koffline.data.structure.logged_rows import LoggedRows

_NEIGHBOURS = 40
_ALIKE = 2  # neighbours that must take a similar step
_SAME_STEP = 1e-3  # distances below are rounding
_MOST_REFERENCES = 6000
_MOST_QUERIES = 500
# of a change of action by one, beside a change of the state by one deviation
_ACTION_WEIGHT = 2.0
_STEP_FLOOR = 1e-3  # of a state's deviation: the least scale of its steps
# chance that such a step is more surprising than one inside an episode
_UNLIKE_SHARE = 0.8
_UNLIKE_P = 1e-4
_FEWEST = 5
_FEWEST_REFERENCES = 60
_NEAR = 3.0  # times the usual distance to the nearest row


@dataclass(frozen=True, eq=False)
class PlacesOfEpisodes:
    """Steps inside episodes (up to 6000, drawn once) with their states, actions and
    episodes.

    scale: root mean square (d,) of the steps of each number of the state.
    """

    rows: LoggedRows
    reference: Int[np.ndarray, " reference"]
    inputs: Float[np.ndarray, "reference x"]
    steps: Float[np.ndarray, "reference d"]
    scale: Float[np.ndarray, " d"]

    @classmethod
    def of(
        cls, rows: LoggedRows, without: np.ndarray | None = None
    ) -> PlacesOfEpisodes:
        """Draw steps inside episodes, but not the rows ``without``; the same rows give
        the same steps.
        """
        generator = np.random.default_rng(0)
        is_usable = ~rows.is_last
        if without is not None:
            is_usable[without] = False
        inside = np.flatnonzero(is_usable)
        if len(inside) > _MOST_REFERENCES:
            inside = np.sort(
                generator.choice(inside, size=_MOST_REFERENCES, replace=False)
            )
        steps = rows.states(inside, following=True) - rows.states(inside)
        if len(inside):
            scale = np.sqrt(np.mean(steps**2, axis=0))
        else:
            scale = np.ones(steps.shape[1])
        scale = np.maximum(scale, _STEP_FLOOR).astype(np.float32)
        return cls(
            rows=rows,
            reference=inside,
            inputs=_inputs(rows=rows, chosen=inside),
            steps=(steps / scale).astype(np.float32),
            scale=scale,
        )

    def surprise(
        self, chosen: Int[np.ndarray, " query"]
    ) -> Float[np.ndarray, " query"]:
        """Distance of each chosen row's step to the second most similar one among its
        40 neighbours.

        Neighbours are steps of other episodes from the nearest (state, action). In
        units of a usual step; 0 where the difference is rounding, ∞ with too few
        neighbours.
        """
        rows = self.rows
        steps = (rows.states(chosen, following=True) - rows.states(chosen)) / self.scale
        distances = _squared_distances(_inputs(rows=rows, chosen=chosen), self.inputs)
        is_same = rows.episode[chosen][:, None] == rows.episode[self.reference][None, :]
        distances[is_same] = np.inf
        count = min(_NEIGHBOURS, distances.shape[1])
        nearest = np.argpartition(distances, kth=count - 1, axis=1)[:, :count]
        apart = np.sqrt(((steps[:, None, :] - self.steps[nearest]) ** 2).mean(axis=2))
        is_usable = np.isfinite(np.take_along_axis(distances, nearest, axis=1))
        apart = np.where(is_usable, apart, np.inf)
        if count < _ALIKE:
            return np.full(len(chosen), np.inf)
        second = np.partition(apart, kth=_ALIKE - 1, axis=1)[:, _ALIKE - 1]
        return np.where(second < _SAME_STEP, 0.0, second)

    def step_lengths(
        self, chosen: Int[np.ndarray, " query"]
    ) -> Float[np.ndarray, " query"]:
        """Root mean square of each chosen row's step, in units of usual steps."""
        steps = (
            self.rows.states(chosen, following=True) - self.rows.states(chosen)
        ) / self.scale
        return np.sqrt((steps**2).mean(axis=1))

    def go_elsewhere_at_other_steps(
        self, chosen: Int[np.ndarray, " query"], step: int
    ) -> bool:
        """Whether similar rows at other step numbers take other steps than the chosen
        rows at ``step``.

        False also if no similar rows at other step numbers are known: then nothing
        contradicts the jump.
        """
        stride = max(1, len(chosen) // _MOST_QUERIES)
        chosen = chosen[::stride][:_MOST_QUERIES]
        numbers = np.asarray(self.rows.log.steps)
        is_other = (numbers[self.reference] + 1) % (step + 1) != 0
        if is_other.sum() < _FEWEST_REFERENCES:
            return False
        other = replace(
            self,
            reference=self.reference[is_other],
            inputs=self.inputs[is_other],
            steps=self.steps[is_other],
        )
        controls = other.controls()
        usual_distance = float(np.median(other.neighbour_distance(controls)))
        is_near = other.neighbour_distance(chosen) <= _NEAR * max(usual_distance, 1e-6)
        if is_near.sum() < _FEWEST:
            return False
        return other.p_value_of_unlike(chosen[is_near]) < _UNLIKE_P

    def neighbour_distance(
        self, chosen: Int[np.ndarray, " query"]
    ) -> Float[np.ndarray, " query"]:
        """Distance of each chosen row to the nearest reference row of another episode,
        in (state, action).
        """
        distances = _squared_distances(
            _inputs(rows=self.rows, chosen=chosen), self.inputs
        )
        is_same = (
            self.rows.episode[chosen][:, None]
            == self.rows.episode[self.reference][None, :]
        )
        distances[is_same] = np.inf
        return np.sqrt(distances.min(axis=1))

    def controls(self) -> Int[np.ndarray, " control"]:
        """Up to 500 rows inside episodes to compare with."""
        stride = max(1, len(self.reference) // _MOST_QUERIES)
        return self.reference[::stride][:_MOST_QUERIES]

    def p_value_of_unlike(self, chosen: Int[np.ndarray, " query"]) -> float:
        """P-value of a rank test that the chosen rows' steps are as surprising as steps
        inside episodes.

        1.0 if the difference is small (a chosen step is the more surprising one in less
        than 80 % of the pairs), or if there are fewer than five rows.
        """
        if len(chosen) < _FEWEST or len(self.reference) < _FEWEST_REFERENCES:
            return 1.0
        stride = max(1, len(chosen) // _MOST_QUERIES)
        surprise = self.surprise(chosen[::stride][:_MOST_QUERIES])
        usual = self.surprise(self.controls())
        surprise = surprise[np.isfinite(surprise)]
        usual = usual[np.isfinite(usual)]
        if len(surprise) < _FEWEST or len(usual) < _FEWEST:
            return 1.0
        if min(surprise.min(), usual.min()) == max(surprise.max(), usual.max()):
            return 1.0
        if _share_of_pairs_above(surprise, usual) <= _UNLIKE_SHARE:
            return 1.0
        # To import scipy.stats takes a second, a quarter of the start of an evaluation.
        from scipy.stats import mannwhitneyu

        return float(mannwhitneyu(surprise, usual, alternative="greater").pvalue)


def _share_of_pairs_above(
    first: Float[np.ndarray, " n"], second: Float[np.ndarray, " m"]
) -> float:
    """Share of the n·m pairs in which the first value is above the second; a tie counts
    half.

    This is the Mann-Whitney statistic U over n·m.
    """
    in_order = np.sort(second)
    below = np.searchsorted(in_order, first, side="left")
    up_to = np.searchsorted(in_order, first, side="right")
    return float((below.sum() + up_to.sum()) / 2.0) / (len(first) * len(second))


def _inputs(rows: LoggedRows, chosen: np.ndarray) -> Float[np.ndarray, "some x"]:
    """States and weighted actions side by side."""
    return np.hstack([rows.states(chosen), _ACTION_WEIGHT * rows.actions(chosen)])


def _squared_distances(
    left: Float[np.ndarray, "left x"], right: Float[np.ndarray, "right x"]
) -> Float[np.ndarray, "left right"]:
    """Squared Euclidean distances of all pairs."""
    products = left @ right.T
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.maximum(squares - 2.0 * products, 0.0)
