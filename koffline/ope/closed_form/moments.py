"""Sums over the rows of a feature system, whole or by fold: all that the closed forms need of the log."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from koffline.data.unit_hash import unit_hash
from koffline.errors import DataError
from koffline.kernels import FourierFeatures
from koffline.ope.features import FeatureSystem
from koffline.solvers.selection import make_folds

BLOCK = 8192
DEFAULT_CRITICS = 300
_FOLDS = 0x666F6C64  # a stream of hashes of its own
_MOST_RANKED = 1_000_000
# Several estimators read one system: (folds, seed, critics) -> sums.
_KEPT: WeakKeyDictionary[FeatureSystem, dict[tuple[int, int, int], FoldedMoments]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums, not means, over some rows with weights W; ψ are m instruments, Z = φ − discount · φ'.

    ``projected (m, p + 1)``: ψᵀW[Z, r]. ``temporal (p, p + 1)``: φᵀW[Z, r]. ``squares (p + 1, p + 1)``:
    [Z, r]ᵀW²[Z, r]. ``critic (k, k)``: ψᵀWψ of the first k/2 frequencies.
    """

    projected: Float[Tensor, "instrument column"]
    temporal: Float[Tensor, "parameter column"]
    squares: Float[Tensor, "column column"]
    critic: Float[Tensor, "critic critic"]
    weight: float  # Σ w
    weight_squares: float  # Σ w²

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) - getattr(other, name) for name in _FIELDS))


_FIELDS = tuple(field.name for field in fields(Moments))


