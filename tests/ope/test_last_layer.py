"""The exact last layer against a least-squares problem written down row by row in numpy."""

import dataclasses

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.last_layer import (
    accumulate_systems,
    dual_weights,
    last_layer,
    minimise_kernel_loss,
    with_last_layer,
)
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


def asked(kind):
    """A problem, two networks, its table, instruments and weights of rows (2, N)."""
    problem = prepared(kind)
    network, table = stack(problem)
    weights = torch.rand(2, problem.n_rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    instruments = random_fourier_features(Gaussian(1.5), table.kernel_inputs.shape[1], 400, generator)
    return problem, network, table, instruments, weights


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_minimiser_solves_the_ridged_least_squares_problem(kind, monkeypatch):
    """‖A θ − b‖² + λ ‖P (θ − θ₀)‖² as one stacked problem, λ relative to the mean curvature.

    P is the identity but for the same constant added to every output.
    """
    monkeypatch.setattr("koffline.ope.learning._MOST_ROWS", 17)  # several blocks, the last one ragged
    problem, network, table, instruments, weights = asked(kind)
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
        held = scale * np.eye(len(old))
        outputs = network.sizes[-1]
        held[-outputs:, -outputs:] -= scale * (1.0 - 1e-9**0.5) / outputs
        stacked = np.vstack([matrix, held])
        expected = np.linalg.lstsq(stacked, np.concatenate([vector, held @ old]), rcond=None)[0]
        np.testing.assert_allclose(solved[replica], expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_weights_of_rows_give_the_value_of_the_minimiser(kind):
    """From a last layer of zeros, cᵀθ is the mean of rewards weighted by ω = ψᵀα."""
    _, network, table, instruments, weights = asked(kind)
    systems = accumulate_systems(network, table, instruments, weights)
    old = last_layer(network)
    zero = with_last_layer(network, torch.zeros_like(old))
    starts = torch.rand(old.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alpha = dual_weights(network, systems.mean(weights.sum(dim=1)), starts, 1e-2)
    rewarded = (alpha @ instruments(table.kernel_inputs).mT) * weights * table.rewards
    values = (starts * last_layer(minimise_kernel_loss(zero, systems, 1e-2))).sum(dim=1)
    torch.testing.assert_close(rewarded.sum(dim=1) / weights.sum(dim=1), values, rtol=1e-8, atol=1e-8)


def test_the_level_of_all_values_is_free() -> None:
    """Rewards of one and a discount of 0.999: a network of zeros reaches 1000 in one solve."""
    _, network, table, instruments, weights = asked("discrete")
    table = dataclasses.replace(
        table, rewards=torch.ones_like(table.rewards), discounts=torch.full_like(table.discounts, 0.999)
    )
    zero = with_last_layer(network, torch.zeros_like(last_layer(network)))
    systems = accumulate_systems(zero, table, instruments, weights)
    solved = minimise_kernel_loss(zero, systems, 1e-3)
    torch.testing.assert_close(
        solved.forward(table.inputs.double()),
        torch.full((2, len(table), 3), 1000.0).double(),
        rtol=1e-3,
        atol=0,
    )
