"""The semiparametric efficiency bound of a policy's value from a log: what no regular
estimator can beat.

n · Var ≥ E_μ[ω² (r + γ V(s') − Q)²] + (n / E) Var V(s0) for E start states, with the
true density ratio ω and the true Q. An estimator whose MSE · n is the bound wastes
nothing. (Kallus & Uehara 2020, Double Reinforcement Learning)
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from tests.exact_problems import FiniteCase, LinearCase

_LONG = 2000  # steps of a discounted sum


def efficiency_bound(case: FiniteCase | LinearCase) -> float:
    """n · variance, the value over the start distribution; infinite where the log has
    no density there.
    """
    if isinstance(case, FiniteCase):
        return _of_finite(case)
    return _of_linear(case)


def _of_finite(case: FiniteCase) -> float:
    """Exact sums over states and actions."""
    mdp = case.world.mdp
    gamma = case.gamma
    target = case.target
    values = np.where(mdp.terminal, 0.0, mdp.state_values(target, gamma))
    alive = ~mdp.terminal
    if case.time_limit is None:
        start = alive / alive.sum()
        steps_of_episode = 1.0
        logged = start
    else:
        start = mdp.initial
        state = mdp.initial * alive
        logged = np.zeros(mdp.n_states)
        for _ in range(min(case.time_limit, _LONG)):
            logged = logged + state
            state = (
                np.einsum("s,sa,sax->x", state, case.behavior, mdp.transition) * alive
            )
        steps_of_episode = logged.sum()
        logged = logged / steps_of_episode
    visits = np.zeros(mdp.n_states)
    state = start * alive
    for _ in range(_LONG):
        visits = visits + state
        state = gamma * np.einsum("s,sa,sax->x", state, target, mdp.transition) * alive
    rows = logged[:, None] * case.behavior
    policy = visits[:, None] * target
    ratio = np.divide(policy, rows, out=np.zeros_like(rows), where=rows > 0.0)
    if (policy[rows == 0.0] > 1e-12).any():
        return math.inf
    ahead = mdp.reward + gamma * values  # (S, A, S')
    mean = np.einsum("sax,sax->sa", mdp.transition, ahead)
    variance = np.einsum(
        "sax,sax->sa", mdp.transition, np.square(ahead - mean[..., None])
    )
    spread = float(start @ values**2 - (start @ values) ** 2)
    return float((rows * ratio**2 * variance).sum()) + steps_of_episode * spread


def _of_linear(case: LinearCase, rows: int = 200_000) -> float:
    """Densities are mixtures of normal ones over steps; the mean over pairs is by Monte
    Carlo.
    """
    world = case.world
    gamma = case.gamma
    limit = case.time_limit or 1
    if case.target.deterministic:
        return math.inf
    generator = np.random.default_rng(0)
    behavior, target = (
        _stages(world, policy, steps) for policy, steps in _policies(case, limit)
    )
    at = generator.integers(limit, size=rows)
    pairs = np.stack(
        [
            generator.multivariate_normal(np.zeros(len(behavior[0])), behavior[t])
            for t in at
        ]
    )
    logged = np.mean([_density(pairs, covariance) for covariance in behavior], axis=0)
    visits = sum(
        gamma**t * _density(pairs, covariance) for t, covariance in enumerate(target)
    )
    width = len(world.drift)
    mean = (
        pairs[:, :width] @ np.asarray(world.drift).T
        + pairs[:, width:] @ np.asarray(world.control).T
    )
    noise = world.noise * generator.standard_normal(mean.shape)
    zero = world.state_values(np.zeros((1, width)), case.target, gamma)
    constant = (world.state_values(noise, case.target, gamma) - zero).mean()
    following = world.state_values(mean + noise, case.target, gamma)
    error = gamma * (
        following - world.state_values(mean, case.target, gamma) - constant
    )
    starts = world.state_values(world.reset(rows, generator), case.target, gamma)
    return float(np.mean((visits / logged) ** 2 * error**2)) + limit * float(
        starts.var()
    )


def _policies(
    case: LinearCase, limit: int
) -> tuple[tuple[LinearGaussian, int], tuple[LinearGaussian, int]]:
    horizon = math.ceil(math.log(1e-8) / math.log(case.gamma))
    return (case.behavior, limit), (case.target, horizon)


def _stages(
    world: LinearQuadratic, policy: LinearGaussian, steps: int
) -> list[np.ndarray]:
    """Covariance of (state, action) at each step; means are zero."""
    drift = np.asarray(world.drift)
    control = np.asarray(world.control)
    gain = np.asarray(policy.gain)
    state = world.start**2 * np.eye(len(drift))
    stages = []
    for _ in range(steps):
        both = np.vstack([np.eye(len(drift)), gain])
        pair = both @ state @ both.T
        pair[len(drift) :, len(drift) :] += policy.deviation**2 * np.eye(len(gain))
        stages.append(pair)
        move = np.hstack([drift, control])
        state = move @ pair @ move.T + world.noise**2 * np.eye(len(drift))
    return stages


def _density(pairs: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    return stats.multivariate_normal(np.zeros(len(covariance)), covariance).pdf(pairs)
