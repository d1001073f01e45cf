"""GTD2 and SBEED against derivations that share nothing with them."""

import numpy as np
import pytest
import torch

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.dual_objectives import GradientTD2, SaddlePoint, projected_error
from koffline.dual_steps import dual_step
from koffline.errors import ConfigError
from koffline.fitting import Checkpointing, FitSettings, fit
from koffline.replicas import StackedMLP
from koffline.stacked_module import StackedModule
from koffline.stacked_tangents import forward_with_tangent
from koffline.steps import BatchSource
from tests.engine_problems import FORMS, SIZES, draws_of, make_table
from tests.test_replicas import module_of

# The first forward derivative of a process loads scripted code of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
PLAN = ReplicaPlan((0.01, 0.02, 0.01, 0.03), (1, 1, 2, 3))


def source_of(table, batch=9, plan=PLAN, form="state"):
    return BatchSource(table, None, plan, BatchSchedule(plan, len(table), batch), draws_of(form))


def networks(form, seeds=(1, 2, 3, 4), activation="relu", **extra):
    return StackedMLP.initialise(SIZES[form], seeds, activation, dtype=torch.float64, **extra)


def value_of(outputs, readout, draws=1):
    if draws > 1:
        outputs = outputs.unflatten(1, (-1, draws)).mean(dim=2)
    return outputs.squeeze(-1) if readout is None else (outputs * readout).sum(dim=-1)


