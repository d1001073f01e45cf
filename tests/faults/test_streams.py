"""Streams that are full or lack characters, names that are no UTF-8, deleted folders:
no traceback.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from koffline.data.sources import write_transitions
from koffline.policies import save_mlp_policy
from tests.ope.problems import discrete_log
from tests.train.small_runs import make_log

KOFFLINE = str(Path(sys.executable).with_name("koffline"))
SMALL = "--gamma .9 --estimator is --set resampled_replicas=2 --quiet"
NO_UTF8 = {
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ASCII, strict": {"PYTHONIOENCODING": "ascii:strict"},
}
UTF8 = {"LC_ALL": "C.UTF-8"}


@pytest.fixture
def folder(tmp_path):
    write_transitions(discrete_log(120, 20), tmp_path / "log.hdf5")
    write_transitions(make_log(), tmp_path / "train.hdf5")
    (tmp_path / "train.yaml").write_text(
        "data: {source: train.hdf5}\nalgo: {type: kloss_dqn, params: {batch_size: 8}}\n"
        "train: {n_steps: 2, n_steps_per_epoch: 2}\n"
    )
    layers = [(np.ones((discrete_log(120, 20).observation_shape[0], 3)), np.zeros(3))]
    save_mlp_policy(tmp_path / "policy.npz", layers, "softmax")
    for name in ("pölicy.npz", "p\udcff.npz"):
        os.link(tmp_path / "policy.npz", tmp_path / name)
    return tmp_path


def run(folder, words, environment=UTF8, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    words = [os.fsencode(word) for word in (KOFFLINE, *words.split())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(words, cwd=folder, env=environment, timeout=300, **streams)


@pytest.mark.parametrize("environment", NO_UTF8.values(), ids=NO_UTF8)
@pytest.mark.parametrize(
    "words",
    [
        "data info log.hdf5",
        f"evaluate log.hdf5 --policy pölicy.npz {SMALL} --out öut",
        f"evaluate log.hdf5 --policy uniform {SMALL} --estimator is,wis",
        f"select log.hdf5 --policies pölicy.npz uniform {SMALL} --out öut",
        "data convert log.hdf5 nëw.npz",
    ],
    ids=["info", "evaluate", "several", "select", "convert"],
)
def test_characters_that_a_stream_lacks_are_replaced(folder, words, environment):
    done = run(folder, words, environment)
    encoding = "latin-1" if "latin-1" in environment.values() else "ascii"
    assert done.returncode == 0, done.stderr
    done.stdout.decode(encoding)  # raises for other bytes
    assert b"Traceback" not in done.stderr
    for path in folder.glob(os.fsdecode(os.fsencode("öut/*.json"))):
        json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "words",
    [
        f"evaluate log.hdf5 --policy p\udcff.npz {SMALL} --out o\udcff",
        f"evaluate log.hdf5 --policy p\udcff.npz {SMALL} --json",
        f"select log.hdf5 --policies ./p\udcff.npz uniform {SMALL} --out o\udcff",
        "train train.yaml --quiet --out o\udcff",
        "data convert log.hdf5 o\udcff.hdf5",
        "export model.d3 o\udcff.pt",
        "export model.d3 o\udcff.onnx",
    ],
)
def test_names_that_are_no_utf8(folder, words):
    """They come from other systems; results hold them as escapes."""
    if "export" in words:
        assert run(folder, "train train.yaml --quiet --out run").returncode == 0
        (folder / "run" / "model_2.d3").rename(folder / "model.d3")
    done = run(folder, words)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["policy"] == "p\udcff.npz"
    else:
        assert [path for path in folder.iterdir() if path.name.startswith("o\udcff")]


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "evaluate --help",
        "data info log.hdf5",
        "data info log.hdf5 --json",
        f"evaluate log.hdf5 --policy uniform {SMALL} --out out",
        "data convert log.hdf5 new.npz",
    ],
)
def test_a_full_disk_behind_stdout_is_one_line(folder, words):
    with open("/dev/full", "wb") as full:
        done = run(folder, words, stdout=full)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1
    assert b"No space left on device" in done.stderr
    assert ("out" in words) == (folder / "out" / "estimate.json").exists()


def test_a_full_disk_behind_stderr_stops_no_work(folder):
    with open("/dev/full", "wb") as full:
        assert run(folder, "train train.yaml --out run", stderr=full).returncode == 0
        assert run(folder, "data info nowhere.hdf5", stderr=full).returncode == 2


@pytest.mark.parametrize(
    "words",
    ["data info {}/log.hdf5", "evaluate {}/log.hdf5 --policy uniform --gamma .9"],
)
def test_a_deleted_folder_is_one_line_and_the_help_works(folder, words):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    start = ["sh", "-c", script, "sh", KOFFLINE]
    done = subprocess.run(
        [*start, *words.format(folder).split()],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    remedy = (
        "error: the current folder was deleted; change into another one (cd); see"
        " 'koffline --help'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", remedy)
    for option in ("--help", "--version"):
        done = subprocess.run(
            [*start, option], cwd=folder, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