@dataclass(frozen=True, eq=False)
class FoldedMoments:
    """The same sums by fold; no episode lies in two."""

    parts: tuple[Moments, ...]

    def __add__(self, other: FoldedMoments) -> FoldedMoments:
        return FoldedMoments(tuple(one + two for one, two in zip(self.parts, other.parts, strict=True)))

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
    """Fold of each row (N,); units (episodes) stay together, and only those with weight are shared out.

    Units of a larger log are shared out by hashes of their numbers: the same way in each of its parts. Where
    it has fewer than folds, each is cut into stretches. A log
    with fewer such units than folds is cut into stretches of successive rows instead (only the rows at
    a cut are then seen from both sides), into fewer where there are fewer rows. DataError for a single row.
    """
    if system.units is not None:
        lengths = np.diff(np.append(system.unit_starts, len(system)))
        if system.log_units < folds:
            steps = np.arange(len(system)) - np.repeat(system.unit_starts, lengths)
            return np.asarray(steps * folds // np.repeat(lengths, lengths))
        return np.repeat(_shared_out(system.log_units, folds, seed, system.units), lengths)
    weighted = np.flatnonzero(system.row_weights.numpy())
    lengths = np.diff(np.append(system.unit_starts, len(system)))
    units = np.flatnonzero(np.add.reduceat(system.row_weights.numpy(), system.unit_starts))
    if len(units) < folds:
        if len(weighted) < 2:
            raise DataError("a single row has weight; fits on the rest of a log need at least 2")
        fold_of = np.zeros(len(system), dtype=np.int64)
        fold_of[weighted] = np.arange(len(weighted)) * min(folds, len(weighted)) // len(weighted)
        return fold_of
    number = np.zeros(len(lengths), dtype=np.int64)
    number[units] = make_folds(len(units), folds, torch.Generator().manual_seed(seed)).numpy()
    return np.repeat(number, lengths)


def _shared_out(
    count: int, folds: int, seed: int, units: Int[np.ndarray, " unit"]
) -> Int[np.ndarray, " unit"]:
    """Folds of some of ``count`` units: as many in each, but for many units, where chance sees to that."""
    if count > _MOST_RANKED:
        return (unit_hash(seed, _FOLDS, units) % np.uint64(folds)).astype(np.int64)
    order = np.argsort(unit_hash(seed, _FOLDS, np.arange(count)), kind="stable")
    fold_of = np.empty(count, dtype=np.int64)
    fold_of[order] = np.arange(count) % folds
    return fold_of[units]


@dataclass(frozen=True, eq=False)
class ProductSums:
    """The arrays of `Moments` for R feature maps, float64, that blocks of rows are added to in place.

    ``projected (m, R, p + 1)``, ``temporal (R, p, p + 1)``, ``squares (R, p + 1, p + 1)``, ``critic (k, k)``.
    """

    projected: Float[Tensor, "instrument replica column"]
    temporal: Float[Tensor, "replica parameter column"]
    squares: Float[Tensor, "replica column column"]
    critic: Float[Tensor, "critic critic"]

    @classmethod
    def zeros(cls, replicas: int, instruments: int, parameters: int, critics: int) -> ProductSums:
        """Of no rows."""
        p, new = parameters + 1, partial(torch.zeros, dtype=torch.float64)
        return cls(
            new(instruments, replicas, p),
            new(replicas, parameters, p),
            new(replicas, p, p),
            new(critics, critics),
        )

    def add(
        self,
        psi: Float[Tensor, "row instrument"],
        now: Float[Tensor, "replica row parameter"],
        weighted: Float[Tensor, "row replica column"],
        weights: Float[Tensor, " row"],
    ) -> None:
        """Rows with ψ, φ and ``weighted`` = w [Z, r]. Products are made in the precision of what is given."""
        _add_product(self.projected.flatten(1), psi, weighted.flatten(1))
        for replica, features in enumerate(now):
            _add_product(self.temporal[replica], features, weighted[:, replica])
            _add_product(self.squares[replica], weighted[:, replica], weighted[:, replica])
        critics, instruments = len(self.critic), psi.shape[1]
        if critics:
            part = psi[:, leading_instruments(instruments, critics)]
            _add_product(self.critic, part, part * weights.to(part)[:, None], instruments / critics)


def accumulate_moments(system: FeatureSystem, rows: Int[Tensor, " chosen"], critics: int) -> Moments:
    """Sums over some rows, in blocks: O(n (m p + p² + k²)). critics: k, even."""
    instruments = 2 * system.instruments.frequencies.shape[1]
    sums = ProductSums.zeros(1, instruments, system.parameters, critics)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        weights = system.row_weights[block]
        weighted = torch.cat((system.difference[block], system.rewards[block, None]), dim=1)
        weighted *= weights[:, None]
        psi = system.instruments(system.kernel_inputs[block])
        sums.add(psi, system.now[block][None], weighted[:, None], weights)
    weight = system.row_weights[rows]
    return Moments(
        sums.projected[:, 0],
        sums.temporal[0],
        sums.squares[0],
        sums.critic,
        float(weight.sum()),
        float(weight.square().sum()),
    )


def _add_product(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """total += factor · leftᵀ right."""
    if left.dtype == total.dtype:
        total.addmm_(left.mT, right, alpha=factor)
    else:
        total.add_(left.mT @ right, alpha=factor)


@dataclass(frozen=True, eq=False)
class MomentsOfPart:
    """Sums by fold over a part of a log."""

    folds: int
    seed: int
    critics: int

    def __call__(self, system: FeatureSystem) -> FoldedMoments:
        """Over its rows."""
        rows = np.zeros(len(system), dtype=np.int64)
        fold_of = folds_of_units(system, self.folds, self.seed) if self.folds > 1 else rows
        count = int(fold_of.max()) + 1 if system.units is None else self.folds
        members = [torch.as_tensor(np.flatnonzero(fold_of == fold)) for fold in range(count)]
        return FoldedMoments(tuple(accumulate_moments(system, rows, self.critics) for rows in members))


def folded_moments(system: FeatureSystem, folds: int, seed: int, critics: int | None = None) -> FoldedMoments:
    """Sums by fold, one pass over the rows; kept as long as the system lives. folds: 1 for none."""
    critics = default_critics(system) if critics is None else critics
    kept = _KEPT.setdefault(system, {})
    if (folds, seed, critics) not in kept:
        kept[folds, seed, critics] = system.fold(MomentsOfPart(folds, seed, critics))
    return kept[folds, seed, critics]


def whole_moments(system: FeatureSystem, critics: int | None = None) -> Moments:
    """Sums over all rows, from folds that are known already where there are any."""
    critics = default_critics(system) if critics is None else critics
    for (_, _, some_critics), found in _KEPT.get(system, {}).items():
        if some_critics == critics:
            return found.total
    return folded_moments(system, 1, 0, critics).total


def default_critics(system: FeatureSystem) -> int:
    """How many instruments (even) DualDICE's ζ is linear in."""
    return min(DEFAULT_CRITICS, 2 * system.instruments.frequencies.shape[1])


def leading_instruments(instruments: int, critics: int) -> Int[Tensor, " critic"]:
    """Columns of the first critics/2 frequencies: their cosines, then their sines."""
    first = torch.arange(critics // 2)
    return torch.cat((first, first + instruments // 2))


def leading_features(features: FourierFeatures, critics: int) -> FourierFeatures:
    """The feature map of the first critics/2 frequencies, again of squared length one."""
    return FourierFeatures(features.frequencies[:, : critics // 2])
