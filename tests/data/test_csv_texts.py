"""What CSV files hold beside plain rows, and times in the forms of other programs."""

import datetime

import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.errors import DataError
from tests.data.table_rows import MAPPING, read, refusal, walk, write, write_text
from tests.refusals import one_line

ROWS = "id,t,x_1,x_2,a,r,done\ne,0,1.5,2,0,1.0,0\ne,1,2.5,3,1,2.0,1\n"
SEMICOLONS = ROWS.replace(",", ";")


class TestLinesAboveTheHeader:
    @pytest.mark.parametrize(
        "text",
        [
            ROWS,
            f"sep=,\n{ROWS}",
            f"sep=;\n{SEMICOLONS}",
            f'"sep=;"\r\n{SEMICOLONS}'.replace("\n", "\r\n").replace("\r\r", "\r"),
            f"\ufeffsep=;\n{SEMICOLONS}",
            f"# exported by hand\n#\n{ROWS}",
            f"# one, two\n{ROWS}",
            f"sep=;\n# a comment; of two\n{SEMICOLONS}",
            f"# above\n{ROWS}# below\n",
        ],
    )
    def test_separators_and_comments_are_no_rows(self, tmp_path, text):
        path = write_text(text, tmp_path / "log.csv")
        log = open_transitions(path, mapping=MAPPING)
        np.testing.assert_array_equal(log.observations, [[1.5, 2], [2.5, 3]])
        np.testing.assert_array_equal(log.rewards, [1, 2])

    def test_a_first_name_may_begin_with_the_sign_of_comments(self, tmp_path):
        path = write_text(ROWS.replace("id,", "#id,"), tmp_path / "log.csv")
        log = open_transitions(path, mapping={**MAPPING, "episode": "#id"})
        assert len(log) == 2

    def test_rows_may_begin_with_it_where_no_comment_stands_above(self, tmp_path):
        path = write_text(ROWS.replace("\ne,", "\n#7,"), tmp_path / "log.csv")
        assert len(open_transitions(path, mapping=MAPPING)) == 2

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (f"sep=ab\n{ROWS}", "'sep=ab', which names no separator"),
            (f"sep=\n{ROWS}", "names no separator"),
            ("# nothing\n# else\n", "no header below its first"),
        ],
    )
    def test_what_is_wrong_with_them_is_one_line(self, tmp_path, text, words):
        assert words in refusal(write_text(text, tmp_path / "log.csv"))


class TestListsAsText:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("[1.5, 2]", "[2.5, 3]"),
            ("[1.5 2.]", "[ 2.5  3. ]"),
            ("(1.5, 2.0)", "(2.5, 3e0)"),
        ],
    )
    def test_they_are_the_observation(self, tmp_path, first, second):
        text = f'id,t,x,a,r,done\ne,0,"{first}",0,1,0\ne,1,"{second}",1,2,1\n'
        path = write_text(text, tmp_path / "log.csv")
        log = open_transitions(path, mapping={**MAPPING, "observations": "x"})
        np.testing.assert_array_equal(log.observations, [[1.5, 2], [2.5, 3]])
        column = next(c for c in inspect_table(path).columns if c.name == "x")
        assert (column.kind, column.role) == ("list", "observations")

    @pytest.mark.parametrize(
        ("late", "words"),
        [
            ("hello", "column x holds 'hello' in row 251, no list of numbers"),
            ("[1.5, nothing]", "no list of numbers like those above"),
            ("[1.5]", "lists of 2 and 1 numbers"),
        ],
    )
    def test_a_row_unlike_the_others_is_one_line(self, tmp_path, late, words):
        rows = [f'e,{t},"[{t}, 2]",0,1,0' for t in range(250)]
        text = "\n".join(["id,t,x,a,r,done", *rows, f'e,250,"{late}",0,1,1', ""])
        path = write_text(text, tmp_path / "log.csv")
        assert words in refusal(path, observations="x")

    def test_labels_in_brackets_stay_texts(self, tmp_path):
        path = write_text("x,a\n[1],0\n[b],1\n", tmp_path / "log.csv")
        column = inspect_table(path).columns[0]
        assert column.kind == "text"


