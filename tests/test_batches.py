from dataclasses import replace

import pytest
import torch

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError, DataError
from tests.refusals import refused


def plan_of(seeds, **options):
    return ReplicaPlan((1e-3,) * len(seeds), tuple(seeds), **options)


def table_of(rows=5):
    return Table(torch.randn(rows, 2), torch.randn(rows, 2), torch.randn(rows), torch.rand(rows))


def epoch_of(schedule, group, steps):
    return torch.cat([schedule.rows(step)[group] for step in range(steps)])


def test_an_epoch_visits_every_row_once():
    schedule = BatchSchedule(plan_of([3, 4]), rows=12, batch_size=4)
    assert schedule.steps_per_epoch == 3
    first, second = epoch_of(schedule, 0, 3), epoch_of(schedule, 1, 3)
    assert first.sort().values.tolist() == list(range(12))
    assert first.tolist() != second.tolist()
    following = torch.cat([schedule.rows(step)[0] for step in range(3, 6)])
    assert following.sort().values.tolist() == list(range(12))
    assert following.tolist() != first.tolist()
    with_remainder = BatchSchedule(plan_of([3]), rows=14, batch_size=4)
    assert with_remainder.steps_per_epoch == 3
    assert len(set(epoch_of(with_remainder, 0, 3).tolist())) == 12


def test_rows_depend_on_seed_and_step_alone():
    among, alone = BatchSchedule(plan_of([1, 2, 3]), 20, 6), BatchSchedule(plan_of([2]), 20, 6)
    expected = [alone.rows(step)[0].clone() for step in range(10)]
    for step in (7, 0, 9, 3):  # any order: a resumed run starts in the middle
        assert torch.equal(among.rows(step)[1], expected[step])
        assert torch.equal(among.draws(step, 5)[1], alone.draws(step, 5)[0])


def test_row_sets_are_multisets_and_replicas_keep_to_theirs():
    sets = (torch.tensor([0, 0, 0, 1, 5, 5]), torch.tensor([2, 3, 4, 6, 7, 8, 9, 2]))
    plan = plan_of([7, 7, 8], row_sets=sets, row_set_of=(0, 1, 1))
    schedule = BatchSchedule(plan, rows=10, batch_size=2)
    assert len(plan.groups) == 3  # one seed, two row sets: two groups
    assert epoch_of(schedule, 0, 3).sort().values.tolist() == sets[0].sort().values.tolist()
    assert epoch_of(schedule, 1, 4).sort().values.tolist() == sets[1].sort().values.tolist()
    alone = BatchSchedule(plan_of([8], row_sets=sets, row_set_of=(1,)), rows=10, batch_size=2)
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
        (DataError, lambda: replace(table_of(), rewards=torch.zeros(4)), "rewards has 4 rows"),
        (DataError, lambda: replace(table_of(), discounts=torch.full((5,), torch.nan)), "holds NaN"),
        (DataError, lambda: replace(table_of(), next_inputs=torch.zeros(5, 3)), "next_inputs has shape"),
        (DataError, lambda: replace(table_of(), readout=torch.ones(5, 1)), "come together"),
        (DataError, lambda: replace(table_of(), inputs=torch.zeros(0, 2)), "inputs has shape"),
        (ConfigError, lambda: ReplicaPlan((1e-3,), (1, 2)), "one of each per replica"),
        (ConfigError, lambda: plan_of([1], row_sets=sets_of([0])), "one of each per replica"),
    ],
)  # fmt: skip
def test_tables_and_plans_are_checked_once(kind, make, words):
    with refused(kind, words):
        make()
