"""Episodes of a log with their importance weights under a policy, shared by all
estimators over episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.ope.importance.ratios import (
    AUTO,
    Ratios,
    action_log_probabilities,
    importance_ratios,
)
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import Columns, LogPart, WorkingLog
from koffline.policies import ContinuousPolicy, DiscretePolicy

_ROW_BYTES = 150  # bytes of a row's columns, ratios and weights
_LEFT_OUT = (
    "observations",
    "next_observations",
    "episode_ids",
    "action_mask",
    "next_action_mask",
)
# most steps, and most numbers, in a block of steps of all episodes
STEPS = 1024
MOST_NUMBERS = 1 << 20
_NEVER = -np.inf
_LEAST = np.finfo(np.float64).min


def with_unknown_actions(
    values: RowValues, transitions: Transitions, known: Bool[np.ndarray, " action"]
) -> RowValues:
    """The values of a Q that is defined for unknown actions too.

    Networks are asked about the policy restricted to ``known`` actions, renormalised
    (`koffline.ope.log.coverage.among`). Their expectations are those of the whole
    policy under a Q that gives every unknown action the mean value of the known ones in
    that state. A row with an unknown action gets this value as well: that of its state,
    which is a start state or the next state of the row before.
    """
    of_states = np.roll(values.later, 1)
    of_states[transitions.unit_starts] = values.starts
    is_known = known[np.asarray(transitions.actions)]
    return replace(values, now=np.where(is_known, values.now, of_states))


@dataclass(frozen=True, eq=False)
class EpisodeProblem:
    """E episodes of positive weight, with weights w_t = Π_{u ≤ t} π(a_u|s_u) /
    β(a_u|s_u) of their N rows.

    ``log_weights`` (N,): logarithms, to avoid overflow; −inf if the policy never takes
    such actions. ``rewards`` (N,); ``discounts`` (N,): γ, or 0 after a termination.
    ``shares`` (E,): the log's own weights of episodes, with sum one. An ended episode
    keeps its last weight for all later steps, with rewards of zero. ``clusters`` (E,):
    their clusters' numbers, if the log has any. ``counted``: the selected rows and
    episodes of the given log.
    """

    log_weights: Float[np.ndarray, " row"]
    rewards: Float[np.ndarray, " row"]
    discounts: Float[np.ndarray, " row"]
    starts: Int[np.ndarray, " episode"]
    lengths: Int[np.ndarray, " episode"]
    shares: Float[np.ndarray, " episode"]
    ratios: Ratios
    gamma: float
    clip: float | None = None
    clusters: np.ndarray | None = None
    counted: tuple[Any, Any] = (slice(None), slice(None))

    @property
    def n_episodes(self) -> int:
        """Number E of episodes."""
        return len(self.starts)

    @property
    def horizon(self) -> int:
        """Steps T of the longest episode."""
        return int(self.lengths.max())

    @cached_property
    def steps(self) -> Int[np.ndarray, " row"]:
        """Number (N,) of each row's step in its episode."""
        return np.arange(len(self.log_weights)) - np.repeat(self.starts, self.lengths)

    @property
    def ends(self) -> Int[np.ndarray, " episode"]:
        """Last row (E,) of each episode."""
        return self.starts + self.lengths - 1

    @cached_property
    def last(self) -> Float[np.ndarray, " episode"]:
        """Logarithm (E,) of the weight of each whole episode."""
        return self.log_weights[self.ends]

    @cached_property
    def final(self) -> Float[np.ndarray, " episode"]:
        """Products share · weight (E,) of whole episodes, with maximum 1; zeros without
        any weight.
        """
        logs = self.last + np.log(self.shares)
        if logs.max() > _NEVER:
            return np.exp(logs - logs.max())
        return np.zeros(len(logs))

    @cached_property
    def effective_sizes(self) -> Float[np.ndarray, " step"]:
        """Effective sizes (T,): (Σw)² / Σw² over episodes at each step; 0 without
        weight.
        """
        squares = np.concatenate(
            [np.square(parts).sum(axis=0) for _, _, parts in self.blocks()]
        )
        return np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0.0)

    @property
    def unseen(self) -> Float[np.ndarray, " episode"]:
        """γ^length (E,) of episodes whose recording stopped before the world ended; 0
        for the others.
        """
        return np.where(self.discounts[self.ends] > 0.0, self.gamma**self.lengths, 0.0)

    @property
    def cut_share(self) -> float:
        """Mean of ``unseen`` under the policy: episodes are weighted by final weights,
        if any are left.
        """
        weights = self.final
        if not weights.any():
            weights = self.shares
        return float(weights @ self.unseen / weights.sum())

    @property
    def weightless_from(self) -> int | None:
        """First step at which no episode has weight; None if there is no such step."""
        gone = np.flatnonzero(self.effective_sizes == 0.0)
        if len(gone):
            return int(gone[0])
        return None

    def effective_size(self, stepwise: bool) -> float:
        """Effective number of episodes (Σw)²/Σw²: of final weights, or a γ^t-weighted
        mean over steps.
        """
        if not stepwise:
            if self.final.any():
                return float(self.final.sum() ** 2 / np.square(self.final).sum())
            return 0.0
        powers = self.gamma ** np.arange(self.horizon)
        return float(powers @ self.effective_sizes / powers.sum())

    def blocks(
        self,
    ) -> Iterator[tuple[Int[np.ndarray, " step"], np.ndarray, np.ndarray]]:
        """Blocks of steps: their numbers, rows (E, b), and each episode's part (E, b)
        of the step's weight.

        An ended episode stays at its last row. Parts sum to one, or are zero at steps
        without weight.
        """
        size = max(1, min(STEPS, MOST_NUMBERS // self.n_episodes))
        for start in range(0, self.horizon, size):
            steps = np.arange(start, min(start + size, self.horizon))
            rows = self.starts[:, None] + np.minimum(steps, self.lengths[:, None] - 1)
            logs = self.log_weights[rows] + np.log(self.shares)[:, None]
            # against overflow
            parts = np.exp(logs - np.maximum(logs.max(axis=0), _LEAST))
            yield (
                steps,
                rows,
                parts / np.maximum(parts.sum(axis=0), np.finfo(np.float64).tiny),
            )

    def episode_sums(
        self, rows: Float[np.ndarray, " row"]
    ) -> Float[np.ndarray, " episode"]:
        """Sums (E,) over the rows of each episode."""
        return np.add.reduceat(rows, self.starts)

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics of the weights as plain numbers."""
        largest_share = None
        if self.final.any():
            largest_share = 1.0 / float(self.final.sum())
        return {
            "episodes": self.n_episodes,
            "longest_episode": self.horizon,
            "largest_share": largest_share,
            "cut_share": self.cut_share,
            **self.ratios.diagnostics,
        }


def episode_columns(
    policy: DiscretePolicy | ContinuousPolicy, part: LogPart
) -> Columns:
    """Columns for estimators over episodes: no observations, log π of the logged
    actions as ``target``.
    """
    log = part.transitions
    columns = {
        name: column for name, column in log.columns.items() if name not in _LEFT_OUT
    }
    return Columns(({**columns, "target": action_log_probabilities(log, policy)},))


def episodes_of_log(
    log: WorkingLog, policy: DiscretePolicy | ContinuousPolicy
) -> tuple[Transitions, np.ndarray]:
    """All episodes of a log with observations replaced by 0, and the policy's
    log-probabilities (N,).
    """
    needed = _ROW_BYTES * len(log.log)
    if needed > log.stream.memory_bytes:
        raise DataError(
            f"importance weights keep {_ROW_BYTES} bytes of each row,"
            f" {needed / 1e9:.3g} GB of this log, and memory is {log.stream.memory};"
            " give that much (--memory)"
        )
    columns = log.fold(partial(episode_columns, policy)).joined()
    target = columns.pop("target")
    sample = log.sample.transitions
    nothing = np.zeros((len(target), 1), dtype=np.uint8)
    episodes = Transitions(
        observations=nothing,
        next_observations=nothing,
        action_space=sample.action_space,
        metadata=sample.metadata,
        **columns,
    )
    return episodes, target


def prepare_episodes(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    gamma: float,
    *,
    behavior: str = AUTO,
    behavior_model: Any = None,
    clip: float | None = None,
    seed: int = 0,
    target: Float[np.ndarray, " row"] | None = None,
) -> EpisodeProblem:
    """Weights of the log's episodes under the policy; ``clip`` caps them.

    ``behavior``, ``behavior_model``: source of the behavior probabilities, see
    `importance_ratios`.
    ``target``: the policy's log-probabilities of the logged actions, if known. Raises
    DataError (no episodes, no probabilities, weights all zero or changing inside an
    episode) and PolicyError (no density).
    """
    if not transitions.has_episodes:
        raise DataError(
            "importance weights are products along episodes, this log's rows stand"
            " alone; add episode_ids, or use an estimator that needs none (kloss, fqe,"
            " mwl)"
        )
    totals = np.add.reduceat(transitions.row_weights, transitions.episode_starts)
    has_weight = totals > 0.0
    rows = np.repeat(has_weight, transitions.episode_lengths)
    log = transitions
    if not has_weight.all():
        log = transitions.select_episodes(has_weight)
    if target is not None:
        target = target[rows]
    ratios = importance_ratios(log, policy, behavior, seed, target, behavior_model)
    episodes = weigh_episodes(log, ratios, gamma, clip)
    return replace(episodes, counted=(rows, has_weight))


def weigh_episodes(
    transitions: Transitions, ratios: Ratios, gamma: float, clip: float | None = None
) -> EpisodeProblem:
    """Products of ratios along each episode; ``clip`` caps the cumulative weights.

    Raises DataError for row weights that vary inside an episode.
    """
    starts = np.asarray(transitions.episode_starts)
    lengths = np.asarray(transitions.episode_lengths)
    log_weights = ratios.logs
    if len(starts) < len(log_weights):  # of several rows, not of one each
        log_weights = np.concatenate(
            [np.cumsum(part) for part in np.split(log_weights, starts[1:])]
        )
    if clip is not None:
        log_weights = np.minimum(log_weights, math.log(clip))
    row_weights = transitions.row_weights
    uneven = np.flatnonzero(row_weights != np.repeat(row_weights[starts], lengths))
    if len(uneven):
        raise DataError(
            f"weights change inside an episode (row {int(uneven[0])}); importance"
            " weights belong to whole episodes: give all rows of an episode the same"
            " weight"
        )
    clusters = None
    if transitions.clusters is not None:
        clusters = transitions.clusters[starts]
    return EpisodeProblem(
        log_weights=log_weights,
        rewards=np.asarray(transitions.rewards, dtype=np.float64),
        discounts=gamma * (1.0 - transitions.terminated),
        starts=starts,
        lengths=lengths,
        shares=row_weights[starts] / row_weights[starts].sum(),
        ratios=ratios,
        gamma=gamma,
        clip=clip,
        clusters=clusters,
    )
