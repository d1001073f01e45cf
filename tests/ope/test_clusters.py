"""Episodes of one cluster (a user) are resampled together, and standard errors are
taken over clusters.
"""

from __future__ import annotations

import numpy as np
import pytest

import koffline
from koffline.data.sources import convert_to_shards
from koffline.errors import ConfigError, DataError
from koffline.ope.cross_fit import assign_folds
from koffline.ope.importance.episode_means import plain_mean
from koffline.ope.importance.episodes import prepare_episodes
from koffline.ope.log.facts import log_facts
from koffline.ope.log.problem import prepare_problem
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import LogPart
from koffline.ope.networks.out_of_bag import RowSums
from koffline.ope.networks.resampling import Resampling
from koffline.policy_specs import load_policy
from tests.ope.importance.cases import estimate_one
from tests.ope.problems import uneven_log

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

USERS = 30
VISITS = 12
QUICK = {"gamma": 0.9, "steps": 60, "resampled_replicas": 12, "full_replicas": 2}


def visits(seed: int = 0, **changes) -> koffline.Transitions:
    """Users who pay by their own mood, whatever is done."""
    random = np.random.default_rng(seed)
    n = USERS * VISITS
    states = random.normal(size=(n, 1))
    user = np.tile(np.arange(USERS), VISITS)
    rewards = random.normal(size=USERS)[user] + 0.1 * random.normal(size=n)
    ends = {"terminated": np.ones(n, bool), "truncated": np.zeros(n, bool)}
    chances = {
        "behavior_log_probabilities": np.full(n, np.log(0.5)),
        "action_space": koffline.Discrete(2),
    }
    columns = {
        "observations": states,
        "next_observations": states,
        "actions": random.integers(2, size=n),
    }
    changed = {"episode_ids": np.arange(n), "clusters": user, **changes}
    return koffline.Transitions(
        **columns, rewards=rewards, **ends, **chances, **changed
    )


@pytest.mark.parametrize("kind", ["discrete", "rows"])
def test_replicas_count_all_units_of_a_cluster_alike(kind):
    log = uneven_log(kind)
    log = log.replace(clusters=7 - log.units % 5)  # not contiguous
    policy = load_policy("uniform", log.action_space, log.observation_shape)
    problem = prepare_problem(log, policy, 0.9, 2, np.random.default_rng(0))
    counts = Resampling(0, 1, (0, 1, 2)).row_counts(problem)
    assert problem.kind == "clusters"
    for cluster in range(3, 8):
        of_it = counts[:, np.asarray(log.clusters) == cluster]
        assert (of_it == of_it[:, :1]).all()
    assert log_facts(LogPart(log, problem.units), 0.9).units <= 5.0


def test_standard_errors_are_those_of_sums_over_clusters():
    log = visits()
    policy = load_policy("uniform", log.action_space, log.observation_shape)
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    random = np.random.default_rng(1)
    now, later, starts, weights = random.normal(size=(4, len(log)))
    sums = RowSums.of(problem, RowValues(now, later, starts, weights=weights))
    parts = weights * (log.rewards - now) + starts
    gaps = [
        np.sum((parts - parts.mean())[log.clusters == user]) for user in range(USERS)
    ]
    error = np.sqrt(USERS / (USERS - 1) * np.square(gaps).sum()) / len(log)
    assert sums.standard_error() == pytest.approx(error, rel=1e-9)
    assert sums.count == USERS

    values = np.asarray(log.rewards)
    without = [values[log.clusters != user].mean() for user in range(USERS)]
    mean = plain_mean(values, np.full(len(log), 1.0 / len(log)), log.clusters)
    np.testing.assert_allclose(
        mean.deviations, mean.value - np.array(without), rtol=1e-9
    )
    estimate = estimate_one("is", prepare_episodes(log, policy, 0.9), None)
    assert f"{USERS} independent units" in estimate.interval.assumptions
    # none is certified
    assert set(estimate.diagnostics["intervals"]) == {
        "episodes-t",
        "episodes-bootstrap",
    }


@pytest.mark.parametrize("estimator", ["kloss", "dr"])
def test_intervals_are_as_wide_as_users_differ(estimator):
    with_clusters, untold = (
        koffline.evaluate(log, "uniform", estimator=estimator, **QUICK).interval
        for log in (visits(), visits(clusters=None))
    )
    assert with_clusters.width > 2.0 * untold.width
    assert with_clusters.width == pytest.approx(
        2.0 * 2.05 * np.sqrt(1.0 / USERS), rel=0.6
    )


def test_clusters_across_shards_are_those_in_memory(tmp_path):
    log = visits()
    options = {**QUICK, "steps": 20, "sample_rows": 100}
    koffline.write_transitions(log, tmp_path / "log.hdf5")
    convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", 90)
    logs = log, koffline.open_transitions(tmp_path / "shards")
    first, other = (
        koffline.evaluate(source, "uniform", **options).interval for source in logs
    )
    assert (first.low, first.high) == pytest.approx((other.low, other.high), rel=1e-10)


def test_groups_and_folds_count_users():
    log = visits()
    users = np.asarray(log.clusters)
    few = koffline.evaluate(
        log, "uniform", by={"it": np.where(users < 2, "a", "b")}, **QUICK
    ).groups[0]
    assert (few.value, few.reason) == (
        None,
        "too few start states to answer: 24, of an effective number of 2 (at least 10)",
    )
    assert all(
        len(np.unique(assign_folds(log, 3, 0)[users == user])) == 1
        for user in range(USERS)
    )
    with pytest.raises(ConfigError, match="a log of 30 clusters"):
        assign_folds(log, 31, 0)
    for part in koffline.split_transitions(log, 0.2):
        assert len(part) == VISITS * len(np.unique(part.clusters))


def test_kinds_that_take_rows_as_independent_are_refused():
    with pytest.raises(
        ConfigError, match="kernel-calibrated takes rows for independent"
    ):
        koffline.evaluate(visits(), "uniform", interval="kernel-calibrated", **QUICK)
    assert (
        koffline.evaluate(
            visits(), "uniform", interval="bootstrap-pivot", **QUICK
        ).interval.width
        > 0.5
    )
    log = uneven_log("discrete")
    with pytest.raises(DataError, match="clusters change inside an episode"):
        log.replace(clusters=np.arange(len(log)))


def test_tables_name_clusters_by_ids_of_any_type(tmp_path):
    log = visits()
    rows = zip(
        log.observations[:, 0], log.actions, log.rewards, log.clusters, strict=True
    )
    text = "".join(f"{x},{a},{r},user {user}\n" for x, a, r, user in rows)
    (tmp_path / "log.csv").write_text("x,a,r,user_id\n" + text)
    mapping = {"observations": "x", "action": "a", "reward": "r", "one_step": True}
    read = koffline.open_transitions(
        tmp_path / "log.csv", mapping={**mapping, "cluster": "user_id"}
    )
    same = np.asarray(read.clusters)[:, None] == np.asarray(read.clusters)
    np.testing.assert_array_equal(same, log.clusters[:, None] == log.clusters)
    assert not any("user_id" in note for note in read.metadata.notes)
    untold = koffline.open_transitions(
        tmp_path / "log.csv", mapping=mapping
    ).metadata.notes
    (note,) = (note for note in untold if "user_id" in note)
    assert note.startswith(
        f"units: {len(log)} rows share {len(np.unique(log.clusters))} values of user_id"
    )
    assert note.endswith("name it (--cluster user_id)")
