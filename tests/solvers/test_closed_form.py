"""The closed form against dense normal equations in numpy and LSTD; what must not change its solution."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import kernel_loss
from koffline.kernels import Gaussian, Linear, random_fourier_features
from koffline.solvers import RandomFourierFeatures, UnitBox, linear, solve_kernel_loss, solve_lstd
from koffline.solvers.linear import LinearResidual, accumulate_forms
from tests.engine_problems import FORMS, make_table
from tests.solvers.problems import cosines, exact_table, plain_kernel_solution, plain_rows

SOLVERS = {
    "v_statistic": lambda table, **more: solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1e-3, **more),
    "mixture": lambda table, **more: solve_kernel_loss(
        table, cosines, Gaussian(1.0), diag_weight=0.2, ridge=1e-3, **more
    ),
    "lstd": lambda table, **more: solve_lstd(table, cosines, ridge=1e-3, **more),
}


@pytest.mark.parametrize("weight", [None, 0.1, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_weights_solve_the_dense_normal_equations(form, weight):
    """The constant, which the ridge leaves alone, is among them; the loss is that of the residual."""
    table = make_table(form)
    value = solve_kernel_loss(table, cosines, Gaussian(1.5), diag_weight=weight, ridge=1e-3)
    expected = plain_kernel_solution(table, cosines, 1.5, 1 / 40 if weight is None else weight, 1e-3)
    np.testing.assert_allclose(value.weights, expected, rtol=1e-8, atol=1e-10)
    now, difference = plain_rows(table, cosines)
    residual, gram = table.rewards - torch.as_tensor(difference) @ value.weights, Gaussian(1.5).gram
    loss = kernel_loss(residual, gram(table.kernel_inputs), 1 / 40 if weight is None else weight)
    assert value.loss == pytest.approx(float(loss), rel=1e-9)
    readout = None if table.readout is None else table.readout.numpy()
    np.testing.assert_allclose(value.values(table.inputs.numpy(), readout), now @ expected, rtol=1e-6)


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
    value = solve_kernel_loss(table, lambda x: x, Gaussian(0.7), constant=False, row_weights=weights)
    torch.testing.assert_close(value.values(torch.eye(len(values))), values, rtol=1e-6, atol=1e-8)
    lstd = solve_lstd(table, lambda x: x, constant=False, row_weights=weights)
    torch.testing.assert_close(lstd.weights, values)


@pytest.mark.parametrize("name", ["v_statistic", "residual_gradient", "lstd"])
def test_a_weight_of_three_is_three_copies_and_equal_weights_are_none(name):
    solvers = {
        **SOLVERS,
        "residual_gradient": lambda table, **more: solve_kernel_loss(
            table, cosines, Gaussian(1.0), diag_weight=1.0, **more
        ),
    }
    table, solver = make_table("state"), solvers[name]
    counts = torch.randint(1, 4, (40,), generator=torch.Generator().manual_seed(1)).double()
    copies = solver(table.select(torch.repeat_interleave(torch.arange(40), counts.long())))
    weighted = solver(table, row_weights=counts)
    torch.testing.assert_close(weighted.weights, copies.weights)
    torch.testing.assert_close(weighted.loss, copies.loss)
    assert torch.equal(solver(table, row_weights=torch.full((40,), 0.3)).weights, solver(table).weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["exact", "features"])
def test_blocks_of_any_size_agree(monkeypatch, form, kernel):
    """Rows that do not fit into memory are computed again, block by block."""
    table, chosen = make_table(form), Gaussian(0.8)
    weights = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kernel == "features":
        width = table.kernel_inputs.shape[1]
        chosen = random_fourier_features(chosen, width, 10, torch.Generator().manual_seed(0))
    residual = LinearResidual(table, cosines, weights=weights)
    whole = accumulate_forms(residual, chosen, block_size=40)
    monkeypatch.setattr(linear, "_MOST_NUMBERS", 200)
    assert residual.stored() is None
    assert len(list(residual.blocks())) > 4
    for block_size in (1, 7, 39, 41):
        blocks = accumulate_forms(residual, chosen, block_size=block_size)
        for name in ("total", "own", "square"):
            torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ridge": -1.0}, ConfigError, "ridge is -1.0"),
        ({"diag_weight": 1.5}, ConfigError, "diag_weight is 1.5"),
        ({"row_weights": torch.ones(3)}, DataError, r"row_weights has shape \(3,\); give 40"),
        ({"row_weights": -torch.ones(40)}, DataError, "not negative"),
        ({"features": lambda x: x[:, 0]}, DataError, r"gave \(1,\) for 1 rows; give a tensor \(N, F\)"),
        ({"features": lambda x: x / 0.0}, DataError, "NaN or infinite"),
    ],
)
def test_bad_arguments(changes, error, message):
    arguments = {"features": cosines, "kernel": Gaussian(1.0), **changes}
    with pytest.raises(error, match=message):
        solve_kernel_loss(make_table("state"), **arguments)


def test_an_unbounded_loss_and_bad_maps_are_refused():
    """Twelve features for twelve rows: without the diagonal the quadratic form has negative curvature."""
    table, features = make_table("state", rows=12), RandomFourierFeatures(0.5, 12)
    refused = (
        (
            lambda: solve_kernel_loss(table, features, Gaussian(0.3), diag_weight=0.0, ridge=1e-6),
            r"no minimum on these rows; raise the ridge or use .* 0\.0833",
        ),
        (lambda: RandomFourierFeatures(0.0, 8), "bandwidth is 0.0"),
        (lambda: RandomFourierFeatures(0.1, 7), "count is 7; give an even number"),
        (lambda: UnitBox((0.0,), (0.0,)), "give equal lengths and finite low < high"),
        (lambda: UnitBox((0.0,), (1.0, 1.0)), "give equal lengths and finite low < high"),
    )
    for make, message in refused:
        with pytest.raises(ConfigError, match=message):
            make()
    bounded = solve_kernel_loss(table, features, Gaussian(0.3), diag_weight=0.0, ridge=50.0)
    assert bool(torch.isfinite(bounded.weights).all())
