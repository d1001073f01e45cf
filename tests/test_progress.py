"""What is heard of a long run where stderr is no terminal."""

import time

import pytest

from koffline import progress


def test_lines_come_early_and_then_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.05)
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.1)
    with progress.training_bar("evaluating uniform") as told:
        time.sleep(0.12)
        told.update(300, 1000, 0.5)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "evaluating uniform: reading, 0 s"
    assert any("step 300 of 1,000" in line for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_what_is_over_at_once_or_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.training_bar("short") as told:
        told.update(1, 2, 0.1)
    with progress.training_bar("quiet", quiet=True) as told:
        assert told is None
    assert capsys.readouterr().err == ""
