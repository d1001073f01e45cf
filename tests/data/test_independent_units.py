"""Copies are no second unit, wherever a log is divided or resampled by units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.data.copies import hash_units
from koffline.data.independence import independent_units, with_independent_clusters
from koffline.data.sources import convert_to_shards, write_transitions
from koffline.errors import DataError
from koffline.improvement.parts import split_in_three
from koffline.ope.cross_fit import assign_folds, cross_fit
from tests.improve.test_copies import episodes, repeated, with_clusters
from tests.refusals import succeed

ONCE = episodes(60)
# clusters of two episodes; the copies form clusters of their own, three of them at once
SHIFTED = with_clusters(
    repeated(ONCE), np.append(np.arange(60) // 2, 30 + np.arange(60) // 3)
)
LOGS = {
    "copied episodes": (repeated(ONCE), 60),
    "copied rows": (repeated(episodes(200, 1)).replace(episode_ids=None), 200),
    "clusters that share copies": (SHIFTED, 10),
    "one episode in two clusters": (
        with_clusters(
            ONCE.select_episodes(np.append(np.arange(60), 0)),
            np.append(np.arange(60) // 2, 29),
        ),
        29,
    ),
}
QUICK = {"gamma": 0.9, "steps": 40, "resampled_replicas": 4, "full_replicas": 1}


def by_data_split(log: koffline.Transitions) -> list[koffline.Transitions]:
    return list(koffline.split_transitions(log, held_out=0.4))


def by_folds(log: koffline.Transitions) -> list[koffline.Transitions]:
    folds = assign_folds(log, 3, seed=0)
    return [log.select(folds == fold) for fold in range(3)]


def by_improve(log: koffline.Transitions) -> list[koffline.Transitions]:
    parts = split_in_three(log, seed=0)
    return [parts.train, parts.choose, parts.certify]


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("divide", [by_data_split, by_folds, by_improve])
def test_no_copy_and_no_part_of_a_cluster_is_elsewhere(
    name: str, divide: Callable[..., list[koffline.Transitions]]
) -> None:
    log, count = LOGS[name]
    assert independent_units(log).count == count
    seen: set[int] = set()
    clusters: set[int] = set()
    parts = divide(log)
    assert all(len(part) for part in parts)
    for part in parts:
        contents = set(hash_units(part).tolist())
        assert not contents & seen
        seen |= contents
        if part.clusters is not None:
            numbers = set(part.clusters.tolist())
            assert not numbers & clusters
            clusters |= numbers
    assert seen == set(hash_units(log).tolist())


@pytest.mark.parametrize("name", ["clusters that share copies"])
@pytest.mark.parametrize("storage", ["memory", "sample", "disk"])
def test_an_evaluation_resamples_clusters_that_share_copies_as_one(
    name: str, storage: str, tmp_path: Path
) -> None:
    log, count = LOGS[name]
    options = dict(QUICK)
    source = log
    if storage != "memory":
        options["sample_rows"] = 90
    if storage == "disk":
        write_transitions(log, tmp_path / "log.hdf5")
        convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", shard_rows=60)
        source = koffline.open_transitions(tmp_path / "shards", lazy=True)
    estimate = koffline.evaluate(source, "uniform", **options)
    assert estimate.diagnostics["n_clusters"] == count
    assert (
        sum("hold copies of the same episodes" in note for note in estimate.notes) == 1
    )
    assert estimate.data_sha256 == log.sha256


def test_a_ranking_and_an_estimator_of_episodes_resample_them_as_one() -> None:
    log, count = LOGS["clusters that share copies"]
    log = log.replace(behavior_log_probabilities=np.full(len(log), np.log(0.5)))
    ranking = koffline.select_policies(log, ["uniform", "uniform"], **QUICK)
    assert any("which leaves 10" in note for note in ranking.notes)
    estimate = koffline.evaluate(log, "uniform", gamma=0.9, estimator="is")
    assert f"{count} independent units" in estimate.interval.assumptions


def test_the_split_says_so_and_keeps_the_numbers_of_clusters(tmp_path: Path) -> None:
    log, _ = LOGS["clusters that share copies"]
    write_transitions(log, tmp_path / "log.hdf5")
    text = succeed(
        "data", "split", *(tmp_path / name for name in ("log.hdf5", "a.hdf5", "b.hdf5"))
    )
    assert "some of which hold copies of the same episodes" in text
    parts = [
        koffline.open_transitions(tmp_path / name) for name in ("a.hdf5", "b.hdf5")
    ]
    numbers = np.concatenate([part.clusters for part in parts])
    assert set(numbers.tolist()) == set(log.clusters.tolist())


def test_a_model_fitted_by_folds_is_judged_on_a_log_with_copies() -> None:
    log = repeated(ONCE)
    fitted = cross_fit(log, lambda rows: lambda states, actions: np.zeros(len(states)))
    diagnosis = koffline.diagnose(fitted, log, "uniform", gamma=0.9)
    assert len(diagnosis.test.rows.weights) == len(ONCE)
    with pytest.raises(DataError, match="received other rows"):
        koffline.diagnose(fitted, episodes(80), "uniform", gamma=0.9)


@pytest.mark.parametrize("clustered", [False, True])
def test_without_copies_units_are_what_they_were(clustered: bool) -> None:
    log = ONCE
    expected = log.units
    if clustered:
        log = with_clusters(ONCE, 7 - np.arange(60) % 5)
        expected = np.unique(log.clusters, return_inverse=True)[1]
    units = independent_units(log)
    assert np.array_equal(units.of_row, expected)
    assert units.notes == ()
    assert with_independent_clusters(log) is log
