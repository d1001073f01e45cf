"""The sums of a pass: those of the whole log in memory, whatever the blocks, shards and machines."""

import dataclasses

import numpy as np
import pytest
import torch

from koffline.jobs.mapping import PassSettings
from koffline.ope.closed_form.moments import accumulate_moments
from koffline.ope.streaming.columns import STRETCH, make_columns
from koffline.ope.streaming.sums import PassPlan, shard_stretches, sum_over_log
from koffline.stacked_products import Workspace
from tests.ope.problems import continuous_log
from tests.ope.streaming.logs import CLOSE, HERE, NOISY, example, on_disk, seen, system_of


def summed(log, frame, block_rows=STRETCH, passes=HERE):
    return sum_over_log(PassPlan(log, frame, block_rows), passes)


@pytest.mark.parametrize("kind", ["episodes", "tuples"])
def test_sums_are_those_of_the_log_in_memory(kind, tmp_path):
    log, policy = example(kind)
    frame, problem = seen(log, policy)
    found = summed(on_disk(tmp_path, log), frame).moments
    for replica in range(2):
        system = system_of(problem, frame.features.network, replica)
        expected = accumulate_moments(system, torch.arange(len(log)), 20)
        moments = found.moments(replica, problem.reward_scale)
        for field in dataclasses.fields(expected):
            np.testing.assert_allclose(
                np.asarray(getattr(moments, field.name)), np.asarray(getattr(expected, field.name)), **CLOSE
            )
        np.testing.assert_allclose(found.start_mean()[replica], system.start_mean, **CLOSE)
    assert found.rows.sum() == len(log)


def test_single_precision_is_near(tmp_path):
    log, policy = example("episodes", 400)
    frame, _ = seen(log, policy)
    lazy = on_disk(tmp_path, log, 100)
    exact, single = (
        summed(lazy, dataclasses.replace(frame, dtype=dtype)).moments
        for dtype in (torch.float64, torch.float32)
    )
    for name in ("projected", "temporal", "squares", "starts"):
        expected = getattr(exact, name)
        error = np.abs(getattr(single, name) - expected).max() / np.abs(expected).max()
        assert 0.0 < error < 1e-6, name


@pytest.mark.parametrize("noisy", [False, True])
def test_blocks_and_shards_do_not_matter(noisy, tmp_path):
    rows = 2 * STRETCH + 300
    log, policy = (continuous_log(rows), NOISY) if noisy else example("episodes", 2500)
    frame, _ = seen(log, policy)
    one = on_disk(tmp_path, log, rows)
    short, long = (summed(one, frame, size).moments for size in (STRETCH, 4 * STRETCH))
    np.testing.assert_allclose(short.projected, long.projected, rtol=0.0, atol=1e-10)
    np.testing.assert_allclose(short.starts, long.starts, rtol=0.0, atol=1e-10)
    np.testing.assert_array_equal(short.rows, long.rows)


def test_groups_are_units_and_share_all_rows(tmp_path):
    log, policy = example("episodes", 400)
    frame, _ = seen(log, policy)
    lazy = on_disk(tmp_path, log, 100)
    found = summed(lazy, frame).moments
    assert found.rows.sum() == 400
    assert set(found.rows % 10) == {0.0}  # whole episodes of ten rows
    assert (found.rows > 0).all()
    np.testing.assert_allclose(found.weight.sum(), 400.0)
    np.testing.assert_allclose(found.total().projected[0], found.projected.sum(axis=0))
    rest = found.total().without(found.part([0, 1]))
    np.testing.assert_allclose(rest.squares, found.part([2, 3, 4, 5]).squares, **CLOSE)


@pytest.mark.slow
def test_processes_give_the_same_bits(tmp_path):
    log, policy = example("episodes", 200)
    frame, _ = seen(log, policy, dtype=torch.float32)
    lazy = on_disk(tmp_path, log, 50)
    here = summed(lazy, frame, passes=PassSettings(skip_bad_shards=True))
    there = summed(lazy, frame, passes=PassSettings(workers=2, skip_bad_shards=True))
    for field in dataclasses.fields(here.moments):
        np.testing.assert_array_equal(getattr(here.moments, field.name), getattr(there.moments, field.name))
    assert here.facts == there.facts


def test_a_bad_shard_is_named_or_left_out(tmp_path):
    log, policy = example("episodes", 200)
    frame, _ = seen(log, policy)
    lazy = on_disk(tmp_path, log, 50)
    bad = lazy.shards[2].name
    with open(bad, "r+b") as file:
        file.truncate(900)
    with pytest.raises(Exception, match="shard-00002") as caught:
        summed(lazy, frame)
    assert type(caught.value).__name__ == "DataError"
    found = summed(lazy, frame, passes=PassSettings(skip_bad_shards=True))
    assert found.facts.rows == 150
    assert len(found.skipped) == 1
    assert "shard-00002" in found.skipped[0]


def test_small_shards_are_summed_together(tmp_path):
    lazy = on_disk(tmp_path, example("episodes", 200)[0], 50)
    assert shard_stretches(lazy) == [(0, 1, 2, 3)]
    assert shard_stretches(lazy, one_by_one=True) == [(0,), (1,), (2,), (3,)]


def test_columns_keep_groups_together(tmp_path):
    log, policy = example("episodes", 120)
    frame, _ = seen(log, policy)
    block = next(on_disk(tmp_path, log, 200).blocks())
    columns = make_columns(frame, block, Workspace())
    assert columns.bounds[0] == 0
    assert columns.bounds[-1] == len(columns) == 120
    np.testing.assert_allclose(columns.psi.square().sum(dim=1), 1.0, atol=1e-12)
    assert columns.starts is not None
    assert columns.starts.shape == (2, 12, frame.parameters)


def test_facts_are_the_logs(tmp_path):
    log, policy = example("episodes", 200)
    frame, _ = seen(log, policy)
    facts = summed(on_disk(tmp_path, log, 60), frame).facts
    returns = log.returns(frame.gamma)
    assert facts.terminated == log.terminated.sum()
    assert facts.truncated == (log.truncated & ~log.terminated).sum()
    final, going_on = log.rewards[log.terminated], log.rewards[~log.terminated]
    assert facts.final == (final.min(), final.max())
    assert facts.going_on == (going_on.min(), going_on.max())
    assert facts.longest_episode == 10
    assert facts.returns.count == len(returns)
    np.testing.assert_allclose(facts.returns.mean, returns.mean(), **CLOSE)
    np.testing.assert_allclose(
        facts.returns.standard_error, returns.std(ddof=1) / np.sqrt(len(returns)), **CLOSE
    )
