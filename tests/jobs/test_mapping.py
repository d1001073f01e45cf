import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koffline.errors import DataError, KofflineError
from koffline.jobs import JobError, PassSettings
from tests.jobs import functions

WHERE = [pytest.param({}, id="here"), pytest.param({"workers": 2}, id="processes")]


def values(call: Any, items: Any, shared: Any = None, name: Any = None, **settings: Any) -> list[Any]:
    return list(PassSettings(**settings).map(call, items, shared, name))


@pytest.mark.parametrize("where", WHERE)
def test_values_come_in_the_order_of_the_items(where: dict[str, int]) -> None:
    assert values(functions.slow_first, range(5), **where) == [0, 1, 2, 3, 4]
    assert values(functions.double, iter((4, 2)), **where) == [8, 4]
    assert values(functions.double, [], **where) == []


def test_sums_are_the_same_everywhere() -> None:
    rows = np.random.default_rng(0).normal(size=(999, 7))
    here = sum(values(functions.sums, range(5), shared=rows))
    np.testing.assert_allclose(here, rows.T @ rows, rtol=1e-10)
    np.testing.assert_array_equal(here, sum(values(functions.sums, range(5), shared=rows, workers=2)))


def test_a_pass_left_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate())
    for _ in range(3):
        started = PassSettings(workers=2).map(functions.slow_later, range(9))
        assert next(started) == 0
        started.close()
    deadline = time.monotonic() + 20.0
    while set(threading.enumerate()) > before and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread is alive for a moment after its work
    assert set(threading.enumerate()) <= before
    assert (multiprocessing.active_children(), list(tmp_path.iterdir())) == ([], [])
    assert capfd.readouterr() == ("", "")


def test_passes_share_kept_workers(tmp_path: Path) -> None:
    settings = PassSettings(workers=2)
    with settings.kept():
        first, second = (set(settings.map(functions.surroundings, range(6))) for _ in range(2))
        assert first == second
        assert {threads for _, threads in first} == {"1"}
        assert os.getpid() not in {process for process, _ in first}
        deaths = functions.Deaths(tmp_path, times=1)
        assert list(settings.map(functions.die, range(3), deaths)) == [0, 1, 2]
        with pytest.raises(DataError):
            list(settings.map(functions.refuse_third, range(4), "data"))
        one, other = (settings.map(functions.double, range(3)) for _ in range(2))  # one within the other
        assert list(zip(one, other, strict=True)) == [(0, 0), (2, 2), (4, 4)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("where", WHERE)
def test_a_refused_item_is_named_and_ends_the_pass(where: dict[str, int]) -> None:
    with pytest.raises(DataError, match=re.escape("item 2: the shard is damaged; copy it again")):
        values(functions.refuse_third, range(4), shared="data", **where)
    with pytest.raises(KofflineError, match=re.escape("shard-2: odd; mend it")):
        values(functions.refuse_third, range(4), shared="rare", name=lambda item: f"shard-{item}", **where)


def test_a_fault_ends_the_pass() -> None:
    with pytest.raises(ZeroDivisionError):  # here, as it is
        values(functions.stumble, range(3))
    with pytest.raises(JobError, match=r"item 1: ZeroDivisionError at functions.py:\d+") as caught:
        values(functions.stumble, range(3), workers=2)
    assert "in stumble" in caught.value.trace


def test_an_item_whose_worker_died_goes_to_another(tmp_path: Path) -> None:
    deaths = functions.Deaths(tmp_path, times=2)
    assert values(functions.die, range(4), shared=deaths, workers=2) == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_item_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    deaths = functions.Deaths(tmp_path, times=99)
    message = r"item 1: a worker process died \(killed, or out of memory\?\), 3 times; give the workers more"
    with pytest.raises(JobError, match=message):
        values(functions.die, range(4), shared=deaths, workers=2)


SCRIPT = """
import os
from koffline.jobs import PassSettings

def die_over_two(shared, item):
    if item == 2 and not os.path.exists("dead"):
        open("dead", "w").close()
        os.kill(os.getpid(), 9)
    return shared + item

print(list(PassSettings(workers=2).map(die_over_two, range(4), 1)))
"""


def test_a_script_needs_no_guard_and_a_container_no_tools(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    surroundings = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    options = {"capture_output": True, "text": True, "check": False, "timeout": 60}
    done = subprocess.run(command, env=surroundings, cwd=tmp_path, **options)
    assert (done.stdout, done.stderr) == ("[1, 2, 3, 4]\n", "")
