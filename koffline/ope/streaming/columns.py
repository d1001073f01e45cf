"""A block of rows as the columns that sums are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.data.row_block import RowBlock
from koffline.data.unit_hash import unit_hash
from koffline.ope.streaming.frame import Frame
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.solvers.linear import combine_features
from koffline.stacked_products import Workspace

# Draws belong to stretches of this many rows of a shard, so that they do not depend on the size of blocks.
STRETCH = 1024
_NEXT, _STARTS = 31, 32
_GROUPS = 0x67726F75  # samples are drawn by hashes of their own


@dataclass(frozen=True, eq=False)
class Columns:
    """B rows, those of a group together; group g is ``bounds[g]`` … ``bounds[g + 1]``.

    ``psi (B, m)``, ``now (R, B, p)``: φ(s, a), ``weighted (B, R, p + 1)``: w [Z, r] with rewards in units of
    the problem, ``weights (B,)``. ``starts (R, S, p)`` of the rows that begin a unit, with ``start_weights
    (S,)`` and ``start_groups (S,)``, both NumPy.
    """

    psi: Float[Tensor, "row instrument"]
    now: Float[Tensor, "replica row parameter"]
    weighted: Float[Tensor, "row replica column"]
    weights: Float[Tensor, " row"]
    bounds: np.ndarray
    starts: Float[Tensor, "replica start parameter"] | None
    start_weights: np.ndarray
    start_groups: np.ndarray

    def __len__(self) -> int:
        return len(self.weights)


@torch.no_grad()
def make_columns(frame: Frame, block: RowBlock, workspace: Workspace) -> Columns:
    """The columns of a block, which begins at a multiple of ``STRETCH`` rows of its shard.

    They last until the next call with the same workspace.
    """
    assert block.start % STRETCH == 0
    groups = groups_of(frame, block.shard, block.units)
    order = np.argsort(groups, kind="stable")
    weights = row_weights(frame, block)
    if isinstance(frame.policy, DiscretePolicy):
        columns = _discrete(frame, frame.policy, block, order)
    else:
        columns = _continuous(frame, frame.policy, block, order)
    inputs, kernel_inputs, readout, next_inputs, next_readout = columns
    now = combine_features(frame.features(inputs, frame.dtype), 1, readout, constant=True)
    later = combine_features(
        frame.features(next_inputs.flatten(0, 1), frame.dtype),
        next_inputs.shape[1],
        next_readout,
        constant=True,
    )
    discounts = frame.gamma * (1.0 - block.terminated[order])
    rewards = np.asarray(block.rewards, dtype=np.float64)[order] / frame.units.reward_scale
    ordered_weights = torch.from_numpy(weights[order])
    weighted = workspace.take("weighted", (now.shape[1], len(now), now.shape[2] + 1), now)
    later.mul_(torch.from_numpy(discounts).to(later)[:, None])
    torch.sub(now.transpose(0, 1), later.transpose(0, 1), out=weighted[..., :-1])
    weighted[..., -1] = torch.from_numpy(rewards).to(weighted)[:, None]
    if block.weights is not None:
        weighted.mul_(ordered_weights.to(weighted)[:, None, None])
    first = _first_rows(frame, block)
    return Columns(
        psi=frame.psi(kernel_inputs, workspace),
        now=now,
        weighted=weighted,
        weights=ordered_weights,
        bounds=np.searchsorted(groups[order], np.arange(frame.groups + 1)),
        starts=_starts(frame, block, first) if len(first) else None,
        start_weights=weights[first],
        start_groups=groups[first],
    )


def groups_of(frame: Frame, shard: int, units: np.ndarray) -> np.ndarray:
    """(B,) group of each unit of a shard."""
    return (unit_hash(frame.seed ^ _GROUPS, shard, units) % np.uint64(frame.groups)).astype(np.int64)


def row_weights(frame: Frame, block: RowBlock) -> np.ndarray:
    """(B,) the log's own weights in units of the sample's mean, or ones."""
    if block.weights is None:
        return np.ones(len(block))
    return np.asarray(block.weights, dtype=np.float64) / frame.weight_scale


_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


def _discrete(frame: Frame, policy: DiscretePolicy, block: RowBlock, order: np.ndarray) -> _Parts:
    """Inputs (B, d), kernel inputs, readout (B, n), next inputs (B, 1, d) and next readout (B, n)."""
    inputs = torch.from_numpy(frame.units.standardise(block.observations[order]))
    readout = torch.zeros(len(order), policy.n, dtype=frame.dtype)
    readout.scatter_(1, torch.from_numpy(np.asarray(block.actions)[order])[:, None], 1.0)
    following = block.next_observations[order]
    next_readout = torch.from_numpy(policy.probabilities(following)).to(frame.dtype)
    next_inputs = torch.from_numpy(frame.units.standardise(following))[:, None]
    return inputs, torch.cat([inputs.to(frame.dtype), readout], dim=1), readout, next_inputs, next_readout


def _continuous(frame: Frame, policy: ContinuousPolicy, block: RowBlock, order: np.ndarray) -> _Parts:
    """Inputs (B, d + k), twice, and next inputs (B, draws, d + k); no readouts."""
    inputs = torch.from_numpy(
        frame.units.standardise(block.observations[order], np.asarray(block.actions)[order])
    )
    drawn = _draw(frame, policy, block, np.arange(len(block)), frame.next_draws, _NEXT)[:, order]
    next_inputs = _beside_draws(frame, block.next_observations[order], drawn)
    return inputs, inputs, None, next_inputs, None


def _beside_draws(frame: Frame, observations: np.ndarray, drawn: np.ndarray) -> Tensor:
    """(B, draws, d + k) of observations (B, …) and actions (draws, B, k)."""
    return torch.from_numpy(
        np.stack([frame.units.standardise(observations, actions) for actions in drawn], axis=1)
    )


def _draw(
    frame: Frame, policy: ContinuousPolicy, block: RowBlock, rows: np.ndarray, draws: int, purpose: int
) -> np.ndarray:
    """(draws, M, k) actions of the policy at M rows of a block; rows of a stretch share a generator."""
    observations = block.next_observations if purpose == _NEXT else block.observations
    if policy.deterministic:
        return policy.mean(observations[rows])[None]
    drawn = np.empty((draws, len(rows), policy.k))
    numbers = (block.start + rows) // STRETCH
    edges = np.flatnonzero(np.diff(numbers, prepend=-1))
    for first, last in zip(edges, np.append(edges[1:], len(rows)), strict=True):
        generator = np.random.default_rng([frame.seed, purpose, block.shard, int(numbers[first])])
        for draw in range(draws):
            drawn[draw, first:last] = policy.sample(observations[rows[first:last]], generator)
    return drawn


def _first_rows(frame: Frame, block: RowBlock) -> np.ndarray:
    """Rows whose observation is a start state: first steps, or all rows of a log without episodes."""
    if not frame.own_starts:
        return np.zeros(0, dtype=np.int64)
    return np.arange(len(block)) if block.steps is None else np.flatnonzero(block.steps == 0)


def _starts(frame: Frame, block: RowBlock, rows: np.ndarray) -> Float[Tensor, "replica start parameter"]:
    """φ (R, S, p) of start states under the policy, stretch by stretch: many draws need little memory."""
    parts = []
    for some in np.split(rows, np.flatnonzero(np.diff((block.start + rows) // STRETCH)) + 1):
        observations = block.observations[some]
        readout = None
        if isinstance(frame.policy, DiscretePolicy):
            readout = torch.from_numpy(frame.policy.probabilities(observations)).to(frame.dtype)
            inputs = torch.from_numpy(frame.units.standardise(observations))[:, None]
        else:
            drawn = _draw(frame, frame.policy, block, some, frame.start_draws, _STARTS)
            inputs = _beside_draws(frame, observations, drawn)
        features = frame.features(inputs.flatten(0, 1), frame.dtype)
        parts.append(combine_features(features, inputs.shape[1], readout, constant=True))
    return torch.cat(parts, dim=1)
