import math
from dataclasses import replace

import pytest
import torch
from threadpoolctl import threadpool_info

from koffline.batches import BatchSchedule, Table
from koffline.errors import ConfigError
from koffline.fitting import FitSettings, fit, threads
from koffline.kernels import Linear
from koffline.objectives import (
    CopyTarget,
    FittedIteration,
    GradientTD2,
    KernelLoss,
    SaddlePoint,
)
from koffline.replicas import ReplicaPlan, StackedMLP
from tests.engine_problems import (
    FORMS,
    OBJECTIVES,
    PLANS,
    SIZES,
    make_table,
    reference_loss,
)
from tests.refusals import refused
from tests.strategies import draw_finite_case

STEPS = FitSettings(steps=12, batch_size=9, record_every=5)


def network_of(form, seeds):
    return StackedMLP.initialise(SIZES[form], seeds, dtype=torch.float64)


def plain_fit(table, objective, network, seed, rate, settings):
    """One replica by autograd and torch's own Adam, nothing packed, stacked or
    shared.
    """
    parameter = torch.nn.Parameter(network.flat.clone())
    target = network.flat.clone()
    adam = torch.optim.Adam([parameter], lr=rate)
    schedule = BatchSchedule(
        ReplicaPlan((rate,), (seed,)), len(table), settings.batch_size
    )

    def read(flat, inputs, readout):
        outputs = network.with_flat(flat).forward(inputs)
        return outputs[..., 0] if readout is None else (outputs * readout).sum(dim=-1)

    losses = []
    for step in range(settings.steps):
        table_rows = schedule.rows(step)[0]
        picks = schedule.draws(step, table.draws)[0]
        rows = table.select(table_rows)
        next_inputs = (
            rows.next_inputs
            if table.draws == 1
            else rows.next_inputs[torch.arange(9), picks]
        )
        following = target if objective.next_from == "target" else parameter
        gram = (
            None
            if objective.kernel is None
            else objective.kernel.gram(rows.kernel_inputs)
        )
        value = read(parameter, rows.inputs, rows.readout)
        next_value = read(following, next_inputs, rows.next_readout)
        loss = reference_loss(
            objective, rows.rewards, rows.discounts, value, next_value, gram
        )
        adam.param_groups[0]["lr"] = (
            rate * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
        )
        adam.zero_grad()
        loss.sum().backward()
        adam.step()
        losses.append(loss.detach()[0])
        rule = getattr(objective, "target", None)
        moved = parameter.detach()
        if isinstance(rule, CopyTarget):
            every = rule.every or len(table) // settings.batch_size
            target = moved.clone() if (step + 1) % every == 0 else target
        elif rule is not None:
            target = target + rule.rate * (moved - target)
    return parameter.detach(), torch.stack(losses)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "plan"),
    [*zip(OBJECTIVES, list(PLANS) * 2, strict=False), ("rg", "crossed")],
)
def test_fit_is_the_plain_loop_for_every_replica(name, plan, form):
    table = make_table(form)
    objective = OBJECTIVES[name]
    seeds = PLANS[plan].batch_seeds
    settings = FitSettings(steps=9, batch_size=9, record_every=3, schedule="cosine")
    rates = (1e-2, 1e-3, 3e-3, 1e-2)
    network = network_of(form, (1, 1, 2, 3))
    before = network.flat.clone()
    probe = {"probe": lambda step, trained: trained.flat[:, 0], "probe_every": 3}
    record = fit(
        table, network, objective, ReplicaPlan(rates, seeds), settings, **probe
    )
    assert torch.equal(network.flat, before)
    assert record.probe_steps == (3, 6, 9)
    assert torch.equal(record.probes[2], record.network.flat[:, 0])
    assert not torch.equal(record.probes[0], record.probes[1])
    assert record.diverged_at == (None,) * 4
    assert record.loss_steps == (3, 6, 9)
    for replica, (seed, rate) in enumerate(zip(seeds, rates, strict=True)):
        last, losses = plain_fit(
            table, objective, network.select([replica]), seed, rate, settings
        )
        torch.testing.assert_close(
            record.network.flat[replica], last[0], rtol=1e-9, atol=1e-11
        )
        means = losses.view(3, 3).mean(dim=1)  # over the steps of each record
        torch.testing.assert_close(
            record.losses[:, replica], means, rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize(
    "objective", [OBJECTIVES["fqe"], OBJECTIVES["td0"], FittedIteration(CopyTarget(10))]
)
def test_fitted_evaluation_finds_the_exact_values(objective):
    """One weight per state and a table with every transition in proportion: the fixed
    point is V itself.
    """
    case = draw_finite_case(0, states=4, gamma=0.5)
    copies = torch.tensor((case.moves * 20).round())
    pairs = [
        (s, t) for s in range(4) for t in range(4) for _ in range(int(copies[s, t]))
    ]
    at, to = (torch.tensor(column) for column in zip(*pairs, strict=True))
    one_hot = torch.eye(4, dtype=torch.float64)
    gains = torch.tensor(case.gains)
    discounts = torch.full((len(pairs),), 0.5, dtype=torch.float64)
    table = Table(one_hot[at], one_hot[to], gains[at, to], discounts)
    visits = copies.sum(dim=1)
    exact = torch.linalg.solve(
        one_hot - 0.5 * copies / visits[:, None], (copies * gains).sum(dim=1) / visits
    )
    settings = FitSettings(steps=300, batch_size=len(pairs), schedule="cosine")
    network = StackedMLP.initialise((4, 1), [0], dtype=torch.float64)
    record = fit(table, network, objective, ReplicaPlan.grid([0], [0.1]), settings)
    torch.testing.assert_close(
        record.network.forward(one_hot)[0, :, 0], exact, rtol=0.0, atol=5e-3
    )


@pytest.mark.parametrize(
    ("name", "every"), [("rg", 1), ("rg", 10), ("rg", 50), ("gtd2", 10), ("sbeed", 10)]
)
def test_a_diverged_replica_is_named_and_never_a_number(name, every):
    """Adam moves every weight by about its rate: 1e200 overflows the squared residual
    in the second step.
    """
    table = make_table("state")
    plan = ReplicaPlan((1e-3, 1e200, 1e-3), (0, 1, 2))
    objective = {
        "rg": OBJECTIVES["rg"],
        "gtd2": GradientTD2(),
        "sbeed": SaddlePoint(ascent_steps=2),
    }[name]
    settings = FitSettings(steps=30, batch_size=9, record_every=every)
    record = fit(table, network_of("state", range(3)), objective, plan, settings)
    # SBEED's f moves before V
    assert record.diverged_at == (
        None,
        0 if name == "sbeed" else 1,
        None,
    )
    assert record.network.flat[1].isnan().all()
    assert record.network.forward(table.inputs)[1].isnan().all()
    alone = fit(
        table,
        network_of("state", [2]),
        objective,
        ReplicaPlan.grid([2], [1e-3]),
        settings,
    )
    torch.testing.assert_close(
        record.network.flat[2], alone.network.flat[0], rtol=0.0, atol=1e-10
    )
    assert record.losses[:, [0, 2]].isfinite().all()
    assert not record.losses[0, 1].isfinite() or every == 1


def test_a_last_step_that_breaks_a_replica_is_noticed():
    plan = ReplicaPlan((1e-3, math.inf), (0, 1))
    settings = FitSettings(steps=1, batch_size=9)
    record = fit(
        make_table("state"),
        network_of("state", range(2)),
        OBJECTIVES["rg"],
        plan,
        settings,
    )
    assert record.losses.isfinite().all()
    assert record.diverged_at == (None, 1)
    assert record.network.flat[1].isnan().all()


def fit_two(table=None, objective=None, seeds=range(2)):
    plan = ReplicaPlan.grid(range(2), [1e-3])
    return fit(
        table or make_table("state"),
        network_of("state", seeds),
        objective or OBJECTIVES["rg"],
        plan,
        STEPS,
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KernelLoss(Linear(), 2.0), "diag_weight is 2"),
        (
            lambda: replace(STEPS, schedule="cosin"),
            "schedule is 'cosin'; give constant or cosine",
        ),
        (lambda: replace(STEPS, record_every=0), "record_every is 0; give at least 1"),
        (lambda: fit_two(seeds=range(3)), "network has 3 replicas"),
        (
            lambda: fit_two(
                replace(make_table("state"), kernel_inputs=None),
                objective=OBJECTIVES["kloss"],
            ),
            "no kernel_inputs",
        ),
    ],
)
def test_misfits_are_refused(call, words):
    with refused(ConfigError, words):
        call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_fits_agree_on_a_gpu(name, form):
    records = []
    for device in ("cpu", "cuda"):
        network = StackedMLP.initialise(
            SIZES[form], range(4), dtype=torch.float64, device=device
        )
        settings = FitSettings(steps=30, batch_size=9, record_every=10)
        table = make_table(form).to(device)
        records.append(fit(table, network, OBJECTIVES[name], PLANS["shared"], settings))
    here, there = records
    torch.testing.assert_close(
        there.network.flat.cpu(), here.network.flat, rtol=0.0, atol=1e-9
    )
    torch.testing.assert_close(there.losses, here.losses, rtol=1e-9, atol=1e-12)


def test_threads_are_those_of_linear_algebra_too_and_restored_after() -> None:
    def of_blas() -> list[int]:
        return [
            library["num_threads"]
            for library in threadpool_info()
            if library["user_api"] == "blas"
        ]

    before = of_blas()
    assert before  # NumPy's at least
    with threads(2):
        assert torch.get_num_threads() == 2
        with threads(1):
            assert of_blas() == [1] * len(before)
            assert torch.get_num_threads() == 1
    assert of_blas() == before
