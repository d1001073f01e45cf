"""Random finite processes with exact values, as hypothesis strategies and as plain
functions of a seed.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from koffline.envs.finite import FiniteMDP


@dataclass(frozen=True, eq=False)
class FiniteCase:
    """A process under a policy, a full-support distribution over states, and a point in
    space per state.
    """

    mdp: FiniteMDP
    policy: np.ndarray  # (S, A)
    weights: np.ndarray  # (S,), positive, sums to one
    points: np.ndarray  # (S, 2), distinct
    gamma: float

    @property
    def moves(self) -> np.ndarray:
        """P_π, (S, S)."""
        return np.einsum("sa,sat->st", self.policy, self.mdp.transition)

    @property
    def gains(self) -> np.ndarray:
        """Expected reward given s and s', (S, S)."""
        joint = np.einsum(
            "sa,sat,sat->st", self.policy, self.mdp.transition, self.mdp.reward
        )
        return joint / self.moves

    @property
    def values(self) -> np.ndarray:
        """V^π, (S,)."""
        return self.mdp.state_values(self.policy, self.gamma)


def draw_finite_case(
    seed: int, states: int = 5, actions: int = 3, gamma: float = 0.9
) -> FiniteCase:
    """Every transition, action and state has positive probability; nothing
    terminates.
    """
    rng = np.random.default_rng(seed)
    mdp = FiniteMDP(
        transition=rng.dirichlet(np.full(states, 0.5), size=(states, actions)) * 0.99
        + 0.01 / states,
        reward=rng.normal(size=(states, actions, states)),
        terminal=np.zeros(states, dtype=bool),
        initial=rng.dirichlet(np.ones(states)),
    )
    return FiniteCase(
        mdp=mdp,
        policy=rng.dirichlet(np.ones(actions), size=states),
        weights=rng.dirichlet(np.full(states, 3.0)) * 0.9 + 0.1 / states,
        points=rng.normal(size=(states, 2)),
        gamma=gamma,
    )


# Arguments of draw_finite_case: the case is drawn in the test, where shape checks may
# use `random`.
finite_cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "states": st.integers(2, 6),
        "actions": st.integers(1, 3),
        "gamma": st.floats(0.0, 0.98),
    }
)
