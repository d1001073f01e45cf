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
# What Python makes of PYTHONIOENCODING at its start.
RECODE = """
import sys
encoding, _, errors = {!r}.partition(":")
sys.stdout.reconfigure(encoding=encoding, errors=errors or "strict")
sys.stderr.reconfigure(encoding=encoding, errors="backslashreplace")
"""


@pytest.fixture
def folder(tmp_path):
    write_files(tmp_path)
    return tmp_path


def write_files(folder):
    write_transitions(discrete_log(120, 20), folder / "log.hdf5")
    write_transitions(make_log(), folder / "train.hdf5")
    (folder / "train.yaml").write_text(
        "data: {source: train.hdf5}\nalgo: {type: kloss_dqn, params: {batch_size: 8}}\n"
        "train: {n_steps: 2, n_steps_per_epoch: 2}\n"
    )
    layers = [(np.ones((discrete_log(120, 20).observation_shape[0], 3)), np.zeros(3))]
    save_mlp_policy(folder / "policy.npz", layers, "softmax")
    for name in ("pölicy.npz", "p\udcff.npz"):
        os.link(folder / "policy.npz", folder / name)


def run_afresh(folder, words, environment=UTF8, **streams):
    """In a Python that starts anew."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    words = [os.fsencode(word) for word in (KOFFLINE, *words.split())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(words, cwd=folder, env=environment, timeout=300, **streams)


@pytest.fixture
def run(forked_commands):
    """run(folder, words, environment) in a process that is forked."""

    def run(folder, words, environment=UTF8, **streams):
        before = ""
        if "PYTHONIOENCODING" in environment:
            before = RECODE.format(environment["PYTHONIOENCODING"])
            environment = UTF8
        commands = forked_commands(environment)
        return commands.run(words.split(), folder, before=before, **streams)

    return run


@pytest.fixture(scope="module")
def trained(forked_commands, tmp_path_factory):
    """A trained model."""
    folder = tmp_path_factory.mktemp("trained")
    write_files(folder)
    words = ["train", "train.yaml", "--quiet", "--out", "run"]
    assert forked_commands(UTF8).run(words, folder).returncode == 0
    return folder / "run" / "model_2.d3"


@pytest.mark.parametrize("environment", NO_UTF8.values(), ids=NO_UTF8)
@pytest.mark.parametrize(
    "words",
    [
        f"evaluate log.hdf5 --policy pölicy.npz {SMALL} --out öut",
        f"evaluate log.hdf5 --policy uniform {SMALL} --estimator is,wis",
        f"select log.hdf5 --policies pölicy.npz uniform {SMALL} --out öut",
        "data convert log.hdf5 nëw.npz",
    ],
    ids=["evaluate", "several", "select", "convert"],
)
def test_characters_that_a_stream_lacks_are_replaced(folder, words, environment, run):
    check_that_characters_are_replaced(run(folder, words, environment), environment)
    for path in folder.glob(os.fsdecode(os.fsencode("öut/*.json"))):
        json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("environment", NO_UTF8.values(), ids=NO_UTF8)
def test_also_in_a_python_that_starts_anew(folder, environment):
    done = run_afresh(folder, "data info log.hdf5", environment)
    check_that_characters_are_replaced(done, environment)


def check_that_characters_are_replaced(done, environment):
    encoding = "latin-1" if "latin-1" in environment.values() else "ascii"
    assert done.returncode == 0, done.stderr
    done.stdout.decode(encoding)  # raises for other bytes
    assert b"Traceback" not in done.stderr


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
def test_names_that_are_no_utf8(folder, words, run, trained):
    """They come from other systems; results hold them as escapes."""
    if "export" in words:
        os.link(trained, folder / "model.d3")
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
def test_a_full_disk_behind_stdout_is_one_line(folder, words, run):
    check_that_a_full_disk_is_one_line(run(folder, words, stdout="/dev/full"))
    assert ("out" in words) == (folder / "out" / "estimate.json").exists()


@pytest.mark.parametrize("words", ["--help", "data info log.hdf5"])
def test_a_full_disk_also_in_a_python_that_starts_anew(folder, words):
    with open("/dev/full", "wb") as full:
        check_that_a_full_disk_is_one_line(run_afresh(folder, words, stdout=full))


def check_that_a_full_disk_is_one_line(done):
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1
    assert b"No space left on device" in done.stderr


def test_a_full_disk_behind_stderr_stops_no_work(folder, run):
    full = "/dev/full"
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
