"""The study of coverage: its page says what its file says."""

import json
from pathlib import Path

from scripts.bench import interval_coverage

ROOT = Path(__file__).parents[3]


def test_the_page_says_what_the_file_says() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "intervals.json").read_text())["rows"]
    page = (ROOT / "docs" / "intervals.md").read_text(encoding="utf-8")
    assert interval_coverage.with_table(page, rows) == page


def test_certified_intervals_covered_and_calibrated_ones_on_independent_rows() -> None:
    """What the docs claim of the study: certified ones never below their level."""
    rows = json.loads((ROOT / "docs" / "results" / "intervals.json").read_text())["rows"]
    assert {row["rows"] for row in rows} == set(interval_coverage.SIZES)
    for row in rows:
        if row["kind"] in ("kernel-certified", "dual"):
            assert row["coverage"] >= 0.95
        if row["rows"] < 16_000 and row["features"] == "one-hot":
            assert row["repetitions"] >= 500
