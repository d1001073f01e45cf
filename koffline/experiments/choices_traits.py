"""What the problems of `choices` are like, to explain who wins: noisy backups,
conditioning, errors.

The traits of a setting do not depend on a trained network:

- The variance of a state's backup r + γ V(s') over transitions, and over actions and
  transitions, as shares of Var V. It is the bias of a method that squares single
  residuals (double sampling).
- The conditioning of the losses. With the error e = V − V^π at n states, the kernel
  loss of infinitely many tuples is eᵀ (I − γP)ᵀ K (I − γP) e / n² and the squared
  Bellman error eᵀ (I − γP)ᵀ (I − γP) e / n. Descent removes the part of e in an
  eigenvector at a speed proportional to its eigenvalue. So beside the spread of the
  eigenvalues stands the depth: by how many powers of ten the eigenvalues of the
  directions in which V itself lies are below the largest, on average with V's squared
  parts as weights.

(Feng et al. 2019, thm:eigen)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from koffline.envs.boxes import BoxWorld
from koffline.envs.finite import discretise
from koffline.experiments.benchmark import (
    FORMAT,
    GAMMA,
    Probabilities,
    Problem,
    Scaling,
    SoftmaxProblem,
    scaling_of,
)
from koffline.experiments.result_files import digest_of, write_result
from koffline.kernels import Gaussian, Kernel

KERNEL = Gaussian(0.5)
LEADING = 10  # eigenvectors that count as leading
_FAR = 50  # number of the kernel loss's eigenvalue that is compared with its largest
_ROUNDING = 1e-16  # least eigenvalue, as a share of the largest
# cells per axis: for V at next states; for the matrices of the losses
_FINE = (40, 40)
_COARSE = (25, 20)
_SAMPLES = 64  # transitions per cell
_SEED = 20190534


@dataclass(frozen=True)
class TraitsCell:
    """The problems of a setting, equal but for their seeds, and the scaling of the
    kernel's inputs.
    """

    problems: tuple[SoftmaxProblem, ...]
    scaling: str

    @property
    def name(self) -> str:
        """Short unique name: world and a digest of all settings."""
        return f"traits-{self.problems[0].world}-{digest_of(FORMAT, self)}"


@dataclass(frozen=True, eq=False)
class TraitsResult:
    """Measures of a setting; those per log are (G,).

    value_variance: Var V. transition_share, backup_share: mean variance of a backup
    over transitions, and over actions and transitions, divided by Var V. grid_share:
    mean squared difference of the paper's grid from Monte Carlo, divided by Var V.
    kernel_spread: largest eigenvalue of the kernel loss by its 50th; the last ones are
    rounding. squared_spread: largest by smallest eigenvalue of the squared Bellman
    error. kernel_depth, squared_depth: see the module, of V less its mean.
    """

    value_variance: Float[np.ndarray, " log"]
    transition_share: Float[np.ndarray, " log"]
    backup_share: Float[np.ndarray, " log"]
    grid_share: Float[np.ndarray, " log"]
    kernel_spread: float
    squared_spread: float
    kernel_depth: float
    squared_depth: float


def write_traits(path: Path, cell: TraitsCell) -> None:
    """Measure the traits of a setting, whose problems lie in the same folder."""
    problems = [
        Problem.load(path.with_name(f"{settings.name}.npz"), settings)
        for settings in cell.problems
    ]
    write_result(path, vars(measure_traits(problems, cell.scaling)))


def measure_traits(problems: Sequence[Problem], scaling: str) -> TraitsResult:
    """Traits of problems that differ in their seeds only. Takes some seconds."""
    first = problems[0]
    variances = np.array([problem.monte_carlo.variance for problem in problems])
    backups = np.array([backup_variances(problem) for problem in problems])
    gaps = [
        np.mean((problem.paper.values - problem.monte_carlo.values) ** 2)
        for problem in problems
    ]
    bellman, values, centres = _bellman_operator(first)
    gram = gram_of(KERNEL, scaling_of(scaling, first)(centres))
    count = len(values)
    kernel_eigenvalues, kernel_depth = conditioning(
        bellman.T @ gram @ bellman / count**2, values
    )
    squared_eigenvalues, squared_depth = conditioning(
        bellman.T @ bellman / count, values
    )
    far = min(_FAR, count)
    return TraitsResult(
        value_variance=variances,
        transition_share=backups[:, 0] / variances,
        backup_share=backups[:, 1] / variances,
        grid_share=np.array(gaps) / variances,
        kernel_spread=float(kernel_eigenvalues[0] / kernel_eigenvalues[far - 1]),
        squared_spread=float(squared_eigenvalues[0] / squared_eigenvalues[-1]),
        kernel_depth=kernel_depth,
        squared_depth=squared_depth,
    )


def backup_variances(problem: Problem) -> tuple[float, float]:
    """Mean variance of r + γ V(s') given (s, a), averaged over π, and given s; V of a
    fine grid.

    The draws of an action are few: the variance of their mean is subtracted from the
    spread of the actions.
    """
    backups = problem.backups
    following = backups.next_states.reshape(-1, backups.next_states.shape[-1])
    values = _GridValues(problem)(following).reshape(backups.rewards.shape)
    return variances_of(
        backups.rewards + GAMMA * np.where(backups.terminated, 0.0, values),
        backups.weights,
    )


def variances_of(
    targets: Float[np.ndarray, "row action draw"],
    weights: Float[np.ndarray, "row action"],
) -> tuple[float, float]:
    """Mean over rows of E_a Var[target | a], and of Var[target]; both unbiased.
    weights: π(a|s).
    """
    draws = targets.shape[2]
    within = targets.var(axis=2, ddof=1)
    means = targets.mean(axis=2)
    centre = (weights * means).sum(axis=1, keepdims=True)
    between = (weights * (means - centre) ** 2).sum(axis=1)
    noise = (weights * (1.0 - weights) * within).sum(axis=1) / draws
    transition = float((weights * within).sum(axis=1).mean())
    return transition, transition + float((between - noise).mean())


def leading_share(
    values: Float[np.ndarray, "rate seed state"],
    problem: Problem,
    scaling: Scaling,
    kernel: Kernel,
) -> Float[np.ndarray, "rate seed"]:
    """Share of V's squared error at the log's first states in the kernel's ten leading
    eigenvectors.

    The noise of the Monte Carlo values is subtracted from both squares. NaN for
    diverged networks.
    """
    count = values.shape[-1]
    states = problem.backups.states
    truth = problem.monte_carlo
    _, vectors = np.linalg.eigh(gram_of(kernel, scaling(states)))
    leading = vectors[:, -LEADING:]
    noise = truth.standard_errors[:count] ** 2
    errors = values.astype(np.float64) - truth.values[:count]
    inside = ((errors @ leading) ** 2).sum(axis=-1) - noise @ (leading**2).sum(axis=1)
    return inside / ((errors**2).sum(axis=-1) - noise.sum())


def gram_of(kernel: Kernel, inputs: np.ndarray) -> Float[np.ndarray, "row row"]:
    """The kernel's values of all pairs of inputs (N, d), in double precision."""
    return kernel.gram(
        torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float64))
    ).numpy()


