"""A large log is announced before it is read: how much memory it takes, and what takes
less.
"""

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest

from koffline.data.d3rlpy_dump import write_d3rlpy_dump
from koffline.data.disk.writer import open_lazy
from koffline.data.flat import write_hdf5, write_npz
from koffline.data.minari import write_minari
from koffline.data.sources import convert_to_shards, open_transitions
from koffline.data.table.readers import unpacked_bytes
from koffline.data.table.reading import TableStream
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.untrusted import limits

ROWS = 4000
WIDTH = 10
LOG = Transitions(
    observations=np.zeros((ROWS, WIDTH), np.float32),
    next_observations=np.zeros((ROWS, WIDTH), np.float32),
    actions=np.arange(ROWS) % 2,
    rewards=np.ones(ROWS),
    terminated=np.arange(ROWS) % 20 == 19,
    truncated=np.zeros(ROWS, bool),
    episode_ids=np.arange(ROWS) // 20,
    steps=np.arange(ROWS) % 20,
    action_space=Discrete(2),
)
TABLE = pl.DataFrame(
    {f"x_{i}": np.linspace(0.125, 0.875, ROWS) for i in range(WIDTH)}
    | {
        "a": np.arange(ROWS) % 2,
        "r": np.ones(ROWS),
        "id": np.arange(ROWS) // 20,
        "t": np.arange(ROWS) % 20,
    }
)
MAPPING = {
    "observations": ["x_*"],
    "action": "a",
    "reward": "r",
    "episode": "id",
    "time": "t",
    "last_row": "cut",
}
NUMBERS = {"kB": 1e3, "MB": 1e6}


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGE_BYTES", 100_000)
    limits.announce_large.cache_clear()


def gzipped(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        TABLE.write_csv(file)


FLAT: dict[str, Callable[[Path], object]] = {
    "log.hdf5": lambda path: write_hdf5(LOG, path),
    "log.npz": lambda path: write_npz(LOG, path),
    "dump.h5": lambda path: write_d3rlpy_dump(LOG, path),
    "minari-v0": lambda path: write_minari(LOG, path, "minari-v0"),
}


def arrays(path: Path) -> None:
    np.savez_compressed(
        path, **{name: TABLE[name].to_numpy() for name in TABLE.columns}
    )


def datasets(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name in TABLE.columns:
            file.create_dataset(name, data=TABLE[name].to_numpy(), compression="gzip")


TABLES: dict[str, Callable[[Path], object]] = {
    "log.parquet": TABLE.write_parquet,
    "log.arrow": TABLE.write_ipc,
    "log.csv": TABLE.write_csv,
    "log.csv.gz": gzipped,
    "columns.npz": arrays,
    "columns.hdf5": datasets,
}


def announced(caplog: pytest.LogCaptureFixture) -> float:
    """Bytes that the only announcement names."""
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "of memory" in record.getMessage()
    ]
    assert "\n" not in warning
    assert "--shard-rows" in warning
    assert "--memory" in warning
    size = re.search(r"take about ([\d.]+) (kB|MB) of memory", warning)
    assert size is not None
    return float(size[1]) * NUMBERS[size[2]]


@pytest.mark.parametrize("name", FLAT)
def test_flat_logs_and_episodes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FLAT[name](tmp_path / name)
    log = open_transitions(tmp_path / name)
    needed = sum(column.nbytes for column in log.columns.values())
    assert needed / 2 < announced(caplog) < 2 * needed


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TABLES[name](tmp_path / name)
    open_transitions(tmp_path / name, mapping=MAPPING)
    assert TABLE.estimated_size() / 2 < announced(caplog) < 2 * TABLE.estimated_size()


def test_the_size_of_a_packed_table_is_told_from_its_beginning(tmp_path: Path) -> None:
    """It unpacks to more than the four million bytes that are looked at."""
    long = pl.concat([TABLE] * 30)
    with gzip.open(tmp_path / "log.csv.gz", "wb") as file:
        long.write_csv(file)
    text = len(long.write_csv())
    assert text > 2 * 2**22
    assert 0.7 * text < unpacked_bytes(str(tmp_path / "log.csv.gz")) < 1.4 * text


def test_a_folder_of_tables_is_announced_once_and_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(4):
        TABLE[number * 1000 : number * 1000 + 1000].write_parquet(
            tmp_path / f"parts/{number}.parquet"
        )
    open_transitions(tmp_path / "parts", mapping=MAPPING)
    assert TABLE.estimated_size() / 2 < announced(caplog) < 2 * TABLE.estimated_size()


def test_the_remedy_takes_less_and_is_not_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_hdf5(LOG, tmp_path / "log.hdf5")
    convert_to_shards(tmp_path / "log.hdf5", tmp_path / "shards", 500)
    caplog.clear()
    assert sum(len(block) for block in open_lazy(tmp_path / "shards").blocks()) == ROWS
    TABLE.write_parquet(tmp_path / "log.parquet")
    assert (
        sum(map(len, TableStream(tmp_path / "log.parquet", MAPPING, piece_rows=500)))
        > 0
    )
    assert caplog.records == []
    open_transitions(tmp_path / "shards")  # whole, after all
    assert announced(caplog) > 0


@pytest.mark.parametrize("name", ["log.hdf5", "log.npz", "log.parquet"])
def test_what_is_not_allowed_is_refused_instead(
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ({**FLAT, **TABLES})[name](tmp_path / name)
    monkeypatch.setenv(limits.MAX_BYTES, "120000")
    with pytest.raises(DataError, match=limits.MAX_BYTES):
        open_transitions(tmp_path / name, mapping=MAPPING if name in TABLES else None)
    assert caplog.records == []


def test_small_logs_are_read_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    write_hdf5(LOG, tmp_path / "log.hdf5")
    open_transitions(tmp_path / "log.hdf5")
    assert caplog.records == []
