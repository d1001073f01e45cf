"""Importance sampling from sums over episodes: the numbers of the estimators in memory."""

import dataclasses
import itertools

import numpy as np
import pytest

from koffline.errors import DataError
from koffline.ope.importance.episode_estimates import make_statistic
from koffline.ope.importance.problem import prepare_episodes
from koffline.ope.streaming.columns import STRETCH, groups_of
from koffline.ope.streaming.importance import NAMES, WeighedEpisodes, estimate_by_episodes
from koffline.ope.streaming.sums import PassPlan, sum_over_log
from koffline.policies import DiscretePolicy
from tests.ope.problems import SOFT, discrete_log
from tests.ope.streaming.logs import GAMMA, HERE, on_disk, seen


def logged(rows: int = 300, length: int = 7, weighted: bool = False, **changes):
    """Episodes with the behaviour's probabilities, uniform over three actions."""
    columns = {"behavior_log_probabilities": np.full(rows, np.log(1.0 / 3.0)), **changes}
    if weighted:
        episodes = np.arange(rows) // length
        columns["weights"] = np.random.default_rng(1).uniform(0.5, 2.0, episodes[-1] + 1)[episodes]
    return discrete_log(rows, length, **columns)


def episode_sums(folder, log, policy=SOFT, shard_rows=60, block_rows=STRETCH, **changes):
    frame, _ = seen(log, policy, replicas=1, ratios=True, **changes)
    return sum_over_log(PassPlan(on_disk(folder, log, shard_rows), frame, block_rows), HERE).episodes, frame


def in_memory(name, log, policy=SOFT, clip=None):
    problem = prepare_episodes(log, policy, GAMMA, clip=clip)
    return make_statistic(name, problem, None, 0, np.random.default_rng(0)).value, problem


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", [None, 2.0])
def test_values_are_those_in_memory(clip, weighted, tmp_path):
    log = logged(weighted=weighted)
    sums, _ = episode_sums(tmp_path, log, clip=clip)
    weighed = WeighedEpisodes.of(sums, GAMMA)
    for name in NAMES:
        expected, problem = in_memory(name, log, clip=clip)
        np.testing.assert_allclose(weighed.value(name), expected, rtol=1e-10)
        size = problem.effective_size(stepwise=name in ("pdis", "wpdis"))
        np.testing.assert_allclose(weighed.effective_size(name), size, rtol=1e-9)
        np.testing.assert_allclose(weighed.cut_share, problem.cut_share, rtol=1e-9)


def test_episodes_go_on_over_blocks(tmp_path):
    """Episodes of 1500 steps, some cut by the end of a block in their middle."""
    log = logged(4500, 1500)
    mild = DiscretePolicy(3, lambda s: 0.01 * SOFT.probabilities(s) + 0.99 / 3.0)
    sums, _ = episode_sums(tmp_path, log, mild, shard_rows=5000)
    for name in NAMES:
        expected, _ = in_memory(name, log, mild)
        np.testing.assert_allclose(WeighedEpisodes.of(sums, GAMMA).value(name), expected, rtol=1e-9)


def test_without_a_group_is_the_log_without_its_episodes(tmp_path):
    log = logged(weighted=True)
    lazy = on_disk(tmp_path, log, 1000)
    sums, frame = episode_sums(tmp_path, log, shard_rows=1001)
    block = next(lazy.blocks())
    groups = groups_of(frame, 0, block.units)[log.episode_starts]
    weighed = WeighedEpisodes.of(sums, GAMMA)
    for name, group in itertools.product(NAMES, range(frame.groups)):
        expected, _ = in_memory(name, log.select_episodes(groups != group))
        np.testing.assert_allclose(weighed.value(name, group), expected, rtol=1e-9)


def test_impossible_actions_end_an_episodes_weight(tmp_path):
    """A policy that never takes action 0: most episodes lose their weight, some at once."""
    never = DiscretePolicy(3, lambda s: np.tile([0.0, 0.5, 0.5], (len(s), 1)))
    log = logged(210, 3)
    sums, _ = episode_sums(tmp_path, log, never)
    for name in NAMES:
        expected, _ = in_memory(name, log, never)
        np.testing.assert_allclose(WeighedEpisodes.of(sums, GAMMA).value(name), expected, rtol=1e-10)


def test_no_weight_at_all_is_one_line(tmp_path):
    log = logged(60, 6, actions=np.zeros(60, dtype=np.int64))
    never = DiscretePolicy(3, lambda s: np.tile([0.0, 0.5, 0.5], (len(s), 1)))
    sums, _ = episode_sums(tmp_path, log, never)
    for name in NAMES:
        with pytest.raises(DataError, match="takes none of the logged actions"):
            estimate_by_episodes(name, sums, GAMMA, 0.95, None)


def test_an_estimate_has_an_interval_over_groups(tmp_path):
    log = logged(700)
    sums, _ = episode_sums(tmp_path, log, shard_rows=200)
    point = estimate_by_episodes("wpdis", sums, GAMMA, 0.9, None)
    assert point.interval is not None
    assert point.interval.kind == "group-jackknife"
    assert point.interval.holds(point.value)
    assert point.diagnostics["episodes"] == 100
    assert any("Recording stopped" in warning for warning in point.warnings)


def test_weights_that_change_inside_an_episode_are_refused(tmp_path):
    log = logged(60, weights=np.linspace(1.0, 2.0, 60))
    with pytest.raises(DataError, match="weights change inside an episode"):
        episode_sums(tmp_path, log)


def test_sums_of_parts_add_up_whatever_their_scale(tmp_path):
    """Weights of e^±400 in different shards: nothing overflows, the self-normalised value is right."""
    logs = np.concatenate([np.full(30, -40.0), np.full(30, np.log(1.0 / 3.0))])
    log = logged(60, 10, behavior_log_probabilities=logs)
    for shard_rows in (30, 60):
        sums, _ = episode_sums(tmp_path, log, shard_rows=shard_rows)
        weighed = WeighedEpisodes.of(sums, GAMMA)
        for name in ("wis", "wpdis"):
            np.testing.assert_allclose(weighed.value(name), in_memory(name, log)[0], rtol=1e-9)


def test_ratios_that_do_not_average_one_are_said(tmp_path):
    log = logged(300, behavior_log_probabilities=np.full(300, np.log(0.9)))
    sums, frame = episode_sums(tmp_path, log)
    point = estimate_by_episodes("wpdis", sums, GAMMA, 0.95, None)
    assert any("average" in warning for warning in point.warnings)
    assert dataclasses.replace(frame, clip=1.0).clip == 1.0
