"""Where results may be written is known before the work."""

from pathlib import Path

import pytest

from koffline.errors import ConfigError
from koffline.report.folder import check_output_directory


def test_a_good_place_stays_as_it_was(tmp_path: Path) -> None:
    check_output_directory(tmp_path / "a" / "b", force=False, marker="estimate.json")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_no_directory_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where permissions look fine, as on a read-only mount."""

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"not writable \(Read-only file system\); name a directory"):
        check_output_directory(tmp_path / "a", force=False, marker="estimate.json")
