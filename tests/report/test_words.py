"""Numbers, levels and nested records in words."""

import pytest

from koffline.ope.interval import percent
from koffline.report.words import count_of, describe_lines, labelled, promise

_INTERVAL = {"low": 1.23456, "high": 2.0, "level": 0.9999, "kind": "hoeffding", "assumptions": "long"}


@pytest.mark.parametrize(
    ("share", "text"), [(0.95, "95%"), (0.9999, "99.99%"), (0.07, "7%"), (1.0 - 0.9999, "0.01%")]
)
def test_a_level_keeps_its_digits(share: float, text: str) -> None:
    assert percent(share) == text


def test_one_and_many() -> None:
    assert count_of(1, "episode") == "1 episode"
    assert count_of(2000, "row") == "2,000 rows"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bootstrap", "calibrated"), ("kernel-simultaneous", "calibrated"), ("kernel-certified", "certified"),
     ("dual", "certified"), ("hoeffding", "certified"), ("episodes-t", "calibrated")],
)  # fmt: skip
def test_what_a_kind_promises(kind: str, expected: str) -> None:
    assert promise(kind) == expected


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (0.123456, ["0.1235"]),
        (None, ["–"]),
        (True, ["yes"]),
        ([], ["–"]),
        ([1, 2.34567], ["1, 2.346"]),
        ([0.5] * 50, ["50 values"]),
        ([{"a": 1}], ["1 record"]),
        ({}, ["–"]),
        ({"kloss": 1.23456, "missing": None}, ["kloss 1.235"]),
        (
            {"details": {"tau_low": 1e-7, "start": [0.1] * 9}},
            ["details tau low 1e-07", "details start 9 values"],
        ),
        (_INTERVAL, ["1.235 … 2 (99.99% hoeffding)"]),
        ({"hoeffding": _INTERVAL, "n": 3}, ["1.235 … 2 (99.99% hoeffding)", "n 3"]),
        ({"other": _INTERVAL}, ["other 1.235 … 2 (99.99% hoeffding)"]),
    ],
)
def test_diagnostics_line_by_line(value: object, lines: list[str]) -> None:
    assert describe_lines(value) == lines


def test_notes_of_the_reader_are_no_warnings():
    assert labelled("Reader: 1 row was left out") == ("note", "1 row was left out")
    assert labelled("coverage is low") == ("warning", "coverage is low")
