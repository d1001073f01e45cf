"""Sums over the rows of a feature system, whole or by fold: all that the closed forms need of the log."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.features import FeatureSystem
from koffline.solvers.held_out import make_folds

BLOCK = 8192
# Several estimators read one system: (folds, seed, critics) -> sums.
_KEPT: WeakKeyDictionary[FeatureSystem, dict[tuple[int, int, int], FoldedMoments]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums, not means, over some rows with weights W; ψ are m instruments, Z = φ − discount · φ'.

    ``projected (m, p + 1)``: ψᵀW[Z, r]. ``temporal (p, p + 1)``: φᵀW[Z, r]. ``squares (p + 1, p + 1)``:
    [Z, r]ᵀW²[Z, r]. ``critic (k, k)``: ψᵀWψ of the first k/2 frequencies, where it was asked for.
    """

    projected: Float[Tensor, "instrument column"]
    temporal: Float[Tensor, "parameter column"]
    squares: Float[Tensor, "column column"]
    critic: Float[Tensor, "critic critic"] | None
    weight: float  # Σ w
    weight_squares: float  # Σ w²

    def __sub__(self, other: Moments) -> Moments:
        critic = None if self.critic is None or other.critic is None else self.critic - other.critic
        return Moments(
            self.projected - other.projected,
            self.temporal - other.temporal,
            self.squares - other.squares,
            critic,
            self.weight - other.weight,
            self.weight_squares - other.weight_squares,
        )

    def __add__(self, other: Moments) -> Moments:
        critic = None if self.critic is None or other.critic is None else self.critic + other.critic
        return Moments(
            self.projected + other.projected,
            self.temporal + other.temporal,
            self.squares + other.squares,
            critic,
            self.weight + other.weight,
            self.weight_squares + other.weight_squares,
        )


@dataclass(frozen=True, eq=False)
class FoldedMoments:
    """The same sums by fold; ``fold_of (N,)`` never divides an episode."""

    parts: tuple[Moments, ...]
    fold_of: Int[np.ndarray, " row"]

    @property
    def total(self) -> Moments:
        """Over all rows."""
        whole = self.parts[0]
        for part in self.parts[1:]:
            whole = whole + part
        return whole

    def without_each(self) -> list[Moments]:
        """Over all rows but those of one fold, for each fold."""
        whole = self.total
        return [whole - part for part in self.parts]


def folds_of_units(system: FeatureSystem, folds: int, seed: int) -> Int[np.ndarray, " row"]:
    """Fold of each row (N,); units (episodes) stay together.

    A log with fewer units than folds is cut into stretches of successive rows instead: only the rows at a
    cut are then seen from both sides. ConfigError when there are fewer rows than folds.
    """
    units, rows = len(system.unit_starts), len(system)
    if units < folds <= rows:
        return np.arange(rows) * folds // rows
    number = make_folds(units, folds, torch.Generator().manual_seed(seed)).numpy()
    return np.repeat(number, np.diff(np.append(system.unit_starts, rows)))


def accumulate_moments(system: FeatureSystem, rows: Int[Tensor, " chosen"], critics: int = 0) -> Moments:
    """Sums over some rows, in blocks: O(n (m p + p² + k²)). critics: k, even; 0: no critic matrix."""
    p, m = system.parameters + 1, 2 * system.instruments.frequencies.shape[1]
    new = system.rewards.new_zeros
    projected, temporal, squares = new(m, p), new(p - 1, p), new(p, p)
    critic, chosen = new(critics, critics), leading_instruments(m, critics)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        weights = system.row_weights[block, None]
        columns = torch.cat((system.difference[block], system.rewards[block, None]), dim=1) * weights
        psi = system.instruments(system.kernel_inputs[block])
        projected.addmm_(psi.mT, columns)
        temporal.addmm_(system.now[block].mT, columns)
        squares.addmm_(columns.mT, columns)
        if critics:
            part = psi[:, chosen]
            critic.addmm_(part.mT, part * weights, alpha=m / critics)
    weight = system.row_weights[rows]
    return Moments(
        projected,
        temporal,
        squares,
        critic if critics else None,
        float(weight.sum()),
        float(weight.square().sum()),
    )


def folded_moments(system: FeatureSystem, folds: int, seed: int, critics: int = 0) -> FoldedMoments:
    """Sums by fold, one pass over the rows; kept as long as the system lives. folds: 1 for none."""
    kept = _KEPT.setdefault(system, {})
    for (some_folds, some_seed, some_critics), found in kept.items():
        if (some_folds, some_seed) == (folds, seed) and critics in (0, some_critics):
            return found
    fold_of = folds_of_units(system, folds, seed) if folds > 1 else np.zeros(len(system), dtype=np.int64)
    members = [np.flatnonzero(fold_of == fold) for fold in range(int(fold_of.max()) + 1)]
    parts = tuple(accumulate_moments(system, torch.as_tensor(rows), critics) for rows in members)
    kept[(folds, seed, critics)] = FoldedMoments(parts, fold_of)
    return kept[(folds, seed, critics)]


def whole_moments(system: FeatureSystem, critics: int = 0) -> Moments:
    """Sums over all rows, from folds that are known already where there are any."""
    for (_, _, some_critics), found in _KEPT.get(system, {}).items():
        if critics in (0, some_critics):
            return found.total
    return folded_moments(system, 1, 0, critics).total


def leading_instruments(instruments: int, critics: int) -> Int[Tensor, " critic"]:
    """Columns of the first critics/2 frequencies: their cosines, then their sines."""
    first = torch.arange(critics // 2)
    return torch.cat((first, first + instruments // 2))


def leading_features(features: FourierFeatures, critics: int) -> FourierFeatures:
    """The feature map of the first critics/2 frequencies, again of squared length one."""
    return FourierFeatures(features.frequencies[:, : critics // 2])
