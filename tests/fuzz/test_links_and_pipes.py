"""Links, pipes and devices are looked at before they are opened: nothing outside is
touched, nobody waits.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from koffline.algos.model_files import load
from koffline.builders import read_manifest
from koffline.checkpoints import read_checkpoint
from koffline.config import read_yaml
from koffline.data.disk.writer import ShardWriter
from koffline.data.flat import write_hdf5
from koffline.data.sources import open_transitions, read_initial_states
from koffline.data.table.reading import TableStream
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import KofflineError
from koffline.experiments.result_files import is_result, read_results
from koffline.online.group import read_result
from koffline.ope.stream_settings import read_sums
from koffline.policies.files import load_onnx, read_torchscript
from koffline.policy_specs import load_policy, training_rows
from koffline.store import read_record
from scripts.fuzz import seeds
from tests.fuzz import hostile
from tests.refusals import assert_refused, run_cli

LOG = Transitions(
    observations=np.arange(24.0).reshape(12, 2),
    actions=np.arange(12) % 2,
    rewards=np.arange(12.0),
    next_observations=np.arange(24.0).reshape(12, 2) + 1.0,
    terminated=np.arange(12) % 3 == 2,
    truncated=np.zeros(12, dtype=bool),
    action_space=Discrete(2),
    episode_ids=np.arange(12) // 3,
    steps=np.arange(12) % 3,
)
# seconds; a file that was accessed so long ago gets a new access time when read
LONG_AGO = 1_000_000_000.0


@contextlib.contextmanager
def never_opened(path: Path) -> Iterator[None]:
    """Check by the access time that a file was not read; skip where the file system
    keeps none.
    """
    os.utime(path, (LONG_AGO, LONG_AGO))
    path.read_bytes()
    if path.stat().st_atime == LONG_AGO:
        pytest.skip("this file system keeps no access times")
    os.utime(path, (LONG_AGO, LONG_AGO))
    yield
    assert path.stat().st_atime == LONG_AGO


@contextlib.contextmanager
def at_once(seconds: int = 20) -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError("it waited for a pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def linked(folder: Path, name: str) -> Path:
    """Move a file of a folder out of it, and leave a link; the file's new place."""
    outside = folder.parent / f"outside-{Path(name).name}"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    return outside


def shard_folder(folder: Path) -> Path:
    with ShardWriter(folder, 6) as writer:
        writer.append(LOG)
    return folder


def minari_folder(folder: Path) -> Path:
    seeds.minari_folder(folder)
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "manifest": (shard_folder, "manifest.json"),
    "first shard": (shard_folder, "shard-00000.hdf5"),
    "last shard": (shard_folder, "shard-00001.hdf5"),
    "Minari metadata": (minari_folder, "data/metadata.json"),
    "Minari data": (minari_folder, "data/main_data.hdf5"),
}


