import math

import pytest
import torch

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.fitting import FitSettings, fit, threads
from koffline.objectives import CopyTarget, FittedIteration, ResidualGradient, TemporalDifference, fitted_q
from koffline.replicas import StackedMLP
from koffline.stacked_module import StackedModule
from tests.engine_problems import FORMS, OBJECTIVES, SIZES, draws_of, make_table
from tests.strategies import draw_finite_case
from tests.test_replicas import module_of
from tests.test_steps import plain_step

STEPS = FitSettings(steps=23, batch_size=9, record_every=5)


def network_of(form, seeds, dtype=torch.float64):
    return StackedMLP.initialise(SIZES[form], seeds, dtype=dtype)


def plain_fit(table, objective, form, network, seed, rate, settings):
    """One replica by torch's own Adam; returns last and averaged parameters, and all losses."""
    parameter = torch.nn.Parameter(network.flat.clone())
    target = network.flat.clone() if objective.next_from == "target" else None
    adam = torch.optim.Adam([parameter], lr=rate)
    schedule = BatchSchedule(ReplicaPlan((rate,), (seed,)), len(table), settings.batch_size)
    losses, tail = [], []
    for step in range(settings.steps):
        rows, picks = schedule.rows(step)[0], schedule.draws(step, table.draws)[0]
        trained = network.with_flat(parameter.detach())
        held = None if target is None else network.with_flat(target)
        loss, gradient = plain_step(table, objective, form, rows, picks, trained, held, 0)
        if settings.schedule == "cosine":
            adam.param_groups[0]["lr"] = rate * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
        parameter.grad = gradient
        adam.step()
        losses.append(loss[0])
        if target is not None:
            rule = objective.target
            if isinstance(rule, CopyTarget):
                every = rule.every or len(table) // settings.batch_size
                target = parameter.detach().clone() if (step + 1) % every == 0 else target
            else:
                target = target + rule.rate * (parameter.detach() - target)
        if step >= settings.steps - round(settings.tail_average * settings.steps):
            tail.append(parameter.detach().clone())
    return parameter.detach(), sum(tail) / max(len(tail), 1), torch.stack(losses)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_fit_is_the_plain_loop_for_every_replica(name, form):
    table, objective = make_table(form), OBJECTIVES[name]
    settings = FitSettings(
        steps=23, batch_size=9, record_every=1, schedule="cosine", tail_average=0.3, draws=draws_of(form)
    )
    plan = ReplicaPlan((1e-2, 1e-3, 3e-3), (5, 5, 6))
    network = network_of(form, (1, 1, 2))
    before = network.flat.clone()
    record = fit(table, network, objective, plan, settings)
    assert torch.equal(network.flat, before)
    assert record.diverged_at == (None, None, None)
    assert record.loss_steps == tuple(range(1, 24))
    for replica in range(3):
        seed, rate = plan.batch_seeds[replica], plan.learning_rates[replica]
        last, average, losses = plain_fit(
            table, objective, form, network.select([replica]), seed, rate, settings
        )
        torch.testing.assert_close(record.network.flat[replica], last[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(record.averaged.flat[replica], average[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(record.losses[:, replica], losses, rtol=1e-9, atol=1e-11)
    assert record.best is record.averaged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["state", "discrete"])
@pytest.mark.parametrize("name", ["kloss", "rg", "td0", "fvi", "fqe"])
def test_a_replica_does_not_notice_the_others(name, form, dtype):
    table, objective = make_table(form, dtype=dtype), OBJECTIVES[name]
    sets = tuple(
        torch.randint(40, (30 + 5 * i,), generator=torch.Generator().manual_seed(i)) for i in range(7)
    )
    rates = tuple(1e-3 * (1 + i) for i in range(7))
    many = ReplicaPlan(rates, tuple(range(7)), sets, tuple(range(7)))
    together = fit(table, network_of(form, range(7), dtype), objective, many, STEPS)
    alone_plan = ReplicaPlan(rates[4:5], (4,), sets[4:5], (0,))
    alone = fit(table, network_of(form, [4], dtype), objective, alone_plan, STEPS)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(together.network.flat[4], alone.network.flat[0], rtol=0.0, atol=tolerance)
    torch.testing.assert_close(together.losses[:, 4], alone.losses[:, 0], rtol=0.0, atol=10 * tolerance)


def test_any_module_is_fitted_the_same():
    table, plan = make_table("state"), ReplicaPlan((1e-2, 1e-3), (1, 1))
    fast = network_of("state", (0, 1))
    general = StackedModule([module_of(fast, replica) for replica in range(2)])
    records = [fit(table, stack, OBJECTIVES["kloss"], plan, STEPS) for stack in (fast, general)]
    values = [record.network.forward(table.inputs).detach() for record in records]
    torch.testing.assert_close(values[0], values[1])


def test_history_is_the_mean_over_its_steps():
    table, plan = make_table("state"), ReplicaPlan.of_seeds(range(2))
    network = network_of("state", range(2))
    fine = fit(table, network, ResidualGradient(), plan, FitSettings(steps=25, batch_size=9, record_every=1))
    coarse = fit(
        table, network, ResidualGradient(), plan, FitSettings(steps=25, batch_size=9, record_every=10)
    )
    assert coarse.loss_steps == (10, 20, 25)
    torch.testing.assert_close(coarse.losses[1], fine.losses[10:20].mean(dim=0))
    torch.testing.assert_close(coarse.losses[2], fine.losses[20:].mean(dim=0))
    assert coarse.averaged is None
    assert coarse.best is coarse.network


def test_probe_and_progress_are_called():
    class Listener:
        def __init__(self):
            self.calls = []

        def update(self, step, steps, loss):
            self.calls.append((step, steps, loss))

    table, plan, listener = make_table("state"), ReplicaPlan.of_seeds(range(2)), Listener()
    record = fit(
        table,
        network_of("state", range(2)),
        ResidualGradient(),
        plan,
        FitSettings(steps=20, batch_size=9, record_every=10),
        probe=lambda step, network: network.forward(table.inputs[:3])[..., 0],
        probe_every=8,
        progress=listener,
    )
    assert record.probe_steps == (8, 16)
    assert record.probes[0].shape == (2, 3)
    assert not torch.equal(record.probes[0], record.probes[1])
    assert [call[:2] for call in listener.calls] == [(10, 20), (20, 20)]
    assert listener.calls[1][2] == pytest.approx(record.losses[1].median().item())


def test_fitted_evaluation_finds_the_exact_values():
    """One weight per state and a table with every transition in proportion: the fixed point is V itself."""
    case = draw_finite_case(0, states=4, gamma=0.8)
    copies = (case.moves * 50).round().astype(int)
    pairs = [(s, t) for s in range(4) for t in range(4) for _ in range(copies[s, t])]
    at, to = (torch.tensor(column) for column in zip(*pairs, strict=True))
    one_hot = torch.eye(4, dtype=torch.float64)
    rewards = torch.tensor(case.gains)[at, to]
    discounts = torch.full((len(pairs),), 0.8, dtype=torch.float64)
    table = Table(one_hot[at], one_hot[to], rewards, discounts)
    exact = torch.linalg.solve(
        torch.eye(4, dtype=torch.float64) - 0.8 * torch.tensor(copies / copies.sum(axis=1, keepdims=True)),
        torch.tensor((copies * case.gains).sum(axis=1) / copies.sum(axis=1)),
    )
    for objective in (fitted_q(0.1), TemporalDifference(), FittedIteration(CopyTarget(20))):
        settings = FitSettings(steps=1000, batch_size=len(pairs), schedule="cosine")
        network = StackedMLP.initialise((4, 1), [0], dtype=torch.float64)
        record = fit(table, network, objective, ReplicaPlan.of_seeds([0], 0.05), settings)
        values = record.network.forward(one_hot)[0, :, 0]
        torch.testing.assert_close(values, exact, rtol=0.0, atol=2e-3)


def test_bounds_stop_a_divergent_regression():
    """One feature, V(s') = 2 V(s): the fixed-point iteration multiplies by 1.98 (Tsitsiklis & Van Roy)."""
    one = torch.ones(8, 1)
    table = Table(inputs=one, next_inputs=2.0 * one, rewards=torch.zeros(8), discounts=torch.full((8,), 0.99))
    network = StackedMLP((1, 1), torch.tensor([[1.0, 0.0]]))
    settings = FitSettings(steps=800, batch_size=8, record_every=100)
    plan = ReplicaPlan.of_seeds([0], 0.25)
    free, bounded = (
        fit(table, network, FittedIteration(CopyTarget(1), bounds), plan, settings)
        .network.forward(one)
        .abs()
        .max()
        for bounds in (None, (-3.0, 3.0))
    )
    assert free > 100.0
    assert bounded < 4.0


def test_row_sets_train_on_their_rows_only():
    table = make_table("state")
    rows = torch.arange(10)
    changed = torch.where(torch.arange(40) < 10, table.rewards, table.rewards + 100.0)
    other = Table(table.inputs, table.next_inputs, changed, table.discounts)
    plan = ReplicaPlan((1e-2,), (0,), (rows,), (0,))
    results = [fit(t, network_of("state", [0]), fitted_q(), plan, STEPS).network.flat for t in (table, other)]
    assert torch.equal(results[0], results[1])


def test_threads_are_restored():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1

    @threads(before + 1)
    def fail():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.get_num_threads() == before


def test_misfits_are_refused():
    table, plan = make_table("state"), ReplicaPlan.of_seeds(range(2))
    with pytest.raises(ConfigError, match="network has 3 replicas"):
        fit(table, network_of("state", range(3)), ResidualGradient(), plan, STEPS)
    with pytest.raises(ConfigError, match=r"network is torch\.float32"):
        fit(table, network_of("state", range(2), torch.float32), ResidualGradient(), plan, STEPS)
    for name, value in (("steps", 0), ("batch_size", 0), ("record_every", 0), ("threads", 0)):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            FitSettings(**{"steps": 10, name: value})
    with pytest.raises(ConfigError, match="tail_average is 1"):
        FitSettings(steps=10, tail_average=1.0)
    with pytest.raises(ConfigError, match="schedule is"):
        FitSettings(steps=10, schedule="linear")
