"""The closed form against dense normal equations in numpy, gradient descent, and LSTD."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from koffline.batches import Table
from koffline.envs.finite import TSITSIKLIS_FEATURES, TSITSIKLIS_WEIGHTS, tsitsiklis_van_roy
from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import kernel_loss
from koffline.kernels import Gaussian, Linear, random_fourier_features
from koffline.solvers import RandomFourierFeatures, TileCoding, solve_kernel_loss, solve_lstd
from tests.engine_problems import FORMS, make_table
from tests.solvers.problems import cosines, exact_table, plain_kernel_solution, plain_rows


def residual_of(value, table):
    """r − Zθ through plain loops."""
    _, difference = plain_rows(table, value.features, value.constant)
    return table.rewards - torch.as_tensor(difference) @ value.weights


@pytest.mark.parametrize("weight", [None, 0.1, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_weights_solve_the_dense_normal_equations(form, weight):
    table = make_table(form)
    value = solve_kernel_loss(table, cosines, Gaussian(1.5), diag_weight=weight, ridge=1e-3, block_size=7)
    expected = plain_kernel_solution(table, cosines, 1.5, 1 / 40 if weight is None else weight, 1e-3)
    np.testing.assert_allclose(value.weights, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("weight", [None, 0.0, 0.3])
def test_loss_is_the_kernel_loss_of_its_residual(weight):
    table = make_table("state")
    value = solve_kernel_loss(table, cosines, Gaussian(1.0), diag_weight=weight, ridge=0.5)
    gram = Gaussian(1.0).gram(table.kernel_inputs)
    expected = kernel_loss(residual_of(value, table), gram, 1 / 40 if weight is None else weight)
    assert value.loss == pytest.approx(float(expected), rel=1e-9)


def test_ridge_pulls_toward_given_weights_but_leaves_the_constant():
    table, toward = make_table("state"), torch.arange(6, dtype=torch.float64)
    value = solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=0.2, toward=toward)
    expected = plain_kernel_solution(table, cosines, 1.0, 1 / 40, 0.2, toward.numpy())
    np.testing.assert_allclose(value.weights, expected, rtol=1e-9)
    stiff = solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1e9, toward=toward)
    torch.testing.assert_close(stiff.weights[:-1], toward[:-1], atol=1e-6, rtol=0.0)
    assert abs(float(stiff.weights[-1] - toward[-1])) > 0.1
    assert stiff.degrees_of_freedom == pytest.approx(1.0, abs=1e-6)


def test_gradient_descent_arrives_at_the_closed_form():
    table = make_table("state")
    _, difference = plain_rows(table, lambda x: x)
    difference, gram = torch.as_tensor(difference), Gaussian(2.0).gram(table.kernel_inputs)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    rate = 0.5 / float(torch.linalg.eigvalsh(difference.T @ gram @ difference / 40**2).max())
    for _ in range(5000):
        loss = kernel_loss(table.rewards - difference @ theta, gram, 1 / 40)
        (slope,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= rate * slope
    value = solve_kernel_loss(table, lambda x: x, Gaussian(2.0))
    torch.testing.assert_close(theta.detach(), value.weights, rtol=1e-6, atol=1e-8)
    assert value.loss <= float(loss.detach()) + 1e-15


@pytest.mark.parametrize("form", FORMS)
def test_lstd_solves_its_equations(form):
    table = make_table(form)
    now, difference = plain_rows(table, cosines)
    free = 4 if form == "discrete" else 1
    matrix = now.T @ difference / 40
    bound = np.append(np.ones(len(matrix) - free), np.zeros(free))
    penalty = 0.01 * np.abs(np.diag(matrix)[:-free]).mean() * np.diag(bound)
    expected = np.linalg.solve(matrix + penalty, now.T @ table.rewards.numpy() / 40)
    value = solve_lstd(table, cosines, ridge=0.01)
    np.testing.assert_allclose(value.weights, expected, rtol=1e-7, atol=1e-9)
    assert value.degrees_of_freedom == pytest.approx(np.trace(matrix @ np.linalg.inv(matrix + penalty)))
    diagonal = np.abs(np.diag(matrix))
    unit = np.sqrt(np.where(bound == 1.0, diagonal[:-free].max(), diagonal[-free:].max()))
    assert value.condition == pytest.approx(np.linalg.cond((matrix + penalty) / np.outer(unit, unit)))


def test_linear_kernel_gives_lstd():
    """(Feng et al. 2019, cor:same_as_td)"""
    table = make_table("state")
    ones = torch.ones(40, 1, dtype=torch.float64)
    table = replace(table, kernel_inputs=torch.cat((cosines(table.inputs), ones), dim=1))
    value, lstd = solve_kernel_loss(table, cosines, Linear()), solve_lstd(table, cosines)
    torch.testing.assert_close(value.weights, lstd.weights, rtol=1e-6, atol=1e-8)
    assert value.loss == pytest.approx(0.0, abs=1e-14)
    assert lstd.loss == pytest.approx(0.0, abs=1e-14)


def test_one_hot_features_give_the_exact_values_of_a_finite_process():
    """Rows weighted by their probabilities leave no sampling error: any kernel finds V^π."""
    table, weights, values = exact_table()
    for kernel in (Gaussian(0.7), Linear()):
        if isinstance(kernel, Linear):
            table = replace(table, kernel_inputs=table.inputs)
        value = solve_kernel_loss(table, lambda x: x, kernel, constant=False, row_weights=weights)
        torch.testing.assert_close(value.values(torch.eye(len(values))), values, rtol=1e-6, atol=1e-8)
    lstd = solve_lstd(table, lambda x: x, constant=False, row_weights=weights)
    torch.testing.assert_close(lstd.weights, values)


def test_the_diverging_chain_is_solved():
    """TD runs away on it; the closed form is LSTD, off by sampling error (about 0.5/√2000) alone."""
    rng = np.random.default_rng(0)
    mdp, features = tsitsiklis_van_roy(), torch.tensor(TSITSIKLIS_FEATURES, dtype=torch.float64)
    states = rng.integers(4, size=2000)
    outcome = mdp.step(states, np.zeros(2000, dtype=np.int64), rng)
    inputs, following = features[states], features[np.asarray(outcome.state)]
    table = Table(
        inputs, following, torch.as_tensor(outcome.reward), torch.as_tensor(1.0 - outcome.terminated)
    )
    value = solve_kernel_loss(table, lambda x: x, Linear(), constant=False)
    torch.testing.assert_close(
        value.weights, solve_lstd(table, lambda x: x, constant=False).weights, rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(value.weights, TSITSIKLIS_WEIGHTS, atol=0.05)


def test_redundant_tiles_need_no_ridge():
    """Each tiling sums to one: singular equations, one function. A tiling without the constant spans less."""
    generator = torch.Generator().manual_seed(0)
    table = make_table("state", rows=60)
    table = replace(table, inputs=table.inputs[:, :1], next_inputs=table.next_inputs[:, :1])
    tiles = TileCoding((-2.0,), (2.0,), (3,), 2)
    value = solve_kernel_loss(table, tiles, Gaussian(1.0))
    assert value.condition == np.inf
    assert value.degrees_of_freedom < tiles.count
    _, difference = plain_rows(table, tiles)
    gram = Gaussian(1.0).gram(table.kernel_inputs).numpy()
    scaled = np.linalg.cholesky(gram + 1e-12 * np.eye(60)).T / 60
    best = np.linalg.lstsq(scaled @ difference, scaled @ table.rewards.numpy(), rcond=1e-8)[0]
    least = np.square(scaled @ (table.rewards.numpy() - difference @ best)).sum()
    assert value.loss == pytest.approx(least, rel=1e-6)
    probe = torch.rand(5, 1, generator=generator)
    lstd = solve_lstd(table, tiles)
    assert bool(torch.isfinite(lstd.values(probe)).all())
    assert lstd.loss == pytest.approx(0.0, abs=1e-14)


def test_values_of_actions_read_their_row():
    table = make_table("discrete")
    value = solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1e-3)
    now, _ = plain_rows(table, cosines)
    found = value.values(table.inputs.numpy(), table.readout.numpy())
    np.testing.assert_allclose(found, now @ value.weights.numpy(), rtol=1e-12)
    with pytest.raises(DataError, match=r"no readout; give \(M, d\) and a readout \(M, 4\)"):
        value.values(table.inputs)
    with pytest.raises(DataError, match="a readout; give"):
        solve_lstd(make_table("state"), cosines).values(table.inputs, table.readout)


def test_an_unbounded_loss_is_refused_with_the_remedy():
    """Twelve features for twelve rows: without the diagonal the quadratic form has negative curvature."""
    table, features = make_table("state", rows=12), RandomFourierFeatures(0.5, 12)
    with pytest.raises(
        ConfigError, match=r"no minimum on these rows; raise the ridge or use diag_weight 0\.0833"
    ):
        solve_kernel_loss(table, features, Gaussian(0.3), diag_weight=0.0, ridge=1e-6)
    bounded = solve_kernel_loss(table, features, Gaussian(0.3), diag_weight=0.0, ridge=50.0)
    assert bool(torch.isfinite(bounded.weights).all())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ridge": -1.0}, ConfigError, "ridge is -1.0"),
        ({"diag_weight": 1.5}, ConfigError, "diag_weight is 1.5"),
        (
            {"toward": torch.zeros(3)},
            ConfigError,
            r"toward has shape \(3,\); give one weight per parameter, \(6,\)",
        ),
        ({"block_size": 0}, ConfigError, "block_size is 0"),
        ({"row_weights": torch.ones(3)}, DataError, r"row_weights has shape \(3,\); give 40"),
        ({"row_weights": -torch.ones(40)}, DataError, "not negative"),
        ({"row_weights": torch.zeros(40)}, DataError, "all zero"),
        ({"features": lambda x: x[:, 0]}, DataError, r"gave \(1,\) for 1 rows; give a tensor \(N, F\)"),
        ({"features": lambda x: x[:, :0]}, DataError, r"gave \(1, 0\) for 1 rows; .* F > 0"),
        ({"features": lambda x: x.numpy()}, DataError, "gave ndarray for 1 rows"),
        ({"features": lambda x: x / 0.0}, DataError, "NaN or infinite"),
    ],
)
def test_bad_arguments(changes, error, message):
    arguments = {"features": cosines, "kernel": Gaussian(1.0), **changes}
    with pytest.raises(error, match=message):
        solve_kernel_loss(make_table("state"), **arguments)


def test_one_row_has_no_u_statistic():
    table = make_table("state", rows=1)
    with pytest.raises(DataError, match="needs two rows"):
        solve_kernel_loss(table, cosines, Gaussian(1.0), diag_weight=0.5, ridge=1.0)
    assert solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1.0).rows == 1


def test_random_features_of_the_kernel_come_close_to_it():
    """With 20,000 features each kernel value is off by about 0.01; values follow."""
    table = make_table("state", rows=200)
    psi = random_fourier_features(Gaussian(1.0), 3, 20_000, torch.Generator().manual_seed(0))
    exact = solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1e-2)
    approximate = solve_kernel_loss(table, cosines, psi, ridge=1e-2)
    gap = (exact.values(table.inputs) - approximate.values(table.inputs)).square().mean().sqrt()
    assert float(gap / exact.values(table.inputs).std()) < 0.1
