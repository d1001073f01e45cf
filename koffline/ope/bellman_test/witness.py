"""Location of the error: the witness function of the kernel loss, and mean residuals
along one variable.

The kernel loss is the squared norm of f*(x) = E[δ k(X, x)]: f* is large where residuals
of one sign gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from koffline.data.columns import blocks
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test.case import BellmanCase
from koffline.ope.bellman_test.forms import random_signs
from koffline.ope.results import Record

_BLOCK_NUMBERS = 1 << 22  # kernel values per block
_FEWEST_EFFECTIVE = 5.0  # least effective rows of a local mean that is examined
_CANDIDATES = 400
_SIGN_DRAWS = 500
_BINS = 12
_FEWEST = 8  # rows per bin, if there are enough
_ROUNDING = 1e-12
Numbers = Float[np.ndarray, " row"]


class WitnessValues(NamedTuple):
    """Values at Q places. ``witness``: f*; ``mean``: kernel-weighted mean residual in
    units of the reward.

    ``standard_error``: of the mean, if the local mean is zero. |mean|/standard_error
    never exceeds the root of ``effective_rows`` = (Σk)²/Σk², so that one odd row is no
    evidence. If the log has no rows nearby, mean and standard error are NaN and
    effective_rows is 0.
    """

    witness: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    effective_rows: np.ndarray

    @property
    def z_scores(self) -> np.ndarray:
        """mean / standard_error; 0 if either is zero or unknown."""
        known = (self.effective_rows > 0.0) & (self.standard_error > 0.0)
        return np.divide(
            self.mean, self.standard_error, out=np.zeros_like(self.mean), where=known
        )


@dataclass(frozen=True, eq=False)
class WitnessMap:
    """Values for one action over a grid of two-number states: ``axes`` x (W,), y (H,),
    ``values`` (H, W).
    """

    axes: tuple[np.ndarray, np.ndarray]
    values: WitnessValues
    action: int | np.ndarray


@dataclass(frozen=True, eq=False)
class Region(Record):
    """Rows around a place where the Bellman equation fails most.

    ``center``: mean observation of its rows, flat. ``action``: their action (an int),
    or their mean action (k,). ``size``: number of rows; ``mean_residual`` ±
    ``standard_error`` over them. ``z_score``: of the kernel-weighted mean at the
    region's central row. ``threshold``: exceeded by the largest |z| over all places
    with probability level under H0; ``is_significant``: |z| exceeds it. ``rows``: row
    numbers.
    """

    center: np.ndarray
    action: int | np.ndarray
    size: int
    mean_residual: float
    standard_error: float
    z_score: float
    threshold: float
    is_significant: bool
    rows: np.ndarray = field(repr=False)


@dataclass(frozen=True, eq=False)
class Witness:
    """f*(x) = Σ_i w_i δ_i k(x_i, x) / Σ_i w_i, from the residuals of a case's rows.

    (Feng et al. 2019, thm:rkhs)
    """

    case: BellmanCase = field(repr=False)

    def __call__(self, observations: np.ndarray, actions: np.ndarray) -> WitnessValues:
        """Evaluate at observations (Q, …) and actions (Q,) or (Q, a).

        Raises DataError.
        """
        observations = np.asarray(observations)
        shape = self.case.transitions.observation_shape
        if observations.shape[1:] != shape or not np.isfinite(observations).all():
            received = (
                f"observations have shape {observations.shape}, the log's rows {shape}"
            )
            raise DataError(f"{received}; give finite numbers (Q, …) of the same shape")
        places = self.case.place(observations, actions).numpy()
        total, spread = self._sums(places)
        seen = total[:, 1] > 1e-8
        mass = np.where(seen, total[:, 1], np.nan)
        effective = np.divide(
            total[:, 1] ** 2, spread[:, 1], out=np.zeros(len(places)), where=seen
        )
        witness = total[:, 0] / self.case.weights.sum()
        return WitnessValues(
            witness, total[:, 0] / mass, np.sqrt(spread[:, 0]) / mass, effective
        )

    def map(self, action: int | np.ndarray, resolution: int = 50) -> WitnessMap:
        """Evaluate for one action over a grid of two-number states.

        Raises ConfigError for other states.
        """
        shape = self.case.transitions.observation_shape
        states = self._flat(self.case.weights > 0.0)
        if states.shape[1] != 2:
            raise ConfigError(
                f"a map needs states of two numbers, these have {shape}; use"
                " top_regions"
            )
        x, y = (
            np.linspace(numbers.min(), numbers.max(), resolution)
            for numbers in states.T
        )
        places = np.stack(np.meshgrid(x, y), axis=-1).reshape((-1, *shape))
        values = self(places, np.stack([np.asarray(action)] * len(places)))
        grid = (resolution, resolution)
        shaped = WitnessValues(
            witness=values.witness.reshape(grid),
            mean=values.mean.reshape(grid),
            standard_error=values.standard_error.reshape(grid),
            effective_rows=values.effective_rows.reshape(grid),
        )
        return WitnessMap((x, y), shaped, action)

    def top_regions(self, k: int = 5) -> list[Region]:
        """At most k separate regions, the largest |z| first; the threshold holds for
        all places at once.

        Places are 400 rows drawn with the seed. A region holds the rows of one action
        within one bandwidth (kernel value above e⁻¹) of its place.
        """
        generator = np.random.default_rng(self.case.settings.seed)
        rows = np.flatnonzero(self.case.weights > 0.0)
        rows = np.sort(
            generator.choice(rows, min(len(rows), _CANDIDATES), replace=False)
        )
        signs = np.zeros((len(self.case.weights), _SIGN_DRAWS))
        signs[self.case.weights > 0.0] = random_signs(
            (self.case.n, _SIGN_DRAWS), generator
        )
        total, spread = self._sums(self.case.inputs[rows].numpy(), signs)
        usable = (spread[:, 0] > 0.0) & (
            total[:, 1] ** 2 > _FEWEST_EFFECTIVE * spread[:, 1]
        )
        scale = np.where(usable, np.sqrt(np.where(usable, spread[:, 0], 1.0)), np.inf)
        scores = total[:, 0] / scale
        largest = np.abs(total[:, 2:] / scale[:, None]).max(axis=0)
        threshold = float(np.quantile(largest, 1.0 - self.case.settings.level))
        regions: list[Region] = []
        left = np.abs(scores)
        while len(regions) < k and left.max() > 0.0:
            best = int(np.argmax(left))
            regions.append(
                self._region(int(rows[best]), float(scores[best]), threshold)
            )
            left[np.isin(rows, regions[-1].rows)] = left[best] = 0.0
        return regions

    def _sums(
        self, places: np.ndarray, signs: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sums at places (Q, k): Σ k·(wδ, w) and Σ k²·(w²δ², w²), (Q, 2) each.

        With signs of rows, the first has further columns Σ k·wδ·sign, (Q, 2 + B).
        """
        weights = self.case.weights
        residual = self.case.residuals * self.case.weights
        if signs is None:
            signs = np.zeros((len(residual), 0))
        total = np.zeros((len(places), 2 + signs.shape[1]))
        spread = np.zeros((len(places), 2))
        size = max(1, _BLOCK_NUMBERS // max(len(places), 1))
        for rows in blocks(len(residual), size):
            near = self.case.kernel.gram(
                torch.as_tensor(places), self.case.inputs[rows]
            ).numpy()
            columns = np.column_stack(
                [residual[rows], weights[rows], residual[rows, None] * signs[rows]]
            )
            total += near @ columns  # (Q, b) @ (b, 2 + B)
            spread += np.square(near) @ np.square(columns[:, :2])
        return total, spread

    def _region(self, row: int, score: float, threshold: float) -> Region:
        """Rows of positive weight within a bandwidth of one row, with its action if
        actions are discrete.
        """
        log = self.case.transitions
        is_discrete = self.case.problem.n_actions is not None
        close = self.case.kernel.gram(
            self.case.inputs[row : row + 1], self.case.inputs
        )[0].numpy()
        inside = (close >= np.exp(-1.0)) & (self.case.weights > 0.0)
        if is_discrete:
            inside &= np.asarray(log.actions) == log.actions[row]
        rows = np.flatnonzero(inside)
        residual = self.case.residuals[rows]
        share = self.case.weights[rows]
        share = share / share.sum()
        if is_discrete:
            action = int(log.actions[row])
        else:
            action = share @ log.actions[rows]
        mean = float(share @ residual)
        error = float(np.sqrt(share**2 @ residual**2))
        center = share @ self._flat(rows)
        clear = abs(score) > threshold
        return Region(
            center, action, len(rows), mean, error, score, threshold, clear, rows
        )

    def _flat(self, rows: slice | np.ndarray) -> np.ndarray:
        """Observations (Q, d) of some rows."""
        observations = np.asarray(
            self.case.transitions.observations[rows], dtype=np.float64
        )
        return observations.reshape(len(observations), -1)


@dataclass(frozen=True, eq=False)
class ResidualProfile(Record):
    """Residuals in bins of nearly equal weight along a variable.

    (B,) each: ``center``: weighted mean of the variable; ``mean`` ± ``standard_error``
    of the residual; ``low``, ``high``: 10 % and 90 % quantiles of the residual;
    ``rows``: number of rows.
    """

    center: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray


def make_profile(
    numbers: Numbers, residuals: Numbers, weights: Numbers
) -> ResidualProfile:
    """Bins by quantiles of ``numbers``; equal numbers share a bin.

    Rows of weight zero are left out.
    """
    kept = np.flatnonzero(weights > 0.0)
    order = kept[np.argsort(numbers[kept], kind="stable")]
    numbers = numbers[order]
    residuals = residuals[order]
    weights = weights[order]
    bins = max(1, min(_BINS, len(order) // _FEWEST))
    reached = np.cumsum(weights) / weights.sum()
    cuts = np.searchsorted(reached, np.arange(1, bins) / bins + 1e-9, side="right")
    firsts = np.searchsorted(
        numbers, numbers[np.minimum(cuts, len(order) - 1)], side="left"
    )
    edges = np.unique(np.concatenate([[0], firsts, [len(order)]]))
    parts = [slice(int(start), int(stop)) for start, stop in pairwise(edges)]
    columns = zip(
        *(_summary(numbers[part], residuals[part], weights[part]) for part in parts),
        strict=True,
    )
    center, mean, error, low, high = map(np.array, columns)
    return ResidualProfile(center, mean, error, low, high, np.diff(edges))


def _summary(
    numbers: np.ndarray, residuals: np.ndarray, weights: np.ndarray
) -> tuple[float, ...]:
    """Summary of one bin: centre, mean, standard error and two quantiles."""
    share = weights / weights.sum()
    count = len(numbers)
    mean = float(share @ residuals)
    error = math.sqrt(float(np.square(share) @ np.square(residuals - mean)))
    if np.ptp(residuals) <= _ROUNDING * abs(mean):  # equal residuals have no spread
        error = 0.0
    if count > 1:
        error *= math.sqrt(count / (count - 1))
    low, high = np.quantile(residuals, [0.1, 0.9])
    return float(share @ numbers), mean, error, float(low), float(high)
