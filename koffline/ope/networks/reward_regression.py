"""Networks for one-step logs (bandits): Q(s, a) is the mean reward, so that they are
plain regressions on rewards.

Estimators over episodes (``dr``, ``wdr``, ``magic``) read these. Every network trains
on resampled units; a row is predicted by those that did not draw its unit. Training
stops where these predictions no longer get better: more steps would fit the noise of
rewards, which a row's importance weight multiplies. Neither the policy nor its weights
take part, so that the networks are the same for every policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from koffline.batches import Table, rows_by_weight
from koffline.config import EvaluationSettings
from koffline.errors import KofflineError
from koffline.fitting import FitSettings, Progress, fit_on_cores
from koffline.jobs.cores import PRODUCT_SECONDS, each_on_cores
from koffline.objectives import RewardRegression
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import Columns, Sums
from koffline.ope.networks.resampling import (
    Resampling,
    make_table,
    read_values,
    row_blocks,
    start_values,
)
from koffline.replicas import ReplicaPlan, StackedMLP

# Steps of the rounds: each doubles the steps before it.
ROUNDS = (125, 125, 250, 500, 1000, 2000, 4000)
_JUDGED_ROWS = 20_000  # rows whose prediction errors are compared, about


@dataclass(frozen=True, eq=False)
class PredictedRewards(Sums):
    """Predictions by row: ``now`` of the logged action; ``unseen``, whether any network
    had not drawn the row's unit. By start state: ``starts``, under the policy.
    """

    columns: Columns

    @property
    def values(self) -> RowValues:
        """The predictions as values of rows; nothing follows a row."""
        columns = self.columns.joined()
        now = columns["now"]
        return RowValues(
            now=now,
            later=np.zeros_like(now),
            starts=columns["starts"],
            unseen=float(columns["unseen"].mean()),
        )


@dataclass(frozen=True, eq=False)
class RewardModel:
    """R networks in float64 that predict rewards, in units of the problem's
    ``reward_scale``, each from its own sample of units.

    ``steps``: of each network. ``error``: mean squared error of the predictions of rows
    by networks that had not drawn them, in the same units.
    """

    network: StackedMLP
    resampling: Resampling
    steps: int
    error: float

    def predict(self, problem: EvaluationProblem) -> PredictedRewards:
        """Predictions in units of the reward, each the mean over the networks that had
        not drawn the row's unit (over all, if each had).
        """
        network = self.network
        table = make_table(problem, str(network.flat.device), network.flat.dtype)
        is_unseen = _unseen_rows(self.resampling, problem)
        shares = shares_of_networks(is_unseen)
        now = _mean_predictions(network, table, shares)
        starts = start_values(network, problem).double().cpu()  # in units of the reward
        if problem.fixed_starts:  # of no row: networks count as in the mean row
            weights = torch.as_tensor(problem.row_weights)
            start_means = (shares @ weights / weights.sum()) @ starts
        else:
            of_starts = shares[:, problem.episode_starts.tolist()]
            start_means = (starts * of_starts).sum(dim=0)
        columns = {
            "now": now.numpy() * problem.reward_scale,
            "starts": start_means.numpy(),
            "unseen": is_unseen.any(dim=0).numpy(),
        }
        return PredictedRewards(Columns((columns,)))


def fit_reward_model(
    problem: EvaluationProblem,
    resampling: Resampling,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> RewardModel:
    """Train networks on resampled rows of a one-step log.

    problem: the rows in memory, each without a next one. resampling: the networks'
    samples, none of them the whole log. settings: if they give ``steps``, all of these
    are taken; else training goes on in rounds until errors of unseen rows no longer
    fall, and the networks of least error are kept. progress: called with the steps
    done, all steps of the round and a note. Raises KofflineError if fewer than two
    networks have finite parameters.
    """
    table = make_table(problem, settings.device)
    weights = resampling.row_weights(problem)
    generator = torch.Generator().manual_seed(resampling.seeds[0])
    row_sets = tuple(rows_by_weight(of_replica, generator) for of_replica in weights)
    judged = _JudgedRows.of(problem, resampling, table)
    sizes = (problem.inputs.shape[1], *settings.hidden_units, problem.n_actions or 1)
    network = StackedMLP.initialise(sizes, resampling.seeds, device=table.inputs.device)
    _, output_biases = network.layers(network.flat)[-1]
    # the mean reward of each network's own sample; biases are a view of the parameters
    levels = weights @ torch.as_tensor(problem.rewards) / weights.sum(dim=1)
    output_biases.add_(levels.to(output_biases)[:, None, None])
    rounds: tuple[int, ...] = ROUNDS
    if settings.steps is not None:
        rounds = (settings.steps,)
    done = 0
    best: RewardModel | None = None
    for steps in rounds:
        plan = ReplicaPlan(
            learning_rates=(settings.learning_rate,) * len(row_sets),
            batch_seeds=tuple(seed + done for seed in resampling.seeds),
            row_sets=row_sets,
            row_set_of=tuple(range(len(row_sets))),
        )
        record = fit_on_cores(
            table=table,
            network=network,
            objective=RewardRegression(),
            plan=plan,
            settings=FitSettings(
                steps=steps,
                batch_size=min(settings.batch_size, len(table)),
                schedule="cosine",
            ),
            progress=progress,
        )
        network = record.network
        done += steps
        model = _model_of(network, resampling, done, judged)
        if best is not None and not model.error < best.error:
            break
        best = model
    assert best is not None  # there is at least one round
    return best


def _model_of(
    network: StackedMLP, resampling: Resampling, steps: int, judged: _JudgedRows
) -> RewardModel:
    """The networks with finite parameters after so many steps, and their error.

    Raises KofflineError if there are fewer than two.
    """
    kept = network.flat.isfinite().all(dim=1).nonzero().squeeze(1).tolist()
    if len(kept) < 2:
        raise KofflineError(
            f"{network.replicas - len(kept)} of {network.replicas} networks diverged;"
            " lower learning_rate or look for outliers (koffline data validate)"
        )
    finite = network.select(kept)
    return RewardModel(
        network=finite.with_flat(finite.flat.double()),
        resampling=resampling.select(kept),
        steps=steps,
        error=judged.error(finite, kept),
    )


@dataclass(frozen=True, eq=False)
class _JudgedRows:
    """Rows on which prediction errors are compared between rounds.

    ``weights (B,)``: of the rows, zero where every network drew the row's unit.
    ``is_unseen (R, B)``: whether a network did not draw it.
    """

    table: Table
    weights: Float[Tensor, " row"]
    is_unseen: Bool[Tensor, "replica row"]

    @classmethod
    def of(
        cls, problem: EvaluationProblem, resampling: Resampling, table: Table
    ) -> _JudgedRows:
        """Every row, or every second, third, … of many."""
        stride = max(1, len(table) // _JUDGED_ROWS)
        rows = torch.arange(0, len(table), stride)
        is_unseen = _unseen_rows(resampling, problem)[:, rows]
        weights = torch.as_tensor(problem.row_weights)[rows]
        return cls(
            table=table.select(rows.to(table.inputs.device)),
            weights=weights * is_unseen.any(dim=0),
            is_unseen=is_unseen,
        )

    def error(self, network: StackedMLP, replicas: list[int]) -> float:
        """Mean squared error of the mean predictions by networks, the ``replicas`` of
        all, that did not draw a row.
        """
        shares = shares_of_networks(self.is_unseen[replicas])
        predicted = _mean_predictions(network, self.table, shares)
        squares = (predicted - self.table.rewards.double().cpu()).square()
        return float(self.weights @ squares / self.weights.sum())


def _unseen_rows(
    resampling: Resampling, problem: EvaluationProblem
) -> Bool[Tensor, "replica row"]:
    """Whether a network's sample lacks a row."""
    return torch.as_tensor(resampling.row_counts(problem) == 0)


def shares_of_networks(
    is_unseen: Bool[Tensor, "replica row"],
) -> Float[Tensor, "replica row"]:
    """Share of each network in the prediction of a row: equal among those that did not
    see it; among all, if each did.
    """
    counted = torch.where(is_unseen.any(dim=0), is_unseen.double(), 1.0)
    return counted / counted.sum(dim=0)


def _mean_predictions(
    network: StackedMLP, table: Table, shares: Float[Tensor, "replica row"]
) -> Float[Tensor, " row"]:
    """Predictions of the rows' logged actions, averaged over networks with these
    shares.
    """

    def mean_of(rows: slice) -> Tensor:
        predicted = read_values(network, table.inputs, table.readout, rows)
        return (predicted.double().cpu() * shares[:, rows]).sum(dim=0)

    parts = each_on_cores(
        mean_of,
        items=list(row_blocks(network, len(table))),
        seconds=2.0 * network.flat.numel() * len(table) * PRODUCT_SECONDS,
    )
    return torch.cat(parts)
