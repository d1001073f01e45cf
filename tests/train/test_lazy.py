"""Training from a log that stays on disk."""

import subprocess
import sys

import numpy as np
import pytest

from koffline import ColumnarReplayBuffer
from koffline.algos.options import resolve_params
from koffline.algos.training import fit_scalers, make_algorithm
from koffline.data.disk.block_sampler import BlockSampler
from koffline.data.disk.writer import ShardWriter
from koffline.data.replay import LazyReplayBuffer
from koffline.data.sources import open_transitions
from koffline.data.statistics import statistics_of
from koffline.data.units import sample_units
from koffline.errors import ConfigError
from koffline.store import read_record
from koffline.train.config import DataSettings, load_config
from koffline.train.prepare import open_data
from koffline.train.run import train
from tests.data.logs import in_shards
from tests.ope.problems import mortal_log
from tests.train.small_runs import check_killed_run, make_config, make_log

SCALERS = {
    "observation_scaler": ("standard", "min_max"),
    "action_scaler": ("min_max",),
    "reward_scaler": (
        "standard",
        "min_max",
        "return",
        "multiply",
        {"type": "clip", "params": {"low": 0.0}},
    ),
}
NAMES = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "next_actions",
    "terminals",
    "intervals",
)


def test_late_ends_are_left_out_in_memory_and_named_from_disk(tmp_path, caplog) -> None:
    log = mortal_log(rows_after=False)
    in_shards(log, tmp_path / "log", 2000)
    settings = DataSettings(source=str(tmp_path / "log"), split={"held_out": 0.2})
    data = open_data(settings)
    assert not caplog.records
    assert (
        data.rows.terminated.sum() + data.held_out.terminated.sum()
        < 0.9 * log.terminated.sum()
    )
    assert len(open_data(settings.model_copy(update={"lazy": True})).log) == len(log)
    assert "ends are too frequent" in caplog.text


def write_shards(folder, discrete=True, **changes) -> str:
    log = make_log(discrete, episodes=20).replace(**changes)
    in_shards(log, folder / "shards", 50)
    return str(folder / "shards")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("log"))


def lazy_config(shards, kind="dqn", **data):
    content = make_config(shards, kind)
    content["data"].update({"lazy": True, **data})
    return load_config(content, ["logger.gradients=false"])


def make_buffer(shards) -> LazyReplayBuffer:
    log = open_transitions(shards, lazy=True)
    sampler = BlockSampler(log, 0, pool_rows=40, block_rows=10)
    return LazyReplayBuffer(
        sampler, sample_units(log, 30, 0).transitions, statistics_of(log)
    )


def made(name, kind):
    return make_algorithm("td3", resolve_params("td3", {name: kind}))


def test_batches_are_those_of_the_columnar_buffer(shards):
    """Row by row: told by the rewards, all of them different."""
    log = open_transitions(shards)
    buffer = make_buffer(shards)
    known = {np.float32(reward): row for row, reward in enumerate(log.rewards)}
    columnar = ColumnarReplayBuffer(log, 0)
    for _ in range(10):
        batch = buffer.sample_transition_batch(16)
        rows = np.array([known[reward] for reward in batch.rewards[:, 0]])
        columnar._draw = lambda count, rows=rows: rows
        expected = columnar.sample_transition_batch(16)
        for name in NAMES:
            actual = getattr(batch, name)
            assert actual.dtype == getattr(expected, name).dtype == np.float32
            np.testing.assert_array_equal(actual, getattr(expected, name))


@pytest.mark.parametrize(
    ("name", "kind"), [(n, kind) for n, kinds in SCALERS.items() for kind in kinds]
)
def test_scalers_in_memory_and_on_disk_are_d3rlpys(name, kind, tmp_path):
    shards = write_shards(tmp_path, discrete=False)
    columnar = ColumnarReplayBuffer(open_transitions(shards), 0)
    theirs = getattr(made(name, kind), name)
    if not theirs.built:
        theirs.fit_with_transition_picker(columnar.episodes, columnar.transition_picker)
    expected = theirs.serialize_to_dict()
    for buffer in (columnar, make_buffer(shards)):
        algo = made(name, kind)
        fit_scalers(algo, buffer)
        actual = getattr(algo, name).serialize_to_dict()
        assert actual.keys() == expected.keys()
        for key, value in actual.items():
            np.testing.assert_allclose(
                np.asarray(value, float), np.asarray(expected[key], float), rtol=1e-6
            )


def test_scalers_that_cannot_be_fitted():
    log = make_log(discrete=False)
    still = ColumnarReplayBuffer(
        log.replace(observations=np.ones_like(log.observations)), 0
    )
    words = "observation_scaler 'min_max' gives observations that are not finite"
    with pytest.raises(ConfigError, match=words):
        fit_scalers(made("observation_scaler", "min_max"), still)
    algo = made("action_scaler", "min_max")
    algo.action_scaler.minimum = -np.ones(5)
    algo.action_scaler.maximum = np.ones(5)
    with pytest.raises(
        ConfigError, match=r"is for other actions.*of shape \(2,\); --set algo"
    ):
        fit_scalers(algo, ColumnarReplayBuffer(log, 0))


@pytest.mark.parametrize("kind", ["dqn", "kloss_dqn"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    kind, shards, tmp_path, monkeypatch
):
    check_killed_run(lazy_config(shards, kind), tmp_path, monkeypatch)


def test_large_folders_stay_on_disk_unasked(shards, tmp_path, caplog):
    content = make_config(shards)
    content["data"]["memory"] = 4000
    result = train(load_config(content, ["logger.gradients=false"]), tmp_path / "run")
    assert read_record(result.out)["data"]["lazy"] is True
    assert "its rows stay on disk" in caplog.text
    content["data"]["memory"] = "1MB"
    result = train(load_config(content, ["logger.gradients=false"]), tmp_path / "fits")
    assert read_record(result.out)["data"]["lazy"] is False


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("trust_pcl", {}, r"trust_pcl learns from paths .* this log stays on disk"),
        ("cal_ql", {}, "returns to the end of an episode"),
        ("iql", {"weights": np.arange(1.0, 161.0)}, "the log has weights"),
    ],
)
def test_what_needs_the_rows_in_memory_is_refused(kind, changes, message, tmp_path):
    config = lazy_config(write_shards(tmp_path, discrete=False, **changes), kind)
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path):
    """Both logs are larger than the pool of 8 MB; in memory the second would take 230
    MB more.
    """
    piece = make_log(discrete=True, episodes=1000, length=50)
    wide = np.tile(piece.observations, (1, 64))  # 192 columns: 77 MB in all
    piece = piece.replace(observations=wide, next_observations=wide)
    peaks = []
    for copies in (1, 4):
        with ShardWriter(tmp_path / f"{copies}", shard_rows=10_000) as writer:
            for _ in range(copies):
                writer.append(piece)
        code = PEAK.format(folder=str(tmp_path / f"{copies}"))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 50_000


# Kilobytes that a process holds at most which trains on the folder.
PEAK = """
import resource
from koffline.train.config import load_config
from koffline.train.run import train
from tests.train.small_runs import make_config
content = make_config({folder!r})
content["data"].update(lazy=True, memory="16MB")
train(load_config(content, ["logger.gradients=false"]), {folder!r} + "-run")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
