"""Sums over the rows of a feature system, whole or by fold: all that the closed forms need of the log."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial, reduce
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.data.units import unit_hash
from koffline.errors import DataError
from koffline.ope.features import FeatureSystem
from koffline.ope.working_log import Sums
from koffline.solvers import make_folds

BLOCK = 8192
_CRITICS = 300
_FOLDS = 0x666F6C64  # a stream of hashes of its own
_MOST_RANKED = 1_000_000
# Several estimators read one system: (folds, seed) -> sums.
_KEPT: WeakKeyDictionary[FeatureSystem, dict[tuple[int, int], Moments]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Moments(Sums):
    """Sums, not means, over some rows with weights W, or over those of each fold (one more axis in front).

    ψ are m instruments, Z = φ − discount · φ'. ``projected (m, p + 1)``: ψᵀW[Z, r]. ``temporal (p, p + 1)``:
    φᵀW[Z, r]. ``squares (p + 1, p + 1)``: [Z, r]ᵀW²[Z, r]. ``critic (k, k)``: ψᵀWψ of DualDICE's critics, of
    squared length one again. ``weight``, ``weight_squares``: Σ w and Σ w².
    """

    projected: Float[Tensor, "*fold instrument column"]
    temporal: Float[Tensor, "*fold parameter column"]
    squares: Float[Tensor, "*fold column column"]
    critic: Float[Tensor, "*fold critic critic"]
    weight: Float[Tensor, "*fold"]
    weight_squares: Float[Tensor, "*fold"]

    def __sub__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) - column for name, column in vars(other).items()))

    @property
    def parts(self) -> list[Moments]:
        """Of each fold."""
        return [Moments(*columns) for columns in zip(*vars(self).values(), strict=True)]

    @property
    def total(self) -> Moments:
        """Over all folds."""
        return reduce(operator.add, self.parts)

    def folds(self) -> list[tuple[Moments, Moments]]:
        """Of the rows of each fold, and of all rows but those."""
        return [(part, self.total - part) for part in self.parts]


def folds_of_units(system: FeatureSystem, folds: int, seed: int) -> Int[np.ndarray, " row"]:
    """Fold of each row (N,); units (episodes) stay together, and only those with weight are shared out.

    Units of a part of a larger log are shared out by hashes of their numbers: the same way in each part.
    A log with fewer units than folds is cut into stretches of successive rows instead (only the rows at a cut
    are then seen from both sides), into fewer where there are fewer rows. DataError for a single row.
    """
    lengths = np.diff(np.append(system.unit_starts, len(system)))
    if system.units is not None:
        if system.log_units < folds:
            steps = np.arange(len(system)) - np.repeat(system.unit_starts, lengths)
            return np.asarray(steps * folds // np.repeat(lengths, lengths))
        return np.repeat(_shared_out(system.log_units, folds, seed, system.units), lengths)
    weights = system.row_weights.numpy()
    units, weighted = np.flatnonzero(np.add.reduceat(weights, system.unit_starts)), np.flatnonzero(weights)
    if len(units) >= folds:
        number = np.zeros(len(lengths), dtype=np.int64)
        number[units] = make_folds(len(units), folds, torch.Generator().manual_seed(seed)).numpy()
        return np.repeat(number, lengths)
    if len(weighted) < 2:
        raise DataError("a single row has weight; fits on the rest of a log need at least 2")
    fold_of = np.zeros(len(system), dtype=np.int64)
    fold_of[weighted] = np.arange(len(weighted)) * min(folds, len(weighted)) // len(weighted)
    return fold_of


def _shared_out(count: int, folds: int, seed: int, units: Int[np.ndarray, " unit"]) -> np.ndarray:
    """Folds of some of ``count`` units: as many in each, but for many units, where chance sees to that."""
    if count > _MOST_RANKED:
        return (unit_hash(seed, _FOLDS, units) % np.uint64(folds)).astype(np.int64)
    order = np.argsort(unit_hash(seed, _FOLDS, np.arange(count)), kind="stable")
    fold_of = np.empty(count, dtype=np.int64)
    fold_of[order] = np.arange(count) % folds
    return fold_of[units]


def accumulate_moments(system: FeatureSystem, rows: Int[Tensor, " chosen"]) -> Moments:
    """Sums over some rows, in blocks: O(n (m p + p² + k²))."""
    p, critics = system.parameters, dice_critics(system)
    instruments = 2 * system.instruments.frequencies.shape[1]
    sizes = ((instruments, p + 1), (p, p + 1), (p + 1, p + 1), (len(critics), len(critics)))
    projected, temporal, squares, critic = (torch.zeros(size, dtype=torch.float64) for size in sizes)
    for block in rows.split(BLOCK):
        weights = system.row_weights[block][:, None]
        columns = torch.cat((system.difference[block], system.rewards[block, None]), dim=1) * weights
        psi = system.instruments(system.kernel_inputs[block])
        projected.addmm_(psi.mT, columns)
        temporal.addmm_(system.now[block].mT, columns)
        squares.addmm_(columns.mT, columns)
        leading = psi[:, critics]
        critic.addmm_(leading.mT, leading * weights, alpha=instruments / len(critics))
    weight = system.row_weights[rows]
    return Moments(projected, temporal, squares, critic, weight.sum(), weight.square().sum())


def moments_of_part(folds: int, seed: int, system: FeatureSystem) -> Moments:
    """Sums by fold over a part of a log. folds: 1 for none."""
    fold_of = folds_of_units(system, folds, seed) if folds > 1 else np.zeros(len(system), dtype=np.int64)
    count = int(fold_of.max()) + 1 if system.units is None else folds
    members = [torch.as_tensor(np.flatnonzero(fold_of == fold)) for fold in range(count)]
    parts = [vars(accumulate_moments(system, rows)).values() for rows in members]
    return Moments(*(torch.stack(columns) for columns in zip(*parts, strict=True)))


def folded_moments(system: FeatureSystem, folds: int, seed: int) -> Moments:
    """Sums by fold, one pass over the rows; kept as long as the system lives."""
    kept = _KEPT.setdefault(system, {})
    if (folds, seed) not in kept:
        kept[folds, seed] = system.fold(partial(moments_of_part, folds, seed))
    return kept[folds, seed]


def whole_moments(system: FeatureSystem) -> Moments:
    """Sums over all rows, from folds that are known already where there are any."""
    known = list(_KEPT.get(system, {}).values())
    return (known[0] if known else folded_moments(system, 1, 0)).total


def dice_critics(system: FeatureSystem) -> Int[Tensor, " critic"]:
    """The instruments that DualDICE's ζ is linear in: cosines, then sines of the first 150 frequencies."""
    frequencies = system.instruments.frequencies.shape[1]
    first = torch.arange(min(_CRITICS // 2, frequencies))
    return torch.cat((first, first + frequencies))
