"""The mathematics once more, as slow as it is plain: loops over pairs, nothing shared
with the library.
"""

import itertools
import math

import numpy as np


def gaussian(x, y, bandwidth):
    return math.exp(
        -sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / bandwidth**2
    )


def laplacian(x, y, bandwidth):
    return math.exp(-sum(abs(a - b) for a, b in zip(x, y, strict=True)) / bandwidth)


def inverse_multiquadric(x, y, bandwidth):
    return 1.0 / math.sqrt(
        1.0 + sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / bandwidth**2
    )


def gram(kernel, xs, ys):
    return np.array([[kernel(x, y) for y in ys] for x in xs])


def median_distance(xs):
    """Median Euclidean distance between different rows, the mean of the middle two."""
    distances = sorted(math.dist(x, y) for x, y in itertools.combinations(xs, 2))
    middle = len(distances) // 2
    return (
        distances[middle]
        if len(distances) % 2
        else (distances[middle - 1] + distances[middle]) / 2.0
    )


def v_statistic(residual, gram):
    n = len(residual)
    return (
        sum(gram[i][j] * residual[i] * residual[j] for i in range(n) for j in range(n))
        / n**2
    )


def u_statistic(residual, gram):
    n = len(residual)
    pairs = itertools.permutations(range(n), 2)
    return sum(gram[i][j] * residual[i] * residual[j] for i, j in pairs) / (n * (n - 1))


def diagonal_mean(residual, gram):
    return sum(gram[i][i] * residual[i] ** 2 for i in range(len(residual))) / len(
        residual
    )


def batch_v_statistic(residual, gram, population):
    """L_KV as the paper's appendix prints it."""
    m = len(residual)
    diagonal = sum(gram[i][i] * residual[i] * residual[i] for i in range(m))
    off = sum(
        gram[i][j] * residual[i] * residual[j]
        for i, j in itertools.permutations(range(m), 2)
    )
    return (diagonal + (population - 1) / (m - 1) * off) / (m * population)


def expected_residual(transition, reward, gamma, value):
    """R V(s) = Σ_s' P(s'|s) (r(s, s') + γ V(s')) − V(s)."""
    states = range(len(value))
    return [
        sum(transition[s][t] * (reward[s][t] + gamma * value[t]) for t in states)
        - value[s]
        for s in states
    ]


def kernel_norm(weights, values, gram):
    """E_{s, t ~ μ}[k(s, t) f(s) f(t)]."""
    states = range(len(values))
    return sum(
        weights[s] * weights[t] * gram[s][t] * values[s] * values[t]
        for s in states
        for t in states
    )


def dual_gram(transition, weights, gamma, gram):
    """k* of the dual-kernel theorem; d*(s|s') = P(s'|s) μ(s) / μ(s') need not sum to
    one over s.

    Each term is averaged over the variables it contains, and no others, as in the
    theorem's proof.
    """
    states = range(len(weights))
    back = [
        [transition[s][t] * weights[s] / weights[t] for s in states] for t in states
    ]
    dual = np.zeros((len(weights), len(weights)))
    for t, u in itertools.product(states, states):
        first = sum(back[t][s] * gram[s][u] for s in states)
        second = sum(back[u][r] * gram[t][r] for r in states)
        both = sum(back[t][s] * back[u][r] * gram[s][r] for s in states for r in states)
        dual[t, u] = gram[t][u] - gamma * (first + second) + gamma**2 * both
    return dual


def lstd(features, next_features, rewards, gamma):
    """θ = (XᵀZ)⁻¹ Xᵀ r with Z = X − γ X', sums written out."""
    size = len(features[0])
    matrix = np.zeros((size, size))
    vector = np.zeros(size)
    for phi, next_phi, reward in zip(features, next_features, rewards, strict=True):
        matrix += np.outer(phi, np.asarray(phi) - gamma * np.asarray(next_phi))
        vector += np.asarray(phi) * reward
    return np.linalg.solve(matrix, vector)
