"""One computation on several cores: same results, news, deaths, interrupts, defaults."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.errors import DataError
from koffline.jobs import cores as module
from koffline.jobs import forks
from koffline.jobs.cores import (
    cores,
    each_on_cores,
    free_cores,
    on_cores,
    pieces_of,
)
from koffline.jobs.forks import can_fork
from koffline.jobs.workers import JobError
from tests.interrupts import hear_interrupts

LONG = 100.0  # seconds of work, which is worth a fork
needs_forks = pytest.mark.skipif(
    not can_fork(), reason="pieces are sent to workers here"
)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 50])
def test_pieces_cover_every_replica_once_and_differ_by_one_at_most(parts) -> None:
    pieces = pieces_of(7, parts)
    sizes = [piece.stop - piece.start for piece in pieces]
    assert [n for piece in pieces for n in range(7)[piece]] == list(range(7))
    assert max(sizes) - min(sizes) <= 1 <= min(sizes)
    assert len(pieces) == min(parts, 7)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_results_come_in_order_and_news_arrive(count) -> None:
    news = []

    def square(replicas, tell):
        numbers = torch.arange(5.0, dtype=torch.float64)[replicas]
        tell(len(numbers))
        return {"squares": numbers**2, "pid": os.getpid(), "empty": np.zeros((0, 3))}

    with cores(count):
        parts = on_cores(square, 5, LONG, hear=lambda *heard: news.append(heard))
    assert torch.cat([part["squares"] for part in parts]).tolist() == [0, 1, 4, 9, 16]
    parts[0]["squares"] += 1.0  # results can be written to
    pieces = pieces_of(5, count)
    sizes = {piece.start: piece.stop - piece.start for piece in pieces}
    assert dict(news) == sizes
    if can_fork():
        assert len({part["pid"] for part in parts}) == len(pieces)
        assert parts[-1]["pid"] == os.getpid()


@needs_forks
def test_a_fork_computes_alone_and_leaves_the_parent_as_it_was() -> None:
    state = {"changed": False}

    def change(replicas, tell):
        inner = on_cores(lambda part, _: os.getpid(), 2, LONG)
        if replicas.start == 0:
            state["changed"] = True
        return inner

    with cores(2):
        assert [len(part) for part in on_cores(change, 2, LONG)] == [1, 2]
    assert state == {"changed": False}


@needs_forks
@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_a_process_that_dies_or_hangs_is_replaced(how, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(forks, "_STUCK_SECONDS", 0.2)
    monkeypatch.setattr(forks, "_BETWEEN_LOOKS", 0.1)
    first_try = tmp_path / "first"
    heard = {}

    def fail_once(replicas, tell):
        tell(replicas.start)
        if replicas.start == 0 and not first_try.exists():
            first_try.touch()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait(60.0)
        return replicas.start

    with cores(2):
        assert on_cores(fail_once, 4, LONG, hear=heard.__setitem__) == [0, 2]
    assert first_try.exists()
    assert heard == {0: 0, 2: 2}


@needs_forks
def test_a_process_that_always_dies_is_an_error_with_a_remedy() -> None:
    def die(replicas, tell):
        if replicas.start == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with cores(2), pytest.raises(JobError, match=r"died .* 3 times; .*\(cores=1\)"):
        on_cores(die, 2, LONG)


class Unsendable(Exception):
    def __init__(self, first, second) -> None:  # cannot be unpickled
        super().__init__(f"{first}{second}")


@needs_forks
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (DataError("the log is empty"), DataError, "^the log is empty$"),
        (torch.linalg.LinAlgError("singular"), torch.linalg.LinAlgError, "^singular$"),
        (Unsendable("a", "b"), JobError, "^Unsendable at test_cores.py:.*: ab$"),
    ],
)
def test_the_error_of_a_piece_is_raised_as_in_this_process(
    error, kind, message
) -> None:
    def fail(replicas, tell):
        if replicas.start == 0:
            raise error

    with cores(3), pytest.raises(kind, match=message):
        on_cores(fail, 3, LONG)


@needs_forks
def test_an_interrupt_leaves_no_process_behind(tmp_path) -> None:
    def wait_or_interrupt(replicas, tell):
        place = tmp_path / f"{replicas.start}"
        if replicas.start < 2:
            place.with_suffix(".new").write_text(str(os.getpid()))
            place.with_suffix(".new").rename(place)
            time.sleep(60.0)
        while len(list(tmp_path.glob("[01]"))) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with cores(3), pytest.raises(KeyboardInterrupt):
        on_cores(wait_or_interrupt, 3, LONG)
    forks = [int(place.read_text()) for place in tmp_path.iterdir()]
    assert len(forks) == 2
    assert not any(map(is_running, forks))


SCRIPT = r"""
import os, time
from koffline.jobs.cores import cores, on_cores

