"""`long_tests.txt` names tests that are there."""

import re
from pathlib import Path

from tests.conftest import LONG_TESTS

LINES = [
    line
    for line in LONG_TESTS.read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def test_each_line_names_a_function_of_its_file():
    assert len(LINES) > 100
    root = Path(__file__).parents[1]
    absent = []
    for line in LINES:
        file, _, names = line.partition("[")[0].partition("::")
        function = names.split("::")[-1]
        path = root / file
        if not path.is_file() or not re.search(
            rf"def {function}\(", path.read_text(encoding="utf-8")
        ):
            absent.append(line)
    assert absent == []


def test_lines_are_sorted_and_stand_once():
    assert sorted(set(LINES)) == LINES