def flat_gradient(function, flat):
    flat = flat.clone().requires_grad_()
    return torch.autograd.grad(function(flat).sum(), flat)[0]


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
@pytest.mark.parametrize("form", ["state", "discrete"])
def test_tangents_are_derivatives(form, activation):
    network = networks(form, activation=activation, scale=1.7, offset=0.3)
    generator = torch.Generator().manual_seed(3)
    way = torch.randn(network.flat.shape, generator=generator, dtype=torch.float64)
    x = make_table(form).inputs
    outputs, tangents, pull = forward_with_tangent(network, x, way)

    def run(flat):
        return network.with_flat(flat).forward(x)

    expected, expected_tangent = torch.func.jvp(run, (network.flat,), (way,))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(tangents, expected_tangent)
    one, two = (torch.randn(outputs.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    step = 1e-6  # differences of the first derivative along the direction are the Hessian's product with it
    ahead, behind = (
        flat_gradient(lambda flat: (run(flat) * two).sum(), network.flat + sign * step * way)
        for sign in (1, -1)
    )
    hessian = (ahead - behind) / (2 * step)
    plain = flat_gradient(lambda flat: (run(flat) * one).sum(), network.flat)
    torch.testing.assert_close(pull(one, two), plain + hessian, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(pull(one, None), plain)


def test_tangents_of_any_module_agree():
    network = networks("state", activation="tanh")
    general = StackedModule([module_of(network, replica) for replica in range(4)])
    x = make_table("state").inputs
    # The module orders its parameters as (out, in): go through the same direction by finite differences.
    way = torch.randn(general.flat.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs, tangents, pull = forward_with_tangent(general, x, way)
    step = 1e-6
    near = [general.with_flat(general.flat + sign * step * way).forward(x) for sign in (1, -1)]
    torch.testing.assert_close(tangents, (near[0] - near[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    one = torch.ones_like(outputs)
    gradients = [
        forward_with_tangent(general.with_flat(general.flat + sign * step * way), x, way)[2](one, None)
        for sign in (1, -1)
    ]
    hessian = (gradients[0] - gradients[1]) / (2 * step)
    torch.testing.assert_close(pull(torch.zeros_like(one), one), hessian, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gtd2_step_equals_the_published_update(form, activation):
    """θ and w move as Maei et al. write it, row by row, with the Hessian by autograd."""
    table, network = make_table(form), networks(form, activation=activation)
    source = source_of(table, form=form)
    with torch.no_grad():
        step = dual_step(GradientTD2(), source, network, PLAN, (0.9, 0.999), 1e-8)
        step._weights.normal_(generator=torch.Generator().manual_seed(4))
        weights = step._weights.clone()
        loss, gradient = step.compute(0, network)
        auxiliary = step._pending.clone()
    batch, _ = source.batch(0)
    for replica in range(2):
        rows = range(batch.rewards.shape[1])
        down, auxiliary_down = torch.zeros_like(network.flat[0]), torch.zeros_like(network.flat[0])
        w, total = weights[replica], 0.0
        for row in rows:

            def value(flat, replica=replica, row=row):
                outputs = (
                    network.select([replica]).with_flat(flat[None]).forward(batch.inputs[replica, row][None])
                )
                return value_of(
                    outputs, None if batch.readout is None else batch.readout[replica, row][None]
                )[0, 0]

            def following(flat, replica=replica, row=row):
                inputs = batch.next_inputs[replica].unflatten(0, (-1, batch.draws))[row]
                outputs = network.select([replica]).with_flat(flat[None]).forward(inputs)
                readout = None if batch.next_readout is None else batch.next_readout[replica, row][None]
                return value_of(outputs, readout, batch.draws)[0, 0]

            flat = network.flat[replica].clone()
            phi, phi_next = torch.func.grad(value)(flat), torch.func.grad(following)(flat)
            discount = batch.discounts[replica, row]
            delta = batch.rewards[replica, row] + discount * following(flat) - value(flat)
            product = phi @ w
            hessian = torch.func.jvp(torch.func.grad(value), (flat,), (w,))[1]
            up = (phi - discount * phi_next) * product - (delta - product) * hessian
            down -= up / len(rows)
            auxiliary_down -= (delta - product) * phi / len(rows)
            total += float(2 * delta * product - product**2) / len(rows)
        torch.testing.assert_close(gradient[replica], down)
        torch.testing.assert_close(auxiliary[replica], auxiliary_down)
        assert float(loss[replica]) == pytest.approx(total)


def linear(table, weights):
    """V = w·s without a bias: a network without hidden layers and its parameters (1, d + 1)."""
    flat = torch.cat((weights, torch.zeros(1, dtype=torch.float64)))[None]
    return StackedMLP((table.inputs.shape[1], 1), flat)


def test_gtd2_descends_the_projected_bellman_error():
    """At the optimal w the direction is the gradient of J = bᵀC⁻¹b, by finite differences of J."""
    table, plan = make_table("state"), ReplicaPlan((0.01,), (1,))
    source = source_of(table, len(table), plan)
    network = StackedMLP.initialise((3, 4, 1), [5], "tanh", dtype=torch.float64)

    def parts(flat):
        def run(parameters, x):
            return network.with_flat(parameters[None]).forward(x)[0, :, 0]

        phi = torch.func.jacrev(run)(flat, table.inputs)
        delta = table.rewards + table.discounts * run(flat, table.next_inputs) - run(flat, table.inputs)
        b, c = phi.mT @ delta / len(table), phi.mT @ phi / len(table)
        return b, c

    flat = network.flat[0].clone()
    b, c = parts(flat)
    best = torch.linalg.solve(c, b)
    step = dual_step(GradientTD2(), source, network, plan, (0.9, 0.999), 1e-8)
    with torch.no_grad():
        step._weights.copy_(best[None])
        loss, gradient = step.compute(0, network)
    assert float(loss) == pytest.approx(float(b @ best))

    def error(parameters):
        b, c = parts(parameters)
        return float(b @ torch.linalg.solve(c, b))

    for index in range(0, len(flat), 3):
        nudge = torch.zeros_like(flat)
        nudge[index] = 1e-5
        slope = (error(flat + nudge) - error(flat - nudge)) / 2e-5
        assert 2.0 * float(gradient[0, index]) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_gtd2_finds_the_td_solution_in_the_linear_case():
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=(300, 3)), generator.normal(size=300)
    following = 0.5 * x + 0.3 * generator.normal(size=(300, 3))
    rewards = x @ [1.0, -2.0, 0.5] + 0.1 * noise
    table = Table(*map(torch.as_tensor, (x, following, rewards, np.full(300, 0.9))))
    network = linear(table, torch.zeros(3, dtype=torch.float64))
    plan = ReplicaPlan((0.05,), (0,))
    settings = FitSettings(steps=1500, batch_size=300, schedule="cosine")
    for objective in (GradientTD2(), GradientTD2(auxiliary_rate=3.0)):
        found = fit(table, network, objective, plan, settings).network.flat[0].numpy()
        z = np.column_stack([x, np.ones(300)])
        z_next = np.column_stack([following, np.ones(300)])
        td = np.linalg.solve(z.T @ (z - 0.9 * z_next), z.T @ rewards)
        np.testing.assert_allclose(found, td, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_saddle_point_gradients_equal_autograd(form):
    table, network = make_table(form), networks(form)
    source, objective = source_of(table, form=form), SaddlePoint(hidden=(6,))
    with torch.no_grad():
        step = dual_step(objective, source, network, PLAN, (0.9, 0.999), 1e-8)
        step.update_before(0, network, torch.full((4, 1), 0.05, dtype=torch.float64))
        loss, gradient = step.compute(0, network)
    batch, _ = source.batch(0)
    test = value_of(step._test.forward(batch.inputs), batch.readout)

    def run(flat):
        value = value_of(network.with_flat(flat).forward(batch.inputs), batch.readout)
        following = network.with_flat(flat).forward(batch.next_inputs)
        next_value = value_of(following, batch.next_readout, batch.draws)
        return objective.loss(batch.rewards, batch.discounts, value, next_value, test)

    torch.testing.assert_close(gradient, flat_gradient(run, network.flat))
    torch.testing.assert_close(loss, run(network.flat))


def test_test_function_ascends():
    table, network = make_table("state"), networks("state")
    source = source_of(table)
    rates = torch.full((4, 1), 0.02, dtype=torch.float64)
    gains = []
    for ascent in (1, 10, 200):
        with torch.no_grad():
            step = dual_step(SaddlePoint(ascent_steps=ascent), source, network, PLAN, (0.9, 0.999), 1e-8)
            step.update_before(0, network, rates)
            gains.append(step.compute(0, network)[0])
    assert bool((gains[0] < gains[1]).all() and (gains[1] < gains[2]).all())
    batch, _ = source.batch(0)
    value, following = network.forward(batch.inputs)[..., 0], network.forward(batch.next_inputs)[..., 0]
    residual = batch.rewards + batch.discounts * following - value
    assert bool((gains[2] <= residual.square().mean(dim=-1) + 1e-9).all())  # the unconstrained maximum


def test_auxiliary_gradients_and_loss_agree_with_autograd():
    generator = torch.Generator().manual_seed(0)
    residual, estimate = (torch.randn(2, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    half = flat_gradient(lambda g: (residual - g).square().mean(dim=-1) / 2, estimate)
    torch.testing.assert_close(GradientTD2().compute_auxiliary_gradient(residual, estimate), half)
    up = flat_gradient(lambda f: -projected_error(residual, f), estimate)
    torch.testing.assert_close(SaddlePoint().compute_auxiliary_gradient(residual, estimate), up)
    by_hand = GradientTD2().loss(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.0]]), torch.tensor([[2.0, 1.0]]),
        torch.tensor([[4.0, 9.0]]), torch.tensor([[3.0, 1.0]]),
    )  # fmt: skip
    # residuals (1, 1); along = (0·3, 1·1); bend = (−2·3, 0·1)
    assert by_hand.tolist() == [pytest.approx((-6.0 - 0.0 + 0.0 - 1.0) / 2)]


@pytest.mark.parametrize("objective", [GradientTD2(), SaddlePoint(ascent_steps=2)], ids=["gtd2", "sbeed"])
def test_one_replica_equals_the_same_among_many(objective):
    table, network = make_table("state"), networks("state")
    settings = FitSettings(steps=30, batch_size=9)
    together = fit(table, network, objective, PLAN, settings)
    for replica in range(4):
        plan = ReplicaPlan((PLAN.learning_rates[replica],), (PLAN.batch_seeds[replica],))
        alone = fit(table, network.select([replica]), objective, plan, settings)
        torch.testing.assert_close(
            alone.network.flat[0], together.network.flat[replica], rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(alone.losses[:, 0], together.losses[:, replica], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("objective", [GradientTD2(), SaddlePoint(ascent_steps=2)], ids=["gtd2", "sbeed"])
def test_a_resumed_run_equals_an_unbroken_one(objective, tmp_path):
    table, network = make_table("state"), networks("state")
    settings = FitSettings(steps=40, batch_size=9)
    whole = fit(table, network, objective, PLAN, settings)

    class Stop(Exception):
        pass

    def stop(step, network):
        raise Stop

    checkpoint = Checkpointing(tmp_path / "run.pt", every=10)
    with pytest.raises(Stop):
        fit(table, network, objective, PLAN, settings, probe=stop, probe_every=25, checkpoint=checkpoint)
    resumed = fit(table, network, objective, PLAN, settings, checkpoint=checkpoint)
    assert torch.equal(resumed.network.flat, whole.network.flat)


@pytest.mark.parametrize("objective", [GradientTD2(), SaddlePoint()], ids=["gtd2", "sbeed"])
def test_divergence_is_recorded(objective):
    table, network = make_table("state"), networks("state")
    plan = ReplicaPlan((1e-3, 1e-3, 1e200, 1e-3), (1, 1, 2, 3))
    record = fit(table, network, objective, plan, FitSettings(steps=60, batch_size=9))
    assert record.diverged_at[2] is not None
    assert [step for replica, step in enumerate(record.diverged_at) if replica != 2] == [None] * 3
    assert bool(torch.isnan(record.network.flat[2]).all())


@pytest.mark.parametrize(
    "build",
    [
        lambda: GradientTD2(0.0),
        lambda: SaddlePoint(auxiliary_rate=float("inf")),
        lambda: SaddlePoint(ascent_steps=0),
        lambda: SaddlePoint(hidden=(0,)),
    ],
)
def test_bad_settings_are_refused(build):
    with pytest.raises(ConfigError, match="give"):
        build()
