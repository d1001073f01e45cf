"""A checkpoint is read whole or not at all, and holds no code."""

import io
from pathlib import Path

import pytest
import torch

from koffline.checkpoints import read_checkpoint, write_checkpoint
from koffline.errors import ConfigError, DataError
from tests.refusals import Attack, one_line


def one_wrong_byte(content):
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
    torch.load(io.BytesIO(changed), weights_only=True)  # torch itself does not see it
    return changed


def with_code(content):
    buffer = io.BytesIO()
    torch.save({"fingerprint": "x", "evil": Attack(Path("ran"))}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damaged", [one_wrong_byte, with_code, lambda content: b"", lambda content: b"text"]
)
def test_damaged_checkpoints_are_refused_in_one_line(damaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"fingerprint": "x", "numbers": torch.arange(5000.0)})
    path.write_bytes(damaged(path.read_bytes()))
    with one_line(ConfigError, match="cannot be read|is not read"):
        read_checkpoint(path, "x")
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    write_checkpoint(path, {"fingerprint": "x", "step": 1})

    def torn(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("koffline.checkpoints.torch.save", torn)
    with pytest.raises(DataError, match="disk full"):
        write_checkpoint(path, {"fingerprint": "x", "step": 2})
    monkeypatch.undo()
    assert read_checkpoint(path, "x") == {"fingerprint": "x", "step": 1}
    assert list(tmp_path.iterdir()) == [path]
