"""Where is the error? The witness function of the kernel loss, over states and actions.

The kernel loss is the squared norm of f*(x) = E[δ k(X, x)]: f* points to where residuals of one sign gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float

from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test.forms import random_signs
from koffline.ope.bellman_test.kernel_space import KernelSpace

_BLOCK_NUMBERS = 1 << 22  # of kernel values at a time
_FEWEST = 5.0  # effective rows behind a local mean that is worth a look
_CANDIDATES = 400
_SIGN_DRAWS = 500


@dataclass(frozen=True, eq=False)
class WitnessValues:
    """At Q places: ``witness`` f*; ``mean`` the kernel-weighted mean residual in units of the reward.

    ``standard_error`` is that of the mean if the residual had no local mean: |mean|/standard_error never
    exceeds the root of ``effective_rows`` = (Σk)²/Σk², so one odd row is no evidence. Where the log has no
    rows near, mean and standard error are NaN and effective_rows is 0.
    """

    witness: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    effective_rows: np.ndarray

    @property
    def z_scores(self) -> np.ndarray:
        """mean / standard_error; 0 where either says nothing."""
        known = (self.effective_rows > 0.0) & (self.standard_error > 0.0)
        return np.divide(self.mean, self.standard_error, out=np.zeros_like(self.mean), where=known)


@dataclass(frozen=True, eq=False)
class WitnessMap:
    """Over a grid of two observation coordinates: ``x (W,)``, ``y (H,)``, ``values`` of (H, W) arrays.

    ``action``: the action of the map; None: rows' actions are ignored (V) or averaged (see `Witness.map`).
    ``columns``: which coordinates of the flat observation x and y are.
    """

    x: np.ndarray
    y: np.ndarray
    values: WitnessValues
    action: object
    columns: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Region:
    """Rows around a place where the Bellman equation fails most.

    ``center``: mean observation of its rows, flat. ``action``: theirs (an int) or their mean action (k,);
    None for V(s). ``size``: number of rows; ``mean_residual`` ± ``standard_error`` over them. ``z_score``: of
    the kernel-weighted mean at the region's seed row; ``threshold``: what the largest |z| over all places
    exceeds with probability level under H0; ``is_significant``: z beyond it. ``rows``: row numbers.
    """

    center: np.ndarray
    action: object
    size: int
    mean_residual: float
    standard_error: float
    z_score: float
    threshold: float
    rows: np.ndarray = field(repr=False)

    @property
    def is_significant(self) -> bool:
        """|z| exceeds the threshold."""
        return abs(self.z_score) > self.threshold


@dataclass(frozen=True, eq=False)
class Witness:
    """f*(x) = Σ_i w_i δ_i k(x_i, x) / Σ_i w_i with what is needed to evaluate it anywhere.

    ``inputs (N, k)``: places of the rows in ``space``; ``residuals (N,)``; ``weights (N,)``: the log's;
    ``units (N,)``: number of the random sign a row shares with its neighbours; ``observations``, ``actions``:
    the rows as logged; ``level``: of the regions' joint threshold.
    (Feng et al. 2019, thm:rkhs)
    """

    space: KernelSpace
    inputs: np.ndarray
    residuals: np.ndarray
    weights: np.ndarray
    units: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    level: float
    seed: int

    def __call__(self, observations: np.ndarray, actions: np.ndarray | None = None) -> WitnessValues:
        """At observations (Q, …) and, for Q(s, a), actions (Q,) or (Q, a). Raises DataError."""
        observations = np.asarray(observations)
        if observations.shape[1:] != self.observations.shape[1:]:
            raise DataError(
                f"observations have shape {observations.shape}, the log's rows "
                f"{self.observations.shape[1:]}; give (Q, …) of the same shape"
            )
        if not np.isfinite(observations).all():
            raise DataError("observations hold NaN or infinite numbers; give places that exist")
        if self.space.with_actions:
            actions = self._checked_actions(actions, len(observations))
        return self._at(self.space.place(observations, actions).numpy())

    def map(
        self, resolution: int = 50, action: object = None, columns: tuple[int, int] = (0, 1)
    ) -> WitnessMap:
        """Over a grid of two coordinates, the others at their mean.

        ``action``: the one the map is for; None: for Q(s, a) the kernel ignores actions, so that residuals
        of all actions are averaged as the log holds them.
        """
        flat = np.asarray(self.observations, dtype=np.float64).reshape(len(self.observations), -1)
        if flat.shape[1] < 2 or max(columns) >= flat.shape[1] or columns[0] == columns[1]:
            raise ConfigError(
                f"a map over columns {columns} needs them among the {flat.shape[1]} of an observation; "
                "use top_regions"
            )
        counted = flat[self.weights > 0.0]
        axes = [np.linspace(counted[:, c].min(), counted[:, c].max(), resolution) for c in columns]
        across, up = np.meshgrid(*axes)
        places = np.tile(np.average(flat, axis=0, weights=self.weights), (resolution**2, 1))
        places[:, columns[0]], places[:, columns[1]] = across.ravel(), up.ravel()
        shaped = places.reshape(-1, *self.observations.shape[1:])
        if action is None and self.space.with_actions:
            found = self._states_only().__call__(shaped)
        else:
            found = self(shaped, None if action is None else np.stack([np.asarray(action)] * len(shaped)))
        grids = [part.reshape(resolution, resolution) for part in _parts(found)]
        return WitnessMap(axes[0], axes[1], WitnessValues(*grids), action, columns)

    def top_regions(self, k: int = 5) -> list[Region]:
        """At most k separate regions, the largest |z| first; the thresholds hold for all places at once.

        Places are 400 rows drawn with the seed. A region holds the rows of one action within one bandwidth
        (kernel value above e⁻¹) of its place.
        """
        if k < 1:
            raise ConfigError(f"k is {k}; give a number of regions of at least 1")
        generator = np.random.default_rng(self.seed)
        rows = np.flatnonzero(self.weights > 0.0)
        rows = np.sort(generator.choice(rows, min(len(rows), _CANDIDATES), replace=False))
        scores, threshold = self._joint_scores(rows, generator)
        regions: list[Region] = []
        taken = np.zeros(len(rows), dtype=bool)
        while len(regions) < k and not taken.all():
            best = int(np.argmax(np.where(taken, -1.0, np.abs(scores))))
            if scores[best] == 0.0:
                break
            members = self._near(int(rows[best]))
            regions.append(self._region(members, float(scores[best]), threshold))
            taken |= np.isin(rows, members)
            taken[best] = True
        return regions

    def _checked_actions(self, actions: np.ndarray | None, count: int) -> np.ndarray:
        """(Q,) actions 0 … n − 1 or finite (Q, k); DataError for any others."""
        expected = (count, *np.shape(self.actions)[1:])
        found = None if actions is None else np.asarray(actions)
        if found is None or found.shape != expected:
            got = "none" if found is None else f"shape {found.shape}"
            raise DataError(
                f"the witness of Q(s, a) needs one action per observation, got {got}; give actions {expected}"
            )
        n = self.space.n_actions
        if n is None:
            if not (np.issubdtype(found.dtype, np.number) and np.isfinite(found).all()):
                raise DataError("actions hold NaN or infinite numbers; give finite ones")
        elif not np.isin(found, np.arange(n)).all():
            wrong = found[~np.isin(found, np.arange(n))][0]
            raise DataError(f"actions hold {wrong}; give whole numbers from 0 to {n - 1}")
        return found if n is None else found.astype(np.int64)

    def _at(self, places: Float[np.ndarray, "place k"]) -> WitnessValues:
        """Sums over all rows in blocks."""
        residual, weights = self.residuals * self.weights, self.weights
        columns = torch.as_tensor(np.stack([residual, weights], axis=1))
        squares = torch.as_tensor(np.stack([residual**2, weights**2], axis=1))
        total, spread = np.zeros((len(places), 2)), np.zeros((len(places), 2))
        for rows, near in self._kernel_blocks(places):
            total += (near @ columns[rows]).numpy()
            spread += (near.square() @ squares[rows]).numpy()
        mass = total[:, 1]
        seen = mass > 1e-8
        safe = np.where(seen, mass, np.nan)
        effective = np.divide(mass**2, spread[:, 1], out=np.zeros(len(places)), where=seen)
        return WitnessValues(
            total[:, 0] / weights.sum(),
            total[:, 0] / safe,
            np.sqrt(spread[:, 0]) / safe,
            effective,
        )

    def _joint_scores(self, rows: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
        """z (C,) at the rows' places, and the level's quantile of the largest |z| under random signs."""
        residual = self.residuals * self.weights
        places = self.inputs[rows]
        signs = random_signs((int(self.units.max()) + 1, _SIGN_DRAWS), generator)
        drawn, spread = np.zeros((len(rows), _SIGN_DRAWS)), np.zeros(len(rows))
        found, mass, weighed = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
        for block, near in self._kernel_blocks(places):
            part = near.numpy() * residual[block]
            drawn += part @ signs[self.units[block]]
            found += part.sum(axis=1)
            spread += np.square(part).sum(axis=1)
            mass += near.numpy() @ self.weights[block]
            weighed += near.square().numpy() @ np.square(self.weights[block])
        usable = (spread > 0.0) & (mass**2 > _FEWEST * weighed)
        scale = np.where(usable, np.sqrt(np.where(usable, spread, 1.0)), np.inf)
        largest = np.abs(drawn / scale[:, None]).max(axis=0)
        return found / scale, float(np.quantile(largest, 1.0 - self.level))

    def _near(self, row: int) -> np.ndarray:
        """Rows of positive weight within a bandwidth of one row; of its action where actions are discrete."""
        place = self.inputs[row : row + 1]
        close = np.concatenate([near.numpy()[0] for _, near in self._kernel_blocks(place)])
        members = (close >= np.exp(-1.0)) & (self.weights > 0.0)
        if self.space.with_actions and self.space.n_actions is not None:
            members &= np.asarray(self.actions) == self.actions[row]
        return np.flatnonzero(members)

    def _region(self, members: np.ndarray, score: float, threshold: float) -> Region:
        residual, weights = self.residuals[members], self.weights[members]
        share = weights / weights.sum()
        flat = np.asarray(self.observations[members], dtype=np.float64).reshape(len(members), -1)
        action: object = None
        if self.space.with_actions:
            own = np.asarray(self.actions[members])
            action = int(own[0]) if self.space.n_actions is not None else share @ own
        return Region(
            center=share @ flat,
            action=action,
            size=len(members),
            mean_residual=float(share @ residual),
            standard_error=float(np.sqrt(share**2 @ residual**2)),
            z_score=score,
            threshold=threshold,
            rows=members,
        )

    def _states_only(self) -> Witness:
        """The same residuals with a kernel that ignores actions."""
        width = len(self.space.location)
        if self.space.n_actions is None:
            width -= np.asarray(self.actions).reshape(len(self.actions), -1).shape[1]
        space = KernelSpace(
            self.space.kernel, self.space.location[:width], self.space.scale[:width], None, with_actions=False
        )
        return Witness(
            space,
            self.inputs[:, :width],
            self.residuals,
            self.weights,
            self.units,
            self.observations,
            self.actions,
            self.level,
            self.seed,
        )

    def _kernel_blocks(self, places: np.ndarray):  # type: ignore[no-untyped-def]
        """Pairs (slice of rows, k(place, row) (Q, b))."""
        at, size = torch.as_tensor(places), max(1, _BLOCK_NUMBERS // max(len(places), 1))
        for start in range(0, len(self.inputs), size):
            rows = slice(start, min(start + size, len(self.inputs)))
            yield rows, self.space.kernel.gram(at, torch.as_tensor(self.inputs[rows]))


def _parts(values: WitnessValues) -> tuple[np.ndarray, ...]:
    return values.witness, values.mean, values.standard_error, values.effective_rows
