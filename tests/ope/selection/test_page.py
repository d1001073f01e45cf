"""The page of a ranking: levels with their digits, numbers in one piece."""

import dataclasses
from pathlib import Path

from koffline.report.selection_page import write_ranking
from koffline.report.selection_table import describe_differences
from tests.ope.selection.rankings import ranking


def test_levels_keep_their_digits(tmp_path: Path) -> None:
    found = dataclasses.replace(ranking(), level=0.9999)
    page = write_ranking(found, tmp_path / "out", "").read_text(encoding="utf-8")
    assert "99.99% bootstrap interval" in page
    assert "100" not in describe_differences(found)[1]
    assert describe_differences(found)[1].endswith("(any error: 0.01%).")


def test_numbers_stay_whole_and_names_may_break(tmp_path: Path) -> None:
    page = write_ranking(ranking(), tmp_path / "out", "").read_text(encoding="utf-8")
    rules = page[page.index("<style>") : page.index("</style>")].replace("\n", " ").split("}")
    by_selector = {rule.split("{")[0].strip(): rule for rule in rules if "{" in rule}
    assert "anywhere" not in by_selector["th, td"]
    assert "white-space: nowrap" in by_selector[".many td"]
    assert '<td class="name">runs/a/model.d3</td>' in page
    assert '<td class="name">4.9</td>' not in page
    assert page.count('<div class="scroll">') == page.count("</table></div>") == 2