def wait(replicas, tell):
    os.write(1, f"{os.getpid()}\n".encode())
    while True:  # no main guard here, and none is needed
        time.sleep(0.02)

with cores(3):
    on_cores(wait, 3, 100.0)
"""


@needs_forks
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_forks_end_with_the_command(ending, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout is not None
    pids = {int(process.stdout.readline()) for _ in range(3)}
    assert process.pid in pids
    assert len(pids) == 3
    process.send_signal(ending)
    assert process.wait(30.0) != 0
    process.stdout.close()
    until = time.monotonic() + 30.0
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_short_work_stays_in_this_process() -> None:
    with cores(3):
        assert on_cores(lambda replicas, _: replicas, 9, seconds=1e-3) == [slice(0, 9)]
    # without a context, too
    assert on_cores(lambda replicas, _: replicas, 9, LONG) == [slice(0, 9)]


@pytest.mark.parametrize(
    ("environment", "usable", "load", "running", "expected"),
    [
        ({}, 8, 0.2, 1, 8),
        ({"CI": "true"}, 8, 0.2, 1, 1),
        ({"CI": "false"}, 8, 0.2, 1, 8),
        ({}, 8, 3.1, 6, 5),
        ({}, 8, 20.0, 30, 1),
        # only the minute before was busy, by an evaluation that has ended
        ({}, 8, 7.5, 1, 8),
        ({}, 2, 4.0, 5, 2),  # a container with two of eight cores
        ({}, 1, 0.0, 1, 1),
    ],
)
def test_the_default_takes_the_free_cores(
    environment, usable, load, running, expected, monkeypatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "usable_cores", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(module, "_running_now", lambda: running)
    assert free_cores() == expected
    results = []
    thread = threading.Thread(target=lambda: results.append(free_cores()))
    thread.start()
    thread.join()
    assert results == [1]  # threads divide the cores themselves


def test_usable_cores_are_those_of_the_affinity() -> None:
    assert 1 <= module.usable_cores() <= (os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        return
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from koffline.jobs.cores import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.fullmatch("1\n", done.stdout), done.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("items", [[], ["a"], ["a", "b", "c", "d", "e"], range(3, 40)])
def test_each_item_gives_its_result_in_order(items, count) -> None:
    with cores(count):
        assert each_on_cores(lambda item: [item], items, LONG) == [[i] for i in items]


@needs_forks
@pytest.mark.parametrize(
    ("seconds", "pieces"), [(0.001, 1), (0.015, 1), (0.1, 3), (1.0, 10), (LONG, 16)]
)
def test_short_work_is_given_to_fewer_cores(seconds, pieces, monkeypatch) -> None:
    """Forks start one after another: each must save more than it takes to start."""
    monkeypatch.setattr(module, "most_workers", lambda: 16)
    monkeypatch.setattr(
        module,
        "compute_in_forks",
        lambda call, call_in_fork, pieces, hear: [
            call_in_fork(p, hear) for p in pieces
        ],
    )
    with cores(16):
        assert len(on_cores(lambda piece, _: piece, 40, seconds)) == pieces
