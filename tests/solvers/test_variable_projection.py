"""The reduced loss and its gradient by finite differences; networks trained on it."""

import pytest
import torch

from koffline.batches import ReplicaPlan
from koffline.kernels import Gaussian, random_fourier_features
from koffline.replicas import StackedMLP
from koffline.solvers import fit_variable_projection, reduced_loss, solve_kernel_loss
from koffline.solvers.linear import last_layer
from tests.engine_problems import FORMS, SIZES, make_table

QUICK = {"steps": 12, "ridge": 1e-3, "record_every": 5}


def make_network(form="state", seeds=(0, 1), activation="tanh"):
    return StackedMLP.initialise(SIZES[form], seeds, activation, dtype=torch.float64)


def make_kernel(table, count=30):
    generator = torch.Generator().manual_seed(7)
    return random_fourier_features(Gaussian(1.5), table.kernel_inputs.shape[1], count, generator)


@pytest.mark.parametrize(("ridge", "weight"), [(1e-3, None), (0.3, 0.3)])
@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_the_reduced_loss(form, ridge, weight):
    """Central differences of J itself, whose last layer is solved anew at each point."""
    table = make_table(form)
    psi = make_kernel(table)(table.kernel_inputs)

    def reduced(flat):
        return reduced_loss(make_network(form).with_flat(flat), table, psi, ridge, weight)[0]

    flat = make_network(form).flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reduced(flat).sum(), flat)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(*flat.shape, generator=generator, dtype=torch.float64)
    slope = (reduced(flat.detach() + 1e-5 * direction) - reduced(flat.detach() - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(dim=1), slope, rtol=1e-5, atol=1e-9)
    last = last_layer(make_network(form)).shape[1]
    assert float(gradient[:, :-last].abs().min()) > 0.0
    assert float(gradient[:, -last:].abs().max()) == 0.0


@pytest.mark.parametrize("weight", [None, 0.3])
def test_reduced_loss_is_the_minimum_of_the_closed_form(weight):
    table, network = make_table("discrete"), make_network("discrete", (5,))
    kernel = make_kernel(table)
    with torch.no_grad():
        loss, theta = reduced_loss(network, table, kernel(table.kernel_inputs), 0.05, weight)
    value = solve_kernel_loss(table, lambda x: network.features(x)[0], kernel, ridge=0.05, diag_weight=weight)
    torch.testing.assert_close(theta[0], value.weights)
    assert float(loss) > value.loss  # the ridge is part of it
    with torch.no_grad():
        bare, _ = reduced_loss(network, table, kernel(table.kernel_inputs), 0.0, weight)
    unridged = solve_kernel_loss(table, lambda x: network.features(x)[0], kernel, diag_weight=weight)
    assert float(bare) == pytest.approx(unridged.loss, rel=1e-6)


@pytest.mark.parametrize("batch_size", [40, 16])
@pytest.mark.parametrize("form", ["state", "discrete", "continuous"])
def test_replicas_together_are_replicas_alone(form, batch_size):
    table, kernel = make_table(form), make_kernel(make_table(form))
    settings = {**QUICK, "batch_size": batch_size}
    plan = ReplicaPlan((0.01, 0.03, 0.01), (4, 4, 9))
    network = make_network(form, (0, 1, 2))
    together = fit_variable_projection(table, network, kernel, plan, **settings)
    for replica, (rate, seed) in enumerate(zip(plan.learning_rates, plan.batch_seeds, strict=True)):
        alone = fit_variable_projection(
            table, network.select([replica]), kernel, ReplicaPlan((rate,), (seed,)), **settings
        )
        torch.testing.assert_close(
            together.network.flat[replica], alone.network.flat[0], rtol=1e-6, atol=1e-8
        )
        torch.testing.assert_close(together.losses[:, replica], alone.losses[:, 0], rtol=1e-6, atol=1e-12)


def test_a_diverged_replica_is_nan_and_the_other_goes_on():
    table, kernel, plan = make_table("state"), make_kernel(make_table("state")), ReplicaPlan.of_seeds((0, 1))
    network = make_network()
    alone = fit_variable_projection(
        table, network.select([1]), kernel, ReplicaPlan.of_seeds((1,)), **QUICK
    ).values(table.inputs)
    network.flat[0, 0] = torch.nan
    fitted = fit_variable_projection(table, network, kernel, plan, **QUICK)
    assert fitted.diverged_at == (0, None)
    assert fitted.solutions[0] is None
    assert bool(fitted.network.flat[0].isnan().all())
    values = fitted.values(table.inputs)
    assert bool(values[0].isnan().all())
    torch.testing.assert_close(values[1], alone[0])
