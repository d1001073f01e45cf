"""Out-of-bag values: every row by the networks that did not draw its episode.

Tolerances: the networks read their inputs in float32.
"""

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.ope.evaluation import open_workspace
from tests.ope.problems import SOFT, discrete_log, plain_q


def test_means_over_the_networks_that_left_the_episode_out() -> None:
    settings = EvaluationSettings(gamma=0.9, steps=20, full_replicas=1, resampled_replicas=4)
    with open_workspace(discrete_log(), SOFT, settings) as workspace, torch.no_grad():
        fitted, values, problem = workspace.fitted, workspace.row_values, workspace.problem
    network, counts = fitted.heads["kloss"], fitted.ensemble.row_counts[1:].numpy()
    for row in range(problem.n_rows):
        unseen = [replica for replica in range(4) if counts[replica, row] == 0] or range(4)
        for found, inputs, readout in (
            (values.now, problem.inputs[row], problem.readout),
            (values.later, problem.next_inputs[row, 0], problem.next_probabilities),
        ):
            outputs = np.mean([plain_q(network, 1 + replica, inputs) for replica in unseen], axis=0)
            expected = np.clip(outputs @ readout[row], *problem.value_bounds) * problem.reward_scale
            np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-6)
    assert values.unseen == np.mean((counts == 0).any(axis=0))
