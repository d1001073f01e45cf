import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koffline.errors import DataError, KofflineError
from koffline.jobs import Job, JobError, PassSettings, run_jobs
from tests.interrupts import hear_interrupts
from tests.jobs import functions

WHERE = [pytest.param({}, id="here"), pytest.param({"workers": 2}, id="processes")]


def jobs_in(folder: Path, count: int = 3) -> list[Job]:
    return [
        Job(f"job{i}", functions.write, (str(i),), folder / f"{i}.txt")
        for i in range(count)
    ]


@pytest.mark.parametrize("where", WHERE)
def test_only_what_is_missing_or_invalid_is_computed(
    tmp_path: Path, where: dict[str, int]
) -> None:
    (tmp_path / "file").write_text("")
    job = Job("job", functions.write, ("whole",), tmp_path / "file", is_whole)
    assert run_jobs([job], **where) == {}
    assert job.done
    wrong = Job("job", functions.write, ("half",), tmp_path / "other", is_whole)
    with pytest.raises(JobError, match="ended without a valid result"):
        run_jobs([wrong], **where)
    good = jobs_in(tmp_path, 2)
    good[1].path.write_text("from before")
    heard: list[Any] = []
    assert (
        run_jobs(good, **where, progress=lambda *progress: heard.append(progress)) == {}
    )
    assert (heard[0], heard[-1]) == ((1, 2, "job0"), (2, 2, ""))
    assert good[1].path.read_text() == "from before"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            functions.refuse,
            r"job bad failed: the log is empty; record one; 1 of 2 results are kept",
        ),
        (
            functions.stumble,
            (
                r"job bad failed: ZeroDivisionError at functions.py:\d+: division by"
                r" zero; 1 of 2"
            ),
        ),
        (
            functions.forget,
            r"job bad failed: it ended without a valid result at .*file; 1 of 2",
        ),
    ],
)
def test_a_failure_is_named_and_stops_what_has_not_begun(
    tmp_path, where, call, message
):
    (tmp_path / "0.txt").write_text("finished before")
    good, late = jobs_in(tmp_path, 2)
    jobs = [good, Job("bad", call, (), tmp_path / "file"), *([] if where else [late])]
    with pytest.raises(
        JobError, match=message.replace("of 2", f"of {len(jobs)}")
    ) as caught:
        run_jobs(jobs, **where)
    assert good.path.exists()
    assert not late.path.exists()
    assert ("in stumble" in caught.value.trace) == (call is functions.stumble)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", WHERE)
def test_keep_going_runs_the_others_and_tells_what_failed(
    tmp_path: Path, where: dict[str, int]
) -> None:
    """Also when a worker dies over a job."""
    good = jobs_in(tmp_path, 4)
    bad = [Job("bad", functions.refuse, (), tmp_path / "bad")]
    bad += [
        Job(f"dead{i}", functions.perish, (), tmp_path / f"dead{i}")
        for i in range(2)
        if where
    ]
    failures = run_jobs([good[0], *bad, *good[1:]], **where, keep_going=True)
    assert failures.keys() == {job.name for job in bad}
    assert str(failures["bad"]) == "the log is empty; record one"
    assert all(job.path.exists() for job in good)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_stops_the_workers_and_keeps_what_is_finished(
    tmp_path: Path, how: int
) -> None:
    command = [sys.executable, "-m", "tests.jobs.functions", str(tmp_path)]
    driver = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    noted = [tmp_path / name for name in ("long0.pid", "long1.pid")]
    pids = [
        int(wait_for(lambda path=path: path.exists() and path.read_text()))
        for path in noted
    ]
    # To the whole group, as a terminal does on Ctrl-C; a kill reaches the driver alone.
    (os.killpg if how == signal.SIGINT else os.kill)(driver.pid, how)
    assert driver.wait(20) == (130 if how == signal.SIGINT else -how)
    for pid in pids:
        wait_for(lambda pid=pid: not alive(pid))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "long0.pid",
        "long1.pid",
        "short",
    ]


def is_whole(path: Path) -> bool:
    return path.read_text() == "whole"


def test_ray_runs_the_same_jobs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")
    jobs = [
        Job(f"job{i}", functions.write_surroundings, (i,), tmp_path / f"{i}.txt")
        for i in range(3)
    ]
    bad = Job("bad", functions.refuse, (), tmp_path / "bad.txt")
    heard: list[Any] = []
    with pytest.raises(
        JobError, match="job bad failed: the log is empty; record one; 3 of 4 results"
    ):
        run_jobs(
            [*jobs, bad],
            workers=2,
            ray="local",
            progress=lambda *progress: heard.append(progress),
        )
    assert not ray.is_initialized()
    assert heard[0][2] == "job0, job1"
    for number, job in enumerate(jobs):
        text, process, threads = job.path.read_text().split()
        assert (text, threads) == (str(number), "1")
        assert int(process) != os.getpid()
    assert run_jobs(jobs, ray="local") == {}  # nothing to do, nothing started
    assert capfd.readouterr() == ("", "")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that nobody has waited for yet counts as ended.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_for(look: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return answer


def values(
    call: Any, items: Any, shared: Any = None, name: Any = None, **settings: Any
) -> list[Any]:
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
    np.testing.assert_array_equal(
        here, sum(values(functions.sums, range(5), shared=rows, workers=2))
    )


def test_a_pass_left_in_the_middle_leaves_nothing(tmp_path, monkeypatch, capfd):
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
        first, second = (
            set(settings.map(functions.surroundings, range(6))) for _ in range(2)
        )
        assert first == second
        assert {threads for _, threads in first} == {"1"}
        assert os.getpid() not in {process for process, _ in first}
        deaths = functions.Deaths(tmp_path, times=2)  # after two it goes to a third
        assert list(settings.map(functions.die, range(3), deaths)) == [0, 1, 2]
        assert len(list(tmp_path.iterdir())) == 2
        with pytest.raises(DataError):
            list(settings.map(functions.refuse_third, range(4), "data"))
        # one within the other
        one_pass, other_pass = (
            settings.map(functions.double, range(3)) for _ in range(2)
        )
        assert list(zip(one_pass, other_pass, strict=True)) == [(0, 0), (2, 2), (4, 4)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("where", WHERE)
def test_a_refused_item_is_named_and_ends_the_pass(where: dict[str, int]) -> None:
    with pytest.raises(
        DataError, match=re.escape("item 2: the shard is damaged; copy it again")
    ):
        values(functions.refuse_third, range(4), shared="data", **where)
    with pytest.raises(KofflineError, match=re.escape("shard-2: odd; mend it")):
        values(
            functions.refuse_third,
            range(4),
            shared="rare",
            name=lambda item: f"shard-{item}",
            **where,
        )


def test_a_fault_ends_the_pass() -> None:
    with pytest.raises(ZeroDivisionError):  # here, as it is
        values(functions.stumble, range(3))
    with pytest.raises(
        JobError, match=r"item 1: ZeroDivisionError at functions.py:\d+"
    ) as caught:
        values(functions.stumble, range(3), workers=2)
    assert "in stumble" in caught.value.trace


def test_an_item_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    deaths = functions.Deaths(tmp_path, times=99)
    message = (
        r"item 1: a worker process died \(killed, or out of memory\?\), 3 times; give"
        r" the workers more"
    )
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
    surroundings = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(tmp_path / "script.py")]
    options = {"capture_output": True, "text": True, "check": False, "timeout": 60}
    done = subprocess.run(command, env=surroundings, cwd=tmp_path, **options)
    assert (done.stdout, done.stderr) == ("[1, 2, 3, 4]\n", "")
