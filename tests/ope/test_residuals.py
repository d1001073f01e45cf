"""Residuals and the held-out kernel loss against double loops."""

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.learning import Resampling, draw_ensemble, start_values
from koffline.ope.out_of_bag import pass_over_rows
from tests.ope.problems import plain_q, prepared, stack

KINDS = ("discrete", "continuous")


def plain_residuals(problem, network, replica):
    found = []
    for row in range(problem.n_rows):
        now = plain_q(network, replica, problem.inputs[row : row + 1])[0]
        later = plain_q(network, replica, problem.next_inputs[row])  # (m, n)
        if problem.readout is None:
            value, following = now[0], later[:, 0].mean()
        else:
            value, following = now @ problem.readout[row], later[0] @ problem.next_probabilities[row]
        found.append(problem.rewards[row] + problem.discounts[row] * following - value)
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS)
def test_start_values_are_expectations_within_bounds(kind):
    problem = prepared(kind)
    network, _ = stack(problem)
    low, high = problem.value_bounds
    for start in range(3):
        outputs = plain_q(network, 1, problem.start_inputs[start])
        if problem.readout is None:
            plain = outputs[:, 0].mean()
        else:
            plain = outputs[0] @ problem.start_probabilities[start]
        expected = np.clip(plain, low, high) * problem.reward_scale
        assert float(start_values(network, problem)[1, start]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_loss_is_the_u_statistic_of_unseen_rows(kind, monkeypatch):
    monkeypatch.setattr("koffline.ope.learning._MOST_ROWS", 13)
    problem = prepared(kind)
    network, table = stack(problem, replicas=3)
    ensemble = draw_ensemble(problem, 1, 2, seed=5)
    instruments = random_fourier_features(
        Gaussian(1.0), table.kernel_inputs.shape[1], 60, torch.Generator().manual_seed(1)
    )
    resampling, duals = Resampling(5, 0, ensemble.resampling.streams), torch.ones(2, 60).double()
    made = pass_over_rows(network, 1, resampling, instruments, duals, problem, ensemble.units)
    found = made.diagnostics(problem.reward_scale)
    psi = instruments(table.kernel_inputs).numpy()
    losses, ratios = [], []
    for replica in (1, 2):
        unseen = np.flatnonzero(ensemble.row_counts[replica].numpy() == 0)
        residual = plain_residuals(problem, network, replica)
        pairs = [(i, j) for i in unseen for j in unseen if i != j]
        off = sum(psi[i] @ psi[j] * residual[i] * residual[j] for i, j in pairs)
        diagonal = sum(residual[i] ** 2 for i in unseen)
        losses.append(off / len(pairs))
        ratios.append((off + diagonal) / diagonal)
    assert found["held_out_kernel_loss"] == pytest.approx(np.mean(losses) * problem.reward_scale**2, rel=1e-4)
    assert found["held_out_kernel_ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
    own = plain_residuals(problem, network, 0) * problem.reward_scale
    assert found["residual_mean"] == pytest.approx(own.mean(), abs=1e-5)
    assert found["residual_rms"] == pytest.approx(np.sqrt(np.mean(own**2)), rel=1e-5)
    np.testing.assert_allclose(made.sample(problem.reward_scale), own, atol=1e-5)
