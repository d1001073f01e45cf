"""A log's episodes with the weights that a policy gives them: what all estimators over episodes share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.ope.importance.ratios import AUTO, Ratios, action_log_probabilities, importance_ratios
from koffline.ope.importance.weights import EpisodeWeights, effective_size, make_weights
from koffline.ope.row_values import RowValues
from koffline.ope.working_log import Columns, LogPart, WorkingLog
from koffline.policies import ContinuousPolicy, DiscretePolicy

_CURVE_POINTS = 50
_ROW_BYTES = 150  # of a row's columns, ratios and weights
_NAMES = (
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "steps",
    "behavior_log_probabilities",
    "weights",
)


@dataclass(frozen=True, eq=False)
class EpisodeProblem:
    """Rewards (N,), discounts (N,) (γ, and 0 where the world ended) and weights of the episodes that count.

    ``counted`` (N0,) marks their rows among those of the log as given: episodes of weight zero are not here.
    """

    transitions: Transitions
    weights: EpisodeWeights
    ratios: Ratios
    gamma: float
    clip: float | None
    counted: Bool[np.ndarray, " row"]
    counted_episodes: Bool[np.ndarray, " episode"]

    @property
    def rewards(self) -> Float[np.ndarray, " row"]:
        """(N,)"""
        return np.asarray(self.transitions.rewards, dtype=np.float64)

    @property
    def discounts(self) -> Float[np.ndarray, " row"]:
        """(N,) γ, zero where the world ended: a time limit does not cut the future."""
        return self.gamma * (1.0 - np.asarray(self.transitions.terminated, dtype=np.float64))

    @property
    def cut_share(self) -> float:
        """Mean of γ^length over episodes that were cut before the world ended, 0 over others.

        Under the policy: episodes count by their weights, where these leave any.
        """
        cut = ~np.asarray(self.transitions.terminated)[self.transitions.episode_ends]
        missing = np.where(cut, self.gamma**self.weights.lengths, 0.0)
        logs = self.weights.last + self.weights.log_shares
        if logs.max() == -np.inf:
            return float(self.weights.shares @ missing)
        counts = np.exp(logs - logs.max())
        return float(counts @ missing / counts.sum())

    @property
    def weightless_from(self) -> int | None:
        """The first step at which no episode has weight left; None where there always is one."""
        gone = np.flatnonzero(self.weights.log_totals == -np.inf)
        return int(gone[0]) if len(gone) else None

    def effective_size(self, stepwise: bool) -> float:
        """(Σw)²/Σw² over episodes: of whole weights, or averaged over steps with weights γ^t."""
        if not stepwise:
            return effective_size(self.weights.last + self.weights.log_shares)
        powers = self.gamma ** np.arange(self.weights.horizon)
        return float(powers @ self.weights.effective_sizes / powers.sum())

    def select(self, model: RowValues) -> RowValues:
        """The model's values of the rows and episodes that count. Raises DataError for wrong lengths."""
        model.check_sizes(len(self.counted), len(self.counted_episodes))
        return RowValues(
            model.now[self.counted],
            model.later[self.counted],
            model.starts[self.counted_episodes],
            model.unseen,
            model.notes,
        )

    def diagnostics(self) -> dict[str, Any]:
        """Plain numbers about the weights; the curve of effective sizes at up to 50 steps."""
        weights = self.weights
        picks = np.unique(np.linspace(0, weights.horizon - 1, _CURVE_POINTS).astype(int))
        total = weights.log_totals[-1]
        largest = float(np.max(weights.last + weights.log_shares))
        return {
            "episodes": weights.n_episodes,
            "longest_episode": weights.horizon,
            "mean_weight": float(np.exp(total)) if total < 700.0 else None,
            "largest_share": math.exp(largest - total) if largest > -np.inf else None,
            "cut_share": self.cut_share,
            "effective_size_by_step": {
                "step": picks.tolist(),
                "size": weights.effective_sizes[picks].tolist(),
            },
            **self.ratios.diagnostics,
        }


@dataclass(frozen=True, eq=False)
class EpisodesOfPart:
    """What estimators over episodes read of a part of a log: no observations, and the policy's ``target``."""

    policy: DiscretePolicy | ContinuousPolicy

    def __call__(self, part: LogPart) -> Columns:
        """Columns of its rows."""
        log = part.transitions
        present = {name: getattr(log, name) for name in _NAMES}
        columns = {name: np.asarray(column) for name, column in present.items() if column is not None}
        return Columns(({**columns, "target": action_log_probabilities(log, self.policy)},))


def episodes_of_log(
    log: WorkingLog, policy: DiscretePolicy | ContinuousPolicy
) -> tuple[Transitions, np.ndarray]:
    """All episodes of a log, each observation the number 0, and the policy's log-probabilities (N,)."""
    needed = _ROW_BYTES * len(log.log)
    if needed > log.stream.memory_bytes:
        raise DataError(
            f"importance weights keep {_ROW_BYTES} bytes of each row, {needed / 1e9:.3g} GB of this log, and "
            f"memory is {log.stream.memory}; give that much (--memory)"
        )
    columns = log.fold(EpisodesOfPart(policy)).joined()
    target = columns.pop("target")
    nothing = np.zeros((len(target), 1), dtype=np.uint8)
    sample = log.sample.transitions
    rows = Transitions(
        observations=nothing,
        next_observations=nothing,
        action_space=sample.action_space,
        metadata=sample.metadata,
        **columns,
    )
    return rows, target


def prepare_episodes(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    gamma: float,
    *,
    behavior: str = AUTO,
    clip: float | None = None,
    seed: int = 0,
    target: Float[np.ndarray, " row"] | None = None,
) -> EpisodeProblem:
    """Weights of the log's episodes under the policy; ``clip`` caps them.

    ``behavior``: whose probabilities, see `importance_ratios`. ``target``: the policy's log-probabilities of
    the logged actions, where they are known. Raises DataError (no episodes, no
    probabilities, weights all zero or changing inside an episode), PolicyError (no density), ConfigError.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}; give a discount between 0 and 1")
    if not transitions.has_episodes:
        raise DataError(
            "importance weights are products along episodes, this log's rows stand alone; add episode_ids, "
            "or use an estimator that needs none (kloss, fqe, mwl)"
        )
    present = np.ones(transitions.n_episodes, dtype=bool)
    if transitions.weights is not None:
        present = np.add.reduceat(np.asarray(transitions.weights), transitions.episode_starts) > 0.0
        if not present.any():
            raise DataError("weights are all zero; give at least one episode a positive weight")
    counted = np.repeat(present, transitions.episode_lengths)
    log = transitions if present.all() else transitions.select_episodes(present)
    ratios = importance_ratios(log, policy, behavior, seed, None if target is None else target[counted])
    return EpisodeProblem(
        transitions=log,
        weights=make_weights(log, ratios.logs, clip),
        ratios=ratios,
        gamma=gamma,
        clip=clip,
        counted=counted,
        counted_episodes=present,
    )
