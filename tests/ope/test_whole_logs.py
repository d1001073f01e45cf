"""One engine: where a log lies changes nothing, and sums over parts are those over all rows."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

import koffline
from koffline.config import make_settings
from koffline.data.disk.writer import ShardWriter
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.kernels import FourierFeatures
from koffline.ope.evaluation import estimate_all, open_workspace
from koffline.ope.fitted import systems_of_part
from koffline.ope.learning import Resampling
from koffline.ope.problem import prepare_problem
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.working_log import hold, in_problem
from koffline.policies import ContinuousPolicy, DiscretePolicy
from tests.ope.problems import NOISY, stack

QUICK = {"steps": 30, "hidden_units": (8, 8), "full_replicas": 2, "resampled_replicas": 3, "instruments": 60}
TILTED = DiscretePolicy(3, lambda s: np.tile([0.2, 0.3, 0.5], (len(s), 1)), name="tilted")
DRIFT = ContinuousPolicy(1, lambda s: np.tanh(s[:, :1]), name="drift")


def make_log(kind: str, episodes: int = 60) -> Transitions:
    """Episodes of 1 … 12 steps, weighted, with the behaviour's probabilities."""
    generator = np.random.default_rng(8)
    lengths = generator.integers(1, 13, episodes)
    n, starts = int(lengths.sum()), np.cumsum(lengths) - lengths
    last = np.isin(np.arange(n), starts + lengths - 1)
    states = generator.normal(size=(n, 2))
    rewards, following = states[:, 0] + generator.normal(size=n), generator.normal(size=(n, 2))
    is_discrete = kind == "discrete"
    return Transitions(
        observations=states,
        actions=generator.integers(3, size=n) if is_discrete else generator.uniform(-1, 1, (n, 1)),
        rewards=rewards,
        next_observations=0.8 * states + 0.3 * following,
        terminated=last & (generator.random(n) < 0.5),
        truncated=np.zeros(n, bool),
        steps=None if kind == "rows" else np.arange(n) - np.repeat(starts, lengths),
        weights=np.repeat(generator.uniform(0.5, 2.0, episodes), lengths),
        behavior_log_probabilities=np.full(n, np.log(1.0 / 3.0)) if is_discrete else None,
        action_space=koffline.Discrete(3) if is_discrete else koffline.Continuous(1, -1.0, 1.0),
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A log by kind: in memory, and opened from a folder of small shards."""
    found = {}
    for kind in ("discrete", "continuous", "rows"):
        folder = tmp_path_factory.mktemp("logs") / kind
        with ShardWriter(folder, shard_rows=90) as writer:
            writer.append(make_log(kind))
        found[kind] = make_log(kind), koffline.open_transitions(folder, lazy=True)
    return found


def answers(log, policy, names=None, **options) -> dict[str, np.ndarray | str]:
    table = estimate_all(log, policy, 0.9, names=names, seed=4, bounds=False, **QUICK, **options)
    found: dict[str, np.ndarray | str] = {}
    for row in table.rows:
        estimate = row.estimate
        if estimate is None:
            found[row.name] = row.reason
            continue
        ends = [] if estimate.interval is None else [estimate.interval.low, estimate.interval.high]
        found[row.name] = np.array([estimate.value, *ends])
    return found


@pytest.mark.parametrize(
    ("kind", "sample_rows", "workers", "names"),
    [
        *((kind, rows, 1, None) for kind in ("discrete", "continuous", "rows") for rows in (200_000, 150)),
        ("discrete", 150, 2, ("lstdq", "wis")),  # features, weights of episodes
    ],
)
def test_storage_changes_no_estimate_and_no_interval(stored, kind, sample_rows, workers, names) -> None:
    """Every estimator, its value and its interval."""
    memory, shards = stored[kind]
    policy = TILTED if kind == "discrete" else DRIFT
    expected = answers(memory, policy, names, sample_rows=sample_rows)
    answered = sum(not isinstance(value, str) for value in expected.values())
    assert answered >= (len(names) if names else 15 if kind == "discrete" else 8)
    stream = StreamSettings(memory="1GB", workers=workers)
    agree(answers(shards, policy, names, sample_rows=sample_rows, stream=stream), expected)


def agree(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert found[name] == value
        else:
            largest = np.abs(value).max()  # one end of an interval may be near zero
            np.testing.assert_allclose(found[name], value, rtol=0.0, atol=1e-10 * largest, err_msg=name)


def test_records_of_a_sampled_log_count_all_rows(stored) -> None:
    memory, shards = stored["discrete"]
    found = koffline.evaluate(shards, TILTED, 0.9, sample_rows=150, **QUICK)
    assert (found.n_transitions, found.n_episodes) == (len(memory), memory.n_episodes)
    assert found.data_sha256 == memory.sha256
    assert found.diagnostics["sample_rows"] < 200
    assert found.diagnostics["n_terminated"] == memory.terminated.sum()
    assert found.diagnostics["behavior_return"] == pytest.approx(memory.returns(0.9).mean(), rel=1e-12)
    whole = koffline.evaluate(memory, TILTED, 0.9, **QUICK)
    assert found.diagnostics["behavior_return_se"] == pytest.approx(whole.diagnostics["behavior_return_se"])
    assert "sample_rows" not in whole.diagnostics


@pytest.mark.parametrize("kind", ["discrete", "continuous", "rows"])
def test_sums_over_parts_are_those_over_all_rows(stored, kind, monkeypatch) -> None:
    """The systems of the last layers, part by part, against one problem of the whole log."""
    monkeypatch.setattr("koffline.ope.working_log._MOST_ROWS", 40)
    memory, shards = stored[kind]
    policy = TILTED if kind == "discrete" else DRIFT
    log = hold(shards, 150, seed=0)
    assert not log.is_whole
    like = prepare_problem(log.held.transitions, policy, 0.9, 1, np.random.default_rng(0))
    whole = prepare_problem(memory, policy, 0.9, 1, np.random.default_rng(0), like=like)
    network, _ = stack(like)
    instruments = FourierFeatures(torch.ones(like.kernel_inputs.shape[1], 3).double())
    of_part = partial(systems_of_part, network, instruments, Resampling(3, 1, (0,)))
    units = np.arange(memory.n_episodes if memory.has_episodes else len(memory))
    parts = []

    def counted(part):
        parts.append(part)
        return in_problem(of_part, like.without_rows(), policy, 0.9, 1, 0, part)

    with torch.no_grad():
        found, expected = log.fold(counted), of_part(whole, units)
    assert len(parts) > 5
    np.testing.assert_array_equal(np.concatenate([part.units for part in parts]), units)
    for name, expected_sum in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), expected_sum, rtol=1e-10, atol=1e-9)


def test_shards_that_cannot_be_read(stored, tmp_path) -> None:
    """Refused with their name; left out on request, in the sample and in the passes, and said."""
    memory, _ = stored["discrete"]
    with ShardWriter(tmp_path / "log", shard_rows=90) as writer:
        writer.append(memory)
    (tmp_path / "log" / "shard-00001.hdf5").write_bytes(b"no shard")
    log = koffline.open_transitions(tmp_path / "log", lazy=True)
    log = dataclasses.replace(
        log, metadata=dataclasses.replace(log.metadata, sha256=None)
    )  # as of flat files
    for rows in (200_000, 150):
        with pytest.raises(DataError, match=r"shard-00001\.hdf5"):
            koffline.evaluate(log, TILTED, 0.9, sample_rows=rows, **QUICK)
        stream = StreamSettings(skip_bad_shards=True)
        found = koffline.evaluate(log, TILTED, 0.9, sample_rows=rows, stream=stream, **QUICK)
        assert any(w.startswith("Left out: ") and "shard-00001" in w for w in found.warnings)
        assert found.n_transitions == len(memory) - log.shards[1].rows
        assert found.data_sha256 == ""


def test_memory_that_is_too_small_is_refused_with_what_is_enough(stored) -> None:
    _, shards = stored["discrete"]
    with pytest.raises(ConfigError, match=r"memory is 600MB, this evaluation needs at least \d+MB"):
        koffline.evaluate(
            shards, TILTED, 0.9, sample_rows=150, stream=StreamSettings(memory="600MB"), **QUICK
        )


def test_a_drawing_policy_and_given_starts(stored) -> None:
    """Actions are drawn part by part: another cut of the log moves estimates by that noise alone."""
    memory, shards = stored["continuous"]
    starts = np.zeros((5, 2))
    for options in ({}, {"initial_observations": starts}):
        found = [
            estimate_all(log, NOISY, 0.9, seed=4, bounds=False, sample_rows=150, **options, **QUICK)
            for log in (memory, shards)
        ]
        for one, other in zip(found[0].rows, found[1].rows, strict=True):
            assert (one.estimate is None) == (other.estimate is None)
            if one.estimate is not None and one.estimate.interval is not None:
                assert one.estimate.value == pytest.approx(
                    other.estimate.value, abs=0.2 * one.estimate.interval.width
                )


def test_copies_of_a_log_on_disk_are_merged_as_in_memory(tmp_path) -> None:
    """A log of ten copies of each episode says what the episodes say, wherever it lies."""
    one = make_log("discrete", 12).replace(weights=None)
    copied = one.select_episodes(np.tile(np.arange(12), 10))
    with ShardWriter(tmp_path / "log", shard_rows=90) as writer:
        writer.append(copied)
    lazy = koffline.open_transitions(tmp_path / "log", lazy=True)
    found = [koffline.evaluate(log, TILTED, 0.9, **QUICK) for log in (one, copied, lazy)]
    for other in found[1:]:
        assert other.value == pytest.approx(found[0].value, rel=1e-9)
        assert other.interval.width == pytest.approx(found[0].interval.width, rel=1e-9)


def test_networks_are_trained_on_the_units_that_passes_count(stored) -> None:
    """Rows that out-of-bag values call unseen were not drawn by the replica that values them."""
    memory, _ = stored["discrete"]
    with open_workspace(
        memory, TILTED, make_settings({"gamma": 0.9, "sample_rows": 150, **QUICK})
    ) as workspace:
        ensemble, held = workspace.ensemble, workspace.log.held.units
    np.testing.assert_array_equal(ensemble.units, held)
    counts = ensemble.resampling.counts(np.arange(memory.n_episodes))[:, held]
    np.testing.assert_array_equal(ensemble.start_weights > 0.0, counts > 0)


def test_weights_of_another_mean_outside_the_sample(stored) -> None:
    """Closed forms of a sampled log are those of all rows, in whatever units its weights are."""
    memory, _ = stored["discrete"]
    held = hold(memory, 150, seed=0).sample.units
    weights = np.where(np.isin(memory.episode_ids, held), 0.1, 3.0)
    log = memory.replace(weights=weights)
    found = estimate_all(
        log,
        TILTED,
        0.9,
        names=("mql", "mwl"),
        bounds=False,
        sample_rows=150,
        feature_source="random",
        **QUICK,
    )
    for row in found.rows:
        assert row.estimate.diagnostics["mass"] == pytest.approx(1.0, abs=0.02)
        assert not any("of the policy's visits" in warning for warning in row.estimate.warnings)


def test_a_policy_that_fails_is_no_bad_shard(stored) -> None:
    memory, shards = stored["discrete"]
    held = hold(memory, 150, seed=0)
    outside = memory.observations[~np.isin(memory.episode_ids, held.sample.units)][7]

    def odd(states):
        found = np.tile([0.2, 0.3, 0.5], (len(states), 1))
        found[(states == outside).all(axis=1)] = 0.9
        return found

    stream = StreamSettings(skip_bad_shards=True)
    with pytest.raises(KofflineError, match=r"probabilities sums to 2\.7"):
        koffline.evaluate(shards, odd, 0.9, sample_rows=150, stream=stream, **QUICK)


def test_values_may_be_as_large_as_rewards_outside_the_sample_allow(stored) -> None:
    memory, _ = stored["discrete"]
    held = hold(memory, 150, seed=0).sample.units
    rewards = np.where(np.isin(memory.episode_ids, held), 0.0, 7.0)
    settings = make_settings({"gamma": 0.9, "sample_rows": 150})
    with open_workspace(memory.replace(rewards=rewards), TILTED, settings) as workspace:
        low, high = workspace.problem.value_bounds
        scale = workspace.problem.reward_scale
    assert (low * scale, high * scale) == pytest.approx((0.0, 70.0))
