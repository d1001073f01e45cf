"""Importance sampling once more, as slow as it is plain: loops over episodes and steps.

An episode is a list of steps (ratio, reward, q, v_next, discount); ``starts`` are the
values of first states.
"""

import math


def weights_of(episode):
    weights = []
    product = 1.0
    for step in episode:
        product *= step[0]
        weights.append(product)
    return weights


def discounted_return(episode, gamma):
    return sum(gamma**t * step[1] for t, step in enumerate(episode))


def trajectory_is(episodes, shares, gamma):
    return sum(
        share * weights_of(episode)[-1] * discounted_return(episode, gamma)
        for episode, share in zip(episodes, shares, strict=True)
    )


def trajectory_wis(episodes, shares, gamma):
    total = sum(
        share * weights_of(episode)[-1]
        for episode, share in zip(episodes, shares, strict=True)
    )
    return trajectory_is(episodes, shares, gamma) / total


def per_decision_is(episodes, shares, gamma):
    total = 0.0
    for episode, share in zip(episodes, shares, strict=True):
        for t, (step, weight) in enumerate(
            zip(episode, weights_of(episode), strict=True)
        ):
            total += share * gamma**t * weight * step[1]
    return total


def step_weights(episodes, shares):
    """w[t][i] of all episodes, ended ones with their last weight, each multiplied by
    its share.
    """
    horizon = max(map(len, episodes))
    every = [weights_of(episode) for episode in episodes]
    return [
        [
            share * weights[min(t, len(weights) - 1)]
            for weights, share in zip(every, shares, strict=True)
        ]
        for t in range(horizon)
    ]


def effective_sizes(episodes, shares):
    rows = step_weights(episodes, shares)
    return [sum(w) ** 2 / sum(x * x for x in w) if sum(w) else 0.0 for w in rows]


def per_decision_wis(episodes, shares, gamma):
    total = 0.0
    for t, weights in enumerate(step_weights(episodes, shares)):
        if sum(weights) == 0.0:
            continue
        for episode, weight in zip(episodes, weights, strict=True):
            if t < len(episode):
                total += gamma**t * weight / sum(weights) * episode[t][1]
    return total


def doubly_robust(episodes, shares, starts, gamma):
    """The recursion from the end: v(s) + ρ (r + discount · rest − q), with v(s') where
    recording stopped.
    """
    total = 0.0
    for episode, share, start in zip(episodes, shares, starts, strict=True):
        nows = [start, *(step[3] for step in episode[:-1])]
        rest = episode[-1][3]
        for step, now in zip(reversed(episode), reversed(nows), strict=True):
            ratio, reward, q, _, discount = step
            rest = now + ratio * (reward + discount * rest - q)
        total += share * rest
    return total


def weighted_doubly_robust(episodes, shares, starts, gamma, last_step=None):
    """Σ γ^t w_t r_t − Σ γ^t (w_t q_t − w_{t−1} v_t), weights normalised, the model
    after ``last_step``.
    """
    rows = step_weights(episodes, shares)
    normalised = [[w / sum(row) if sum(row) else 0.0 for w in row] for row in rows]
    horizon = len(normalised)
    stop = horizon - 1 if last_step is None else last_step
    total = 0.0
    for i, (episode, share, start) in enumerate(
        zip(episodes, shares, starts, strict=True)
    ):
        before = share
        for t, (_, reward, q, later, discount) in enumerate(episode):
            now = start if t == 0 else episode[t - 1][3]
            if t > stop:
                total += gamma**t * before * now
                break
            weight = normalised[t][i]
            total += gamma**t * (weight * (reward - q) + before * now)
            before = weight
            if t == len(episode) - 1:
                total += gamma**t * discount * weight * later
    return total


def magic_error(values, covariance, low, high, mix):
    """xᵀ(Ω + bbᵀ)x"""
    bias = [
        value - high if value > high else value - low if value < low else 0.0
        for value in values
    ]
    size = range(len(values))
    return sum(
        mix[i] * mix[j] * (covariance[i][j] + bias[i] * bias[j])
        for i in size
        for j in size
    )


def gaussian_density(action, mean, deviation):
    return math.exp(-0.5 * ((action - mean) / deviation) ** 2) / (
        deviation * math.sqrt(2.0 * math.pi)
    )
