"""What each loss of `choices` would reach if training were perfect: exact minimisers on
a grid.

A world has a value per cell of a grid, interpolated between cells, and many transitions
from every cell. In this class V^π solves M v = g: M = I − γP, row by row the mean of
φ(s) − γφ(s'), and g the mean reward. With w the weight of the diagonal, n cells and K
the kernel's Gram matrix, the loss of infinitely many tuples is

    (1 − w) (g − Mv)ᵀ K (g − Mv) / n² + w E[(r + γV(s') − V(s))²] / n,

a quadratic form: its minimiser is one linear solve. w = 1 is residual gradient, whose
minimiser differs from V^π by double sampling; 1/150 is the plain V-statistic of a
mini-batch as large as the paper's, 1/5000 that of the whole log, which the paper's L_KV
estimates from a mini-batch. Next to the error of the minimiser stands how
well conditioned the loss is, because descent needs steps for every power of ten.

(Feng et al. 2019, equ:ourloss, thm:eigen, sec:batch_lv)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from koffline.envs.boxes import BoxWorld
from koffline.envs.finite import Grid
from koffline.experiments.benchmark import (
    FORMAT,
    GAMMA,
    Probabilities,
    Scaling,
    SoftmaxProblem,
)
from koffline.experiments.choices_traits import KERNEL, LEADING, conditioning, gram_of
from koffline.experiments.result_files import digest_of, write_result

# The weight of the diagonal, w, by name of the method that has it.
DIAG_WEIGHTS = {"rg": 1.0, "kloss": 1.0 / 150.0, "kloss_mixture": 1.0 / 5000.0}
_SHAPE = (25, 20)  # cells
_SAMPLES = 64  # transitions per cell and action
_SEED = 20190535

Matrix = Float[np.ndarray, "cell cell"]
PerCell = Float[np.ndarray, " cell"]


class Moments(NamedTuple):
    """Moments of transitions from every cell, whose values are v.

    bellman, gain: M and g, means by cell. second: Σ over cells of E[ddᵀ] with
    d = φ(s) − γφ(s'). cross: Σ of E[d r]. squared_reward: Σ of E[r²].
    """

    bellman: Matrix
    gain: PerCell
    second: Matrix
    cross: PerCell
    squared_reward: float

    @property
    def values(self) -> PerCell:
        """V^π of this class, where the mean residual of every cell is zero."""
        return np.linalg.solve(self.bellman, self.gain)

    def squared_residual(self, values: PerCell) -> float:
        """E[(r + γV(s') − V(s))²], mean over cells."""
        total = values @ self.second @ values - 2.0 * values @ self.cross
        return float(total + self.squared_reward) / len(values)

    def quadratic_form(self, gram: Matrix, diag_weight: float) -> Matrix:
        """The matrix of the loss as a function of v."""
        count = len(self.gain)
        pairs = self.bellman.T @ gram @ self.bellman / count**2
        return (1.0 - diag_weight) * pairs + diag_weight * self.second / count

    def minimiser(self, gram: Matrix, diag_weight: float) -> PerCell:
        """The values with the smallest loss, for a weight above zero."""
        count = len(self.gain)
        pairs = self.bellman.T @ gram @ self.gain / count**2
        right = (1.0 - diag_weight) * pairs + diag_weight * self.cross / count
        return np.linalg.solve(self.quadratic_form(gram, diag_weight), right)


@dataclass(frozen=True)
class ExactCell:
    """A setting of `choices`: its problem (whose seed changes nothing here), and the
    scaling of the kernel's inputs, "unit" or "z".
    """

    problem: SoftmaxProblem
    scaling: str

    @property
    def name(self) -> str:
        """Short unique name: world and a digest of all settings."""
        return f"exact-{self.problem.world}-{digest_of(FORMAT, self)}"


@dataclass(frozen=True, eq=False)
class ExactResult:
    """Measures of the losses of `DIAG_WEIGHTS`, in this order (W,).

    value_variance: Var V over cells. residual_share: E[δ²] at V^π / Var V; as V^π has no
    mean residual, all of it is noise of single transitions. errors: mean squared
    difference of each minimiser from V^π / Var V. leading: share of this difference in
    the kernel's ten leading eigenvectors. spread: largest by smallest eigenvalue of the
    loss. depth: by how many powers of ten the eigenvalues of the directions in which
    V^π lies are below the largest.
    """

    value_variance: float
    residual_share: float
    errors: Float[np.ndarray, " loss"]
    leading: Float[np.ndarray, " loss"]
    spread: Float[np.ndarray, " loss"]
    depth: Float[np.ndarray, " loss"]


def write_exact(path: Path, cell: ExactCell) -> None:
    """Measure a setting and write the result."""
    write_result(path, vars(measure_losses(cell)))


def measure_losses(cell: ExactCell) -> ExactResult:
    """Minimisers and conditioning of the losses in a setting. Takes some seconds."""
    world = cell.problem.build_world()
    grid = Grid(world.low, world.high, _SHAPE)
    alive = ~world.is_terminal(grid.centres)
    centres = grid.centres[alive]
    scaling = Scaling.to_unit_square(world)
    if cell.scaling == "z":
        scaling = Scaling.to_z_scores(centres)
    gram = gram_of(KERNEL, scaling(centres))
    moments = moments_of(world, cell.problem.target_policy(), grid)
    return measures_of(moments, gram)


def measures_of(moments: Moments, gram: Matrix) -> ExactResult:
    """The measures of a problem given by its moments and the kernel's Gram matrix."""
    values = moments.values
    variance = float(values.var())
    _, vectors = np.linalg.eigh(gram)
    leading = vectors[:, -LEADING:]
    errors: list[float] = []
    shares: list[float] = []
    spreads: list[float] = []
    depths: list[float] = []
    for weight in DIAG_WEIGHTS.values():
        error = moments.minimiser(gram, weight) - values
        errors.append(float((error**2).mean()) / variance)
        shares.append(float(((error @ leading) ** 2).sum() / (error**2).sum()))
        eigenvalues, depth = conditioning(moments.quadratic_form(gram, weight), values)
        spreads.append(float(eigenvalues[0] / eigenvalues[-1]))
        depths.append(depth)
    return ExactResult(
        value_variance=variance,
        residual_share=moments.squared_residual(values) / variance,
        errors=np.array(errors),
        leading=np.array(shares),
        spread=np.array(spreads),
        depth=np.array(depths),
    )


def moments_of(
    world: BoxWorld, policy: Probabilities, grid: Grid, samples: int = _SAMPLES
) -> Moments:
    """Moments over the world's own transitions from the centres of the cells that are
    not terminal.

    A transition ends between cells, so its value is interpolated, and the grid adds no
    noise of its own. samples: transitions per cell and action; π weighs the actions.
    """
    generator = np.random.default_rng(_SEED)
    centres = grid.centres
    alive = np.flatnonzero(~world.is_terminal(centres))
    table = np.asarray(policy(world.observe(centres)), dtype=np.float64)
    table = table / table.sum(axis=1, keepdims=True)
    cells = len(centres)
    start = np.repeat(alive, samples)
    rows = np.arange(len(start))
    bellman = np.zeros((cells, cells))
    second = np.zeros((cells, cells))
    gain = np.zeros(cells)
    cross = np.zeros(cells)
    squared_reward = 0.0
    for action in range(world.n_actions):
        following, rewards, ended = world.step(
            centres[start], np.full(len(start), action), generator
        )
        places, shares = grid.weights_of(following)
        steps = np.zeros((len(start), cells))  # φ(s) − γφ(s') by transition
        np.add.at(steps, (rows[:, None], places), -GAMMA * shares)
        steps[ended] = 0.0
        steps[rows, start] += 1.0
        weights = table[start, action] / samples
        weighted = steps * weights[:, None]
        np.add.at(bellman, start, weighted)
        np.add.at(gain, start, weights * rewards)
        second += steps.T @ weighted
        cross += weighted.T @ rewards
        squared_reward += float(weights @ rewards**2)
    square = np.ix_(alive, alive)
    return Moments(
        bellman=bellman[square],
        gain=gain[alive],
        second=second[square],
        cross=cross[alive],
        squared_reward=squared_reward,
    )
