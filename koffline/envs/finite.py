"""Finite Markov decision processes with exact values, and continuous worlds discretised
on a grid.

Policies are tables (S, A) of probabilities. Entering a terminal state ends the episode;
its value is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.random import Generator

from koffline.envs.boxes import BoxWorld, Outcome, Pair, Tuples, draw_categories
from koffline.errors import ConfigError

PerState = Float[np.ndarray, " state"]
Probabilities = Float[np.ndarray, "state action"]
ActionValues = Probabilities
Numbers = Int[np.ndarray, " row"]
Points = Shaped[np.ndarray, "row 2"]
_SUM_TOLERANCE = 1e-9
TSITSIKLIS_FEATURES = (
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.0, 0.0, 1.0),
    (0.0, 0.0, 2.0),
    (0.0, 0.0, 0.0),
)
TSITSIKLIS_WEIGHTS = (0.8, 1.0, 0.0)
TSITSIKLIS_GAMMA = 1.0


@dataclass(frozen=True, eq=False)
class FiniteMDP:
    """A finite MDP: ``transition[s, a, s']``, ``reward`` per (s, a) or (s, a, s'),
    terminal flags, start.

    Raises ConfigError if probabilities do not sum to one.
    """

    transition: np.ndarray  # (S, A, S)
    # (S, A, S) once constructed; (S, A) is accepted and repeated over s'
    reward: np.ndarray
    terminal: np.ndarray  # (S,) bool
    initial: np.ndarray  # (S,), zero on terminal states

    def __post_init__(self) -> None:
        transition = np.asarray(self.transition, dtype=np.float64)
        reward = np.asarray(self.reward, dtype=np.float64)
        initial = np.asarray(self.initial, dtype=np.float64)
        if reward.shape == transition.shape[:2]:
            reward = np.repeat(reward[:, :, None], transition.shape[2], axis=2)
        terminal = np.asarray(self.terminal, dtype=bool)
        _require_probabilities("transition[s, a]", transition[~terminal])
        _require_probabilities(
            "initial over states that are not terminal", initial[~terminal]
        )
        vars(self).update(
            transition=transition, reward=reward, terminal=terminal, initial=initial
        )

    @property
    def n_states(self) -> int:
        """Number S of states, including terminal ones."""
        return self.transition.shape[0]

    @property
    def n_actions(self) -> int:
        """Number A of actions."""
        return self.transition.shape[1]

    def state_values(self, policy: Probabilities, gamma: float) -> PerState:
        """V^π, (S,): solves (I − γ P_π) V = r_π without moves from or to terminal
        states, where V = 0.
        """
        table = self._table(policy)
        moves = np.einsum("sa,sat->st", table, self.transition)
        gain = np.einsum("sa,sat,sat->s", table, self.transition, self.reward)
        moves = np.where(self.terminal[:, None] | self.terminal[None, :], 0.0, moves)
        return np.linalg.solve(
            np.eye(self.n_states) - gamma * moves, np.where(self.terminal, 0.0, gain)
        )

    def action_values(self, policy: Probabilities, gamma: float) -> ActionValues:
        """Q^π, (S, A): one step of any action, then the policy; zero on terminal
        states.
        """
        future = self.reward + gamma * self.state_values(policy, gamma)
        return np.where(
            self.terminal[:, None],
            0.0,
            np.einsum("sat,sat->sa", self.transition, future),
        )

    def policy_value(self, policy: Probabilities, gamma: float) -> float:
        """J = expected discounted return from the initial distribution."""
        return float(self.initial @ self.state_values(policy, gamma))

    def step(self, states: Numbers, actions: Numbers, generator: Generator) -> Outcome:
        """Draw the outcomes of states (N,) and actions (N,), both numbers."""
        following = draw_categories(self.transition[states, actions], generator)
        return Outcome(
            following, self.reward[states, actions, following], self.terminal[following]
        )

    def sample_transitions(
        self,
        n: int,
        policy: Probabilities,
        generator: Generator,
        states: PerState | None = None,
    ) -> Tuples:
        """Draw n independent transitions: s from ``states`` (S,) (default: uniform), a
        from the policy.
        """
        if states is None:
            states = ~self.terminal / np.sum(~self.terminal)
        _require_probabilities("states", states)
        at = draw_categories(np.broadcast_to(states, (n, self.n_states)), generator)
        actions = draw_categories(self._table(policy)[at], generator)
        following, rewards, terminated = self.step(at, actions, generator)
        return Tuples(at, actions, rewards, following, terminated)

    def _table(self, policy: Probabilities) -> Probabilities:
        policy = np.asarray(policy, dtype=np.float64)
        _require_probabilities("policy[s]", policy[~self.terminal])
        return policy


def _require_probabilities(name: str, rows: np.ndarray) -> None:
    gap = np.abs(rows.sum(axis=-1) - 1.0)
    if np.any(rows < 0) or np.any(gap > _SUM_TOLERANCE):
        raise ConfigError(
            f"{name} must be probabilities with sum one (off by {gap.max():.2g});"
            " normalise it"
        )


def value_iteration(
    mdp: FiniteMDP, gamma: float, tolerance: float = 1e-8
) -> ActionValues:
    """Optimal action values (S, A), accurate to ``tolerance`` or, if they are too
    large, to rounding.

    Zero on terminal states. gamma: below one.
    """
    assert 0.0 <= gamma < 1.0, "without a discount the values have no limit"
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


def tsitsiklis_van_roy() -> FiniteMDP:
    """The modified example of Tsitsiklis and Van Roy: five states, a linear value, and
    TD diverges.

    The arrows of the paper's figure are lost. This reconstruction agrees with all of
    its text: states s1 … s4 and a terminal one, in this order, γ = 1, values (w1, w2,
    w3, 2·w3, 0), exact at w* = (0.8, 1, 0). Episodes start in any of the first four
    states. (Feng et al. 2019, fig:toy_diverge)
    """
    transition = np.zeros((5, 1, 5))
    transition[0, 0, [1, 2]] = (0.8, 0.2)
    transition[[1, 2, 4], 0, [4, 3, 4]] = 1.0
    transition[3, 0, [3, 4]] = (0.95, 0.05)
    reward = np.zeros((5, 1))
    reward[1] = 1.0
    return FiniteMDP(
        transition, reward, np.arange(5) == 4, np.array([0.25, 0.25, 0.25, 0.25, 0.0])
    )


@dataclass(frozen=True)
class Grid:
    """Cells of a box, row-major: ``shape``: cells along each axis; ``low``, ``high``:
    corners of the box.
    """

    low: Pair
    high: Pair
    shape: tuple[int, int]

    @property
    def centres(self) -> Float[np.ndarray, "cell 2"]:
        """Centres of the cells in native units, (n1·n2, 2)."""
        low = np.asarray(self.low)
        cells = np.array(list(np.ndindex(self.shape)))
        return low + (cells + 0.5) * (np.asarray(self.high) - low) / np.asarray(
            self.shape
        )

    def cell_of(self, states: Points) -> Int[np.ndarray, " row"]:
        """The cell of each state (N, 2)."""
        place = np.floor(self._places(states)).astype(np.int64)
        return np.ravel_multi_index(tuple(place.T), self.shape, mode="clip")

    def weights_of(
        self, states: Points
    ) -> tuple[Int[np.ndarray, "row 4"], Float[np.ndarray, "row 4"]]:
        """The four cells around each state and their bilinear weights; constant outside
        the outer centres.
        """
        last = np.asarray(self.shape) - 1
        place = np.clip(self._places(states) - 0.5, 0.0, last)
        lower = np.minimum(np.floor(place).astype(np.int64), np.maximum(last - 1, 0))
        share = place - lower
        corners = list(np.ndindex(2, 2))
        around = [np.minimum(lower + corner, last) for corner in corners]
        cells = [np.ravel_multi_index(tuple(index.T), self.shape) for index in around]
        weights = [
            np.where(corner, share, 1.0 - share).prod(axis=1) for corner in corners
        ]
        return np.stack(cells, axis=1), np.stack(weights, axis=1)

    def _places(self, states: Points) -> Float[np.ndarray, "row 2"]:
        """States in units of cells: cell i of an axis reaches from i to i + 1."""
        corner = np.asarray(self.low, dtype=np.float64)
        share = (np.asarray(states, dtype=np.float64) - corner) / (
            np.asarray(self.high) - corner
        )
        return share * np.asarray(self.shape)


@dataclass(frozen=True, eq=False)
class GridProcess(Grid):
    """A finite process with one state per cell, and a last state for ended episodes."""

    mdp: FiniteMDP


def discretise(
    world: BoxWorld,
    shape: tuple[int, int],
    generator: Generator,
    samples: int,
    interpolate: bool = False,
) -> GridProcess:
    """Transitions estimated from ``samples`` steps of the world from every cell.

    Steps start from points uniform in the cell and lead to the cell of the next state.
    With ``interpolate`` they start from the centre and lead to the four cells around
    the next state, by weight: then one step moves values by less than a cell, and grids
    need fewer cells. Cells with a terminal centre are terminal.
    Memory: 16 (n1·n2)² A bytes.
    """
    cells = shape[0] * shape[1]
    actions = world.n_actions
    grid = Grid(world.low, world.high, shape)
    transition = np.zeros((cells + 1, actions, cells + 1))
    reward = np.zeros((cells + 1, actions))
    from_cell = np.repeat(np.arange(cells), samples)
    for action in range(actions):
        start = grid.centres[from_cell]
        if not interpolate:
            cell = (np.asarray(world.high) - np.asarray(world.low)) / np.asarray(shape)
            start = start + cell * generator.uniform(-0.5, 0.5, size=start.shape)
        state, gain, ended = world.step(
            start, np.full(cells * samples, action), generator
        )
        reward[:cells, action] = gain.reshape(cells, samples).mean(axis=1)
        table = transition[:, action]
        on = ~ended
        np.add.at(table, (from_cell[ended], cells), 1.0 / samples)
        if interpolate:
            to, weights = grid.weights_of(state[on])
        else:  # the cell of each state, with all weight
            to = grid.cell_of(state[on])[:, None]
            weights = np.ones((on.sum(), 1))
        np.add.at(table, (from_cell[on][:, None], to), weights / samples)
    transition[cells, :, cells] = 1.0
    terminal = np.append(world.is_terminal(grid.centres), True)
    mdp = FiniteMDP(transition, reward, terminal, ~terminal / np.sum(~terminal))
    return GridProcess(world.low, world.high, shape, mdp)
