"""Passes of the networks over rows, each row by networks that have not seen it; doubly
robust sums.

With ω = d^π/μ, d^π = Σ_t γ^t P^π(x_t = ·) unnormalised and μ the (weighted)
distribution of logged rows, E_μ[ω (f(x) − discount · E f(x'))] = E f(x0) for every f.
Hence

    J = E q(x0) + n⁻¹ Σ w ω (r + discount · E q(x') − q(x))

has the bias E_μ[(ω̂ − ω)(B^π q − q)]: none when either q = Q^π or ω̂ is the true ratio.
ω has the scale of the sum of visits, 1/(1 − γ) per row where nothing ends, so no factor
1 − γ appears. Terminal rows have discount 0; rows cut by a time limit are like any
other row, since their next state is known. (Kallus & Uehara 2020, Double Reinforcement
Learning)

All this holds only if one and the same q(s, a) stands in all three places. So none is
clipped to possible
returns: a row's value is q itself, the others are expectations of q over actions, all
are means over networks, and a bound of a mean is not the mean of a bounded q. Where
rewards are rare, clipped parts lost most of the estimate. A bound of every network's
own q(s, a) would keep the identity, but turn the scatter of the networks, which their
mean removes, into a bias of q, and ω̂ corrects only a part of that
(scripts/bench/doubly_robust.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Table
from koffline.data.units import cluster_sums
from koffline.errors import DataError
from koffline.jobs.cores import PRODUCT_SECONDS, each_on_cores
from koffline.kernels import FourierFeatures
from koffline.ope.log.coverage import doubts_of_weights
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import Columns, Sums
from koffline.ope.networks.fitted_values import FittedValues
from koffline.ope.networks.resampling import (
    Resampling,
    make_table,
    read_rows,
    row_blocks,
    start_values,
)
from koffline.replicas import StackedMLP

_SAMPLE_ROWS = 20_000
_NOT_COVERED = "the policy takes no logged action; use a log that covers the policy"


@dataclass(frozen=True, eq=False)
class PassOverRows(Sums):
    """Columns and sums of one pass of the networks over rows.

    ``columns`` by row: ``now`` and ``later``, mean values by the resampled networks
    that did not see its episode (by all of them if each did: 0.63^12 = 0.4 % of rows
    with 12 networks); ``weights``, ω by the same networks; ``unseen``, whether there
    were any; ``residual`` of the full networks' mean; ``weight``. By start state:
    ``starts``, by the networks of its episode; by all if it was given, each with its
    share in the rows. ``projected (R', m)``: ψᵀδ of the rows of positive weight that a
    resampled network did not draw; ``squares (R',)``: their Σ δ²; ``counts (R',)``:
    their number.
    """

    columns: Columns
    projected: Tensor
    squares: Tensor
    counts: Tensor

    @property
    def values(self) -> RowValues:
        """Out-of-bag values and weights of the rows."""
        columns = self.columns.joined()
        return RowValues(
            now=columns["now"],
            later=columns["later"],
            starts=columns["starts"],
            unseen=float(columns["unseen"].mean()),
            weights=columns["weights"],
        )

    def sample(self, reward_scale: float) -> Float[np.ndarray, " row"]:
        """Residuals of the full networks' mean on (about 20,000) rows, in units of the
        reward.
        """
        columns = self.columns.joined()
        residual = columns["residual"][columns["weight"] > 0.0] * reward_scale
        return np.asarray(residual[:: max(1, len(residual) // _SAMPLE_ROWS)])

    def diagnostics(self, reward_scale: float) -> dict[str, float]:
        """Residuals and held-out losses in units of the reward; NaN if no replica left
        two rows out.

        ``held_out_kernel_loss`` is the U-statistic on the episodes that a resampled
        replica did not draw, averaged over those replicas: unbiased for the kernel loss
        of its network. ``held_out_kernel_ratio`` divides the V-statistic by its
        expectation under a perfect value function: 1 means nothing left to explain.
        """
        columns = self.columns.joined()
        enough = self.counts >= 2
        residual = columns["residual"] * reward_scale
        share = columns["weight"] / columns["weight"].sum()
        norms = self.projected.square().sum(dim=1)[enough]
        squares = self.squares[enough]
        counts = self.counts[enough]
        # k(x, x) = 1
        loss = float(((norms - squares) / (counts * (counts - 1))).mean())
        return {
            "held_out_kernel_loss": loss * reward_scale**2,
            "held_out_kernel_ratio": float((norms / squares.clamp_min(1e-300)).mean()),
            "residual_rms": float(np.sqrt(share @ residual**2)),
            "residual_mean": float(share @ residual),
        }


def reader_of(
    fitted: FittedValues, head: str
) -> Callable[[EvaluationProblem], PassOverRows]:
    """`pass_over_rows` with the replicas of a head that did not diverge."""
    kept = np.flatnonzero(fitted.alive).tolist()
    network = fitted.network_of(head).select(kept)
    resampling = fitted.resampling.select(kept)
    full = resampling.full
    duals = fitted.duals[kept][full:]
    resampled = replace(resampling, full=0)
    return partial(pass_over_rows, network, full, resampled, fitted.instruments, duals)


def pass_over_rows(
    network: StackedMLP,
    full: int,
    resampling: Resampling,
    instruments: FourierFeatures,
    duals: Float[Tensor, "resampled instrument"],
    problem: EvaluationProblem,
) -> PassOverRows:
    """Read the rows of a part of a log with ``full`` full-log networks and R' resampled
    ones.

    duals: coefficients α of the resampled networks' row weights ω = ψᵀα.
    """
    # In the networks' own precision, as start states are read: the same q to the last
    # digit.
    table = make_table(problem, str(network.flat.device), network.flat.dtype)
    weights = torch.as_tensor(problem.row_weights)
    left_out = torch.as_tensor(resampling.row_counts(problem) == 0)  # (R', N)
    held_out = (left_out & (weights > 0.0)).double()
    # of networks; all where each saw a row
    share = torch.where(left_out.any(dim=0), left_out.double(), 1.0)
    share = share / share.sum(dim=0)
    reader = _RowReader(
        network=network,
        full=full,
        table=table,
        held_out=held_out,
        share=share,
        instruments=instruments,
        duals=duals,
    )
    products = 2.0 * (1 + table.draws) * network.flat.numel() * len(table)
    passed = each_on_cores(
        reader.read,
        items=list(row_blocks(network, len(table), table.draws)),
        seconds=products * PRODUCT_SECONDS,
    )
    parts: list[Tensor] = []
    projected = torch.zeros_like(duals)
    squares = duals.new_zeros(len(duals))
    # added in the order of the rows, so that the sums do not depend on the cores
    for block in passed:
        parts.append(block.columns)
        projected = projected + block.projected
        squares = squares + block.squares
    now, later, omega, residual = torch.cat(parts, dim=1)
    # (R', E), in units of the return
    starts = start_values(network, problem).double().cpu()[full:]
    if problem.fixed_starts:  # of no row: networks count as much as in the mean row
        start_mean = (share @ weights / weights.sum()) @ starts
    else:
        start_mean = (starts * share[:, problem.episode_starts.tolist()]).sum(dim=0)
    columns = {
        "now": now * problem.reward_scale,
        "later": later * problem.reward_scale,
        "starts": start_mean,
        "unseen": left_out.any(dim=0),
        "weights": omega,
        "residual": residual,
        "weight": weights,
    }
    arrays = {name: column.numpy() for name, column in columns.items()}
    return PassOverRows(
        columns=Columns((arrays,)),
        projected=projected.cpu(),
        squares=squares.cpu(),
        counts=held_out.sum(dim=1),
    )


@dataclass(frozen=True, eq=False)
class _BlockOfRows:
    """Of a block of rows ``columns`` (4, B): now, later, ω and residual; ``projected``
    and ``squares`` as in `PassOverRows`.
    """

    columns: Float[Tensor, "column row"]
    projected: Float[Tensor, "resampled instrument"]
    squares: Float[Tensor, " resampled"]


@dataclass(frozen=True, eq=False)
class _RowReader:
    """Reads blocks of a table's rows by ``full`` full-log networks and R' resampled
    ones.

    ``held_out``: one where a resampled network did not draw the row, which has weight.
    ``share``: of each resampled network in the row's values. ``instruments``,
    ``duals``: as in `pass_over_rows`.
    """

    network: StackedMLP
    full: int
    table: Table
    held_out: Float[Tensor, "resampled row"]
    share: Float[Tensor, "resampled row"]
    instruments: FourierFeatures
    duals: Float[Tensor, "resampled instrument"]

    def read(self, rows: slice) -> _BlockOfRows:
        """Values, ratios and residuals of a block."""
        now, later, residual = read_rows(self.network, self.table, rows)
        unseen = residual[self.full :] * self.held_out[:, rows].to(now)
        psi = self.instruments(self.table.compared[rows].double())  # (B, m)
        share = self.share[:, rows].to(now)
        columns = [
            (now[self.full :] * share).sum(dim=0),
            (later[self.full :] * share).sum(dim=0),
            ((psi @ self.duals.mT) * share.mT).sum(dim=1),
            residual[: self.full].mean(dim=0),
        ]
        return _BlockOfRows(
            columns=torch.stack(columns).cpu(),
            projected=unseen @ psi,
            squares=unseen.square().sum(dim=1),
        )


@dataclass(frozen=True, eq=False)
class RowSums(Sums):
    """Sums over rows with values q and weights ω, where u = w ω.

    ``units``: by unit, Σ w as ``weight``, Σ u δ as ``term``, Σ u as ``used``; for the
    log's own start states also w as ``start_weight`` and w q(x0) as ``start``.
    ``start_value``, ``start_weight``: Σ w q(x0) and Σ w of start states. ``unseen``:
    rows valued by networks that had not seen their episode. ``size``: Σ|u|;
    ``negative``: that over rows with u < 0. ``mass``: Σ u (1 − discount).
    """

    units: Columns
    start_value: float
    start_weight: float
    rows: int
    unseen: float
    size: float
    negative: float
    mass: float

    @classmethod
    def of(cls, problem: EvaluationProblem, values: RowValues) -> RowSums:
        """Sums over a problem's rows; values in units of the return, and including
        ω.
        """
        assert values.weights is not None
        weights = problem.row_weights
        starts = problem.start_weights
        discounts = problem.discounts
        used = weights * values.weights
        rewards = problem.rewards * problem.reward_scale
        term = used * (rewards + discounts * values.later - values.now)
        by_row = {"weight": weights, "term": term, "used": used}
        units = {
            name: np.add.reduceat(rows, problem.episode_starts)
            for name, rows in by_row.items()
        }
        if not problem.fixed_starts:
            units |= {"start_weight": starts, "start": starts * values.starts}
        return cls(
            Columns(({**units, "cluster": problem.clusters},)),
            start_value=float(starts @ values.starts),
            start_weight=float(starts.sum()),
            rows=len(weights),
            unseen=values.unseen * len(weights),
            size=float(np.abs(used).sum()),
            negative=float(np.abs(used[used < 0.0]).sum()),
            mass=float(used @ (1.0 - discounts)),
        )

    @cached_property
    def by_unit(self) -> dict[str, np.ndarray]:
        """The arrays of ``units``, (U,) each; summed over clusters if the log has
        any.
        """
        units = self.units.joined()
        clusters = units.pop("cluster")
        return {name: cluster_sums(clusters, values) for name, values in units.items()}

    @cached_property
    def weight(self) -> float:
        """Total Σ w."""
        return float(self.by_unit["weight"].sum())

    @property
    def count(self) -> int:
        """Number of units with positive weight."""
        return int((self.by_unit["weight"] > 0.0).sum())

    @property
    def value(self) -> float:
        """Estimate J: E q(x0) plus the mean of the terms."""
        return (
            self.start_value / self.start_weight
            + float(self.by_unit["term"].sum()) / self.weight
        )

    def standard_error(self) -> float | None:
        """Standard error of J over independent units; None for one unit.

        Given start states count as fixed; the log's own are sampled with their units.
        """
        units = self.by_unit
        mean = float(units["term"].sum() / self.weight)
        parts = (units["term"] - mean * units["weight"]) / self.weight
        if "start" in units:
            mean = self.start_value / self.start_weight
            total = units["start_weight"].sum()
            parts = parts + (units["start"] - mean * units["start_weight"]) / total
        if self.count < 2:
            return None
        influence = parts[units["weight"] > 0.0] * self.count
        return math.sqrt(float(influence.var(ddof=1)) / self.count)

    def diagnostics(self) -> dict[str, float]:
        """Properties of ω compared with those of the true ratio d^π/μ, d^π = Σ_t γ^t
        P(x_t = ·).

        ``effective_units``: (Σu)²/Σu² of u = w ω summed over units. ``mass``: mean of w
        ω (1 − discount), 1 for the true ratio, terminal rows included.
        ``negative_share``: of Σ|w ω|; a true ratio is nowhere negative. Raises
        DataError when ω is zero everywhere or not finite.
        """
        if not 0.0 < self.size < math.inf:
            raise DataError(f"weights are all zero or not finite: {_NOT_COVERED}")
        used = self.by_unit["used"]
        return {
            "effective_units": (
                float(used.sum()) ** 2 / max(float(np.square(used).sum()), 1e-300)
            ),
            "mass": self.mass / self.weight,
            "negative_share": self.negative / self.size,
        }

    def warnings(self) -> tuple[str, ...]:
        """Sentences on doubtful diagnostics."""
        return tuple(reason.text for reason in doubts_of_weights(self.diagnostics()))
