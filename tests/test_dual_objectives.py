"""Objectives with a second function, GTD2, SBEED and the memory, against derivations of
their own.
"""

from functools import partial

import numpy as np
import pytest
import torch

from koffline.batches import BatchSchedule, BatchSource, Table
from koffline.errors import ConfigError
from koffline.fitting import FitSettings, fit
from koffline.kernels import Gaussian
from koffline.objectives import (
    GradientTD2,
    KernelLoss,
    MemoryLoss,
    SaddlePoint,
    projected_error,
)
from koffline.replicas import ReplicaPlan, StackedMLP
from koffline.steps import make_step
from tests.engine_problems import FORMS, SIZES, make_table
from tests.refusals import refused

PLAN = ReplicaPlan((0.01, 0.02, 0.01, 0.03), (1, 1, 2, 3))
RATES = torch.tensor(PLAN.learning_rates, dtype=torch.float64)[:, None]


def networks(form="state", activation="relu"):
    return StackedMLP.initialise(
        SIZES[form], (1, 2, 3, 4), activation, dtype=torch.float64
    )


def prepared(objective, table, network):
    """The step, and its first mini-batch."""
    source = BatchSource(table, None, PLAN, BatchSchedule(PLAN, len(table), 9))
    return make_step(objective, source, network, PLAN), source.batch(0)[0]


def value_of(outputs, readout):
    return outputs.squeeze(-1) if readout is None else (outputs * readout).sum(dim=-1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("form", "activation"),
    [
        ("state", "relu"),
        ("state", "tanh"),
        ("discrete", "tanh"),
        ("continuous", "relu"),
    ],
)
def test_gtd2_step_equals_the_published_update(form, activation):
    """θ moves as Maei et al. write it, row by row, with the Hessian by autograd; w by
    its first Adam step.
    """
    table = make_table(form)
    network = networks(form, activation)
    step, batch = prepared(GradientTD2(), table, network)
    with torch.no_grad():
        step.second.normal_(generator=torch.Generator().manual_seed(4))
        weights = step.second.clone()
        loss, gradient = step.compute(0, network, None, RATES)
    for replica in range(2):
        w = weights[replica]
        alone = network.select([replica])
        sums = []
        flat = alone.flat[0].clone()

        def value(parameters, inputs, readout, alone=alone):
            return value_of(
                alone.with_flat(parameters[None]).forward(inputs[None]), readout
            )[0, 0]

        for row in range(9):
            readouts = (
                (None, None)
                if batch.readout is None
                else (batch.readout, batch.next_readout)
            )
            here, there = (
                (
                    inputs[replica, row],
                    None if readout is None else readout[replica, row],
                )
                for inputs, readout in zip(
                    (batch.inputs, batch.next_inputs), readouts, strict=True
                )
            )
            phi = torch.func.grad(value)(flat, *here)
            phi_next = torch.func.grad(value)(flat, *there)
            discount = batch.discounts[replica, row]
            delta = (
                batch.rewards[replica, row]
                + discount * value(flat, *there)
                - value(flat, *here)
            )
            product = phi @ w
            hessian = torch.func.jvp(
                partial(torch.func.grad(value), inputs=here[0], readout=here[1]),
                (flat,),
                (w,),
            )[1]
            up = (phi - discount * phi_next) * product - (delta - product) * hessian
            sums.append(
                (
                    -up / 9,
                    -(delta - product) * phi / 9,
                    (2 * delta * product - product**2) / 9,
                )
            )
        down, auxiliary, total = (sum(parts) for parts in zip(*sums, strict=True))
        torch.testing.assert_close(gradient[replica], down)
        torch.testing.assert_close(loss[replica], total)
        moved = weights[replica] - RATES[replica] * auxiliary / (auxiliary.abs() + 1e-8)
        torch.testing.assert_close(step.second[replica], moved, rtol=1e-6, atol=1e-8)


def test_gtd2_finds_the_td_solution_in_the_linear_case():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(100, 2))
    noise = generator.normal(size=100)
    following = 0.5 * x + 0.3 * generator.normal(size=(100, 2))
    rewards = x @ [1.0, -2.0] + 0.1 * noise
    table = Table(*map(torch.as_tensor, (x, following, rewards, np.full(100, 0.9))))
    network = StackedMLP((2, 1), torch.zeros(1, 3, dtype=torch.float64))
    settings = FitSettings(steps=300, batch_size=100, schedule="cosine")
    record = fit(
        table, network, GradientTD2(2.0), ReplicaPlan((0.2,), (0,)), settings
    ).network.flat[0]
    z, z_next = (np.column_stack([part, np.ones(100)]) for part in (x, following))
    td = np.linalg.solve(z.T @ (z - 0.9 * z_next), z.T @ rewards)
    np.testing.assert_allclose(record.numpy(), td, atol=5e-3)


