"""The study of coverage: its page says what its file says."""

import json
from pathlib import Path

from scripts.bench import interval_coverage

ROOT = Path(__file__).parents[3]


def test_the_page_says_what_the_file_says_and_certified_intervals_covered() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "intervals.json").read_text())["rows"]
    page = (ROOT / "docs" / "intervals.md").read_text(encoding="utf-8")
    assert interval_coverage.with_table(page, rows) == page
    assert {row["rows"] for row in rows} == set(interval_coverage.SIZES)
    assert all(row["coverage"] >= 0.95 for row in rows if row["kind"] in ("kernel-certified", "dual"))
