"""Optimal and near-optimal policies of finite processes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from koffline.envs.finite import FiniteMDP, Probabilities
from koffline.errors import ConfigError

ActionValues = Float[np.ndarray, "state action"]


def value_iteration(mdp: FiniteMDP, gamma: float, tolerance: float = 1e-8) -> ActionValues:
    """Optimal action values (S, A) within ``tolerance`` or, where they are too large for that, rounding.

    Zero on terminal states. Raises ConfigError.
    """
    if not 0.0 <= gamma < 1.0:
        raise ConfigError(f"gamma is {gamma}; value iteration needs it in [0, 1)")
    gain = np.einsum("sat,sat->sa", mdp.transition, mdp.reward)
    moves = mdp.transition.reshape(-1, mdp.n_states)
    values = np.zeros(mdp.n_states)
    while True:
        action_values = gain + gamma * (moves @ values).reshape(gain.shape)
        action_values[mdp.terminal] = 0.0
        following = action_values.max(axis=1)
        gap = np.abs(following - values).max()
        values = following
        rounding = 4.0 * np.finfo(np.float64).eps * np.abs(values).max()
        if gap * gamma <= max(tolerance * (1.0 - gamma), rounding):
            return action_values


def policy_iteration(mdp: FiniteMDP, gamma: float) -> tuple[Probabilities, ActionValues]:
    """An optimal deterministic policy (S, A) and its action values, by exact evaluation and improvement."""
    policy = np.full((mdp.n_states, mdp.n_actions), 1.0 / mdp.n_actions)
    while True:
        action_values = mdp.action_values(policy, gamma)
        # An action is left only for a better one: ties cannot make it run in circles.
        taken = np.einsum("sa,sa->s", policy, action_values)
        better = action_values.max(axis=1) > taken + 1e-10 * (1.0 + np.abs(taken))
        settled = policy.max(axis=1) == 1.0
        if not np.any(better | ~settled):
            return policy, action_values
        best = np.eye(mdp.n_actions)[action_values.argmax(axis=1)]
        policy = np.where((better | ~settled)[:, None], best, policy)


def softmax_policy(action_values: ActionValues, temperature: float) -> Probabilities:
    """Probabilities (S, A) proportional to exp(Q / temperature)."""
    if not temperature > 0.0:
        raise ConfigError(f"temperature is {temperature}; give a positive number")
    scaled = (action_values - action_values.max(axis=1, keepdims=True)) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum(axis=1, keepdims=True)