def conditioning(
    matrix: Float[np.ndarray, "row row"], values: Float[np.ndarray, " row"]
) -> tuple[Float[np.ndarray, " row"], float]:
    """Eigenvalues of a loss, falling and at least a rounding error, and the depth of
    centred values in it.
    """
    eigenvalues, vectors = np.linalg.eigh(matrix)
    falling = np.maximum(eigenvalues[::-1], _ROUNDING * eigenvalues[-1])
    parts = (vectors[:, ::-1].T @ (values - values.mean())) ** 2
    return falling, float(parts @ np.log10(falling[0] / falling) / parts.sum())


class _GridValues:
    """V^π at any states: of a fine grid with interpolation, in native units."""

    def __init__(self, problem: Problem) -> None:
        world = problem.world
        policy = problem.settings.target_policy()
        self._grid = discretise(
            world, _FINE, np.random.default_rng(_SEED), _SAMPLES, interpolate=True
        )
        self._values = self._grid.mdp.state_values(
            _table(self._grid.centres, world, policy), GAMMA
        )

    def __call__(self, states: np.ndarray) -> Float[np.ndarray, " row"]:
        cells, weights = self._grid.weights_of(states)
        return (weights * self._values[cells]).sum(axis=1)


def _bellman_operator(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """I − γ P_π (n, n), V^π (n,) and the states (n, 2) of the cells that are not
    terminal.
    """
    world = problem.world
    policy = problem.settings.target_policy()
    grid = discretise(
        world, _COARSE, np.random.default_rng(_SEED), _SAMPLES, interpolate=True
    )
    table = _table(grid.centres, world, policy)
    alive = np.flatnonzero(~grid.mdp.terminal)
    moves = np.einsum("sa,sat->st", table, grid.mdp.transition)[np.ix_(alive, alive)]
    values = grid.mdp.state_values(table, GAMMA)[alive]
    return np.eye(len(alive)) - GAMMA * moves, values, grid.centres[alive]


def _table(
    centres: np.ndarray, world: BoxWorld, policy: Probabilities
) -> Float[np.ndarray, "state action"]:
    """The policy at the cells' centres, and any action in the state of ended
    episodes.
    """
    table = np.asarray(policy(world.observe(centres)), dtype=np.float64)
    table = table / table.sum(axis=1, keepdims=True)
    return np.vstack([table, np.full((1, table.shape[1]), 1.0 / table.shape[1])])