@pytest.mark.parametrize(
    "words",
    [
        ("data", "info"),
        ("data", "validate"),
        ("data", "convert", "{}", "copy.npz"),
        ("evaluate", "{}", "--policy", "uniform", "--gamma", "0.9", "--out", "results"),
        ("sweep", "configs.yaml", "--data", "{}", "--out", "sweep"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", FOLDERS)
def test_links_out_of_a_folder_are_refused_unopened(
    name: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(
        Path(__file__).parents[2] / "configs" / "kloss_dqn.yaml",
        tmp_path / "configs.yaml",
    )
    make, part = FOLDERS[name]
    folder = make(tmp_path / "log-v0")
    outside = linked(folder, part)
    arguments = [word.format(folder) for word in words]
    if "{}" not in words:
        arguments.append(str(folder))
    with never_opened(outside):
        if words[0] == "sweep":
            assert run_cli(*arguments).exit_code != 0
        else:
            assert_refused(run_cli(*arguments))
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "link", ["columns", "num_episodes", "episode_0", "observations", "rewards"]
)
def test_links_inside_hdf5_are_refused_unopened(link: str, tmp_path: Path) -> None:
    path = tmp_path / "log.hdf5"
    other = tmp_path / "other.hdf5"
    write_hdf5(LOG, path)
    write_hdf5(LOG, other)
    with h5py.File(path, "a") as file:
        if link in file:
            del file[link]
        if link == "num_episodes":
            file["columns"] = 1
        file[link] = h5py.ExternalLink(str(other), "rewards")
    with (
        never_opened(other),
        pytest.raises(KofflineError, match="link to another file"),
    ):
        open_transitions(path)


@pytest.mark.parametrize("attack", [hostile.virtual_dataset, hostile.external_storage])
@pytest.mark.parametrize("as_table", [False, True])
def test_data_kept_in_other_files_is_refused_unopened(
    attack: Callable[[Path], None], as_table: bool, tmp_path: Path
) -> None:
    path = tmp_path / "log.hdf5"
    attack(path)
    other_files = [other for other in tmp_path.iterdir() if other != path]
    assert other_files
    mapping = {
        "action": "actions",
        "reward": "rewards",
        "observations": ["observations"],
    }
    with never_opened(other_files[0]), pytest.raises(KofflineError):
        open_transitions(path, mapping=mapping if as_table else None)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


SPACE = Discrete(2)
# What may name a file, by the file's name. Each refuses it, or does as if there were
# nothing.
READS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "log": ("log", open_transitions),
    "log at a URL": ("log", lambda path: open_transitions(f"file://{path}")),
    "CSV": ("log.csv", open_transitions),
    "packed CSV": ("log.csv.gz", open_transitions),
    "Parquet at a URL": (
        "log.parquet",
        lambda path: open_transitions(f"file://{path}"),
    ),
    "Arrow": ("log.arrow", open_transitions),
    "table in pieces": (
        "log.csv",
        lambda path: list(TableStream(path, {"action": "a", "reward": "r"})),
    ),
    "folder of tables": ("part.csv", lambda path: open_transitions(path.parent)),
    "pattern": ("part.csv", lambda path: open_transitions(path.with_name("*.csv"))),
    "manifest of shards": ("manifest.json", lambda path: open_transitions(path.parent)),
    "manifest at a URL": (
        "manifest.json",
        lambda path: open_transitions(f"file://{path.parent}", lazy=True),
    ),
    "Minari metadata": ("metadata.json", lambda path: open_transitions(path.parent)),
    "start states": ("starts.npy", lambda path: read_initial_states(str(path))),
    "mapping": (
        "mapping.yaml",
        lambda path: open_transitions(path.parent / "log.csv", mapping=path),
    ),
    "settings": ("settings.yaml", read_yaml),
    "policy": ("policy.npz", lambda path: load_policy(path, SPACE, (2,))),
    "TorchScript": ("policy.pt", read_torchscript),
    "ONNX": ("policy.onnx", load_onnx),
    "model": ("model.d3", load),
    "record beside a model": (
        "run.json",
        lambda path: training_rows(path.with_name("model.d3")),
    ),
    "record of a run": ("run.json", lambda path: read_record(path.parent)),
    "checkpoint": ("checkpoint.pt", lambda path: read_checkpoint(path, "")),
    "sums": ("sums", read_sums),
    "result of a stack": ("finished.json", read_result),
    "results of a figure": ("figure-toy.json", read_results),
    "cell": ("cell.npz", is_result),
    "manifest of datasets": ("manifest.json", read_manifest),
}
ABSENT = {"record beside a model", "sums", "result of a stack", "cell"}


@pytest.mark.parametrize("make", [pipe, device, endless])
@pytest.mark.parametrize("what", READS)
def test_pipes_and_devices_are_never_read(
    what: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    name, read = READS[what]
    if what == "mapping":
        (tmp_path / "log.csv").write_text("x,a,r\n1,0,1\n")
    if what == "record beside a model":
        (tmp_path / "model.d3").write_bytes(b"")
    make(tmp_path / name)
    with at_once():
        if what in ABSENT:
            assert read(tmp_path / name) in (None, False, (0, None))
            return
        with pytest.raises(KofflineError) as caught:
            read(tmp_path / name)
    assert "\n" not in str(caught.value)
