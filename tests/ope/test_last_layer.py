"""The exact last layer against a least-squares problem written down row by row in numpy."""

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.last_layer import accumulate_systems, last_layer, minimise_kernel_loss
from tests.ope.problems import plain_hidden, prepared, stack


def plain_features(network, replica, inputs, readout):
    """φ of one row as a loop: hidden units and a one, for each output times its readout, mean over draws."""
    rows = []
    for index in range(len(inputs)):
        draws = np.atleast_2d(inputs[index])
        units = np.mean(
            [np.append(plain_hidden(network, replica, draw[None])[0], 1.0) for draw in draws], axis=0
        )
        rows.append(units if readout is None else np.outer(units, readout[index]).ravel())
    return np.array(rows)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_minimiser_solves_the_ridged_least_squares_problem(kind, monkeypatch):
    """‖A θ − b‖² + λ ‖θ − θ₀‖² as one stacked problem, λ relative to the mean curvature."""
    problem = prepared(kind)
    network, table = stack(problem)
    weights = torch.rand(2, problem.n_rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    instruments = random_fourier_features(
        Gaussian(1.5), table.kernel_inputs.shape[1], 400, torch.Generator().manual_seed(1)
    )
    monkeypatch.setattr("koffline.ope.learning._MOST_ROWS", 17)  # several blocks, the last one ragged
    systems = accumulate_systems(network, table, instruments, weights)
    solved = last_layer(minimise_kernel_loss(network, systems, 1e-2)).numpy()
    psi = instruments(table.kernel_inputs).numpy()
    for replica in range(2):
        now = plain_features(network, replica, problem.inputs, problem.readout)
        later = plain_features(network, replica, problem.next_inputs, problem.next_probabilities)
        weighted = psi * weights[replica].numpy()[:, None]
        matrix = weighted.T @ (now - problem.discounts[:, None] * later) / problem.n_rows
        vector = weighted.T @ problem.rewards / problem.n_rows
        old = last_layer(network)[replica].numpy()
        scale = np.sqrt(1e-2 * np.mean(np.sum(matrix**2, axis=0)))
        stacked = np.vstack([matrix, scale * np.eye(len(old))])
        expected = np.linalg.lstsq(stacked, np.concatenate([vector, scale * old]), rcond=None)[0]
        np.testing.assert_allclose(solved[replica], expected, atol=2e-5)
