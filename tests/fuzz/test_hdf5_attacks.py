"""HDF5 files made to do harm: refused in one line, other files stay unread, memory and time stay bounded."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from koffline.data.sources import open_transitions
from koffline.errors import DataError
from tests.fuzz import hostile


@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
@pytest.mark.parametrize("build", hostile.HDF5, ids=lambda build: build.__name__)
def test_a_hostile_file_is_one_line(tmp_path: Path, build, lazy):
    path = tmp_path / "log.hdf5"
    build(path)
    with pytest.raises(DataError) as error:
        open_transitions(path, lazy=lazy)
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()
    if not lazy:  # the lazy reader says some of it in other words
        assert hostile.HDF5[build] in str(error.value)


@pytest.mark.parametrize(
    "build", [hostile.external_link, hostile.external_storage, hostile.virtual_dataset],
    ids=lambda build: build.__name__,
)  # fmt: skip
def test_these_files_would_read_another_one(tmp_path: Path, build):
    """The attack works where nothing is checked: else the refusals above would prove nothing."""
    path = tmp_path / "log.hdf5"
    build(path)
    with h5py.File(path) as file:
        assert (file["rewards"][()] == hostile.SECRET).all()


def test_links_within_the_file_are_no_attack(tmp_path: Path):
    with hostile.flat(tmp_path / "log.hdf5") as file:
        file["infos/again"] = h5py.SoftLink("/rewards")
        file["infos/same"] = file["rewards"]
    assert len(open_transitions(tmp_path / "log.hdf5")) == 4


def test_honest_columns_of_one_value_are_read(tmp_path: Path):
    """Forty thousand times smaller on disk than in memory, but small in memory too."""
    with hostile.flat(tmp_path / "log.hdf5") as file:
        for name, shape in {"observations": (500_000, 2), "rewards": (500_000,), "terminals": (500_000,),
                            "actions": (500_000,), "next_observations": (500_000, 2)}.items():  # fmt: skip
            del file[name]
            dtype = "f4" if "obs" in name else "i1"
            file.create_dataset(name, shape, dtype, compression="gzip", chunks=True, fillvalue=1)
    assert len(open_transitions(tmp_path / "log.hdf5")) == 500_000
