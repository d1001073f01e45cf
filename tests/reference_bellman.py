"""The Bellman test once more, as loops over pairs; nothing shared with the library."""

import math

import numpy as np

from tests.reference import gaussian


def statistic(residuals, places, bandwidth, weights=None):
    """n · V̂ with n the rows of positive weight."""
    weights = np.ones(len(residuals)) if weights is None else weights
    total = 0.0
    for i in range(len(residuals)):
        for j in range(len(residuals)):
            product = weights[i] * residuals[i] * weights[j] * residuals[j]
            total += product * gaussian(places[i], places[j], bandwidth)
    return total / sum(1 for w in weights if w > 0)


def products(scores, places, bandwidth, n):
    """m_gh = f_gᵀ f_h / n of scores (G, N) dense."""
    count = len(scores)
    result = np.zeros((count, count))
    for g in range(count):
        for h in range(count):
            for i, left in enumerate(scores[g]):
                for j, right in enumerate(scores[h]):
                    if left and right:
                        result[g, h] += (
                            left * right * gaussian(places[i], places[j], bandwidth)
                        )
    return result / n


def witness(residuals, weights, places, at, bandwidth):
    """f*, kernel-weighted mean, its standard error, effective rows."""
    n = sum(1 for w in weights if w > 0)
    total = mass = squares = weighed = 0.0
    for residual, weight, place in zip(residuals, weights, places, strict=True):
        near = gaussian(place, at, bandwidth) * weight
        total += near * residual
        mass += near
        squares += near**2 * residual**2
        weighed += near**2
    return total / n, total / mass, math.sqrt(squares) / mass, mass**2 / weighed
