"""Every closed form against loops in numpy, to 1e-8 and better."""

import numpy as np
import pytest
import torch

from koffline.ope.closed_form import doubly_robust_value, moments
from koffline.ope.closed_form.fits import CRITIC_RIDGES, fit, held_out_losses, kernel_path
from koffline.ope.closed_form.moments import folded_moments, folds_of_units, whole_moments
from koffline.ope.closed_form.sums import RowSums
from koffline.ope.importance.problem import RowValues
from tests import reference_closed_form as reference
from tests.ope.closed_form.systems import combined, plain, small_system

KINDS = pytest.mark.parametrize("kind", ["discrete", "continuous"])
RIDGE = 1e-3


@pytest.fixture(params=["discrete", "continuous"])
def system(request):
    return small_system(request.param, weighted=True)


def instruments(system, frequencies=None):
    chosen = system.instruments.frequencies if frequencies is None else frequencies
    return [reference.instrument(x, chosen.tolist()) for x in system.kernel_inputs.tolist()]


def agree(fit, theta, omega, system):
    np.testing.assert_allclose(fit.theta, theta, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(fit.weights(system), omega, rtol=1e-8, atol=1e-8)
    value = reference.start_mean(plain(system)) @ theta
    assert reference.weighted_reward(fit.weights(system).numpy(), plain(system)) == pytest.approx(
        value, rel=1e-8
    )


def test_mql_and_mwl_are_the_ridged_least_squares_problem_and_its_dual(system):
    theta, omega = reference.minimax(instruments(system), plain(system), RIDGE)
    agree(fit("mql", system, RIDGE), theta, omega, system)
    agree(fit("mwl", system, RIDGE), theta, omega, system)


def test_lstdq_is_the_solution_of_the_normal_equations(system):
    columns = plain(system)
    matrix, vector = reference.moments(list(columns["now"]), columns)
    ridged = matrix + reference.ridge_matrix(matrix, RIDGE, columns["constants"])
    omega = columns["now"] @ np.linalg.solve(ridged.T, reference.start_mean(columns))
    agree(fit("lstdq", system, RIDGE), np.linalg.solve(ridged, vector), omega, system)


def test_dualdice_is_a_regression_within_a_regression(system, monkeypatch):
    monkeypatch.setattr(moments, "_CRITICS", 16)
    columns, first = plain(system), system.instruments.frequencies[:, :8]
    critics, found = instruments(system, first), fit("dualdice", system, RIDGE)
    fits = [
        reference.minimax(critics, columns, RIDGE, reference.dice_metric(critics, columns, critic_ridge))
        for critic_ridge in CRITIC_RIDGES
    ]
    nearest = min(fits, key=lambda pair: np.abs(pair[0] - found.theta.numpy()).max())
    agree(found, *nearest, system)


def test_the_doubly_robust_value_is_its_sum(system):
    generator, columns = np.random.default_rng(1), plain(system)
    n, starts = len(system), len(columns["start_weights"])
    values = RowValues(generator.normal(size=n), generator.normal(size=n), generator.normal(size=starts), 1.0)
    omega = generator.gamma(2.0, size=n)
    expected = reference.doubly_robust(omega, columns, values.now, values.later, values.starts)
    assert doubly_robust_value(combined(system, values, omega)) == pytest.approx(expected, rel=1e-12)


def test_held_out_losses_are_sums_over_pairs_of_rows_of_one_fold(system):
    columns, critics = plain(system), instruments(system)
    fold_of = folds_of_units(system, 3, 0)
    losses = held_out_losses(system, folded_moments(system, 3, 0), kernel_path, (1e-2, 1.0))

    def solve(rows, ridge):
        return reference.minimax([critics[i] for i in rows], reference.select(columns, rows), ridge)[0]

    for loss, ridge in zip(losses.tolist(), (1e-2, 1.0), strict=True):
        expected = reference.held_out_loss(
            columns, critics, fold_of.tolist(), lambda rows, ridge=ridge: solve(rows, ridge)
        )
        assert loss == pytest.approx(expected, rel=1e-8)


@KINDS
def test_standard_errors_are_those_of_sums_over_units(kind):
    given = np.random.default_rng(2).normal(size=(7, 2))
    for starts in (None, given):
        system = small_system(kind, weighted=True, starts=starts)
        generator = np.random.default_rng(3)
        terms, values = generator.normal(size=len(system)), generator.normal(size=len(system.start_weights))
        expected = reference.standard_error(
            plain(system), system.unit_starts, terms, values, 7.5, system.fixed_starts
        )
        sums = RowSums.of(system, np.zeros(len(system)), terms, values)
        assert sums.standard_error(7.5) == pytest.approx(expected, rel=1e-12)


def test_folds_keep_episodes_together_and_a_single_episode_is_cut_into_stretches():
    system = small_system("discrete")
    fold_of = folds_of_units(system, 3, 0)
    assert all(len(set(fold_of[start : start + 10])) == 1 for start in system.unit_starts)
    stretches = folds_of_units(system, 10, 0)  # six episodes only
    assert (np.diff(stretches) >= 0).all()
    assert np.bincount(stretches).tolist() == [6] * 10
    for whole in (folded_moments(system, 3, 0).total, whole_moments(system)):
        expected = system.projected * system.row_weights.sum()
        torch.testing.assert_close(whole.projected, expected, rtol=1e-10, atol=1e-10)
