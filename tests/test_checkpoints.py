"""A checkpoint is read whole or not at all."""

import errno
from pathlib import Path

import pytest
import torch

from koffline.checkpoints import read_checkpoint, write_checkpoint
from koffline.data.hdf5 import disk_faults
from koffline.errors import ConfigError


def test_one_wrong_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"fingerprint": "x", "numbers": torch.arange(5000.0)})
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0xFF
    torch.load(path, weights_only=True)  # as it was
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(path, "x")


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"fingerprint": "x", "numbers": torch.arange(3.0)})
    state = read_checkpoint(path, "x")
    assert state is not None
    assert state["numbers"].tolist() == [0.0, 1.0, 2.0]
    assert read_checkpoint(tmp_path / "b.pt", "x") is None


def test_hdf5s_own_words_become_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="HDF5: flush failed") as caught, disk_faults():
        raise RuntimeError("flush \n failed")
    assert caught.value.errno == errno.EIO