@pytest.mark.parametrize("form", FORMS)
def test_saddle_point_gradients_equal_autograd(form):
    table = make_table(form)
    network = networks(form)
    objective = SaddlePoint(hidden=(6,))
    step, batch = prepared(objective, table, network)
    with torch.no_grad():
        loss, gradient = step.compute(0, network, None, 5.0 * RATES)
    tests = StackedMLP((SIZES[form][0], 6, SIZES[form][-1]), step.second)
    test = value_of(tests.forward(batch.inputs), batch.readout)

    def run(flat):
        value, next_value = (
            value_of(network.with_flat(flat).forward(inputs), readout)
            for inputs, readout in (
                (batch.inputs, batch.readout),
                (batch.next_inputs, batch.next_readout),
            )
        )
        return projected_error(
            batch.rewards + batch.discounts * next_value - value, test
        )

    flat = network.flat.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(run(flat).sum(), flat)[0])
    torch.testing.assert_close(loss, run(network.flat))


def test_test_function_ascends():
    table = make_table("state")
    network = networks("state")
    gains = []
    for ascent in (1, 10, 100):
        step, batch = prepared(SaddlePoint(ascent_steps=ascent), table, network)
        with torch.no_grad():
            gains.append(step.compute(0, network, None, 0.0 * RATES + 0.02)[0])
    assert bool((gains[0] < gains[1]).all() and (gains[1] < gains[2]).all())
    value = network.forward(batch.inputs)[..., 0]
    following = network.forward(batch.next_inputs)[..., 0]
    residual = batch.rewards + batch.discounts * following - value
    # the unconstrained maximum
    assert bool((gains[2] <= residual.square().mean(dim=-1) + 1e-9).all())


class FeatureKernel:
    """ψψᵀ of the objective's own features."""

    def __init__(self, objective):
        self._objective = objective

    def gram(self, x):
        psi = self._objective.kernel.gram(x)
        return psi @ psi.mT

    def diagonal(self, x):
        return self.gram(x).diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("memory", "weight"), [(0.0, 0.0), (0.9, 0.1), (0.99, 0.003)])
def test_on_full_batches_every_step_is_that_of_the_v_statistic(form, memory, weight):
    """What is remembered follows the parameters exactly where each step sees all
    rows.
    """
    table = make_table(form)
    network = networks(form)
    objective = MemoryLoss(Gaussian(1.0), memory, weight, features=64)
    # (1 − w) V + w mean δ² as (1 − u) U + u mean δ²: V itself has a share 1/n of its
    # diagonal
    plain = KernelLoss(FeatureKernel(objective), weight + (1.0 - weight) / 40)
    source, other = (
        BatchSource(
            table,
            loss_of_side.kernel,
            PLAN,
            BatchSchedule(PLAN, len(table), len(table)),
        )
        for loss_of_side in (objective, plain)
    )
    # continuations are drawn afresh, so that rows are not the same at every step
    if table.draws > 1:
        return
    steps = [
        make_step(loss_of_side, part, network, PLAN)
        for loss_of_side, part in ((objective, source), (plain, other))
    ]
    with torch.no_grad():
        for number in range(6):
            actual, expected = (
                step.compute(number, network, None, RATES) for step in steps
            )
            torch.testing.assert_close(actual[0], expected[0])
            torch.testing.assert_close(actual[1].clone(), expected[1].clone())
            network = network.with_flat(network.flat - 0.05 * expected[1].clone())


def test_the_loss_has_no_bias_of_its_diagonal():
    """‖E ψδ‖² of a fixed network from mini-batches of eight: the V-statistic adds E
    k(x, x) δ² / 8.
    """
    generator = torch.Generator().manual_seed(0)
    n = 40_000
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    noise = 3.0 * torch.randn(n, generator=generator, dtype=torch.float64)
    table = Table(x, x, noise, torch.zeros(n, dtype=torch.float64), kernel_inputs=x)
    objective = MemoryLoss(Gaussian(1.0), 0.9, 0.0, features=64)
    network = networks()
    with torch.no_grad():
        residual = table.rewards - network.forward(x[None]).squeeze(-1)  # (R, N)
        truth = (residual @ objective.kernel.gram(x) / n).square().sum(dim=1)
        source = BatchSource(table, objective.kernel, PLAN, BatchSchedule(PLAN, n, 8))
        step = make_step(objective, source, network, PLAN)
        losses = torch.stack(
            [step.compute(number, network, None, RATES)[0] for number in range(4000)]
        )
    # neighbours share what is remembered
    error = losses[100:].std(dim=0) / 3900**0.5 * (1.9 / 0.1) ** 0.5
    bias = residual.square().mean(dim=1) / 8
    assert (bias > 20 * error).all()
    assert ((losses[100:].mean(dim=0) - truth).abs() < 4 * error).all()


@pytest.mark.parametrize("memory", [1.0, -0.1, float("nan")])
def test_impossible_memories_are_refused(memory):
    with pytest.raises(ConfigError, match="memory is"):
        MemoryLoss(Gaussian(1.0), memory)


def test_an_object_that_is_no_objective_is_refused() -> None:
    with refused(ConfigError, "a dict is no objective; give it kernel"):
        make_step({}, None, None, None)
