"""Stacked networks and their optimiser, and the mini-batches that replicas see."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from koffline.batches import BatchSchedule, Table
from koffline.checkpoints import restored, state_of
from koffline.errors import ConfigError, DataError
from koffline.replicas import ReplicaPlan, StackedAdam, StackedMLP
from tests.engine_problems import module_of
from tests.refusals import refused

SHAPES = [(2, 80, 1), (2, 1), (3, 7, 4), (3, 8, 6, 1), (3, 5, 20, 6, 18), (4, 2)]


def stack(sizes, seeds=(0, 1, 2), activation="relu", dtype=torch.float64):
    return StackedMLP.initialise(sizes, seeds, activation, dtype=dtype)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_forward_is_the_ordinary_network_and_the_pullback_its_autograd(
    sizes, activation
):
    network = stack(sizes, activation=activation)
    of_one = draw(3, 11, sizes[0])
    shared = draw(11, sizes[0])
    gradient = draw(3, 11, sizes[-1], seed=1)
    flat = network.flat.clone().requires_grad_()
    expected = torch.autograd.grad(
        (network.with_flat(flat).forward(of_one) * gradient).sum(), flat
    )[0]
    with torch.no_grad():
        for replica in range(3):
            module = module_of(network, replica)
            torch.testing.assert_close(
                network.forward(of_one)[replica], module(of_one[replica])
            )
            torch.testing.assert_close(network.forward(shared)[replica], module(shared))
            torch.testing.assert_close(
                network.features(shared)[replica], module[:-1](shared)
            )
        for _ in range(2):  # the second time every buffer holds something
            outputs, pullback = network.forward_with_pullback(of_one)
            torch.testing.assert_close(
                outputs, network.with_flat(network.flat).forward(of_one)
            )
            torch.testing.assert_close(
                pullback(gradient), expected, rtol=1e-10, atol=1e-12
            )


def test_a_replica_starts_the_same_whatever_its_company():
    alone = stack((3, 8, 2), seeds=[5])
    among = stack((3, 8, 2), seeds=[4, 5, 6])
    assert torch.equal(alone.flat[0], among.flat[1])
    assert not torch.equal(among.flat[0], among.flat[1])
    assert torch.equal(among.select([1]).flat, alone.flat)
    assert torch.equal(
        stack((3, 8, 2), [5], dtype=torch.float32).flat, alone.flat.float()
    )


def test_outputs_stay_when_the_network_is_used_again():
    network = stack((3, 8, 2))
    with torch.no_grad():
        first = network.forward(draw(5, 3))
        features = network.features(draw(5, 3))
        before = first.clone()
        features_before = features.clone()
        network.forward(draw(5, 3, seed=1))
        network.features(draw(5, 3, seed=1))
        network.forward_with_pullback(draw(5, 3, seed=2))
    assert torch.equal(first, before)
    assert torch.equal(features, features_before)


def test_adam_is_adam_with_a_rate_for_each_replica():
    rates = torch.tensor([[1e-2], [1e-3]], dtype=torch.float64)
    flat = draw(2, 6)
    singles = [nn.Parameter(row.clone()) for row in flat]
    pairs = zip(singles, rates.flatten().tolist(), strict=True)
    ordinary = [torch.optim.Adam([single], lr=rate, eps=1e-5) for single, rate in pairs]
    adam = StackedAdam(flat, epsilon=1e-5)
    for step in range(20):
        gradient = draw(2, 6, seed=step) * 10.0 ** (step % 4 - 2)
        adam.update(flat, gradient, rates)
        if step == 9:  # continue from a saved state
            adam = restored(StackedAdam(flat, epsilon=1e-5), state_of(adam))
        for single, optimiser, row in zip(singles, ordinary, gradient, strict=True):
            single.grad = row.clone()
            optimiser.step()
    expected = torch.stack([single.detach() for single in singles])
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=0.0)


def plan_of(seeds, **options):
    return ReplicaPlan((1e-3,) * len(seeds), tuple(seeds), **options)


def table_of():
    return Table(torch.randn(5, 2), torch.randn(5, 2), torch.randn(5), torch.rand(5))


def epoch_of(schedule, group, steps):
    return torch.cat([schedule.rows(step)[group] for step in range(steps)])


def test_an_epoch_visits_every_row_once():
    schedule = BatchSchedule(plan_of([3, 4]), rows=12, batch_size=4)
    assert schedule.steps_per_epoch == 3
    first = epoch_of(schedule, 0, 3)
    second = epoch_of(schedule, 1, 3)
    assert first.sort().values.tolist() == list(range(12))
    assert first.tolist() != second.tolist()
    following = torch.cat([schedule.rows(step)[0] for step in range(3, 6)])
    assert following.sort().values.tolist() == list(range(12))
    assert following.tolist() != first.tolist()
    with_remainder = BatchSchedule(plan_of([3]), rows=14, batch_size=4)
    assert with_remainder.steps_per_epoch == 3
    assert len(set(epoch_of(with_remainder, 0, 3).tolist())) == 12


def test_rows_depend_on_seed_and_step_alone():
    among = BatchSchedule(plan_of([1, 2, 3]), 20, 6)
    alone = BatchSchedule(plan_of([2]), 20, 6)
    expected = [alone.rows(step)[0].clone() for step in range(10)]
    for step in (7, 0, 9, 3):  # any order: a resumed run starts in the middle
        assert torch.equal(among.rows(step)[1], expected[step])
        assert torch.equal(among.draws(step, 5)[1], alone.draws(step, 5)[0])


def test_row_sets_are_multisets_and_replicas_keep_to_theirs():
    sets = (torch.tensor([0, 0, 0, 1, 5, 5]), torch.tensor([2, 3, 4, 6, 7, 8, 9, 2]))
    plan = plan_of([7, 7, 8], row_sets=sets, row_set_of=(0, 1, 1))
    schedule = BatchSchedule(plan, rows=10, batch_size=2)
    assert len(plan.groups) == 3  # one seed, two row sets: two groups
    assert (
        epoch_of(schedule, 0, 3).sort().values.tolist()
        == sets[0].sort().values.tolist()
    )
    assert (
        epoch_of(schedule, 1, 4).sort().values.tolist()
        == sets[1].sort().values.tolist()
    )
    alone = BatchSchedule(
        plan_of([8], row_sets=sets, row_set_of=(1,)), rows=10, batch_size=2
    )
    for step in range(9):
        assert torch.equal(schedule.rows(step)[2], alone.rows(step)[0])


def test_a_small_row_set_is_repeated_to_fill_a_mini_batch():
    plan = plan_of([1], row_sets=(torch.tensor([4, 2, 9]),), row_set_of=(0,))
    drawn = BatchSchedule(plan, rows=10, batch_size=7).rows(0)[0]
    counts = torch.bincount(drawn, minlength=10)
    assert counts.sum() == 7
    assert set(counts[[2, 4, 9]].tolist()) == {2, 3}


def test_draws_cover_all_continuations():
    schedule = BatchSchedule(plan_of([1, 2]), rows=10, batch_size=5)
    picks = torch.stack([schedule.draws(step, 4) for step in range(200)])
    assert picks.shape == (200, 2, 5)
    counts = torch.bincount(picks.flatten(), minlength=4)
    assert (counts - 500).abs().max() < 100  # binomial standard deviation 19
    assert not torch.equal(picks[:, 0], picks[:, 1])


def sets_of(*sets):
    return tuple(torch.tensor(rows, dtype=torch.int64) for rows in sets)


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        (
            DataError,
            lambda: stack((3, 8, 2)).forward(torch.zeros(5, 4, dtype=torch.float64)),
            "have shape",
        ),
        (
            ConfigError,
            lambda: stack((3, 8, 2), activation="gelu"),
            "activation is 'gelu'",
        ),
        (
            DataError,
            lambda: replace(table_of(), rewards=torch.zeros(4)),
            "rewards has 4 rows",
        ),
        (
            DataError,
            lambda: replace(table_of(), discounts=torch.full((5,), torch.nan)),
            "holds NaN",
        ),
        (
            DataError,
            lambda: replace(table_of(), next_inputs=torch.zeros(5, 3)),
            "next_inputs has shape",
        ),
        (
            DataError,
            lambda: replace(table_of(), readout=torch.ones(5, 1)),
            "come together",
        ),
        (
            DataError,
            lambda: replace(table_of(), inputs=torch.zeros(0, 2)),
            "inputs has shape",
        ),
        (ConfigError, lambda: ReplicaPlan((1e-3,), (1, 2)), "one of each per replica"),
        (
            ConfigError,
            lambda: plan_of([1], row_sets=sets_of([0])),
            "one of each per replica",
        ),
    ],
)
def test_misfits_of_networks_tables_and_plans_are_refused(kind, make, words):
    with refused(kind, words):
        make()
