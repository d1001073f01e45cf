"""The study of coverage: runs, goes on where it broke off, and its page says what its file says."""

import json
import sys
from pathlib import Path

import pytest

import koffline.ope.features as feature_module
from scripts.bench import interval_coverage

ROOT = Path(__file__).parents[3]


def test_a_short_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(feature_module, "median_bandwidth", feature_module.median_bandwidth)  # put back after
    out = tmp_path / "rows.json"
    command = ["study", "--studies", "chain_tuples/one-hot", "--sizes", "60", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--repetitions", "2", "--figures", str(tmp_path)])
    interval_coverage.main()
    rows = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == set(interval_coverage._ALL)
    assert all(row["repetitions"] == 2 and 0 <= row["covered"] <= 2 for row in rows)
    assert (tmp_path / "interval-coverage.png").stat().st_size > 1000
    monkeypatch.setattr(sys, "argv", [*command, "--resume", "--repetitions", "3"])
    capsys.readouterr()
    interval_coverage.main()
    assert capsys.readouterr().out == ""  # nothing was left to do


def test_the_page_says_what_the_file_says() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "intervals.json").read_text())["rows"]
    page = (ROOT / "docs" / "intervals.md").read_text(encoding="utf-8")
    assert interval_coverage.with_table(page, rows) == page


def test_certified_intervals_covered_and_calibrated_ones_on_independent_rows() -> None:
    """What the docs claim of the study: certified ones never below their level."""
    rows = json.loads((ROOT / "docs" / "results" / "intervals.json").read_text())["rows"]
    assert {row["rows"] for row in rows} == set(interval_coverage.SIZES)
    for row in rows:
        if row["kind"] in ("kernel-certified", "kernel-certified-iid", "dual"):
            assert row["coverage"] >= 0.95
        if row["rows"] < 16_000 and row["features"] == "one-hot":
            assert row["repetitions"] >= 500
