"""Importance sampling by whole episodes or per decision, self-normalised or not, with a model or without."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from koffline.ope.importance.statistics import StepwiseMean, WeightedMean, plain_mean
from koffline.ope.importance.weights import EpisodeWeights
from koffline.ope.row_values import RowValues


def trajectory_is(weights: EpisodeWeights, rewards: Float[np.ndarray, " row"], gamma: float) -> WeightedMean:
    """J = mean of w·Σ γ^t r_t, w the weight of the whole episode. (Precup et al. 2000)"""
    returns = weights.episode_sums(gamma**weights.steps * rewards)
    return plain_mean(np.exp(weights.last) * returns, weights.shares)


def trajectory_wis(weights: EpisodeWeights, rewards: Float[np.ndarray, " row"], gamma: float) -> WeightedMean:
    """Σ w·return / Σ w, episodes of any length with the weight they end with. (Precup et al. 2000)"""
    returns = weights.episode_sums(gamma**weights.steps * rewards)
    return WeightedMean(weights.last, returns, weights.shares)


def per_decision_is(
    weights: EpisodeWeights, rewards: Float[np.ndarray, " row"], gamma: float
) -> WeightedMean:
    """J = mean of Σ_t γ^t w_t r_t. (Precup et al. 2000)"""
    sums = weights.episode_sums(gamma**weights.steps * np.exp(weights.log_weights) * rewards)
    return plain_mean(sums, weights.shares)


def per_decision_wis(
    weights: EpisodeWeights, rewards: Float[np.ndarray, " row"], gamma: float
) -> StepwiseMean:
    """J = Σ_t γ^t Σ_i w_t r_t / Σ_i w_t, ended episodes in the lower sum. (Thomas 2015, CWPDIS)"""
    return StepwiseMean(weights, rewards, np.zeros(weights.n_episodes), gamma)


def doubly_robust(
    weights: EpisodeWeights,
    rewards: Float[np.ndarray, " row"],
    discounts: Float[np.ndarray, " row"],
    gamma: float,
    model: RowValues,
) -> WeightedMean:
    """J = mean of v(s_0) + Σ_t γ^t w_t (r_t + discount_t v(s_{t+1}) − q(s_t, a_t)).

    Equal to Σ_t γ^t (w_t r_t − w_t q_t + w_{t−1} v_t), with the model's value of the state where recording
    stopped. ``discounts`` (N,) is γ, and 0 where the world ended.
    (Jiang and Li 2016, equation 10)
    """
    model.check_sizes(len(rewards), weights.n_episodes)
    residual = temporal_differences(rewards, discounts, model)
    sums = weights.episode_sums(gamma**weights.steps * np.exp(weights.log_weights) * residual)
    return plain_mean(model.starts + sums, weights.shares)


def weighted_doubly_robust(
    weights: EpisodeWeights,
    rewards: Float[np.ndarray, " row"],
    discounts: Float[np.ndarray, " row"],
    gamma: float,
    model: RowValues,
) -> StepwiseMean:
    """As ``doubly_robust`` with weights normalised at each step. (Thomas and Brunskill 2016, section 5)"""
    model.check_sizes(len(rewards), weights.n_episodes)
    residual = temporal_differences(rewards, discounts, model)
    return StepwiseMean(weights, residual, model.starts, gamma)


def temporal_differences(
    rewards: Float[np.ndarray, " row"], discounts: Float[np.ndarray, " row"], model: RowValues
) -> Float[np.ndarray, " row"]:
    """(N,) r + discount · v(s') − q(s, a)."""
    return rewards + discounts * model.later - model.now
