"""Out-of-bag values: every row by the networks that did not draw its episode.

Tolerances: the networks read their inputs in float32.
"""

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.ope.evaluation import open_workspace
from koffline.ope.workspace import Workspace
from tests.ope.problems import SOFT, discrete_log, plain_q


def _workspace(starts: np.ndarray | None = None, **changes: object) -> Workspace:
    given = {"gamma": 0.9, "steps": 20, "full_replicas": 1, "resampled_replicas": 4, **changes}
    with open_workspace(discrete_log(), SOFT, EvaluationSettings(**given), starts) as workspace:
        return workspace


def test_means_over_the_networks_that_left_the_episode_out() -> None:
    workspace = _workspace()
    with torch.no_grad():
        fitted, values = workspace.fitted, workspace.row_values
    problem, network = workspace.problem, fitted.heads["kloss"]
    counts = fitted.ensemble.row_counts[1:].numpy()
    low, high = problem.value_bounds
    for row in range(problem.n_rows):
        unseen = [replica for replica in range(4) if counts[replica, row] == 0] or range(4)
        now = np.mean([plain_q(network, 1 + replica, problem.inputs[row]) for replica in unseen], axis=0)
        expected = np.clip(now @ problem.readout[row], low, high) * problem.reward_scale
        np.testing.assert_allclose(values.now[row], expected, rtol=1e-5, atol=1e-6)
        later = np.mean(
            [plain_q(network, 1 + replica, problem.next_inputs[row, 0]) for replica in unseen], axis=0
        )
        expected = np.clip(later @ problem.next_probabilities[row], low, high) * problem.reward_scale
        np.testing.assert_allclose(values.later[row], expected, rtol=1e-5, atol=1e-6)
    assert values.unseen == np.mean((counts == 0).any(axis=0))
