"""Equal units are in one part of the log, in memory and on disk; what they weigh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.data.copies import RecurrenceCount, hash_units, join_clusters
from koffline.data.sources import write_transitions
from koffline.improvement import large_logs
from koffline.improvement.constraint import CostLogs
from koffline.improvement.parts import LogParts, count_units, split_in_three
from tests.refusals import succeed

EPISODES = 300


def episodes(
    count: int = EPISODES, steps: int = 3, **changes: object
) -> koffline.Transitions:
    """Episodes whose states are all different."""
    generator = np.random.default_rng(0)
    rows = count * steps
    states = generator.normal(size=(rows, 2))
    ends = np.arange(rows) % steps == steps - 1
    columns: dict = {
        "observations": states,
        "actions": generator.integers(2, size=rows),
        "rewards": generator.normal(size=rows),
        "next_observations": np.roll(states, -1, axis=0),
        "terminated": ends,
        "truncated": np.zeros(rows, bool),
        "episode_ids": np.repeat(np.arange(count), steps),
        "action_space": koffline.Discrete(2),
    }
    return koffline.Transitions(**{**columns, **changes})


def repeated(log: koffline.Transitions, times: int = 2) -> koffline.Transitions:
    """The log once after the other, so that copies are far apart."""
    return log.select_episodes(np.tile(np.arange(log.n_episodes), times))


def with_clusters(
    log: koffline.Transitions, by_unit: np.ndarray
) -> koffline.Transitions:
    return log.replace(clusters=by_unit[log.units])


ONCE = episodes()
TWICE = repeated(ONCE)
LOGS = {
    "copies": TWICE,
    "rows that stand alone": repeated(episodes(600, 1)),
    "copies with weights": TWICE.replace(weights=np.linspace(1, 2, len(TWICE))),
    "copies in other clusters": with_clusters(TWICE, np.arange(2 * EPISODES) // 2),
    "copies in few clusters": with_clusters(
        repeated(episodes(90)), np.arange(180) // 2
    ),
    "three copies": repeated(ONCE, 3),
    "few episodes": repeated(episodes(60)),
    "a copied episode": ONCE.select_episodes(np.append(np.arange(EPISODES), 7)),
    "a chain of clusters": with_clusters(
        ONCE.select_episodes([*range(EPISODES), 0, 3, 3, 6]),
        np.append(np.arange(EPISODES) // 3, [1, 1, 2, 3]),
    ),
}


def parts_on_disk(log: koffline.Transitions, folder: Path, rows: int) -> LogParts:
    write_transitions(log, folder / "log.hdf5")
    place = folder / "shards"
    succeed("data", "convert", folder / "log.hdf5", place, "--shard-rows", rows)
    lazy = koffline.open_transitions(place, lazy=True)
    return large_logs.parts_of(lazy, 0, folder / "work", held_bytes=0.0)


def in_memory(log: koffline.Transitions | object) -> koffline.Transitions:
    if isinstance(log, koffline.Transitions):
        return log
    return log.load()


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_equal_units_are_in_one_part_once_with_all_their_weight(
    name: str, on_disk: bool, tmp_path: Path
) -> None:
    log = LOGS[name]
    if on_disk:
        parts = parts_on_disk(log, tmp_path, rows=200)
    else:
        parts = split_in_three(log, seed=0)
    contents = [
        hash_units(in_memory(part))
        for part in (parts.train, parts.choose, parts.certify)
    ]
    together = np.concatenate(contents)
    assert len(np.unique(together)) == len(together)
    assert set(together.tolist()) == set(hash_units(log).tolist())
    weights = [
        in_memory(part).row_weights
        for part in (parts.train, parts.choose, parts.certify)
    ]
    total = np.concatenate(weights).sum()
    assert total == pytest.approx(log.row_weights.sum(), rel=1e-6)
    if log.clusters is not None:
        numbers = [
            set(np.asarray(in_memory(part).clusters).tolist())
            for part in (parts.train, parts.choose, parts.certify)
        ]
        assert not numbers[0] & numbers[1]
        assert not (numbers[0] | numbers[1]) & numbers[2]
    assert any("copies" in note for note in parts.notes)


@pytest.mark.parametrize("on_disk", [False, True])
def test_units_that_are_equal_by_chance_are_no_copies(
    on_disk: bool, tmp_path: Path
) -> None:
    """Rows of a bandit with three contexts: equal rows are evidence."""
    generator = np.random.default_rng(0)
    rows = 600
    contexts = generator.integers(3, size=(rows, 1)).astype(float)
    log = episodes(
        rows,
        1,
        observations=contexts,
        next_observations=contexts,
        rewards=generator.integers(2, size=rows).astype(float),
    )
    if on_disk:
        parts = parts_on_disk(log, tmp_path, rows=100)
    else:
        parts = split_in_three(log, seed=0)
    sizes = [len(parts.train), len(parts.choose), len(parts.certify)]
    assert sum(sizes) == rows
    assert sizes[2] == pytest.approx(0.2 * rows, abs=30)
    assert not parts.notes or "copies" not in " ".join(parts.notes)


@pytest.mark.parametrize(
    ("episodes_of_log", "certified"),
    [(30, 12), (39, 16), (40, 20), (48, 20), (60, 24), (149, 60), (150, 30), (400, 80)],
)
@pytest.mark.parametrize("clustered", [False, True])
def test_small_logs_keep_enough_units_to_certify_on(
    episodes_of_log: int, certified: int, clustered: bool
) -> None:
    log = episodes(episodes_of_log)
    if clustered:
        twice = episodes(2 * episodes_of_log)
        log = with_clusters(twice, np.arange(2 * episodes_of_log) // 2)
    parts = split_in_three(log, seed=0)
    assert count_units(parts.certify).number == certified


def test_few_units_on_disk_are_split_as_in_memory(tmp_path: Path) -> None:
    parts = parts_on_disk(episodes(60), tmp_path, rows=30)
    assert count_units(parts.certify).number == 24
    assert count_units(parts.train).number == 24


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("weights", "clusters", "number", "effective"),
    [
        (None, None, 4, 4.0),
        ([1.0, 1.0, 2.0, 0.0], None, 4, 16.0 / 6.0),
        (None, [5, 5, 7, 9], 3, 16.0 / 6.0),
        ([3.0, 1.0, 4.0, 4.0], [5, 5, 7, 9], 3, 3.0),
    ],
)
def test_effective_units_by_hand(
    weights: list[float] | None,
    clusters: list[int] | None,
    number: int,
    effective: float,
    on_disk: bool,
    tmp_path: Path,
) -> None:
    log = episodes(4)
    if weights is not None:
        log = log.replace(weights=np.asarray(weights)[log.units])
    if clusters is not None:
        log = with_clusters(log, np.asarray(clusters))
    if on_disk:
        write_transitions(log, tmp_path / "log.hdf5")
        place = tmp_path / "shards"
        succeed("data", "convert", tmp_path / "log.hdf5", place, "--shard-rows", 5)
        log = koffline.open_transitions(place, lazy=True)
    units = count_units(log)
    assert units.number == number
    assert units.effective == pytest.approx(effective)


def test_joined_clusters_by_hand() -> None:
    """3 and 5 share a unit, 5 and 9 another; 7 shares none."""
    clusters = np.array([9, 3, 5, 5, 9, 7])
    contents = np.array([1, 2, 2, 4, 4, 6], dtype=np.uint64)
    assert join_clusters(clusters, contents).tolist() == [3, 3, 3, 3, 3, 7]
    alone = np.arange(6, dtype=np.uint64)
    assert join_clusters(clusters, alone).tolist() == clusters.tolist()


@pytest.mark.parametrize("block", [1, 7, 400])
def test_recurrence_does_not_depend_on_blocks(block: int) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(100, size=400).astype(np.uint64)
    units = generator.integers(50, size=400).astype(np.uint64)
    count = RecurrenceCount(share=1.0)
    for start in range(0, 400, block):
        count.add(values[start : start + block], units[start : start + block])
    holders = {value: set(units[values == value].tolist()) for value in set(values)}
    shared = [len(holders[value]) > 1 for value in values]
    assert count.recurring == pytest.approx(np.mean(shared))


def test_a_share_of_the_values_tells_the_recurrence_of_all() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(20_000, size=20_000).astype(np.uint64)
    units = np.arange(20_000, dtype=np.uint64)
    whole = RecurrenceCount(share=1.0)
    sampled = RecurrenceCount(share=0.1)
    whole.add(values, units)
    sampled.add(values, units)
    # about 1,260 of 12,600 values: a standard error of 0.014
    assert sampled.recurring == pytest.approx(whole.recurring, abs=0.05)


@pytest.mark.parametrize("weighted", [False, True])
def test_copies_cost_what_they_cost_together(weighted: bool) -> None:
    """Weighted sums of costs are those of all rows, whichever copy is kept."""
    log = TWICE
    generator = np.random.default_rng(3)
    if weighted:
        log = log.replace(weights=generator.uniform(0.5, 2.0, size=len(log)))
    costs = generator.uniform(size=len(log))
    parts = split_in_three(log, seed=0)
    of_parts = CostLogs.of(parts, log, costs)
    contents = hash_units(log)
    for part, with_costs in (
        (parts.choose, of_parts.choose),
        (parts.certify, of_parts.certify),
    ):
        rows = np.isin(contents, hash_units(part))[log.units]
        expected = np.sum((costs * log.row_weights)[rows])
        shown = np.sum(with_costs.rewards * with_costs.row_weights)
        assert shown == pytest.approx(expected)
