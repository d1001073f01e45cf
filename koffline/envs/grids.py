"""A continuous two-dimensional world as a finite process on a grid of cells."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int, Shaped

from koffline.envs.boxes import BoxWorld, Pair
from koffline.envs.finite import FiniteMDP
from koffline.errors import ConfigError

Points = Shaped[np.ndarray, "row 2"]


@dataclass(eq=False)
class GridProcess:
    """A finite process with one state per cell, row-major, and a last state in which every episode ends."""

    low: Pair
    high: Pair
    shape: tuple[int, int]
    mdp: FiniteMDP = field(init=False)

    @property
    def centres(self) -> Float[np.ndarray, "cell 2"]:
        """Centres of the cells in native units, (n1·n2, 2)."""
        axes = [
            low + (np.arange(count) + 0.5) * (high - low) / count
            for low, high, count in zip(self.low, self.high, self.shape, strict=True)
        ]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)

    @property
    def cell_size(self) -> Float[np.ndarray, " 2"]:
        """Width and height of a cell in native units."""
        return (np.asarray(self.high) - np.asarray(self.low)) / np.asarray(self.shape)

    def cell_of(self, states: Points) -> Int[np.ndarray, " row"]:
        """The cell in which each state (N, 2) lies."""
        place = np.floor(places(states, self.low, self.high, self.shape)).astype(np.int64)
        return np.ravel_multi_index(tuple(place.T), self.shape, mode="clip")

    def weights_of(self, states: Points) -> tuple[Int[np.ndarray, "row 4"], Float[np.ndarray, "row 4"]]:
        """The four cells around each state and their bilinear weights; constant beyond the outer centres."""
        return bilinear_weights(places(states, self.low, self.high, self.shape), self.shape)

    def values_at(
        self, values: Float[np.ndarray, " state"], states: Points, interpolate: bool = False
    ) -> Float[np.ndarray, " row"]:
        """Values (n1·n2 + 1,) of cells read off at states (N, 2)."""
        if not interpolate:
            return values[self.cell_of(states)]
        cells, weights = self.weights_of(states)
        return (values[cells] * weights).sum(axis=1)


def places(states: Points, low: Pair, high: Pair, shape: tuple[int, int]) -> Float[np.ndarray, "row 2"]:
    """States of the box as places in units of cells: cell i of an axis reaches from i to i + 1."""
    corner = np.asarray(low, dtype=np.float64)
    share = (np.asarray(states, dtype=np.float64) - corner) / (np.asarray(high) - corner)
    return share * np.asarray(shape)


def bilinear_weights(
    place: Float[np.ndarray, "row 2"], shape: tuple[int, int]
) -> tuple[Int[np.ndarray, "row 4"], Float[np.ndarray, "row 4"]]:
    """The four cells (row-major) around each place and their weights; constant beyond the outer centres."""
    last = np.asarray(shape) - 1
    place = np.clip(place - 0.5, 0.0, last)
    lower = np.minimum(np.floor(place).astype(np.int64), np.maximum(last - 1, 0))
    share = place - lower
    cells, weights = [], []
    for corner in np.ndindex(2, 2):
        index = np.minimum(lower + corner, last)
        cells.append(index[:, 0] * shape[1] + index[:, 1])
        weights.append(np.where(corner, share, 1.0 - share).prod(axis=1))
    return np.stack(cells, axis=1), np.stack(weights, axis=1)


def discretise(
    world: BoxWorld,
    shape: tuple[int, int],
    generator: np.random.Generator,
    samples: int = 64,
    interpolate: bool = False,
    aggregate: bool = False,
) -> GridProcess:
    """Transitions estimated from ``samples`` steps of the world out of every cell.

    They start from the cell's centre, or with ``aggregate`` from points uniform in the cell. A step leads
    to the cell it ends in, or with ``interpolate`` to the four cells around it by weight: one step then moves
    values by less than a cell, and grids need fewer cells. Cells whose centre is terminal are terminal.
    Memory is 16 (n1·n2)² A bytes. Raises ConfigError.
    """
    if min(shape) < 1 or samples < 1:
        raise ConfigError(
            f"a grid of {shape} cells with {samples} samples cannot be made; give positive numbers"
        )
    cells, actions = shape[0] * shape[1], world.n_actions
    grid = GridProcess(world.low, world.high, shape)
    centres = grid.centres
    transition = np.zeros((cells + 1, actions, cells + 1))
    reward = np.zeros((cells + 1, actions))
    from_cell = np.repeat(np.arange(cells), samples)
    for action in range(actions):
        start = centres[from_cell]
        if aggregate:
            start = start + grid.cell_size * generator.uniform(-0.5, 0.5, size=start.shape)
        state, gain, ended = world.step(start, np.full(cells * samples, action), generator)
        reward[:cells, action] = gain.reshape(cells, samples).mean(axis=1)
        table, on = transition[:, action], ~ended
        np.add.at(table, (from_cell[ended], cells), 1.0 / samples)
        if interpolate:
            to, weights = grid.weights_of(state[on])
            np.add.at(table, (from_cell[on][:, None], to), weights / samples)
        else:
            np.add.at(table, (from_cell[on], grid.cell_of(state[on])), 1.0 / samples)
    transition[cells, :, cells] = 1.0
    terminal = np.append(world.is_terminal(centres), True)
    grid.mdp = FiniteMDP(transition, reward, terminal, ~terminal / np.sum(~terminal))
    return grid
