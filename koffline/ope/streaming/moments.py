"""Sums over rows by group of units: all that a pass keeps of the log, whatever its length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float

from koffline.ope.closed_form.moments import Moments, ProductSums
from koffline.ope.last_layer import LinearSystems
from koffline.ope.streaming.columns import Columns
from koffline.ope.streaming.frame import Frame


@dataclass(frozen=True, eq=False)
class StreamingMoments:
    """Sums by group (G) and replica (R), float64; two of them add up to that of both their rows.

    ``projected (G, m, R, p + 1)``, ``temporal (G, R, p, p + 1)``, ``squares (G, R, p + 1, p + 1)``, ``critic
    (G, k, k)``: as in `Moments`, rewards in units of the problem. ``starts (G, R, p)``: Σ w φ(s0).
    ``start_weight``, ``weight``, ``weight_squares``, ``rows`` (G,).
    """

    projected: np.ndarray
    temporal: np.ndarray
    squares: np.ndarray
    critic: np.ndarray
    starts: np.ndarray
    start_weight: np.ndarray
    weight: np.ndarray
    weight_squares: np.ndarray
    rows: np.ndarray

    @classmethod
    def zeros(cls, frame: Frame) -> StreamingMoments:
        """Of no rows."""
        groups, stack = frame.groups, (frame.groups, frame.features.replicas)
        m, p, k = frame.instrument_count, frame.parameters, frame.critics
        return cls(
            projected=np.zeros((groups, m, frame.features.replicas, p + 1)),
            temporal=np.zeros((*stack, p, p + 1)),
            squares=np.zeros((*stack, p + 1, p + 1)),
            critic=np.zeros((groups, k, k)),
            starts=np.zeros((*stack, p)),
            start_weight=np.zeros(groups),
            weight=np.zeros(groups),
            weight_squares=np.zeros(groups),
            rows=np.zeros(groups),
        )

    @property
    def groups(self) -> int:
        """G."""
        return len(self.weight)

    @property
    def replicas(self) -> int:
        """R."""
        return self.projected.shape[2]

    def add(self, columns: Columns) -> None:
        """Count the rows of a block."""
        bounds = columns.bounds.tolist()
        for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin == end:
                continue
            weights = columns.weights[begin:end]
            self._at(group).add(
                columns.psi[begin:end], columns.now[:, begin:end], columns.weighted[begin:end], weights
            )
            self.weight[group] += float(weights.sum())
            self.weight_squares[group] += float(weights.square().sum())
            self.rows[group] += end - begin
        if columns.starts is not None:
            self._add_starts(columns.starts.double().numpy(), columns.start_weights, columns.start_groups)

    def _add_starts(self, starts: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> None:
        members = np.zeros((self.groups, len(weights)))
        members[groups, np.arange(len(weights))] = weights
        self.starts[...] += (members @ starts).transpose(1, 0, 2)  # (G, S) @ (R, S, p)
        self.start_weight[...] += members.sum(axis=1)

    def _at(self, group: int) -> ProductSums:
        """Views of one group."""
        parts = (self.projected, self.temporal, self.squares, self.critic)
        return ProductSums(*(torch.from_numpy(part[group]) for part in parts))

    def add_sums(self, other: StreamingMoments) -> None:
        """Count the rows of another record, in place."""
        for name in _FIELDS:
            getattr(self, name)[...] += getattr(other, name)

    @property
    def shares(self) -> Float[np.ndarray, " group"]:
        """Part of the log's weight in each group."""
        return np.asarray(self.weight / self.weight.sum())

    def total(self) -> StreamingMoments:
        """One group of all rows."""
        return StreamingMoments(*(getattr(self, name).sum(axis=0, keepdims=True) for name in _FIELDS))

    def part(self, groups: Sequence[int]) -> StreamingMoments:
        """One group of the rows of some."""
        chosen = list(groups)
        return StreamingMoments(*(getattr(self, name)[chosen].sum(axis=0, keepdims=True) for name in _FIELDS))

    def without(self, part: StreamingMoments) -> StreamingMoments:
        """The rest of a total."""
        return StreamingMoments(*(getattr(self, name) - getattr(part, name) for name in _FIELDS))

    def systems(self) -> LinearSystems:
        """Means over the rows of all groups, by replica."""
        weight = self.weight.sum()
        projected = torch.from_numpy(np.ascontiguousarray(self.projected.sum(axis=0).transpose(1, 0, 2)))
        projected, temporal = projected / weight, torch.from_numpy(self.temporal.sum(axis=0) / weight)
        return LinearSystems(projected[..., :-1], projected[..., -1], temporal[..., :-1], temporal[..., -1])

    def start_mean(self) -> np.ndarray:
        """(R, p) mean of φ(s0) over the start states of all groups."""
        return np.asarray(self.starts.sum(axis=0) / self.start_weight.sum())

    def moments(self, replica: int, reward_scale: float = 1.0) -> Moments:
        """All groups of one replica, rewards multiplied by a scale, as closed forms read them."""
        parts = [
            self.projected[:, :, replica].sum(axis=0),
            self.temporal[:, replica].sum(axis=0),
            self.squares[:, replica].sum(axis=0),
        ]
        for part in parts:
            part[:, -1] *= reward_scale
        parts[2][-1] *= reward_scale
        projected, temporal, squares = (torch.from_numpy(part) for part in parts)
        return Moments(
            projected,
            temporal,
            squares,
            torch.from_numpy(self.critic.sum(axis=0)),
            float(self.weight.sum()),
            float(self.weight_squares.sum()),
        )


_FIELDS = tuple(field.name for field in fields(StreamingMoments))
