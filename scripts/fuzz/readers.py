"""What a fuzzer calls: every reader as a function of bytes; anything but a
KofflineError is a finding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from koffline.data.transitions import Discrete
from koffline.errors import KofflineError
from scripts.fuzz import seeds

# A folder in memory where the system has one: a fuzzer writes the file thousands of
# times.
SCRATCH = (
    Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
)


@dataclass(frozen=True)
class Reader:
    """read: from a path, raising KofflineError. seeds: well-formed contents. place:
    name of the file read.
    """

    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    place: str = "input"
    prepare: Callable[[Path], object] | None = None


def _log(path: Path) -> None:
    from koffline.data.findings import inspect_log
    from koffline.data.sources import open_raw, open_transitions
    from koffline.data.statistics import summarise

    raw = open_raw(path)
    inspect_log(raw)
    summarise(open_transitions(path))


def _shards(file: Path) -> None:
    from koffline.data.sources import open_transitions

    for _ in open_transitions(file.parent, lazy=True).blocks(4):
        pass
    _log(file.parent)


def _minari(file: Path) -> None:
    _log(file.parents[1])


def _starts(path: Path) -> None:
    from koffline.data.sources import read_initial_states

    read_initial_states(str(path))


def _table(path: Path) -> None:
    from koffline.data.sources import open_transitions

    mapping = {
        "observations": ["x_*"],
        "action": "a",
        "reward": "r",
        "episode": "id",
        "time": "t",
        "terminal": "done",
    }
    open_transitions(path, mapping=mapping)


def _policy(path: Path) -> None:
    import numpy as np

    from koffline.policies import DiscretePolicy
    from koffline.policies.files import detect
    from koffline.policy_specs import load_policy

    if detect(path) != "torchscript":  # a program: no promise is made (SECURITY.md)
        policy = load_policy(path, Discrete(2), (2,))
        assert isinstance(policy, DiscretePolicy)
        policy.probabilities(np.zeros((3, 2), np.float32))


def _model(path: Path) -> None:
    from koffline.algos.model_files import load

    load(path)


def _checkpoint(path: Path) -> None:
    from koffline.checkpoints import read_checkpoint

    read_checkpoint(path, "f")


def _settings(path: Path) -> None:
    from koffline.config import make_settings, read_yaml
    from koffline.data.table.mapping import as_mapping
    from koffline.online import config as online
    from koffline.train import config as training

    for read in (
        lambda p: make_settings(read_yaml(p)),
        as_mapping,
        training.load_config,
        online.load_config,
    ):
        try:
            read(path)
        except KofflineError:
            continue


def _description(path: Path) -> None:
    from koffline.data.raw import read_description

    read_description(path.read_bytes())


@cache
def readers() -> dict[str, Reader]:
    """All readers by name."""
    return {
        "hdf5": Reader(_log, seeds.hdf5_seeds),
        "dump": Reader(_log, seeds.dump_seeds),
        "npz": Reader(_log, seeds.npz_seeds),
        "starts": Reader(_starts, lambda: seeds.npy_seeds() + seeds.npz_seeds()),
        "minari-metadata": Reader(
            _minari,
            seeds.minari_metadata_seeds,
            "log/data/metadata.json",
            lambda folder: seeds.minari_folder(folder / "log"),
        ),
        "minari-data": Reader(
            _minari,
            seeds.minari_data_seeds,
            "log/data/main_data.hdf5",
            lambda folder: seeds.minari_folder(folder / "log"),
        ),
        "parquet": Reader(
            _table, partial(seeds.table_seeds, "parquet"), "input.parquet"
        ),
        "arrow": Reader(_table, partial(seeds.table_seeds, "arrow"), "input.arrow"),
        "csv": Reader(_table, partial(seeds.table_seeds, "csv"), "input.csv"),
        "manifest": Reader(
            _shards,
            seeds.manifest_seeds,
            "log/manifest.json",
            lambda folder: seeds.shard_folder(folder / "log"),
        ),
        "shard": Reader(
            _shards,
            seeds.shard_seeds,
            "log/shard-00000.hdf5",
            lambda folder: seeds.shard_folder(folder / "log"),
        ),
        "d3": Reader(_policy, seeds.d3_seeds),
        "model": Reader(_model, seeds.d3_seeds),
        "policy-npz": Reader(_policy, seeds.policy_seeds),
        "onnx": Reader(_policy, seeds.onnx_seeds),
        "checkpoint": Reader(_checkpoint, seeds.checkpoint_seeds),
        "yaml": Reader(_settings, seeds.yaml_seeds, "input.yaml"),
        "json": Reader(_description, seeds.json_seeds),
    }


class Trial:
    """Hands contents to one reader, as a file in a folder; what escapes is a
    finding.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._reader = readers()[name]
        if self._reader.prepare is not None:
            self._reader.prepare(folder)
        self._path = folder / self._reader.place
        self.executions = self.accepted = 0

    def __call__(self, content: bytes) -> None:
        """Read one content. Lets everything but KofflineError through."""
        self.executions += 1
        self._path.write_bytes(content)
        try:
            self._reader.read(self._path)
        except KofflineError as error:
            if not str(error).isprintable():
                raise AssertionError(
                    f"an error that is not one printable line: {str(error)!r}"
                ) from error
            return
        self.accepted += 1
