"""A folder of data with files named as modules that some library looks for: none of
them ever runs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from koffline.data.sources import write_transitions
from tests.ope.problems import discrete_log
from tests.train.small_runs import make_log

CONSOLE = (str(Path(sys.executable).with_name("koffline")),)
MODULE = (sys.executable, "-m", "koffline")
# Runs when Python starts, in workers too, and notes every module that nobody finds.
RECORDER = """
import os, sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        if path is None and "MISSES" in os.environ:
            with open(os.environ["MISSES"], "a") as file:
                file.write(name + "\\n")
sys.meta_path.append(Recorder())
"""
PLANTED = "open({marker!r}, 'a').write(__name__ + '\\n')\n"
POLICY = """
import helper, math, pickle, xml.dom.minidom
import numpy as np
def even(states):
    import late_helper
    return np.full((len(states), 3), late_helper.THIRD)
"""
SMALL = "--set steps=5 --set resampled_replicas=2 --quiet"
COMMANDS = {
    "info": "data info log.hdf5",
    "inspect": "data inspect table.csv",
    "to tables": "data convert log.hdf5 new.parquet",
    "to Minari": "data convert train.hdf5 minari:some/log-v0",
    "evaluate a policy of the folder": (
        "evaluate log.hdf5 --policy policies:even --gamma .9 --estimator wis --out out"
        f" {SMALL}"
    ),
    "workers": (
        "build rollouts --env CartPole-v1 --policy uniform --episodes 8 --out new.hdf5"
        " --workers 2"
    ),
}
SLOW = {
    "train": "train train.yaml --quiet",
    "plot": "d3rlpy plot numbers.csv --save new.png",
    "validate": "data validate log.hdf5",
    "split": "data split log.hdf5 a.npz b.npz",
    "several": (
        "evaluate log.hdf5 --policy uniform --gamma .9 --estimator all --out out"
        f" {SMALL}"
    ),
    "select": (
        f"select log.hdf5 --policies uniform policies:even --gamma .9 --out out {SMALL}"
    ),
    "diagnose": (
        "diagnose log.hdf5 --policy uniform --model fqe --gamma .9 --set steps=5"
        " --out out"
    ),
    "sweep": "sweep train.yaml --seeds 2 --workers 2 --quiet",
    "online": (
        "online --set env=Pendulum-v1 --set steps=400 --seeds 1 --out run --quiet"
    ),
    "a policy for workers": (
        "build rollouts --env CartPole-v1 --policy policies:two --episodes 8 --workers"
        " 2 --out new.npz"
    ),
    "help": "evaluate --help",
}


def run(
    start: tuple[str, ...], words: str, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHONPATH": str(folder.parent / "recorder"),
        "MINARI_DATASETS_PATH": str(folder / "m"),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment, **variables}
    return subprocess.run(
        [*start, *words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def make_folder(place: Path) -> Path:
    folder = place / "data"
    folder.mkdir(parents=True)
    (place / "recorder").mkdir()
    (place / "recorder" / "sitecustomize.py").write_text(RECORDER)
    write_transitions(discrete_log(120, 20), folder / "log.hdf5")
    (folder / "table.csv").write_text("x,a,r\n" + "0.5,1,2.5\n1.5,0,3.5\n" * 20)
    write_transitions(make_log(), folder / "train.hdf5")
    (folder / "train.yaml").write_text(
        "data: {source: train.hdf5}\nalgo: {type: kloss_dqn, params: {batch_size:"
        " 8}}\ntrain: {n_steps: 2, n_steps_per_epoch: 2}\nevaluators: {td_error: {type:"
        " td_error}}\n"
    )
    (folder / "numbers.csv").write_text("1,10,0.5\n2,20,0.25\n")
    text = POLICY + "def two(states): return np.full((len(states), 2), 0.5)\n"
    (folder / "policies.py").write_text(text)
    (folder / "helper.py").write_text("")
    (folder / "late_helper.py").write_text("THIRD = 1 / 3\n")
    return folder


def check_nothing_planted_runs(start: tuple[str, ...], words: str, place: Path) -> None:
    """Run a command, plant a module for every name that was looked up and not found,
    run it again.
    """
    folder = make_folder(place / "first")
    misses = place / "misses"
    first = run(start, words, folder, MISSES=str(misses))
    assert first.returncode == 0, first.stderr
    names = set(misses.read_text().split()) - {"sitecustomize", "usercustomize"}
    assert names, "nothing was looked up in vain: the recorder does not work"
    folder = make_folder(place / "second")
    marker = place / "marker"
    for name in {
        *names,
        "org",
        "msvcrt",
        "nt",
        "typeguard",
        "altair",
        "boto3",
        "deltalake",
        "dill",
    }:
        (folder / f"{name}.py").write_text(PLANTED.format(marker=str(marker)))
    second = run(start, words, folder)
    assert second.returncode == 0, second.stderr
    assert not marker.exists(), f"{marker.read_text().split()} ran"


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_file_runs_that_nobody_named(words, tmp_path):
    check_nothing_planted_runs(CONSOLE, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW)
def test_no_file_runs_that_nobody_named_in_other_commands(words, tmp_path):
    check_nothing_planted_runs(CONSOLE, words, tmp_path)


@pytest.mark.parametrize("name", ["info", "workers"])
def test_nor_with_python_m(name, tmp_path):
    check_nothing_planted_runs(MODULE, COMMANDS[name], tmp_path)


def test_python_m_runs_the_clone_that_it_is_started_in(tmp_path):
    """In this process and in workers, also if another koffline is installed."""
    import koffline

    shutil.copytree(
        Path(koffline.__file__).parent,
        tmp_path / "koffline",
        ignore=shutil.ignore_patterns("__py*"),
    )
    seen = "import os; open(os.environ['SEEN'], 'a').write(__file__ + '\\n')\n"
    workers = tmp_path / "koffline" / "jobs" / "workers.py"
    workers.write_text(
        workers.read_text().replace("import os\n", f"import os\n{seen}", 1)
    )
    words = (
        "build rollouts --env CartPole-v1 --policy uniform --episodes 8 --out new.npz"
        " --workers 2"
    )
    (tmp_path / "work").mkdir()
    environment = {**os.environ, "SEEN": str(tmp_path / "seen"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*MODULE, *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # here and in one worker or both
    seen_by = (tmp_path / "seen").read_text().splitlines()
    assert len(seen_by) > 1
    assert set(seen_by) == {str(workers)}
