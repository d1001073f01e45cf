"""Idioms that cost readers never become more; what counts as one is fixed by examples."""

from collections import Counter

import pytest

from scripts import style_ratchet
from scripts.style_ratchet import count_idioms, count_lines, rises

ADVICE = (
    "write it plainly (CONTRIBUTING.md, Style), or, if code only moved, run"
    " `python -m scripts.style_ratchet --update`"
)


def test_no_file_has_more_than_the_table_says():
    new = rises(style_ratchet.count_files(), style_ratchet.read_table())
    assert not new, "\n".join([*new, ADVICE])


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("a, b = f(), g()", {"tuple display": 1}),
        ("a, b = c, d", {}),
        ("a, b = pair", {}),
        ("f(*values)", {"starred local": 1}),
        ("f(*self.shape, *g())", {}),
        ("rows = [x for y in z if (x := y)]", {"walrus": 1}),
        ("while block := read():\n    use(block)", {}),
        ("a = b if c else d", {"conditional expression": 1}),
        ("a = b * (c > d)", {"boolean arithmetic": 1}),
        ("a = (not b) * c", {"boolean arithmetic": 1}),
        ("a = words[b is None]", {"boolean arithmetic": 1}),
        ("a = rows[b > c]", {}),
        ("found = f()", {"vague name": 1}),
        ("def f(own, weights): ...", {"vague name": 1}),
        ("for each in rows: use(each)", {"vague name": 1}),
        ("use(found)", {}),
    ],
)
def test_each_idiom_is_counted(text, counts):
    assert count_idioms(text) == Counter(counts)


def test_lines_are_counted_without_blanks_comments_and_docstrings():
    text = '''"""A module."""

# a comment
def f(a):  # another
    """Says what it does,

    at length.
    """
    return (
        a
    )
'''
    assert count_lines(text) == 4


def test_a_file_that_is_not_in_the_table_has_none():
    now = {"new.py": {"walrus": 1}, "old.py": {"walrus": 2}}
    table = {"old.py": {"walrus": 2}}
    assert rises(now, table) == ["new.py: 1 × walrus, was 0"]


def test_the_table_is_not_written_where_a_total_rises(tmp_path, monkeypatch):
    monkeypatch.setattr(style_ratchet, "TABLE", tmp_path / "table.json")
    before = {"a.py": {"walrus": 2}}
    assert style_ratchet._update(before) == "table.json holds 2, was 2"
    moved = {"a.py": {"walrus": 1}, "b.py": {"walrus": 1}}
    assert style_ratchet._update(moved) == "table.json holds 2, was 2"
    risen = {"a.py": {"walrus": 3}}
    assert style_ratchet._update(risen).startswith("not written: more of walrus")
    assert style_ratchet.read_table() == moved
