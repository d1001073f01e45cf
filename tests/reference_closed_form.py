"""The closed-form estimators once more in plain numpy: loops over rows, explicit
inverses, nothing shared.
"""

import math

import numpy as np


def instrument(x, frequencies):
    """ψ(x): cosines, then sines, over the root of their number."""
    phases = [
        sum(x[k] * frequencies[k][j] for k in range(len(x)))
        for j in range(len(frequencies[0]))
    ]
    values = [math.cos(phase) for phase in phases] + [
        math.sin(phase) for phase in phases
    ]
    return np.array(values) / math.sqrt(len(phases))


def moments(critics, system):
    """Σ w critic Zᵀ / Σ w and Σ w critic r / Σ w, row by row."""
    matrix = np.zeros((len(critics[0]), len(system["now"][0])))
    vector = np.zeros(len(critics[0]))
    for i, critic in enumerate(critics):
        z = system["now"][i] - system["discounts"][i] * system["later"][i]
        matrix += system["weights"][i] * np.outer(critic, z)
        vector += system["weights"][i] * critic * system["rewards"][i]
    return matrix / system["weights"].sum(), vector / system["weights"].sum()


def ridge_matrix(curvature, ridge, constants):
    """ridge · mean |diagonal| in all directions but that of the same constant on the
    last `constants`.
    """
    p = len(curvature)
    mean = sum(abs(curvature[j, j]) for j in range(p)) / p
    level = np.array([0.0] * (p - constants) + [1.0] * constants) / math.sqrt(constants)
    return ridge * mean * (np.eye(p) - (1.0 - 1e-9) * np.outer(level, level))


def start_mean(system):
    total = sum(
        w * row
        for w, row in zip(system["start_weights"], system["starts"], strict=True)
    )
    return total / sum(system["start_weights"])


def minimax(critics, system, ridge, metric=None):
    """θ and ω of min ‖v − Bθ‖²_G + λ‖θ‖², G = metric (default: identity)."""
    matrix, vector = moments(critics, system)
    metric = np.eye(len(vector)) if metric is None else metric
    curvature = matrix.T @ metric @ matrix
    ridged = curvature + ridge_matrix(curvature, ridge, system["constants"])
    theta = np.linalg.solve(ridged, matrix.T @ metric @ vector)
    alpha = metric @ matrix @ np.linalg.solve(ridged, start_mean(system))
    return theta, np.array([critic @ alpha for critic in critics])


def dice_metric(critics, system, critic_ridge):
    """(E ψψᵀ + ε I)⁻¹ with ε relative to the mean eigenvalue."""
    total = sum(
        w * np.outer(critic, critic)
        for w, critic in zip(system["weights"], critics, strict=True)
    )
    second = total / system["weights"].sum()
    return np.linalg.inv(
        second + critic_ridge * np.trace(second) / len(second) * np.eye(len(second))
    )


def weighted_reward(omega, system):
    return sum(
        w * o * r
        for w, o, r in zip(system["weights"], omega, system["rewards"], strict=True)
    ) / sum(system["weights"])


def doubly_robust(omega, system, now, later, starts):
    """E q(x0) + mean of w ω (r + discount q' − q)."""
    base = sum(w * v for w, v in zip(system["start_weights"], starts, strict=True))
    total = base / sum(system["start_weights"])
    for i, w in enumerate(system["weights"]):
        delta = system["rewards"][i] + system["discounts"][i] * later[i] - now[i]
        total += w * omega[i] * delta / sum(system["weights"])
    return total


def standard_error(system, unit_starts, terms, start_values, fixed_starts):
    """Root of the variance of unit sums."""
    n = len(terms)
    units = len(unit_starts)
    weights = system["weights"]
    mean = sum(w * t for w, t in zip(weights, terms, strict=True)) / sum(weights)
    base = sum(
        w * v for w, v in zip(system["start_weights"], start_values, strict=True)
    ) / sum(system["start_weights"])
    influence = []
    for u in range(units):
        end = unit_starts[u + 1] if u + 1 < units else n
        part = sum(
            weights[i] * (terms[i] - mean) for i in range(unit_starts[u], end)
        ) / sum(weights)
        if not fixed_starts:
            part += (
                system["start_weights"][u]
                * (start_values[u] - base)
                / sum(system["start_weights"])
            )
        influence.append(part * units)
    centre = sum(influence) / units
    variance = sum((x - centre) ** 2 for x in influence) / (units - 1)
    return math.sqrt(variance / units)
