"""From a log to a better policy, on worlds whose values are known."""

from __future__ import annotations

import numpy as np
import pytest

import koffline
from koffline.data.hashing import hash_rows
from koffline.improvement.differences import differences
from koffline.improvement.parts import count_units, split_in_three
from koffline.improvement.scaling import LogScaling
from tests.improve.worlds import GAMMA, QUICK, chain_log


@pytest.fixture(scope="module")
def improvable():
    exact = chain_log(right=0.5)
    return exact, koffline.improve(exact.log, gamma=GAMMA, settings=QUICK, cores=1)


def test_a_better_policy_is_found_and_is_better(improvable) -> None:
    exact, result = improvable
    assert result.recommended
    gain = exact.value(result.policy) - exact.value(exact.behavior)
    best = exact.best_value - exact.value(exact.behavior)
    assert gain > 0.8 * best
    # the interval is of the mean over the log's own starts, all of them alike here
    assert result.interval.low <= gain
    assert 0.0 < result.interval.low <= result.uplift <= result.interval.high
    assert result.reason is None


def test_what_was_tried_is_all_there(improvable) -> None:
    _, result = improvable
    assert [item.stage for item in result.candidates] == ["certify"] * 2 + [
        "choose"
    ] * 2
    assert result.policy.name == result.candidates[0].name
    assert result.policy.trained_on.sha256 == result.data_sha256
    assert result.candidates[0].certified
    frame = result.to_frame()
    assert frame.columns[:3] == ["policy", "share", "stage"]
    assert len(frame) == 4
    text = str(result)
    assert text.startswith(f"Use {result.name}: it is worth ")
    assert repr(result).count("\n") == 0
    content = result.to_dict()
    assert content["recommended"]
    assert content["candidates"][0]["name"] == result.name


def test_the_present_policy_is_kept_where_it_is_the_best() -> None:
    exact = chain_log(right=1.0, rows=600)
    result = koffline.improve(exact.log, gamma=GAMMA, settings=QUICK, cores=1)
    assert not result.recommended
    assert result.policy is None
    assert result.name is None
    assert result.verdict.answer != "supported" or result.interval.low <= 0.0
    assert result.reason.kind in ("noise", "size", "support")
    assert str(result).startswith("Keep the present policy. ")


def test_nothing_is_recommended_from_a_log_that_its_structure_contradicts() -> None:
    exact = chain_log(right=0.5)
    # next observations shifted by a row: the log's structure tests see it
    moved = np.roll(np.asarray(exact.log.next_observations), 1, axis=0)
    result = koffline.improve(
        exact.log.replace(next_observations=moved),
        gamma=GAMMA,
        settings=QUICK,
        cores=1,
    )
    assert not result.recommended
    assert result.verdict.answer != "supported"


def test_parts_share_no_episode_and_hold_all_rows() -> None:
    log = chain_log(right=0.5, rows=2000).log
    parts = split_in_three(log, seed=0)
    hashes = [hash_rows(part) for part in (parts.choose, parts.certify)]
    assert not set(hashes[0].tolist()) & set(hashes[1].tolist())
    sizes = [len(parts.train), len(parts.choose), len(parts.certify)]
    assert sum(sizes) == len(log)
    units = count_units(log).number
    assert count_units(parts.certify).number == pytest.approx(0.2 * units, abs=1)
    assert count_units(parts.choose).number == pytest.approx(0.2 * units, abs=1)
    assert not set(hash_rows(parts.train).tolist()) & set(hashes[1].tolist())


def test_copies_of_an_episode_stay_in_one_part() -> None:
    log = chain_log(right=0.5, rows=900).log
    twice = log.select_episodes(np.repeat(np.arange(log.n_episodes), 2))
    parts = split_in_three(twice, seed=0)
    assert sum(
        count_units(part).number for part in (parts.train, parts.choose, parts.certify)
    ) <= (log.n_episodes)
    assert parts.notes


@pytest.mark.parametrize("rows", [40, 300])
def test_nearest_rows_are_counted_among_those_that_there_are(rows: int) -> None:
    log = chain_log(right=0.5, rows=300).log.select(np.arange(rows))
    log = log.replace(actions=np.ones(rows, dtype=np.int64))

    def always_right(observations: np.ndarray) -> np.ndarray:
        return np.tile([0.0, 1.0], (len(observations), 1))

    policy = koffline.policies.DiscretePolicy(2, always_right)
    scaling = LogScaling.of(log, GAMMA)
    shown = differences(policy, policy, log, scaling, seed=0)
    assert [region.supported for region in shown.regions] == [1.0] * 4
    assert all(example.like == example.near for example in shown.examples)


def test_clusters_stay_in_one_part() -> None:
    log = chain_log(right=0.5, rows=900).log
    clusters = log.units // 3
    parts = split_in_three(log.replace(clusters=clusters), seed=0)
    names = [
        set(np.asarray(part.clusters).tolist())
        for part in (parts.train, parts.choose, parts.certify)
    ]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]


def test_a_log_of_a_few_episodes_is_refused() -> None:
    log = chain_log(right=0.5, rows=300).log.select_episodes([0, 1, 2])
    with pytest.raises(koffline.errors.DataError, match="takes at least 6"):
        koffline.improve(log, gamma=GAMMA, settings=QUICK)
