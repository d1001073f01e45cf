"""Finite processes by name: chains, grids, random ones, and the Graph and drawn grids
of the COBS benchmark.

(Voloshin et al. 2019, Empirical study of off-policy policy evaluation for reinforcement
learning)
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from koffline.envs.boxes import draw_categories
from koffline.envs.finite import FiniteMDP, Probabilities
from koffline.errors import ConfigError
from scripts.bench.embedded import EmbeddedMDP

_PAYS = {".": -0.1, "f": -0.2, "h": -1.0, "g": 4.0, "s": -0.1}
# s: start, f: field, h: hole, g: goal, where the episode ends.
GRIDWORLD = (
    "ssss....",
    "s....ff.",
    "s..h.ff.",
    "s....h..",
    "..f....h",
    ".hff....",
    "....h...",
    ".f.....g",
)


def chain(
    n_states: int = 7, slip: float = 0.1, end_rewards: tuple[float, float] = (0.0, 1.0)
) -> FiniteMDP:
    """States on a line, action 0 left and 1 right, reversed with chance ``slip``; both
    ends are terminal.

    Entering an end pays ``end_rewards``; the start is the middle.
    """
    transition = np.zeros((n_states, 2, n_states))
    for state in range(1, n_states - 1):
        transition[state, :, state - 1] = (1.0 - slip, slip)
        transition[state, :, state + 1] = (slip, 1.0 - slip)
    reward = np.zeros_like(transition)
    reward[:, :, 0], reward[:, :, -1] = end_rewards
    terminal = np.zeros(n_states, dtype=bool)
    terminal[[0, -1]] = True
    initial = np.zeros(n_states)
    initial[n_states // 2] = 1.0
    return FiniteMDP(transition, reward, terminal, initial)


def grid(
    width: int = 5,
    height: int = 5,
    slip: float = 0.2,
    goal: float = 1.0,
    terminal_goal: bool = True,
) -> FiniteMDP:
    """Rooms on a grid (state = x + width·y), moves up, right, down, left; walls hold.

    With chance ``slip`` the move is random. Reward −0.1 a step, plus ``goal`` on
    entering the far corner, where the episode ends (``terminal_goal``) or the agent is
    set back to the start; episodes start anywhere in the near half of the first row.
    """
    n = width * height
    transition = _grid_moves(width, height, 1, slip)
    initial = np.zeros(n)
    initial[: max(width // 2, 1)] = 1.0 / max(width // 2, 1)
    reward = np.full_like(transition, -0.1)
    reward[:, :, -1] += goal
    if not terminal_goal:
        transition[-1] = initial
    return FiniteMDP(
        transition,
        reward,
        np.append(np.zeros(n - 1, dtype=bool), terminal_goal),
        initial,
    )


def random_mdp(
    n_states: int,
    n_actions: int,
    generator: np.random.Generator,
    branching: int = 4,
    ending: float = 0.0,
) -> FiniteMDP:
    """Each pair leads to ``branching`` random states with Dirichlet weights; standard
    normal rewards.

    With ``ending`` > 0 the last state is terminal and every step enters it with that
    probability.
    """
    inner = n_states
    if ending:
        inner = n_states - 1
    transition = np.zeros((n_states, n_actions, n_states))
    for state in range(inner):
        for action in range(n_actions):
            to = generator.choice(inner, size=min(branching, inner), replace=False)
            transition[state, action, to] = (1.0 - ending) * generator.dirichlet(
                np.ones(len(to))
            )
            transition[state, action, -1] += ending
    initial = np.zeros(n_states)
    initial[:inner] = 1.0 / inner
    return FiniteMDP(
        transition,
        generator.standard_normal((n_states, n_actions)),
        np.arange(n_states) >= inner,
        initial,
    )


def graph(length: int = 4, dense: bool = True, slip: float = 0.25) -> FiniteMDP:
    """Two nodes per step: action 0 leads to the upper one with chance 1 − slip, action
    1 with chance slip.

    State 0 is the start, 2t − 1 and 2t are the upper and the lower node of step t; the
    episode ends at step ``length``. Entering an upper node pays 1, a lower −1: at every
    step, or at the last alone (not ``dense``). A policy that picks action 0 with chance
    q everywhere enters upper nodes with chance p = q (1 − slip) + (1 − q) slip and is
    worth (2p − 1) (1 − γ^length) / (1 − γ) with dense rewards, (2p − 1) γ^(length − 1)
    without.
    """
    if length < 1:
        raise ConfigError(f"length is {length}; give a whole number of steps from 1 on")
    if not 0.0 <= slip <= 1.0:
        raise ConfigError(f"slip is {slip}; give a probability")
    n_states = 2 * length + 1
    transition = np.zeros((n_states, 2, n_states))
    reward = np.zeros_like(transition)
    for state in range(n_states - 2):
        step = (state + 1) // 2 + 1  # the step that the action leads to
        upper = 2 * step - 1
        lower = 2 * step
        transition[state, :, upper] = (1.0 - slip, slip)
        transition[state, :, lower] = (slip, 1.0 - slip)
        if dense or step == length:
            reward[state, :, upper] = 1.0
            reward[state, :, lower] = -1.0
    terminal = np.arange(n_states) >= n_states - 2
    initial = np.eye(n_states)[0]
    return FiniteMDP(transition, reward, terminal, initial)


def graph_world(length: int = 4, dense: bool = True, slip: float = 0.25) -> EmbeddedMDP:
    """The graph seen as points: (step / length, ±1), the start (0, 0)."""
    states = np.arange(2 * length + 1)
    side = np.where(states == 0, 0.0, np.where(states % 2 == 1, 1.0, -1.0))
    return EmbeddedMDP(
        graph(length, dense, slip), np.column_stack([(states + 1) // 2 / length, side])
    )


def gridworld(rows: tuple[str, ...] = GRIDWORLD, slip: float = 0.1) -> FiniteMDP:
    """A grid drawn as text, moves up, right, down, left; with chance ``slip`` the move
    is random.

    State = column + width · row. Entering a cell pays: ``.`` and ``s`` −0.1, ``f``
    (field) −0.2, ``h`` (hole) −1, ``g`` (goal) 4 and the episode ends. Episodes start
    in any ``s``. Raises ConfigError.
    """
    width = len(rows[0]) if rows else 0
    cells = "".join(rows)
    if not width or any(len(row) != width for row in rows) or set(cells) - set(_PAYS):
        raise ConfigError(
            f"the grid has rows {rows}; draw equal rows of the letters {''.join(_PAYS)}"
        )
    if "s" not in cells or "g" not in cells:
        raise ConfigError(
            "the grid has no start or no goal; draw at least one 's' and one 'g'"
        )
    transition = _grid_moves(width, len(rows), -1, slip)
    starts = np.array([cell == "s" for cell in cells], dtype=np.float64)
    pays = np.array([_PAYS[cell] for cell in cells])
    reward = np.broadcast_to(pays, transition.shape)
    terminal = np.array([cell == "g" for cell in cells])
    return FiniteMDP(transition, reward, terminal, starts / starts.sum())


def grid_world(rows: tuple[str, ...] = GRIDWORLD, slip: float = 0.1) -> EmbeddedMDP:
    """The grid seen as points (column / width, row / height)."""
    states = np.arange(len(rows) * len(rows[0]))
    width = len(rows[0])
    points = np.column_stack([states % width / width, states // width / len(rows)])
    return EmbeddedMDP(gridworld(rows, slip), points)


def _grid_moves(width: int, height: int, up: int, slip: float) -> np.ndarray:
    """Moves up, right, down, left (S, 4, S) of state = x + width·y; walls hold; by
    ``slip`` any move.
    """
    n = width * height
    moves = np.zeros((n, 4, n))
    for state in range(n):
        x = state % width
        y = state // width
        for action, (dx, dy) in enumerate(((0, up), (1, 0), (0, -up), (-1, 0))):
            to = min(max(x + dx, 0), width - 1) + width * min(
                max(y + dy, 0), height - 1
            )
            moves[state, action, to] = 1.0
    return (1.0 - slip) * moves + slip * moves.mean(axis=1, keepdims=True)


def sample_episodes(
    mdp: FiniteMDP,
    n_episodes: int,
    policy: Probabilities,
    time_limit: int,
    generator: np.random.Generator,
) -> SimpleNamespace:
    """Columns of whole episodes, cut (not ended) after ``time_limit`` steps; rows by
    episode and step.
    """
    index = np.arange(n_episodes)
    state = draw_categories(
        np.broadcast_to(mdp.initial, (n_episodes, mdp.n_states)), generator
    )
    parts = []
    for t in range(time_limit):
        action = draw_categories(policy[state], generator)
        following, reward, terminated = mdp.step(state, action, generator)
        part = {
            "states": state,
            "actions": action,
            "rewards": reward,
            "next_states": following,
        }
        part |= {
            "terminated": terminated,
            "truncated": ~terminated & (t == time_limit - 1),
        }
        parts.append(part | {"episode_ids": index, "steps": np.full(len(index), t)})
        index = index[~terminated]
        state = following[~terminated]
        if not len(index):
            break
    columns = {
        name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    order = np.lexsort((columns["steps"], columns["episode_ids"]))
    return SimpleNamespace(**{name: column[order] for name, column in columns.items()})
