"""Linear systems with quadratic rewards: continuous actions of any dimension and values
in closed form.

x' = A x + B a + w with w ~ N(0, noise² I), reward = offset − xᵀQx − aᵀRa, start x ~
N(0, start² I), nothing terminates. A linear Gaussian policy a ~ N(K x, deviation² I)
has V(x) = −xᵀPx − c where P solves the discrete Lyapunov equation P = Q + KᵀRK + γ
MᵀPM, M = A + BK.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_discrete_lyapunov

from koffline.envs.boxes import Actions, Observations, Outcome, States
from koffline.errors import ConfigError

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LinearGaussian:
    """The policy a ~ N(gain · x, deviation² I); deterministic when ``deviation`` is
    0.
    """

    gain: Matrix  # (k, d)
    deviation: float = 0.0

    @property
    def deterministic(self) -> bool:
        """Whether every sample is the mean."""
        return self.deviation == 0.0

    def mean(
        self, observations: Float[np.ndarray, "row d"]
    ) -> Float[np.ndarray, "row k"]:
        """Mean actions (N, k)."""
        return observations.astype(np.float64) @ np.asarray(self.gain).T

    def sample(
        self, observations: Float[np.ndarray, "row d"], generator: np.random.Generator
    ) -> Float[np.ndarray, "row k"]:
        """Draw actions (N, k)."""
        centre = self.mean(observations)
        return centre + self.deviation * generator.standard_normal(centre.shape)


@dataclass(frozen=True)
class LinearQuadratic:
    """A vectorised world (see :mod:`scripts.bench.classic`) with unbounded continuous
    actions.
    """

    drift: Matrix  # A, (d, d)
    control: Matrix  # B, (d, k)
    state_cost: float = 1.0  # Q = state_cost · I
    action_cost: float = 0.1  # R = action_cost · I
    noise: float = 0.1
    start: float = 1.0
    offset: float = 0.0
    n_actions: None = None

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """No bounds: ± infinity for each of the k actions."""
        k = len(self.control[0])
        return (-math.inf,) * k, (math.inf,) * k

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw start states from N(0, start² I)."""
        return self.start * generator.standard_normal((n, len(self.drift)))

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """One step; the cost is that of the state before the step."""
        push = action @ np.asarray(self.control).T
        following = (
            state @ np.asarray(self.drift).T
            + push
            + self.noise * generator.standard_normal(state.shape)
        )
        cost = self.state_cost * np.sum(state**2, axis=1) + self.action_cost * np.sum(
            action**2, axis=1
        )
        return Outcome(following, self.offset - cost, np.zeros(len(state), dtype=bool))

    def observe(self, state: States) -> Observations:
        """The state itself."""
        return state.astype(np.float32)

    def state_values(
        self, states: Float[np.ndarray, "row d"], policy: LinearGaussian, gamma: float
    ) -> Float[np.ndarray, " row"]:
        """V^π of states (N, d), exact."""
        hessian, constant = self._quadratic(policy, gamma)
        return constant - np.einsum("ni,ij,nj->n", states, hessian, states)

    def policy_value(self, policy: LinearGaussian, gamma: float) -> float:
        """J = E V^π(x0), exact.

        Raises ConfigError where the discounted cost is infinite.
        """
        hessian, constant = self._quadratic(policy, gamma)
        return float(constant - self.start**2 * np.trace(hessian))

    def _quadratic(
        self, policy: LinearGaussian, gamma: float
    ) -> tuple[np.ndarray, float]:
        """P and −c of V(x) = −xᵀPx − c."""
        gain = np.asarray(policy.gain)
        control = np.asarray(self.control)
        closed = math.sqrt(gamma) * (np.asarray(self.drift) + control @ gain)
        radius = float(np.abs(np.linalg.eigvals(closed)).max())
        if radius >= 1.0:
            raise ConfigError(
                f"the discounted cost is infinite (spectral radius {radius:.3g}); use a"
                " smaller gain"
            )
        cost = self.state_cost * np.eye(len(closed)) + self.action_cost * gain.T @ gain
        hessian = solve_discrete_lyapunov(closed.T, cost)
        spread = (
            self.noise**2 * np.eye(len(closed))
            + policy.deviation**2 * control @ control.T
        )
        per_step = self.action_cost * policy.deviation**2 * len(
            gain
        ) + gamma * np.trace(hessian @ spread)
        return hessian, float((self.offset - per_step) / (1.0 - gamma))
