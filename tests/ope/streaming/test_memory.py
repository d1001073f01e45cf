"""Evaluations of logs on disk stay within their limit, and say which limit would be enough."""

import dataclasses
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.config import make_settings
from koffline.errors import ConfigError
from koffline.jobs.mapping import PassSettings
from koffline.ope.streaming.memory import Shapes, plan_memory, shapes_of
from koffline.ope.streaming.settings import StreamSettings
from tests.ope.problems import continuous_log, discrete_log
from tests.ope.streaming.logs import on_disk

LARGE = Shapes(inputs=20, outputs=4, draws=1, hidden=(64, 64), replicas=3, instruments=1000)


def test_more_memory_allows_more(tmp_path):
    lazy = on_disk(tmp_path, discrete_log(300), 120)
    plans = [plan_memory(StreamSettings(memory), LARGE, lazy) for memory in ("1500MB", "4GB", "16GB")]
    assert plans[0].groups <= plans[1].groups <= plans[2].groups == 40
    assert plans[0].block_rows <= plans[1].block_rows <= plans[2].block_rows
    assert {plan.block_rows % 1024 for plan in plans} == {0}


def least_limit(shapes: Shapes, lazy, **stream) -> int:
    """In MB, as the refusal of far too little says."""
    with pytest.raises(ConfigError, match="needs at least") as caught:
        plan_memory(StreamSettings("1MB", **stream), shapes, lazy)
    assert "\n" not in str(caught.value)
    return int(re.findall(r"at least (\d+)MB", str(caught.value))[0])


@pytest.mark.parametrize("draws", [1, 8])
@pytest.mark.parametrize("stream", [{}, {"sample_rows": 250}, {"groups": 4, "precision": "double"}])
def test_the_limit_that_a_refusal_asks_for_is_enough(draws, stream, tmp_path):
    lazy = on_disk(tmp_path, continuous_log(300), 120)
    shapes = dataclasses.replace(LARGE, outputs=1, draws=draws, discrete=False)
    least = least_limit(shapes, lazy, **stream)
    plan = plan_memory(StreamSettings(f"{least}MB", **stream), shapes, lazy)
    assert plan.sample_rows >= min(300, stream.get("sample_rows", 300))
    assert plan.groups >= min(10, stream.get("groups", 10))
    with pytest.raises(ConfigError, match=f"needs at least {least}MB"):
        plan_memory(StreamSettings(f"{least - 1}MB", **stream), shapes, lazy)


def test_small_logs_and_few_networks_need_less(tmp_path):
    small = on_disk(tmp_path, continuous_log(60), 40)
    large = on_disk(tmp_path, continuous_log(5000), 4000)
    wide = dataclasses.replace(LARGE, inputs=500, outputs=1, discrete=False)
    assert least_limit(wide, small) < least_limit(wide, large)
    assert least_limit(dataclasses.replace(wide, replicas=1), small) < least_limit(wide, small)


def test_start_states_are_drawn_as_the_memory_allows(tmp_path):
    """Ten thousand wide ones with their draws would be a gigabyte; given ones are all kept, or refused."""
    lazy = on_disk(tmp_path, continuous_log(300), 120)
    wide = Shapes(1000, 1, 8, (8,), 1, 20, discrete=False)
    least = least_limit(wide, lazy)
    assert plan_memory(StreamSettings(f"{least + 100}MB"), wide, lazy).starts < 2000
    assert least_limit(dataclasses.replace(wide, starts=5000, given_starts=True), lazy) > least + 400
    shapes = shapes_of(lazy, make_settings({"gamma": 0.9}), 1, True, 77)
    assert plan_memory(StreamSettings(), shapes, lazy).starts == 77


class Value:
    """Something that can be watched."""


def test_a_pass_holds_no_value_that_was_handed_out():
    alive: list[weakref.ref] = []

    def compute(_shared, _item):
        assert all(value() is None for value in alive)
        value = Value()
        alive.append(weakref.ref(value))
        return value

    for mapped in PassSettings().map(compute, range(4)):
        del mapped
    assert len(alive) == 4


PEAK = """
import json, sys
import koffline
log = koffline.open_transitions(sys.argv[1], lazy=True)
stream = koffline.StreamSettings(sys.argv[2])
koffline.evaluate(log, "uniform", 0.9, stream=stream, **json.loads(sys.argv[3]))
with open("/proc/self/status") as status:  # what getrusage says includes the parent's peak
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
HAS_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def peak(folder: str, memory: str, **settings) -> int:
    """Bytes that an evaluation held at most."""
    arguments = [sys.executable, "-c", PEAK, folder, memory, json.dumps({"steps": 20, **settings})]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout)


@HAS_PROC
def test_memory_stays_within_its_limit(tmp_path):
    """Of 640 MB the libraries take 350; the log has 100, and eight times that as a problem in memory."""
    lazy = on_disk(tmp_path, made_log(62_000, 200, "continuous"), 15_500)
    assert len(lazy) * lazy.row_bytes > 95e6
    folder = str(Path(lazy.shards[0].name).parent)
    small = {"full_replicas": 1, "hidden_units": [8], "instruments": 20, "action_draws": 2}
    assert 200e6 < peak(folder, "640MB", **small) < 640e6


@HAS_PROC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "memory", "replicas"),
    [
        ("continuous", "600MB", 3),
        ("continuous", "800MB", 3),
        ("continuous", "1GB", 1),
        ("discrete", "800MB", 3),
        ("discrete", "600MB", 1),
        ("rows alone", "1GB", 3),
    ],
)
def test_memory_stays_within_larger_limits(actions, memory, replicas, tmp_path):
    """With the default networks and instruments; three stretches of shards are added up."""
    lazy = on_disk(tmp_path, made_log(600_000, 12, actions), 100_000)
    limit = StreamSettings(memory).memory_bytes
    folder = str(Path(lazy.shards[0].name).parent)
    assert 0.5 * limit < peak(folder, memory, full_replicas=replicas) < limit


def made_log(rows: int, numbers: int, actions: str) -> koffline.Transitions:
    """Episodes of 100 steps, or rows alone."""
    generator = np.random.default_rng(0)
    states = generator.standard_normal((rows + 1, numbers), dtype=np.float32)
    steps = np.arange(rows) % 100
    episodes = {} if actions == "rows alone" else {"episode_ids": np.arange(rows) // 100, "steps": steps}
    discrete = actions == "discrete"
    taken = generator.integers(2, size=rows) if discrete else generator.uniform(-1, 1, (rows, 1))
    return koffline.Transitions(
        observations=states[:-1],
        actions=taken if discrete else taken.astype(np.float32),
        rewards=states[:-1, 0],
        next_observations=states[1:],
        terminated=np.zeros(rows, bool),
        truncated=steps == 99,
        action_space=koffline.Discrete(2) if discrete else koffline.Continuous(1, -1.0, 1.0),
        **episodes,
    )
