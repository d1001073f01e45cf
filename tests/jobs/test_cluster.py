"""Passes on a Ray cluster of two nodes: the same numbers as here, and what happens to
workers that die.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koffline import evaluate, open_transitions
from koffline.builders.rollouts import RolloutSettings, build_rollouts
from koffline.data.findings import inspect_log
from koffline.data.statistics import summarise
from koffline.data.units import sample_units
from koffline.jobs import PassSettings
from koffline.ope.stream_settings import StreamSettings
from tests.data.logs import in_shards, roll_out
from tests.jobs import functions

pytest.importorskip("ray")
_STORE = 80_000_000


@contextmanager
def two_nodes(cores: int = 1) -> Iterator[Any]:
    """A Ray cluster on this machine: each node has its own scheduler, workers and
    object store.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": cores,
        "object_store_memory": _STORE,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=cores, object_store_memory=_STORE)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as cluster:
        settings = PassSettings(ray=cluster.address)
        with settings.kept():  # one connection for all tests
            yield cluster.address


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of five shards."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(3, 20, 60).tolist()
    walk = roll_out(["terminated", "truncated"] * 30, lengths, discrete=True, seed=1)
    played = np.full(sum(lengths), np.log(0.4))
    log = walk.transitions(behavior_log_probabilities=played)
    in_shards(log, tmp_path / "log", len(log) // 5 + 10)
    return tmp_path / "log"


def test_passes_over_shards_are_those_of_this_process(
    address: str, shards: Path
) -> None:
    settings = PassSettings(ray=address)
    log = open_transitions(f"file://{shards}", lazy=True)
    assert len(log.shards) == 5
    assert summarise(log, settings) == summarise(log)
    assert inspect_log(log, settings) == inspect_log(log)
    there = sample_units(log, 50, 1, settings=settings)
    here = sample_units(log, 50, 1)
    assert there.transitions.sha256 == here.transitions.sha256


@pytest.mark.parametrize(
    "estimator", ["lstdq", "wis", pytest.param("kloss", marks=pytest.mark.slow)]
)
def test_estimates_are_those_of_this_process(address, shards, estimator, monkeypatch):
    # so that there are sums to be added
    monkeypatch.setattr("koffline.ope.log.working_log._ROWS_TOGETHER", 1)
    log = open_transitions(shards, lazy=True)
    quick = {
        "steps": 60,
        "full_replicas": 2,
        "instruments": 200,
        "feature_source": "random",
        "features": 32,
    }
    here, there = (
        evaluate(log, "uniform", 0.9, estimator=estimator, stream=stream, **quick)
        for stream in (StreamSettings(), StreamSettings(ray=address))
    )
    assert there.value == pytest.approx(here.value, rel=1e-10)
    assert here.interval is not None
    assert there.interval is not None
    bounds = (here.interval.low, here.interval.high)
    assert (there.interval.low, there.interval.high) == pytest.approx(bounds, rel=1e-10)


def test_rollouts_are_those_of_this_process(address: str) -> None:
    settings = RolloutSettings("CartPole-v1", 12, time_limit=12, num_envs=3)
    assert build_rollouts(settings, ["uniform"], ray=address).sha256 == (
        build_rollouts(settings, ["uniform"]).sha256
    )


@pytest.mark.slow
def test_a_node_that_is_lost_does_not_end_the_pass(tmp_path: Path) -> None:
    with two_nodes() as cluster, PassSettings(ray=cluster.address).kept():
        heard: list[tuple[int, str]] = []
        for value in PassSettings(ray=cluster.address).map(functions.slowly, range(12)):
            heard.append(value)
            if len(heard) == 2:
                cluster.remove_node(
                    next(iter(cluster.worker_nodes)), allow_graceful=False
                )
    assert [item for item, _ in heard] == list(range(12))