TIMES = [
    "31/01/2024 09:05",
    "31/01/2024 10:00",
    "01/02/2024 00:30",
]


def with_times(texts, **changes):
    columns = walk((len(texts),), (True,), t=list(texts))
    order = list(range(len(texts)))[::-1]
    return {name: [column[i] for i in order] for name, column in columns.items()}


class TestDeclaredTimes:
    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    def test_a_form_orders_the_rows(self, tmp_path, suffix):
        log = read(
            with_times(TIMES), tmp_path, f"log.{suffix}", time_format="%d/%m/%Y %H:%M"
        )
        np.testing.assert_array_equal(log.rewards, [1, 2, 3])

    def test_dates_alone_and_offsets_have_forms(self, tmp_path):
        dates = ["31.01.2024", "01.02.2024", "15.02.2024"]
        log = read(with_times(dates), tmp_path, time_format="%d.%m.%Y")
        np.testing.assert_array_equal(log.rewards, [1, 2, 3])
        offsets = ["27/10/24 02:30 +0200", "27/10/24 02:10 +0100"]
        log = read(with_times(offsets), tmp_path, time_format="%d/%m/%y %H:%M %z")
        np.testing.assert_array_equal(log.rewards, [1, 2])

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    def test_a_zone_says_how_much_time_went_by(self, tmp_path, suffix):
        # the night in which the clocks of Berlin went from two to three
        texts = ["2024-03-31 01:30:00", "2024-03-31 03:30:00", "2024-03-31 04:30:00"]
        columns = with_times(texts)
        if suffix == "parquet":
            columns["t"] = [
                datetime.datetime.fromisoformat(text) for text in columns["t"]
            ]
        log = read(columns, tmp_path, f"log.{suffix}", time_zone="Europe/Berlin")
        np.testing.assert_array_equal(log.rewards, [1, 2, 3])
        notes = " ".join(log.metadata.notes)
        assert "read by the clocks of Europe/Berlin" in notes
        assert "longer than others" not in notes

    @pytest.mark.parametrize(
        ("texts", "changes", "words"),
        [
            (
                TIMES,
                {"time_format": "%d/%m/%y"},
                "row 1, no time in the form %d/%m/%y; write all in that form",
            ),
            (TIMES, {"time_format": "day"}, "write the parts of a time as %Y %m %d"),
            (TIMES, {"time_zone": "Berlin"}, "give the name of a time zone"),
            (
                ["2024-03-31 02:30:00"] * 2,
                {"time_zone": "Europe/Berlin"},
                "that the clocks of Europe/Berlin showed",
            ),
            (
                ["2024-03-31T01:30:00+01:00"] * 2,
                {"time_zone": "Europe/Berlin"},
                "no time without a UTC offset",
            ),
            (
                TIMES,
                {"time_format": "%d/%m/%Y %H:%M %z", "time_zone": "Europe/Berlin"},
                "keep one of them",
            ),
            (TIMES, {"time_zone": "Europe/Berlin", "time": None}, "no column of times"),
        ],
    )
    def test_what_contradicts_itself_is_one_line(self, tmp_path, texts, changes, words):
        path = write(with_times(texts), tmp_path / "log.csv")
        mapping = {**MAPPING, **changes}
        if mapping["time"] is None:
            del mapping["time"]
        with one_line(DataError) as caught:
            open_transitions(path, mapping=mapping)
        assert words in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "value"), [("time_format", "%Y"), ("time_zone", "Europe/Berlin")]
    )
    def test_numbers_and_typed_times_have_neither(self, tmp_path, key, value):
        path = write(walk(), tmp_path / "log.parquet")
        assert f"and {key} is for" in refusal(path, **{key: value})
