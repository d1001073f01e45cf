"""Weights of rows by the policy's visits some steps before: a doubly robust correction
between that by the visits of rows and that by whole episodes.

With ω(x) the ratio of the policy's visits to the log's rows and ρ the ratio of the
probabilities of an action, a row k steps after row j has the weight γᵏ ω(x_j) ρ_{j+1}
… ρ_{j+k}; a row fewer than k steps after its start has that of its episode. For k = 0
this is what `drl` does, for k beyond all episodes what `dr` does. In expectation all are
right for any Q if ω is. If something that matters is not in the state, ω(x) does not
see it, and the ratios of the k actions before do, as far as these actions made it.
(Between Kallus & Uehara 2020 and Jiang & Li 2016)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from koffline.data.units import cluster_sums
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.log.problem import EvaluationProblem
from koffline.ope.workspace import Workspace

_FEATURES = 200
_RIDGE = 1e-2  # relative to the mean square of all features


@dataclass(frozen=True)
class Corrections:
    """What weighted residuals add to the networks' mean value of start states, each
    with its standard error over episodes, by depth k.

    ``plain``: by the weights. ``centred``: by what of the weights is not explained by
    the row's state and action, which errors of Q that depend on these alone do not
    move.
    """

    plain: dict[int, tuple[float, float]]
    centred: dict[int, tuple[float, float]]


def corrections(workspace: Workspace, depths: Sequence[int]) -> Corrections:
    """Corrections for these depths, by residuals of networks that have not seen the
    row.

    Only for logs in memory with whole episodes of equal weight. Raises DataError and
    PolicyError where action probabilities are missing.
    """
    problem = workspace.problem
    values = workspace.held_values
    assert values.weights is not None
    ratios = action_ratios(workspace)
    starts = problem.episode_starts
    units = len(starts)
    count = problem.n_rows
    rewards = problem.rewards * problem.reward_scale
    residual = rewards + problem.discounts * values.later - values.now
    weights = np.clip(values.weights, 0.0, None)
    explained_by = explain_by_rows(problem, weights)

    def mean_of(weights: np.ndarray) -> tuple[float, float]:
        sums = np.add.reduceat(weights * residual, starts)
        of_clusters = cluster_sums(problem.clusters, sums)
        error = math.sqrt(len(of_clusters)) * float(of_clusters.std(ddof=1)) / count
        return float(sums.sum()) / count, error

    plain: dict[int, tuple[float, float]] = {}
    centred: dict[int, tuple[float, float]] = {}
    for depth in range(max(depths) + 1):
        if depth > 0:
            of_row_before = np.roll(weights * problem.discounts, 1)
            of_row_before[starts] = count / units
            weights = of_row_before * ratios
        if depth in depths:
            plain[depth] = mean_of(weights)
            centred[depth] = mean_of(weights - explained_by(weights))
    return Corrections(plain, centred)


def explain_by_rows(
    problem: EvaluationProblem, ratios: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Ridge regression of weights (N,) on states, actions, 200 random features of them
    and ω, each half of the episodes by the other half.

    ratios (N,): ω.
    """
    inputs = problem.kernel_inputs
    rows = torch.as_tensor(inputs)
    generator = torch.Generator().manual_seed(0)
    kernel = Gaussian(math.sqrt(2.0) * median_bandwidth(rows, 1000, generator))
    random = random_fourier_features(kernel, rows.shape[1], _FEATURES, generator)
    features = np.hstack(
        [
            math.sqrt(_FEATURES / 2) * random(rows).numpy(),
            inputs,
            np.ones((len(inputs), 1)),
            ratios[:, None],
        ]
    )
    unit = np.repeat(np.arange(len(problem.lengths)), problem.lengths)

    def explain(weights: np.ndarray) -> np.ndarray:
        explained = np.empty(len(weights))
        for half in (0, 1):
            is_in_half = unit % 2 == half
            known = features[~is_in_half]
            second = known.T @ known
            # the same for all: a column that hardly varies in this half has no slope
            ridge = _RIDGE * np.diag(second).mean() * np.eye(len(second))
            slopes = np.linalg.solve(second + ridge, known.T @ weights[~is_in_half])
            explained[is_in_half] = features[is_in_half] @ slopes
        return explained

    return explain


def action_ratios(workspace: Workspace) -> np.ndarray:
    """π(a|s) / β(a|s) of all rows (N,)."""
    episodes = workspace.episodes
    logs = np.maximum(episodes.log_weights, -700.0)
    before = np.roll(logs, 1)
    before[episodes.starts] = 0.0
    return np.exp(np.clip(logs - before, -700.0, 700.0))
