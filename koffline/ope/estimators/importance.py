"""Importance sampling over the episodes of a log.

w_t = Π_{k ≤ t} π(a_k|s_k) / β(a_k|s_k) is the importance ratio of an episode's first
steps, and w that of all its steps. Sums over episodes are weighted by their shares,
1/E each unless the log weighs its rows.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from koffline.ope.estimators.over_episodes import EpisodeEstimator
from koffline.ope.importance.episode_means import (
    StepwiseMean,
    WeightedMean,
    plain_mean,
)
from koffline.ope.importance.episodes import EpisodeProblem
from koffline.ope.log.row_values import RowValues


def ordinary(episodes: EpisodeProblem, model: RowValues | None = None) -> WeightedMean:
    """``is``: the mean of w Σ_t γ^t r_t (Precup, Sutton & Singh 2000).

    model: not used.
    """
    del model
    returns = np.exp(episodes.last) * _returns(episodes)
    return plain_mean(returns, episodes.shares, episodes.clusters)


def weighted(episodes: EpisodeProblem, model: RowValues | None = None) -> WeightedMean:
    """``wis``: Σ_i w_i Σ_t γ^t r_t / Σ_i w_i, w the weight at the episode's end (Precup
    et al. 2000).

    model: not used.
    """
    del model
    return WeightedMean(
        episodes.last, _returns(episodes), episodes.shares, episodes.clusters
    )


def per_decision(
    episodes: EpisodeProblem, model: RowValues | None = None
) -> WeightedMean:
    """``pdis``: the mean of Σ_t γ^t w_t r_t (Precup et al. 2000).

    model: not used.
    """
    del model
    powers = episodes.gamma**episodes.steps
    weighted_rewards = powers * np.exp(episodes.log_weights) * episodes.rewards
    return plain_mean(
        episodes.episode_sums(weighted_rewards), episodes.shares, episodes.clusters
    )


def weighted_per_decision(
    episodes: EpisodeProblem, model: RowValues | None = None
) -> StepwiseMean:
    """``wpdis``: Σ_t γ^t Σ_i w_t r_t / Σ_i w_t; ended episodes stay in the denominator
    (Thomas 2015, CWPDIS).

    model: not used.
    """
    del model
    return StepwiseMean(episodes, episodes.rewards, np.zeros(episodes.n_episodes))


def _returns(episodes: EpisodeProblem) -> Float[np.ndarray, " episode"]:
    """Discounted returns (E,), up to the log's cuts."""
    powers = episodes.gamma**episodes.steps
    return episodes.episode_sums(powers * episodes.rewards)


IS = EpisodeEstimator("is", ordinary, uses_whole_weight=True)
WIS = EpisodeEstimator("wis", weighted, uses_whole_weight=True)
PDIS = EpisodeEstimator("pdis", per_decision)
WPDIS = EpisodeEstimator("wpdis", weighted_per_decision)
