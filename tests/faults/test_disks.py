"""Full disks, places that cannot be written, signals: one line, and nothing is lost or
half-written.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from koffline.data.sources import write_transitions
from scripts.fault_checks import litter_in
from tests.interrupts import hear_interrupts
from tests.refusals import assert_refused, run_cli
from tests.train.small_runs import make_log


@contextlib.contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes, as on a disk that is full
    (EFBIG).

    Python is told to write no compiled modules meanwhile: it would keep the first
    ``size`` bytes of one as the whole.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.undo()


def test_a_module_compiled_on_a_full_disk_is_not_kept(tmp_path, monkeypatch):
    """CPython takes a short write for a whole one: every later process would stop at
    what is left of the file.
    """
    (tmp_path / "cut_if_kept.py").write_text(f"TEXT = {'a' * 5000!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with full_after(1000):
        import_module("cut_if_kept")
    assert list(tmp_path.rglob("*.pyc")) == []


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its bytes; no temporary ones may be there."""
    assert litter_in(folder) == []
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(make_log(episodes=60), tmp_path / "log.hdf5")
    return tmp_path / "log.hdf5"


@pytest.mark.parametrize("room", [100, 4096])
@pytest.mark.parametrize(
    "target",
    [
        "new.hdf5",
        "new.npz",
        "new.parquet",
        "new.csv",
        "new.arrow",
        "dump",
        "shards",
        "minari:a/b-v0",
    ],
)
def test_a_full_disk_while_converting_leaves_what_was_there(
    log, target, room, monkeypatch
):
    """Closing a file that HDF5 could not write used to end the process."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(log.parent / "minari"))
    options = {"dump": ["--format", "d3rlpy"], "shards": ["--shard-rows", "10000"]}.get(
        target, []
    )
    if not options and not target.startswith("minari:"):
        write_transitions(make_log(), log.with_name(target))
    before = content(log.parent)
    with full_after(room):
        done = run_cli("data", "convert", "log.hdf5", target, "--force", *options)
    assert_refused(done, "File too large")
    assert content(log.parent) == before
    assert not (log.parent / "minari").exists()  # no empty folders


def test_a_full_disk_while_converting_in_a_process_of_its_own(log):
    """HDF5 may end the process also when it closes its files at the end."""
    command = (
        f"ulimit -f 8; {sys.executable} -m koffline data convert log.hdf5 minari:a/b-v0"
    )
    environment = {
        **os.environ,
        "MINARI_DATASETS_PATH": str(log.parent / "minari"),
        "PYTHONDONTWRITEBYTECODE": "1",  # see `full_after`
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (log.parent / "minari").exists()


def test_a_full_disk_while_training_keeps_the_epochs_that_had_ended(log):
    """And the run goes on from there, to the same bytes, once there is room again."""
    Path("c.yaml").write_text(
        "data: {source: log.hdf5}\nalgo: {type: kloss_dqn, params: {batch_size: 8}}\n"
        "train: {n_steps: 6, n_steps_per_epoch: 2}\n"
    )
    assert run_cli("train", "c.yaml", "--out", "whole").exit_code == 0
    largest = max(path.stat().st_size for path in Path("whole").iterdir())
    with full_after(largest // 2):
        done = run_cli("train", "c.yaml", "--out", "a")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr
    assert run_cli("train", "c.yaml", "--out", "a", "--resume").exit_code == 0
    same = {
        name
        for name in content(Path("whole"))
        if name.startswith(("model_", "critic_loss"))
    }
    whole = content(Path("whole"))
    again = content(Path("a"))
    assert {name: whole[name] for name in same} == {name: again[name] for name in same}


@pytest.mark.parametrize(
    "place", ["/proc/koffline/out", "log.hdf5/out", "/dev/null/out"]
)
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "log.hdf5", "--policy", "uniform", "--gamma", "0.9"),
        (
            "select",
            "log.hdf5",
            "--policies",
            "uniform",
            "epsilon:0.1:uniform",
            "--gamma",
            "0.9",
        ),
        (
            "diagnose",
            "log.hdf5",
            "--policy",
            "uniform",
            "--model",
            "fqe",
            "--gamma",
            "0.9",
        ),
    ],
    ids=lambda command: command[0],
)
def test_a_place_that_cannot_be_written_is_said_before_any_work(
    log, monkeypatch, command, place
):
    monkeypatch.setattr(
        "koffline.data.sources.open_transitions",
        lambda *_, **__: pytest.fail("work began"),
    )
    before = content(log.parent)
    assert_refused(run_cli(*command, "--out", place))
    assert content(log.parent) == before


SIGNALLED = """
import os, signal, sys
import koffline.store.files as files
from koffline.cli import main

number, ears = int(sys.argv.pop()), sys.argv.pop()
signal.signal(signal.SIGINT, signal.SIG_IGN if ears == "deaf" else signal.default_int_handler)
files.flush_to_disk = lambda path: os.kill(os.getpid(), number)  # when the file is written
main()
"""


@pytest.mark.parametrize(
    ("number", "ears"),
    [(signal.SIGTERM, "open"), (signal.SIGTERM, "deaf"), (signal.SIGINT, "open")],
    ids=["SIGTERM", "SIGTERM in the background", "SIGINT"],
)
def test_a_termination_cleans_up(log, number, ears):
    log.with_name("new.npz").write_text("what was there")
    before = content(log.parent)
    words = [
        "data",
        "convert",
        "log.hdf5",
        "new.npz",
        "--force",
        ears,
        str(int(number)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.lstrip()) == (
        130,
        "interrupted; nothing was written\n",
    )
    assert content(log.parent) == before


def test_an_interrupt_while_modules_are_imported_is_quiet():
    hit = (
        "lambda event, words: words[:1] == ('click',) and"
        " signal.raise_signal(signal.SIGINT)"
    )
    code = (
        f"import signal, sys; sys.addaudithook({hit}); from koffline.__main__ import"
        " main; main()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=hear_interrupts
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_compiled_module_that_was_cut_is_no_interrupt(monkeypatch):
    """Python raises EOFError for it, which click takes for Ctrl-C."""

    def cut(name: str):
        raise EOFError("marshal data too short")

    monkeypatch.setattr("koffline.cli.import_module", cut)
    assert_refused(run_cli("data", "info", "log.hdf5"), "remove __pycache__ in")
